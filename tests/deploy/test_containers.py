"""The images of deploy/docker and the pods of deploy/kubernetes, really built and really run: by podman, as root.

Three replicas of the service on an etcd of three members, all with the certificates that their manifests mount; then a
job's pods, which lose one of them.
"""

from __future__ import annotations

import os
import shutil
import ssl
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from build_images import build_all
from certificates import Authority
from containers import Network, eventually, logs, pod_of, podman, what_is_missing
from test_manifests import built, one

from rendezvous.submit import kubernetes
from rendezvous.submit.job_file import read
from rendezvous.tokens import Grant, Role, add_key, new_grant_id, read_keys, sign

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_TRAIN = Path(__file__).parents[1] / "lab" / "programs" / "train.py"
_USER = 10001
_SVC = "ddp-rendezvous.svc"
_MEMBERS = [f"ddp-rendezvous-etcd-{i}" for i in range(3)]
_REPLICAS = [f"ddp-rendezvous-{i}" for i in range(3)]
_MEMBER_AT, _REPLICA_AT, _POD_AT = 11, 21, 31
_UP_S, _STEPS_S = 60.0, 90.0

pytestmark = [
    pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing() or "-"),
    pytest.mark.timeout(900),
    pytest.mark.soak,  # builds a base image from packages
]


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = Network(f"ddp-launch-test-{os.getpid()}")
        at = self.network.address
        self.hosts = {
            f"{name}.ddp-rendezvous-etcd.{_SVC}": at(_MEMBER_AT + i) for i, name in enumerate(_MEMBERS)
        }
        self.hosts |= {
            f"{name}.ddp-rendezvous-replicas.{_SVC}": at(_REPLICA_AT + i) for i, name in enumerate(_REPLICAS)
        }
        self.hosts[f"ddp-rendezvous.{_SVC}"] = at(_REPLICA_AT)
        self.authority = Authority(folder / "authority")
        self.secrets = {
            "ddp-rendezvous-server-tls": self.issue("server"),
            "ddp-rendezvous-client-tls": self.authority.issue(folder / "client", "ddp-launch"),
            "ddp-rendezvous-etcd-client-tls": self.authority.issue(folder / "etcd-client", "ddp-rendezvous"),
            "ddp-rendezvous-etcd-tls": self._issue_for_etcd(),
            "ddp-rendezvous-token-keys": self._token_keys(),
        }
        self.work = self._work()

    def issue(self, name: str) -> Path:
        """What components/tls asks cert-manager for."""
        wanted = one(list(built("production")), "Certificate", "ddp-rendezvous-server")["spec"]["dnsNames"]
        return self.authority.issue(self.folder / name, "ddp-rendezvous", [f"DNS:{each}" for each in wanted])

    def _issue_for_etcd(self) -> Path:
        spec = one(list(built("production")), "Certificate", "ddp-rendezvous-etcd")["spec"]
        names = [f"DNS:{each}" for each in spec["dnsNames"]] + [f"IP:{each}" for each in spec["ipAddresses"]]
        return self.authority.issue(self.folder / "etcd", "ddp-rendezvous-etcd", names)

    def _token_keys(self) -> Path:
        keys, token = self.folder / "token-keys", self.folder / "token"
        keys.mkdir()
        token.mkdir()
        add_key(str(keys / "keys"))
        grant = Grant(new_grant_id(), "train-*", Role.AGENT, 4e9)
        (token / "token").write_text(sign(grant, read_keys(str(keys / "keys"))[-1]))
        os.chown(keys / "keys", _USER, _USER)
        return keys

    def _work(self) -> Path:
        work = self.folder / "work"
        for each in (work, work / "ranks", work / "orders"):
            each.mkdir()
            os.chown(each, _USER, _USER)
        shutil.copy(_TRAIN, work)
        return work

    def play(self, template: Mapping[str, Any], name: str, number: int, **variables: str) -> None:
        fields = {"metadata.name": name, "metadata.namespace": "ddp-rendezvous"}
        fields["metadata.labels['batch.kubernetes.io/controller-uid']"] = "5f0c"
        pod = pod_of(template, name, self.hosts, self.secrets, fields, **variables)
        self.network.play(self.folder, pod, number)

    def start_service(self) -> None:
        objects = list(built("production"))
        for names, first, owner in (
            (_MEMBERS, _MEMBER_AT, "ddp-rendezvous-etcd"),
            (_REPLICAS, _REPLICA_AT, "ddp-rendezvous"),
        ):
            for i, name in enumerate(names):
                self.play(one(objects, "StatefulSet", owner)["spec"]["template"], name, first + i)
        eventually(
            self._all_ready, _UP_S, lambda: self.logs("ddp-rendezvous-0-rendezvous", f"{_MEMBERS[0]}-etcd")
        )

    def _all_ready(self) -> bool:
        return all(self._ready(self.network.address(_REPLICA_AT + i)) for i in range(3))

    def _ready(self, address: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://{address}:9400/readyz", timeout=1.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def logs(self, *containers: str) -> str:
        return "\n".join(logs(each) for each in containers)

    def steps(self) -> int:
        try:
            return len((self.work / "curve").read_text().splitlines())
        except FileNotFoundError:
            return 0

    def certificate(self) -> str:
        """What a new connection is shown."""
        return ssl.get_server_certificate((self.network.address(_REPLICA_AT), 29400), timeout=5.0)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    build_all()
    made = Cluster(tmp_path)
    os.chmod(tmp_path, 0o755)
    yield made
    made.network.close()


def job_template(cluster: Cluster) -> dict[str, Any]:
    job = read(
        {
            "name": "train",
            "image": "ddp-train",
            "script": ["/data/train.py", "/data"],
            "nodes": 2,
            "ranks_per_node": 1,
            "rendezvous": f"ddp-rendezvous.{_SVC}:29400",
            "resources": {"cpu": "1", "memory": "2Gi"},
            "volumes": [{"path": "/data", "claim": "work"}],
            "kubernetes": {"token_secret": "train-token", "tls_secret": "ddp-rendezvous-client-tls"},
        }
    )
    cluster.secrets |= {"work": cluster.work, "train-token": cluster.folder / "token"}
    found = next(each for each in kubernetes.objects(job) if each["kind"] == "Job")
    return dict(found["spec"]["template"])


def exit_code(container: str) -> int:
    return int(podman("wait", container, timeout_s=_STEPS_S))


def test_a_job_loses_a_pod_and_finishes_while_certificates_change(cluster: Cluster) -> None:
    cluster.start_service()
    template = job_template(cluster)
    for i in range(2):
        cluster.play(template, f"train-{i}", _POD_AT + i, JOB_COMPLETION_INDEX=str(i))

    def trained(until: int) -> None:
        eventually(
            lambda: cluster.steps() >= until, _STEPS_S, lambda: cluster.logs("train-0-node", "train-1-node")
        )

    trained(20)
    assert podman("exec", "train-0-node", "id", "-u") == str(_USER)
    refused = podman("exec", "train-0-node", "sh", "-c", "touch /x 2>&1 || true")
    assert "Read-only" in refused

    shown = cluster.certificate()
    cluster.issue("server")
    eventually(lambda: cluster.certificate() != shown, _UP_S, lambda: "the old certificate is still shown")

    cluster.network.remove("train-1")
    cluster.play(template, "train-1", _POD_AT + 9, JOB_COMPLETION_INDEX="1")
    again = cluster.work / "ranks" / "2-1"
    eventually(again.exists, _STEPS_S, lambda: cluster.logs("train-0-node", "train-1-node"))
    assert yaml.safe_load(again.read_text())["host"] == "train-1"
    trained(cluster.steps() + 20)

    (cluster.work / "finish").touch()
    assert [exit_code(f"train-{i}-node") for i in range(2)] == [0, 0], cluster.logs("train-0-node")
    said = cluster.logs(*(f"{name}-rendezvous" for name in _REPLICAS))
    assert '"kind": "decision"' in said
    assert "Traceback" not in said
