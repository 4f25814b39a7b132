"""`ddp-launch --hosts`: one command, real sshd on every host, the agents of all of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
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
import os, signal, sys, time
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
if how == "once" and rank == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "stay":
    time.sleep(600)
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

    def launch(self, *words: str, hosts: str = "node0:2,node1:2", **env: str) -> Process:
        ssh = f"ssh -T -F {self.folder}/ssh_config -o BatchMode=yes -o ExitOnForwardFailure=yes"
        command = (
            "env",
            "-C",
            str(self.folder),
            LAUNCH,
            *(("--hosts", hosts) if hosts else ()),
            "--ssh",
            ssh,
            *words,
        )
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

    def wait_until_trained(self) -> None:
        eventually(lambda: self.out.count("of 4") == 4, LONG_S, "all four ranks have met")


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
def test_the_story_is_told_once_and_the_exit_code_is_the_jobs(cluster: Cluster) -> None:
    """Also to whoever started the command, in the file that torchrun leaves it in."""
    told = cluster.folder / "error.json"
    done = cluster.launch("train.py", "raise", TORCHELASTIC_ERROR_FILE=str(told))
    assert done.wait(LONG_S) == 1
    assert "the learning rate is gone" in json.loads(told.read_text())["message"]["message"]
    assert cluster.err.count("rank 3 on node1 failed first: ValueError: the learning rate is gone") == 1
    assert cluster.err.count("ddp-launch: job failed") == 1
    assert cluster.agents() == []


@NIGHTLY
def test_a_restart_over_ssh(cluster: Cluster) -> None:
    done = cluster.launch("--max-restarts", "1", "train.py", "once")
    assert done.wait(LONG_S) == 0, cluster.err
    assert cluster.out.count("of 4") == 8
    notices = [line for line in to_the_point(cluster.err) if line.startswith("ddp-launch: ")]
    assert len(notices) == len(set(notices)), "both agents say it, one is shown"
    # The report of a mere consequence may have come first.
    assert len([line for line in notices if " lost the connection to its peers; " not in line]) == 1, notices


@NIGHTLY
def test_ctrl_c_stops_all_hosts(cluster: Cluster) -> None:
    command = cluster.launch("train.py", "stay")
    cluster.wait_until_trained()
    command.send(signal.SIGINT)
    assert command.wait(LONG_S) == 130
    assert cluster.agents() == []


@NIGHTLY
def test_the_death_of_the_command_stops_all_hosts(cluster: Cluster) -> None:
    command = cluster.launch("train.py", "stay")
    cluster.wait_until_trained()
    command.send(signal.SIGKILL)
    command.wait(LONG_S)
    eventually(lambda: not cluster.agents(), LONG_S, "no agent outlives the command that started it")


@NIGHTLY
def test_a_host_that_cannot_be_reached_is_named_and_nothing_is_left(cluster: Cluster) -> None:
    cluster.lab.power_off(cluster.nodes[1])
    config = cluster.folder / "ssh_config"  # of which the first word on something counts
    config.write_text(f"Host node1\n  ConnectTimeout 2\n{config.read_text()}")
    command = cluster.launch("train.py")
    assert command.wait(LONG_S) == 1
    assert "ddp-launch: error: node1: " in cluster.err
    assert "Traceback" not in cluster.err
    # An agent that was about to begin finds out by itself that nobody wants it any more.
    eventually(lambda: not cluster.agents(), LONG_S, "no agent outlives the command that started it")


@NIGHTLY
def test_a_hostfile_and_a_world_smaller_than_its_hosts(cluster: Cluster) -> None:
    (cluster.folder / "hosts").write_text("# the small partition\nnode0 slots=1\nnode1 slots=1\n")
    done = cluster.launch(
        "--hostfile", "hosts", "--nnodes", "1:2", "--last-call", "60s", "train.py", hosts=""
    )
    assert done.wait(LONG_S) == 0, cluster.err
    assert "rank 1 of 2" in cluster.out


@NIGHTLY
def test_a_host_without_the_command_is_named(cluster: Cluster) -> None:
    (cluster.folder / "ssh").write_text('echo "env: ddp-launch: No such file or directory" >&2; exit 127\n')
    command = cluster.launch("--ssh", f"sh {cluster.folder}/ssh", "train.py", hosts="node0")
    assert command.wait(LONG_S) == 1
    assert "ddp-launch: error: node0:" in cluster.err
    assert "No such file or directory" in cluster.err


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
