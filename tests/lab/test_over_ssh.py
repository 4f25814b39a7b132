"""`ddp-launch --hosts`: one command, real sshd on every host, the agents of all of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from lab_host import eventually
from lab_job import to_the_point

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lab_host import Host, Process
    from lab_network import Lab

NIGHTLY = pytest.mark.nightly(
    instead=("::test_one_command_runs_the_job_on_all_hosts", "wings/hosts/test_fleet.py")
)

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin:" + os.environ.get("PATH", ""))
LAUNCH = os.path.join(os.path.dirname(sys.executable), "ddp-launch")
LONG_S = 90.0
TRAIN = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
rank = int(os.environ["RANK"])
where = (os.getcwd(), os.environ.get("FLAVOUR"))
print("rank", rank, "of", int(total), "in", *where, flush=True)
dist.barrier()  # all have said who they are
how = sys.argv[1] if len(sys.argv) > 1 else ""
if how == "raise" and rank == 3:
    raise ValueError("the learning rate is gone")
dist.destroy_process_group()
"""

pytestmark = pytest.mark.skipif(SSHD is None, reason="the lab's hosts need sshd")


class Cluster:
    """Two hosts that answer ssh, and one where people log in."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        *self.nodes, self.login = lab.hosts
        for name in ("host_key", "user_key"):
            make = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
            subprocess.run(make, check=True)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        (folder / "sshd_config").write_text(
            f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\n"
            "UsePAM no\nPermitRootLogin yes\nPidFile none\n"
        )
        (folder / "ssh_config").write_text(
            f"Host *\n  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n  StrictHostKeyChecking no\n"
            "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n  ConnectTimeout 60\n"
        )
        (folder / "train.py").write_text(TRAIN)
        for node in self.nodes:
            self.start_sshd(node)

    def start_sshd(self, node: Host) -> None:
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
        node.start(str(SSHD), "-D", "-f", str(self.folder / "sshd_config"))
        eventually(lambda: ":22 " in node.run("ss", "-ltn"), what=f"sshd listens on {node}")

    def launch(self, *words: str, **env: str) -> Process:
        ssh = f"ssh -T -F {self.folder}/ssh_config -o BatchMode=yes -o ExitOnForwardFailure=yes"
        to = ("--hosts", "node0:2,node1:2", "--ssh", ssh)
        command = ("env", "-C", str(self.folder), LAUNCH, *to, *words)
        with (self.folder / "stdout").open("wb") as out, (self.folder / "stderr").open("wb") as err:
            return self.login.start(*command, env=os.environ | env, stdout=out, stderr=err)

    @property
    def out(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "stderr").read_text()

    def agents(self) -> list[str]:
        found = [text for node in self.nodes for text in node.processes().values()]
        return [text for text in found if "train.py" in text]


@pytest.fixture
def cluster(lab: Callable[..., Lab], tmp_path: Path) -> Cluster:
    return Cluster(lab(2, "login"), tmp_path)


def test_one_command_runs_the_job_on_all_hosts(cluster: Cluster) -> None:
    done = cluster.launch("--send-env", "FLAVOUR", "train.py", FLAVOUR="vanilla")
    assert done.wait(LONG_S) == 0, cluster.err
    lines = sorted(cluster.out.splitlines())
    rest = f"of 4 in {cluster.folder} vanilla"
    assert lines == [f"[node{rank // 2}:{rank}] rank {rank} {rest}" for rank in range(4)]
    assert to_the_point(cluster.err) == []
    assert cluster.agents() == []


@NIGHTLY
def test_a_job_file_runs_on_all_hosts(cluster: Cluster) -> None:
    """`ddpctl submit` becomes `ddp-launch --hosts`: its output and its exit code are the job's."""
    (cluster.folder / "ddp.toml").write_text(
        f"""
name = "train"
script = ["train.py", "raise"]
workdir = "{cluster.folder}"
nodes = 2
max_restarts = 0
[env]
FLAVOUR = "it's $HOME"
[ssh]
hosts = ["node0:2", "node1:2"]
options = ["--ssh", "ssh -T -F {cluster.folder}/ssh_config -o BatchMode=yes -o ExitOnForwardFailure=yes"]
"""
    )
    submit = ("submit", "--target", "ssh", "--file", f"{cluster.folder}/ddp.toml")
    command = (os.path.join(os.path.dirname(LAUNCH), "ddpctl"), *submit)
    environ = os.environ | {"PATH": f"{os.path.dirname(LAUNCH)}:{os.environ['PATH']}"}
    with (cluster.folder / "stdout").open("wb") as out, (cluster.folder / "stderr").open("wb") as err:
        process = cluster.login.start(*command, env=environ, stdout=out, stderr=err)
    assert process.wait(LONG_S) == 1, cluster.err
    rest = f"of 4 in {cluster.folder} it's $HOME"
    assert sorted(cluster.out.splitlines()) == [f"[node{i // 2}:{i}] rank {i} {rest}" for i in range(4)]
    assert "rank 3 on node1 failed first: ValueError: the learning rate is gone" in cluster.err
    assert cluster.agents() == []
