"""An engine of real containers: podman, as root. `podman kube play` takes templates as they stand, security above all.

Not honoured: network policies. Probes are what the cluster asks itself; names are written into the pods' hosts files.
"""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from images import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cluster import Mount
    from pods import Pod

T = TypeVar("T")

BASE, TRAINING_BASE = "localhost/ddp-launch-test-base:1", "localhost/ddp-launch-test-torch:1"
SERVICE, TRAINING = "localhost/ddp-launch-test-service:1", "localhost/ddp-launch-test-train:1"
ETCD = "localhost/ddp-launch-test-etcd:1"
_IMAGES = {"ddp-rendezvous": SERVICE, "ddp-train": TRAINING, "etcd": ETCD}
_NETWORKS = "ddp-launch-test-"  # and the test's process
_PLAY_S = 120.0
_CONFIGURATION = """
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


def what_is_missing() -> str:
    if os.getuid() != 0:
        return "pods are run as root"
    programs = ("podman", "runc", "catatonit", "netavark", "kubectl", "openssl", "etcd")
    places = os.environ.get("PATH", "") + ":/usr/sbin:/usr/lib/podman:/usr/libexec/podman"
    missing = [name for name in programs if shutil.which(name, path=places) is None]
    if not image_exists(BASE) and shutil.which("mmdebstrap") is None:
        missing.append("mmdebstrap")
    return f"no {', '.join(missing)} on this machine" if missing else ""


def environment() -> dict[str, str]:
    path = Path("/run/ddp-launch-tests-containers.conf")
    if not path.exists():
        path.write_text(_CONFIGURATION)
    return {**os.environ, "CONTAINERS_CONF": str(path)}


def podman(*words: str, timeout_s: float = _PLAY_S, check: bool = True) -> str:
    done = subprocess.run(
        ["podman", *words], env=environment(), capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0 or not check, f"podman {' '.join(words)}: {done.stderr or done.stdout}"
    return done.stdout.strip()


def image_exists(name: str) -> bool:
    if shutil.which("podman") is None:
        return False
    return subprocess.run(["podman", "image", "exists", name], env=environment(), timeout=60).returncode == 0


class Containers:
    """One bridge; addresses are ours to give, so that names can be written down before pods exist."""

    what = "in containers of podman: network policies are not honoured"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = f"{_NETWORKS}{os.getpid()}"
        self._begun: set[str] = set()
        self._hosts: dict[str, str] = {}
        self._hosts_files: dict[str, Path] = {}
        self._addresses: dict[str, str] = {}
        self._kept: dict[str, str] = {}  # logs of pods that are gone
        podman("network", "create", self._name)
        (found,) = yaml.safe_load(podman("network", "inspect", self._name))
        self._prefix = found["subnets"][0]["subnet"].rpartition(".")[0]

    def address(self, number: int) -> str:
        return f"{self._prefix}.{number}"

    def publish(self, hosts: Mapping[str, str]) -> None:
        """Into the very files that are mounted in containers which run: podman writes them at the start only."""
        self._hosts = dict(hosts)
        for name, path in self._hosts_files.items():
            lines = ["127.0.0.1 localhost", f"{self._addresses[name]} {name}"]
            lines += [f"{address} {known}" for known, address in self._hosts.items()]
            path.write_text("\n".join(lines) + "\n")

    def start(self, pod: Pod, mounts: Sequence[Mount]) -> None:
        path = self._folder / f"{pod.name}.yaml"
        path.write_text(yaml.safe_dump(_played(pod, mounts, self._hosts)))
        self._begun.add(pod.name)
        podman("kube", "play", "--network", self._name, "--ip", self.address(pod.number), str(path))
        self._addresses[pod.name] = self.address(pod.number)
        self._hosts_files[pod.name] = Path(podman("inspect", "--format", "{{.HostsPath}}", _container(pod)))

    def signal(self, pod: Pod, signum: int) -> None:
        podman("kill", f"--signal={signum}", _container(pod))

    def remove(self, pod: Pod) -> None:
        self._kept[pod.name] = self.logs(pod)
        self._hosts_files.pop(pod.name, None)
        _remove(pod.name)

    def logs(self, pod: Pod) -> str:
        words = ["podman", "logs", _container(pod)]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(words, env=environment(), text=True, timeout=_PLAY_S, **streams)
        return self._kept.get(pod.name, "") + (done.stdout if done.returncode == 0 else "")

    def exit_code(self, pod: Pod) -> int | None:
        words = ("inspect", "--format", "{{.State.Running}} {{.State.ExitCode}}", _container(pod))
        running, code = podman(*words).split()
        return None if running == "true" else int(code)

    def execute(self, pod: Pod, *command: str, env: Mapping[str, str]) -> tuple[int, str]:
        variables = [f"--env={name}={value}" for name, value in env.items()]
        words = ["podman", "exec", *variables, _container(pod), *command]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(words, env=environment(), text=True, timeout=_PLAY_S, **streams)
        return done.returncode, done.stdout

    def reach(self, pod: Pod, ask: Callable[[], T]) -> T:
        """The bridge is this machine's."""
        return ask()

    def close(self) -> None:
        for name in self._begun:
            _remove(name)
        podman("network", "rm", "--force", self._name, check=False)


def _remove(pod: str) -> None:
    podman("pod", "rm", "--force", "--time", "0", pod, check=False)
    volumes = podman("volume", "ls", "--quiet", "--filter", f"name=^{pod}-").split()
    if volumes:
        podman("volume", "rm", "--force", *volumes)


def remove_leftovers() -> None:
    """Of tests that were killed."""
    for network in podman("network", "ls", "--quiet", "--filter", f"name=^{_NETWORKS}").split():
        name = podman("network", "inspect", "--format", "{{.Name}}", network)
        if not Path("/proc", name.removeprefix(_NETWORKS)).exists():
            for pod in podman("pod", "ls", "--quiet", "--filter", f"network={name}").split():
                _remove(podman("pod", "inspect", "--format", "{{.Name}}", pod))
            podman("network", "rm", "--force", name, check=False)


def _container(pod: Pod) -> str:
    return f"{pod.name}-{pod.container['name']}"


def _played(pod: Pod, mounts: Sequence[Mount], hosts: Mapping[str, str]) -> dict[str, Any]:
    """The pod as podman takes it: volumes are folders of this machine, and nobody else's network is touched."""
    spec: dict[str, Any] = copy.deepcopy(dict(pod.spec))
    spec["restartPolicy"] = "Never"  # what ends is to be seen
    spec["hostAliases"] = [{"ip": address, "hostnames": [name]} for name, address in hosts.items()]
    spec.pop("subdomain", None)
    spec["volumes"] = [_volume(f"{pod.name}-{i}", mount) for i, mount in enumerate(mounts)]
    (container,) = spec["containers"]
    container["volumeMounts"] = [
        {"name": f"{pod.name}-{i}", "mountPath": mount.path, "readOnly": mount.read_only}
        for i, mount in enumerate(mounts)
    ]
    for leave_out in ("startupProbe", "livenessProbe", "readinessProbe", "ports"):
        container.pop(leave_out, None)  # podman would take ports of this machine for them
    container["image"] = _IMAGES[name_of(container["image"])]
    container["imagePullPolicy"] = "Never"
    metadata = {"name": pod.name, "labels": dict(pod.labels)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _volume(name: str, mount: Mount) -> dict[str, Any]:
    if mount.source is None:
        return {"name": name, "emptyDir": {"medium": "Memory"} if mount.in_memory else {}}
    return {"name": name, "hostPath": {"path": str(mount.source), "type": "Directory"}}
