"""The manifests and `ddpctl submit` at a real API server: docs/deploy.md as it stands, and who replaces which pod."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import control_plane
import pytest
from control_plane import ControlPlane, eventually
from deploy_page import blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path(__file__).parents[2]
_SERVICE, _JOBS = "ddp-rendezvous", "training"
_LONG_S = 300.0

pytestmark = [
    pytest.mark.skipif(bool(control_plane.what_is_missing()), reason=control_plane.what_is_missing() or "-"),
    pytest.mark.nightly(instead="deploy/test_manifests.py"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    made = ControlPlane(tmp_path_factory.mktemp("plane"))
    try:
        made.start()
        made.add_nodes(4, **{"nvidia.com/gpu": "8"})
        made.add_storage(10)
        yield made
    finally:
        made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Commands are given in the folder of the project; what they write stays here."""
    (tmp_path / "deploy").symlink_to(_ROOT / "deploy")
    return tmp_path


def run(plane: ControlPlane, folder: Path, command: str) -> str:
    environ = plane.environment | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(
        words, cwd=folder, env=environ, capture_output=True, text=True, timeout=_LONG_S, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}\n{plane.words()}"
    return done.stdout


class Machines:
    """Kubelets and cert-manager: pods run as soon as their secrets are there; those of a job then end well."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane, self._over = plane, threading.Event()
        self._thread = threading.Thread(target=self._work)
        self.failed: BaseException | None = None

    def __enter__(self) -> Machines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self.failed is not None:
            raise self.failed

    def _work(self) -> None:
        try:
            while not self._over.wait(0.5):
                self._certify()
                self._run_pods()
        except BaseException as error:
            self.failed = error

    def _certify(self) -> None:
        have = {each["metadata"]["name"] for each in self._plane.get("secrets", "-n", _SERVICE) or []}
        for each in self._plane.get("certificates", "-n", _SERVICE) or []:
            name = each["spec"]["secretName"]
            if name not in have:
                meta = {"name": name, "namespace": _SERVICE}
                keys = {"ca.crt": "ca", "tls.crt": "certificate", "tls.key": "key"}
                self._plane.create(
                    {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": keys}
                )

    def _run_pods(self) -> None:
        for namespace in (_SERVICE, _JOBS):
            pods = self._plane.get("pods", "-n", namespace) or []
            secrets = {each["metadata"]["name"] for each in self._plane.get("secrets", "-n", namespace) or []}
            for pod in pods:
                name, wanted = pod["metadata"]["name"], mounted_secrets(pod)
                if "deletionTimestamp" in pod["metadata"]:
                    self._plane.pod_is_gone(namespace, name)
                    continue
                match pod["status"]["phase"]:
                    case "Pending" if pod["spec"].get("nodeName") and wanted <= secrets:
                        self._plane.pods_run(namespace, [name])
                    case "Running" if namespace == _JOBS:
                        self._plane.pod_ends(namespace, name, 0)


def mounted_secrets(pod: Any) -> set[str]:
    volumes = pod["spec"].get("volumes", [])
    return {each["secret"]["secretName"] for each in volumes if "secret" in each}


@pytest.mark.parametrize("which", ["production", "dev"])
def test_the_page_leads_to_a_finished_job(plane: ControlPlane, folder: Path, which: str) -> None:
    (commands,) = [each for each in blocks() if f"overlays/{which}" in each[0]]
    for claim in ("data", "checkpoints"):
        plane.claim(_JOBS, claim)
    with Machines(plane):
        for command in commands:
            run(plane, folder, command)
        finished(plane, which)
        if which == "production":
            keys_change(plane, folder)
        plane.kubectl("delete", "namespace", _SERVICE, _JOBS, "--wait")
    plane.add_storage(10)


def finished(plane: ControlPlane, which: str) -> None:
    ready = {
        each["metadata"]["name"]: each["status"]["readyReplicas"] for each in plane.get("statefulsets", "-A")
    }
    assert ready == (
        {"ddp-rendezvous": 3, "ddp-rendezvous-etcd": 3} if which == "production" else {"ddp-rendezvous": 1}
    )
    placed = [each["spec"]["nodeName"] for each in plane.get("pods", "-n", _SERVICE)]
    assert len(set(placed)) == (3 if which == "production" else 1)
    (job,) = plane.get("jobs", "-n", _JOBS)
    assert job["status"]["succeeded"] == job["spec"]["completions"]


def keys_change(plane: ControlPlane, folder: Path) -> None:
    """As the page says it for the days after."""
    (commands,) = [each for each in blocks() if "--dry-run=client" in each[-1]]
    secret = ("secret", "ddp-rendezvous-token-keys", "-n", _SERVICE)
    before = plane.get(*secret)["data"]["keys"]
    for command in commands:
        run(plane, folder, command)
    assert len(plane.get(*secret)["data"]["keys"]) > len(before)


# --- a job ---------------------------------------------------------------------------------------------


class Submitted:
    """A job of four machines, or as the job file says, in a namespace of its own."""

    def __init__(self, plane: ControlPlane, folder: Path, name: str, more: str = "nodes = 4\n") -> None:
        self.plane, self.name, self.namespace = plane, name, f"of-{name}"
        text = (_ROOT / "deploy/jobs/namespace.yaml").read_text()
        plane.kubectl("create", "-f", "-", text=text.replace("name: training", f"name: {self.namespace}"))
        (folder / "ddp.toml").write_text(
            f'name = "{name}"\nimage = "train:7"\nscript = ["train.py"]\n{more}'
            f'[kubernetes]\nnamespace = "{self.namespace}"\nreplace = 2\n[resources]\nmemory = "1Gi"\n'
        )
        self.said = run(plane, folder, "ddpctl submit --target kubernetes")

    def pods(self, *phases: str) -> dict[int, str]:
        """By index."""
        found = self.plane.get("pods", "-n", self.namespace)
        key = "batch.kubernetes.io/job-completion-index"
        return {
            int(each["metadata"]["annotations"][key]): each["metadata"]["name"]
            for each in found
            if each["status"]["phase"] in phases and "deletionTimestamp" not in each["metadata"]
        }

    def train(self, machines: int) -> dict[int, str]:
        """All of its pods are placed, and run."""
        eventually(lambda: len(self.pods("Pending", "Running")) == machines, f"{machines} pods")
        waiting = self.pods("Pending")
        self.plane.pods_run(self.namespace, list(waiting.values()))
        return self.pods("Running")

    def end(self, pod: str, code: int) -> None:
        self.plane.pod_ends(self.namespace, pod, code)

    def condition(self) -> tuple[str, str]:
        (job,) = self.plane.get("jobs", "-n", self.namespace)
        last = [each for each in job["status"].get("conditions", []) if each["status"] == "True"]
        return (last[-1]["type"], last[-1].get("reason", "")) if last else ("", "")

    def _stopped(self) -> None:
        """A job has ended when its pods have: what was told to stop does."""
        for pod in self.plane.get("pods", "-n", self.namespace):
            if "deletionTimestamp" in pod["metadata"]:
                self.plane.pod_is_gone(self.namespace, pod["metadata"]["name"])

    def await_condition(self, kind: str) -> str:
        def reached() -> bool:
            self._stopped()
            return self.condition()[0] == kind

        eventually(reached, f"the job is {kind}, not {self.condition()}")
        return self.condition()[1]


def test_a_job_has_names_a_secret_and_takes_them_along(plane: ControlPlane, folder: Path) -> None:
    job = Submitted(plane, folder, "whole")
    pods = job.train(4)
    found = {each["metadata"]["name"]: each for each in plane.get("pods", "-n", job.namespace)}
    assert {found[name]["spec"]["hostname"] for name in pods.values()} == {f"whole-{i}" for i in range(4)}
    assert {each["spec"]["subdomain"] for each in found.values()} == {"whole"}
    uid = plane.get("jobs", "-n", job.namespace)[0]["metadata"]["uid"]
    assert job.said == f"job/whole created in namespace {job.namespace}; its job id for ddpctl: whole-{uid}\n"
    labels = next(iter(found.values()))["metadata"]["labels"]
    assert labels["batch.kubernetes.io/controller-uid"] == uid
    for pod in pods.values():
        job.end(pod, 0)
    job.await_condition("Complete")
    plane.kubectl("-n", job.namespace, "delete", "job", "whole", "--cascade=background")
    for kind in ("services", "secrets", "pods"):
        eventually(lambda kind=kind: not plane.get(kind, "-n", job.namespace), f"{kind} go with their job")


def test_a_pod_that_is_lost_is_replaced_under_its_index_and_no_oftener_than_said(
    plane: ControlPlane, folder: Path
) -> None:
    job = Submitted(plane, folder, "lost")
    for code in (137, 75):
        pods = job.train(4)
        job.end(pods[2], code)
        eventually(lambda gone=pods[2]: job.pods("Pending").get(2, gone) != gone, "another with index 2")
    pods = job.train(4)
    job.end(pods[2], 143)
    assert job.await_condition("Failed") in ("FailedIndexes", "MaxFailedIndexesExceeded")


def test_a_pod_that_is_evicted_does_not_count(plane: ControlPlane, folder: Path) -> None:
    job = Submitted(plane, folder, "evicted")
    for _ in range(4):  # more than `replace` says
        pods = job.train(4)
        plane.evict(job.namespace, pods[1])
        job.end(pods[1], 143)
        eventually(lambda gone=pods[1]: job.pods("Pending").get(1, gone) != gone, "another with index 1")
    for pod in job.train(4).values():
        job.end(pod, 0)
    job.await_condition("Complete")


@pytest.mark.parametrize("code", [1, 2, 77, 78, 139])
def test_the_agents_last_word_ends_the_job(plane: ControlPlane, folder: Path, code: int) -> None:
    job = Submitted(plane, folder, f"word-{code}")
    job.end(job.train(4)[3], code)
    assert job.await_condition("Failed") == "PodFailurePolicy"


def test_an_elastic_job_is_complete_without_the_machines_that_never_came(
    plane: ControlPlane, folder: Path
) -> None:
    job = Submitted(plane, folder, "elastic", 'nodes = "2:4"\nspares = 1\n')
    pods = job.train(5)
    for i in (0, 3):
        job.end(pods[i], 0)
    job.await_condition("Complete")


def test_a_name_that_is_taken_is_not_touched(plane: ControlPlane, folder: Path) -> None:
    job = Submitted(plane, folder, "twice")
    before = plane.get("jobs", "-n", job.namespace)[0]["metadata"]
    with pytest.raises(AssertionError, match="already exists"):
        run(plane, folder, "ddpctl submit --target kubernetes")
    after = plane.get("jobs", "-n", job.namespace)[0]["metadata"]
    assert (after["uid"], after["generation"]) == (before["uid"], before["generation"])
