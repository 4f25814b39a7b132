"""A Kubernetes without machines: etcd, kube-apiserver, its controllers and its scheduler, on loopback.

The programs are those that $KUBEBUILDER_ASSETS names (as controller-runtime's envtest lays them out), or that are on
PATH. They check and default what they are given, create pods, place them on nodes and count how they end. Nodes are
objects without a machine; `Node.end` says of a pod what a kubelet would say of it. Kinds of other projects are known by
name only: whatever is said of them is accepted.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import ssl
import subprocess
import time
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

from ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
_UP_S = 120.0
_FOREIGN = {
    "cert-manager.io/v1": ("Certificate", "Issuer"),
    "monitoring.coreos.com/v1": ("ServiceMonitor", "PodMonitor", "PrometheusRule"),
    "jobset.x-k8s.io/v1alpha2": ("JobSet",),
    "trainer.kubeflow.org/v1alpha1": ("TrainJob", "TrainingRuntime"),
}
_NO_KUBELETS = "--controllers=*,-node-lifecycle-controller"  # which would miss their signs of life
Object = dict[str, Any]


def what_is_missing() -> str:
    missing = [name for name in (*PROGRAMS, "etcd", "kubectl", "openssl") if not program(name)]
    return f"no {', '.join(missing)} on this machine" if missing else ""


def program(name: str) -> str | None:
    path = f"{os.environ.get('KUBEBUILDER_ASSETS', '')}:{os.environ.get('PATH', '')}:/usr/sbin"
    return shutil.which(name, path=path)


def eventually(holds: Callable[[], Any], what: str, timeout_s: float = _UP_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


class ControlPlane:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._token = secrets.token_hex(16)
        self._etcd, peer, self._port, *others = free_ports(5)
        self.url = f"https://127.0.0.1:{self._port}"
        (folder / "tokens").write_text(f"{self._token},admin,admin,system:masters\n")
        make = ("openssl", "genrsa", "-out", str(folder / "accounts.key"), "2048")
        subprocess.run(make, check=True, capture_output=True)
        self._write_kubeconfig()
        self._peer, self._others = peer, others

    def start(self) -> None:
        """Whatever becomes of it, `close` ends what has begun."""
        folder = self.folder
        self._start_etcd(self._peer)
        self._start_apiserver()
        eventually(self._ready, "the API server is ready")
        config = f"--kubeconfig={folder}/config"
        alone = ("--leader-elect=false", "--bind-address=127.0.0.1")
        account = f"--service-account-private-key-file={folder}/accounts.key"
        root = f"--root-ca-file={folder}/certificates/apiserver.crt"
        ports = [f"--secure-port={port}" for port in self._others]
        self._start(
            "kube-controller-manager",
            config,
            *alone,
            account,
            root,
            ports[0],
            f"--cert-dir={folder}/kcm",
            _NO_KUBELETS,
        )
        self._start("kube-scheduler", config, *alone, ports[1])
        self._introduce_foreign_kinds()
        eventually(lambda: self.get("serviceaccounts", "default"), "controllers work")

    # --- its processes -----------------------------------------------------------------------------

    def _start(self, name: str, *words: str) -> None:
        path = program(name)
        assert path is not None
        with (self.folder / f"{name}.log").open("wb") as log:
            command = ["setpriv", "--pdeathsig", "KILL", path, *words]
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder))

    def _start_etcd(self, peer: int) -> None:
        ours, theirs = f"http://127.0.0.1:{self._etcd}", f"http://127.0.0.1:{peer}"
        self._start(
            *("etcd", "--data-dir", str(self.folder / "etcd"), "--listen-client-urls", ours),
            *("--advertise-client-urls", ours, "--listen-peer-urls", theirs),
            *("--initial-advertise-peer-urls", theirs, "--initial-cluster", f"default={theirs}"),
            "--unsafe-no-fsync",
        )

    def _start_apiserver(self) -> None:
        self._start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd}",
            f"--secure-port={self._port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={self.folder}/certificates",
            f"--token-auth-file={self.folder}/tokens",
            "--authorization-mode=Node,RBAC",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.folder}/accounts.key",
            f"--service-account-signing-key-file={self.folder}/accounts.key",
        )

    def _write_kubeconfig(self) -> None:
        told = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url, "insecure-skip-tls-verify": True}}],
            "users": [{"name": "admin", "user": {"token": self._token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        }
        (self.folder / "config").write_text(json.dumps(told))

    def _ready(self) -> bool:
        assert all(each.poll() is None for each in self._processes), self.words()
        try:
            return self._ask("GET", "/readyz", None) == b"ok"
        except OSError:
            return False

    def words(self) -> str:
        """The last of what its programs have logged."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {each.stem}\n{each.read_text()[-1500:]}" for each in logs)

    def close(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    # --- what people and kubelets do ---------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "KUBECONFIG": str(self.folder / "config"), "HOME": str(self.folder)}

    def kubectl(self, *words: str, text: str | None = None) -> str:
        command = [str(program("kubectl")), *words]
        done = subprocess.run(
            command, env=self.environment, input=text, capture_output=True, text=True, timeout=_UP_S
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}\n{self.words()}"
        return done.stdout

    def create(self, *objects: Object) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("create", "--validate=strict", "-f", "-", text=json.dumps(listed))

    def get(self, *words: str) -> Any:
        """The object, the items of a list, or None."""
        command = [str(program("kubectl")), "get", *words, "-o", "json"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=_UP_S)
        if done.returncode:
            return None
        found = json.loads(done.stdout)
        return found["items"] if found["kind"] == "List" else found

    def _ask(self, method: str, path: str, body: Object | None) -> bytes:
        kind = "application/strategic-merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        data = None if body is None else json.dumps(body).encode()
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        request = Request(self.url + path, data, headers, method=method)
        with urlopen(request, timeout=30.0, context=context) as answer:
            return bytes(answer.read())

    def evict(self, namespace: str, pod: str) -> None:
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
        self._ask("POST", f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction", body)

    def pods_run(self, namespace: str, pods: Sequence[str]) -> None:
        for pod in pods:
            state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
            self._say_of(namespace, pod, "Running", state)

    def pod_ends(self, namespace: str, pod: str, code: int) -> None:
        times = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:01:00Z"}
        state = {"terminated": {"exitCode": code, **times}}
        self._say_of(namespace, pod, "Succeeded" if code == 0 else "Failed", state)

    def pod_is_gone(self, namespace: str, pod: str) -> None:
        """After an eviction: the kubelet has stopped it, and says so."""
        self._ask("DELETE", f"/api/v1/namespaces/{namespace}/pods/{pod}", {"gracePeriodSeconds": 0})

    def _say_of(self, namespace: str, pod: str, phase: str, state: Object) -> None:
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}"
        found = json.loads(self._ask("GET", path, None))
        told = [
            {
                "name": each["name"],
                "image": each["image"],
                "imageID": "x",
                "ready": phase == "Running",
                "restartCount": 0,
                "state": state,
            }
            for each in found["spec"]["containers"]
        ]
        ready = {"type": "Ready", "status": "True" if phase == "Running" else "False"}
        status = {"phase": phase, "containerStatuses": told, "conditions": [ready]}
        self._ask("PATCH", f"{path}/status", {"status": status})

    def add_nodes(self, n: int, **more: str) -> None:
        """Each in a zone of its own."""
        room = {"cpu": "200", "memory": "4000Gi", "pods": "110", "ephemeral-storage": "1000Gi", **more}
        for i in range(n):
            labels = {"kubernetes.io/hostname": f"n{i}", "topology.kubernetes.io/zone": f"z{i}"}
            self.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"n{i}", "labels": labels}})
            ready = {"type": "Ready", "status": "True", "reason": "Test"}
            status = {"capacity": room, "allocatable": room, "conditions": [ready]}
            self._ask("PATCH", f"/api/v1/nodes/n{i}/status", {"status": status})
            self._ask("PATCH", f"/api/v1/nodes/n{i}", {"spec": {"taints": None}})  # "not ready yet"

    def add_storage(self, n: int) -> None:
        """Volumes that any claim may have; more of them when those before are used up."""
        group = {"apiVersion": "storage.k8s.io/v1", "provisioner": "kubernetes.io/no-provisioner"}
        default = {"storageclass.kubernetes.io/is-default-class": "true"}
        if not self.get("storageclass", "test"):
            self.create(
                {**group, "kind": "StorageClass", "metadata": {"name": "test", "annotations": default}}
            )
        spec = {
            "capacity": {"storage": "10Gi"},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
            "storageClassName": "test",
            "hostPath": {"path": "/nowhere"},
        }
        names = [f"volume-{secrets.token_hex(4)}" for _ in range(n)]
        kind = {"apiVersion": "v1", "kind": "PersistentVolume", "spec": spec}
        self.create(*({**kind, "metadata": {"name": name}} for name in names))

    def claim(self, namespace: str, name: str) -> None:
        """Made before what it is for: so is its namespace."""
        labels = {"name": namespace}
        text = json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": labels})
        self.kubectl("apply", "-f", "-", text=text)
        spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
        meta = {"name": name, "namespace": namespace}
        self.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec})

    def _introduce_foreign_kinds(self) -> None:
        anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        definitions = []
        for version, kinds in _FOREIGN.items():
            group, _, name = version.partition("/")
            served = {"name": name, "served": True, "storage": True, "schema": {"openAPIV3Schema": anything}}
            for kind in kinds:
                names = {"kind": kind, "plural": f"{kind.lower()}s", "singular": kind.lower()}
                spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [served]}
                meta = {"name": f"{names['plural']}.{group}"}
                definitions.append({"kind": "CustomResourceDefinition", "metadata": meta, "spec": spec})
        self.create(*({"apiVersion": "apiextensions.k8s.io/v1", **each} for each in definitions))
