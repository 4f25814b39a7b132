"""What must go well with the manifests of the production overlay and with a job that `ddpctl submit` renders.

Told once, for whatever runs the pods. One story, for what it begins with costs most of its time: nine processes, two
of them with torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from certificates import Authority, issuer_of
from cluster import Cluster
from test_manifests import built

from rendezvous.access.auth import Grant, Role, add_key, new_grant_id, read_keys, sign

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster import Engine

TRAIN = Path(__file__).parents[1] / "lab" / "programs" / "train.py"
JOB = """
name = "train"
image = "ddp-train:0.1.0"
script = ["/data/train.py", "/data"]
nodes = "2"
ranks_per_node = "1"
rendezvous = "ddp-rendezvous.ddp-rendezvous.svc:29400"

[resources]
cpu = "1"
memory = "2Gi"

[[volumes]]
path = "/data"
claim = "work"

[kubernetes]
token_secret = "train-token"
tls_secret = "ddp-rendezvous-client-tls"
"""
PODS = ("train-0", "train-1")
REPLICAS = tuple(f"ddp-rendezvous-{i}" for i in range(3))
MEMBERS = tuple(f"ddp-rendezvous-etcd-{i}" for i in range(3))
GRPC, HTTP = 29400, 9400
_A_FEW = 10  # steps
_USER = 10001
_NOT_ALLOWED = 77
_KEYS = "ddp-rendezvous-token-keys"


class Story:
    def __init__(self, engine: Engine, folder: Path) -> None:
        self._folder = folder
        self.cluster = Cluster(engine, folder / "cluster")
        self.objects = list(built("production"))
        self.authority = Authority("the first CA")
        self._key_file = folder / "keys"
        self.token = self._new_token()

    # --- what there is from the beginning ------------------------------------------------------------

    def start_service(self) -> None:
        self.cluster.issue(self.objects, self.authority)
        self._put_keys()
        self.cluster.put_secret("train-token", {"token": self.token.encode()})
        # A replica that finds no etcd ends, and a kubelet would start it again: here etcd comes first.
        etcd = [each for each in self.objects if each["metadata"]["name"] == "ddp-rendezvous-etcd"]
        for objects, pods in ((etcd, MEMBERS), ([o for o in self.objects if o not in etcd], REPLICAS)):
            assert self.cluster.apply(objects) == list(pods)
            self.cluster.await_ready(*pods)

    def submit(self) -> None:
        """What `ddpctl submit` would give to kubectl."""
        job, program = self._folder / "ddp.toml", Path(sys.executable).with_name("ddpctl")
        job.write_text(JOB)
        command = (str(program), "submit", "--target", "kubernetes", "--file", str(job), "--dry-run")
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        self.work = self.cluster.claim("work", _USER)
        for each in (self.work / "ranks", self.work / "orders"):
            each.mkdir()
            os.chown(each, _USER, _USER)
        shutil.copy(TRAIN, self.work)
        assert self.cluster.apply(list(yaml.safe_load_all(text))) == list(PODS)
        self.await_generation(1)

    def _new_token(self) -> str:
        """Signed with a key of its own, which becomes the last one in the file."""
        add_key(str(self._key_file))
        return sign(Grant(new_grant_id(), "train-*", Role.AGENT, 4e9), read_keys(str(self._key_file))[-1])

    def _put_keys(self) -> None:
        self.cluster.put_secret(_KEYS, {"keys": self._key_file.read_bytes()})

    # --- what is seen ----------------------------------------------------------------------------------

    def curve(self) -> list[tuple[int, int]]:
        """(step, generation)"""
        path = self.work / "curve"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(int(row[0]), int(row[2])) for row in rows if len(row) == 3]

    def ranks(self, generation: int) -> list[str]:
        """The host of each rank."""
        paths = [self.work / "ranks" / f"{generation}-{rank}" for rank in range(len(PODS))]
        return [json.loads(path.read_text())["host"] for path in paths if path.exists()]

    def await_generation(self, wanted: int) -> None:
        """It trains, with every rank where it has always been."""
        self.cluster.until(
            lambda: len(self.ranks(wanted)) == len(PODS), f"the ranks of generation {wanted} met"
        )
        assert self.ranks(wanted) == list(PODS)
        self.await_steps()
        assert self.curve()[-1][1] == wanted

    def await_steps(self) -> None:
        before = len(self.curve())
        self.cluster.until(lambda: len(self.curve()) >= before + _A_FEW, f"{_A_FEW} more steps are done")

    def streams(self) -> dict[str, int]:
        """Replica -> how many agents it holds."""
        found = {}
        for name in REPLICAS:
            said = re.search(
                r"^ddp_rendezvous_streams (\d+)", self.cluster.get(name, HTTP, "/metrics")[1], re.MULTILINE
            )
            found[name] = int(said[1]) if said else 0
        return found

    def owner(self) -> str:
        """The replica that all agents of the job have settled at."""
        found: list[str] = []

        def settled() -> bool:
            found[:] = [name for name, count in self.streams().items() if count == len(PODS)]
            return bool(found)

        self.cluster.until(settled, "the agents are at one replica")
        return found[0]

    def issuer(self, replica: str) -> str:
        """Of what a new connection is shown; "" where it comes to nothing."""
        pod = self.cluster.pods[replica]
        address = (self.cluster.engine.address(pod.number), GRPC)

        def ask() -> str:
            with contextlib.suppress(OSError):
                return ssl.get_server_certificate(address, timeout=10.0)
            return ""

        shown = self.cluster.engine.reach(pod, ask)
        return issuer_of(shown) if shown else ""

    def ask(self, token: str = "") -> tuple[int, str]:
        """Exit code and answer of a tool in a pod of the job, which has its certificate; "": its token, too."""
        variables = {"DDP_RENDEZVOUS_TOKEN_FILE": "", "DDP_RENDEZVOUS_TOKEN": token} if token else {}
        where = "ddp-rendezvous.ddp-rendezvous.svc:29400"
        command = ("ddpctl", "--rendezvous", where, "-o", "json", "list")
        return self.cluster.execute(PODS[0], *command, **variables)

    def job(self) -> dict[str, Any]:
        code, said = self.ask()
        assert code == 0, said
        (job,) = json.loads(said)["jobs"]
        return dict(job)

    # --- what happens ----------------------------------------------------------------------------------

    def look_at_rights(self) -> None:
        assert self.cluster.execute(PODS[0], "id", "-u")[1].strip() == str(_USER)
        code, said = self.cluster.execute(PODS[0], "touch", "/x")
        assert code != 0
        assert "Read-only" in said
        privileges = self.cluster.execute(PODS[0], "grep", "-E", "NoNewPrivs|CapBnd", "/proc/self/status")[1]
        assert re.findall(r":\s+(\w+)", privileges) == ["0000000000000000", "1"]

    def change_authority(self) -> None:
        """Both are trusted for a while. etcd reads whom it trusts at its start only: its members are restarted."""
        new = Authority("the second CA")
        self.cluster.issue(self.objects, self.authority, new)
        for member in MEMBERS:
            self.cluster.evict(member, signal.SIGTERM)
            self.cluster.bring_back(member)
            self.cluster.await_ready(member)
        self.cluster.issue(self.objects, new, self.authority)
        for replica in REPLICAS:
            self.cluster.until(
                lambda at=replica: self.issuer(at) == new.name, f"{replica} shows its new certificate"
            )
        self.cluster.issue(self.objects, new)
        self.authority = new

    def change_token_and_keys(self) -> None:
        """A second key, a token of it, and then the first key is gone: nobody is restarted for any of it."""
        before, self.token = self.token, self._new_token()
        self._put_keys()
        self.cluster.until(lambda: self.ask(self.token)[0] == 0, "the service has read its second key")
        self.cluster.put_secret("train-token", {"token": self.token.encode()})
        *_, last = self._key_file.read_text().splitlines()
        self._key_file.write_text(f"{last}\n")
        self._put_keys()
        self.cluster.until(
            lambda: self.ask(before)[0] == _NOT_ALLOWED, "the token of the first key is refused"
        )

    def lose_the_owner(self) -> None:
        """Agents come back to another replica, with what is in their files now; ranks go on undisturbed."""
        generation = self.curve()[-1][1]
        lost = self.owner()
        self.cluster.lose(lost)
        self.cluster.until(lambda: self._settled(lost), "the agents are at another replica")
        self.cluster.bring_back(lost)
        self.cluster.await_ready(lost)
        self.await_steps()
        assert self.curve()[-1][1] == generation
        assert not self.ranks(generation + 1)

    def _settled(self, lost: str) -> bool:
        return any(count == len(PODS) for name, count in self.streams().items() if name != lost)

    def lose_a_pod(self) -> None:
        before = self.cluster.engine.address(self.cluster.pods["train-1"].number)
        generation = self.curve()[-1][1]
        self.cluster.lose("train-1")
        self.cluster.bring_back("train-1")
        assert self.cluster.engine.address(self.cluster.pods["train-1"].number) != before
        self.await_generation(generation + 1)

    def evict_a_pod(self) -> None:
        """Its agent says farewell: nothing has to run out before the others know."""
        generation = self.curve()[-1][1]
        assert self.cluster.evict("train-0", signal.SIGTERM) == 128 + signal.SIGTERM
        self.cluster.bring_back("train-0")
        self.await_generation(generation + 1)

    def finish(self) -> None:
        self.cluster.until(
            lambda: self.cluster.holds(REPLICAS[0], "livenessProbe"), "the livenessProbe of a replica holds"
        )
        (self.work / "finish").touch()
        assert self.cluster.await_end(*PODS) == [0, 0], self.cluster.told()
        steps = [step for step, _ in self.curve()]
        assert sorted(set(steps)) == list(range(1, max(steps) + 1))
        said = "\n".join(self.cluster.engine.logs(self.cluster.pods[name]) for name in (*REPLICAS, *PODS))
        assert '"kind": "decision"' in said
        assert not [
            line for line in said.splitlines() if line.startswith("Traceback")
        ]  # ranks' have a label in front


def play(engine: Engine, folder: Path, tell: Callable[[str], None]) -> None:
    """Tells what runs, and how long each part took."""
    tell(engine.what)
    story, begun = Story(engine, folder), time.monotonic()
    for part in (
        *(story.start_service, story.submit, story.look_at_rights, story.change_authority),
        *(
            story.change_token_and_keys,
            story.lose_the_owner,
            story.lose_a_pod,
            story.evict_a_pod,
            story.finish,
        ),
    ):
        part()
        tell(f"{part.__name__.replace('_', ' ')} {time.monotonic() - begun:.0f} s")
        begun = time.monotonic()
