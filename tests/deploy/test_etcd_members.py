"""Members of etcd, started by the very command of the manifests: their probes, and what comes after a lost volume.

Names become ports of this machine, and TLS is left out: it is played by those tests that run whole pods.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import charts
import pytest
import rules
from etcd_cluster import needs_etcd
from ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [needs_etcd, charts.needs_kubectl]

_UP_S = 60.0
_TLS = (
    "--client-cert-auth",
    "--peer-client-cert-auth",
    "--trusted-ca",
    "--peer-trusted-ca",
    "--cert",
    "--key",
)
_VERSION = (
    subprocess.run(["etcd", "--version"], capture_output=True, text=True).stdout
    if shutil.which("etcd")
    else ""
)
_KNOWS_WHO_WAITS = "Version: 3." in _VERSION and int(_VERSION.split("Version: 3.")[1].split(".")[0]) >= 5
_NAMES = [f"ddp-rendezvous-etcd-{i}" for i in range(3)]


def container() -> Any:
    for whose, template, _ in rules.pods(charts.overlay("production")):
        if whose == "StatefulSet/ddp-rendezvous-etcd":
            (found,) = template["spec"]["containers"]
            return found
    raise AssertionError("no etcd in production")


class Member:
    def __init__(self, name: str, folder: Path, everyone: dict[str, tuple[int, int, int]]) -> None:
        self.name, self.data, self._everyone = name, folder / name, everyone
        self.client, self.peer, self.metrics = everyone[name]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, state: str = "") -> None:
        found = container()
        (told,) = (each["value"] for each in found["env"] if each["name"] == "ETCD_INITIAL_CLUSTER_STATE")
        words = [
            self._here(each)
            for each in found["command"]
            if not each.startswith((*_TLS, "--peer-cert", "--peer-key"))
        ]
        environment = {
            **os.environ,
            "ETCD_INITIAL_CLUSTER_STATE": state or told,
            "ETCD_LOGGER": "zap",
            "GOMAXPROCS": "2",
        }
        with open(f"{self.data}.log", "ab") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *words], env=environment, stdout=log, stderr=log
            )

    def _here(self, word: str) -> str:
        word = word.replace("https://", "http://").replace("/var/lib/etcd/data", str(self.data))
        word = word.replace("$(POD_NAME)", self.name)
        for name, (client, peer, _) in self._everyone.items():
            at = f"{name}.ddp-rendezvous-etcd.$(POD_NAMESPACE).svc"
            word = word.replace(f"{at}:2379", f"127.0.0.1:{client}").replace(
                f"{at}:2380", f"127.0.0.1:{peer}"
            )
        for port, ours in ((2379, self.client), (2380, self.peer), (2381, self.metrics)):
            word = word.replace(f"0.0.0.0:{port}", f"127.0.0.1:{ours}")
        return word

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def probe(self, kind: str) -> bool:
        path = container()[kind]["httpGet"]["path"]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}{path}", timeout=5.0) as answer:
                return bool(answer.status == 200)
        except OSError:  # refused, or a status that says no
            return False

    def call(self, path: str, **request: Any) -> Any:
        url = f"http://127.0.0.1:{self.client}/v3/{path}"
        with urllib.request.urlopen(url, data=json.dumps(request).encode(), timeout=30.0) as answer:
            return json.loads(answer.read())

    @property
    def log(self) -> str:
        return Path(f"{self.data}.log").read_text()


def eventually(holds: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + _UP_S
    while not holds():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[list[Member]]:
    ports = free_ports(9)
    everyone = {name: (ports[i], ports[i + 3], ports[i + 6]) for i, name in enumerate(_NAMES)}
    made = [Member(name, tmp_path, everyone) for name in _NAMES]
    yield made
    for each in made:
        each.stop()


@pytest.mark.skipif(
    not _KNOWS_WHO_WAITS, reason="etcd before 3.5 calls a member unwell that waits for others"
)
def test_a_member_that_waits_for_the_others_is_not_killed(members: list[Member]) -> None:
    first, second, _ = members
    first.start()
    eventually(lambda: first.probe("startupProbe"), lambda: first.log)
    assert first.probe("livenessProbe")
    assert not first.probe("readinessProbe")
    second.start()
    eventually(lambda: first.probe("readinessProbe"), lambda: first.log)


def test_a_member_that_lost_its_volume_is_replaced(members: list[Member]) -> None:
    first, _, third = members
    for each in members:
        each.start()
    eventually(lambda: all(each.probe("readinessProbe") for each in members), lambda: first.log)
    first.call("kv/put", key="YQ==", value="Yg==")

    third.stop()
    shutil.rmtree(third.data)
    third.start()
    assert third.process is not None
    assert third.process.wait(_UP_S) != 0
    assert "has already been bootstrapped" in third.log

    eventually(lambda: first.probe("readinessProbe"), lambda: first.log)
    (lost,) = (each for each in first.call("cluster/member/list")["members"] if each["name"] == third.name)
    first.call("cluster/member/remove", ID=lost["ID"])
    eventually(lambda: _added(first, third), lambda: first.log)
    shutil.rmtree(third.data, ignore_errors=True)
    third.start(state="existing")
    eventually(lambda: third.probe("readinessProbe"), lambda: third.log)
    (found,) = third.call("kv/range", key="YQ==", serializable=True)["kvs"]
    assert found["value"] == "Yg=="


def _added(asked: Member, new: Member) -> bool:
    """For a while after a removal etcd wants to be sure of the members that are left."""
    try:
        asked.call("cluster/member/add", peerURLs=[f"http://127.0.0.1:{new.peer}"])
    except urllib.error.HTTPError:
        return False
    return True
