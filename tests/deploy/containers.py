"""Pods as the manifests describe them, run by podman: what a kubelet fills in is filled in here.

Not played: probes (the test looks itself), services (each name is written into the pods' hosts), claims (an empty
folder), and where pods may be scheduled. Everything else of a template, its security above all, goes to
`podman kube play` as it stands.
"""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).parents[2]
BASE, TRAINING_BASE = "localhost/ddp-launch-test-base:1", "localhost/ddp-launch-test-torch:1"
SERVICE, TRAINING, ETCD = "localhost/ddp-rendezvous:0.1.0", "localhost/ddp-train:0.1.0", "localhost/etcd:test"
_IMAGES = {"ddp-rendezvous:0.1.0": SERVICE, "ddp-train": TRAINING, "etcd": ETCD}
_PLAY_S = 60.0
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
    programs = ("podman", "runc", "catatonit", "kubectl", "openssl", "etcd")
    places = os.environ.get("PATH", "") + ":/usr/sbin:/usr/libexec/podman"
    missing = [name for name in programs if shutil.which(name, path=places) is None]
    if not image_exists(BASE) and shutil.which("mmdebstrap") is None:
        missing.append("mmdebstrap")
    return f"no {', '.join(missing)} on this machine" if missing else ""


def environment() -> dict[str, str]:
    path = Path("/run/ddp-launch-tests-containers.conf")
    if not path.exists():
        path.write_text(_CONFIGURATION)
    return {**os.environ, "CONTAINERS_CONF": str(path)}


def podman(*words: str, timeout_s: float = _PLAY_S, check: bool = True, text: str | None = None) -> str:
    done = subprocess.run(
        ["podman", *words], env=environment(), input=text, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0 or not check, f"podman {' '.join(words)}: {done.stderr or done.stdout}"
    return done.stdout.strip()


def logs(container: str) -> str:
    done = subprocess.run(["podman", "logs", container], env=environment(), capture_output=True, text=True)
    return f"--- {container}\n{done.stdout}{done.stderr}"


def image_exists(name: str) -> bool:
    if shutil.which("podman") is None:
        return False
    return subprocess.run(["podman", "image", "exists", name], env=environment(), timeout=60).returncode == 0


class Network:
    """One bridge; addresses are ours to give, so that names can be written down before pods exist."""

    def __init__(self, name: str) -> None:
        self.name = name
        podman("network", "create", name)
        (found,) = yaml.safe_load(podman("network", "inspect", name))
        subnet = (
            found.get("subnets", [{}])[0].get("subnet")
            or found["plugins"][0]["ipam"]["ranges"][0][0]["subnet"]
        )
        self._prefix = subnet.rpartition(".")[0]
        self._pods: list[Path] = []

    def address(self, number: int) -> str:
        return f"{self._prefix}.{number}"

    def play(self, folder: Path, pod: Mapping[str, Any], number: int) -> None:
        path = folder / f"{pod['metadata']['name']}.yaml"
        path.write_text(yaml.safe_dump(pod))
        podman("kube", "play", "--network", self.name, "--ip", self.address(number), str(path))
        self._pods.append(path)

    def remove(self, pod: str) -> None:
        podman("pod", "rm", "--force", "--time", "0", pod, check=False)
        volumes = podman("volume", "ls", "--quiet", "--filter", f"name=^{pod}-").split()
        if volumes:
            podman("volume", "rm", "--force", *volumes)

    def close(self) -> None:
        for path in self._pods:
            self.remove(path.stem)
        podman("network", "rm", "--force", self.name, check=False)


def pod_of(
    template: Mapping[str, Any],
    name: str,
    hosts: Mapping[str, str],
    secrets: Mapping[str, Path],
    fields: Mapping[str, str],
    **variables: str,
) -> dict[str, Any]:
    """`hosts`: name -> address. `secrets`: name -> folder. `fields`: what the API knows of the pod."""
    spec = copy.deepcopy(template["spec"])
    for leave_out in ("affinity", "topologySpreadConstraints", "priorityClassName", "serviceAccountName"):
        spec.pop(leave_out, None)
    spec["hostAliases"] = [{"ip": ip, "hostnames": [host]} for host, ip in hosts.items()]
    spec["volumes"] = [_volume(each, secrets) for each in spec.get("volumes", [])]
    claimed = {each["name"] for each in spec["volumes"]}
    for container in spec["containers"]:
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in claimed:  # a claim of a set
                claimed.add(mount["name"])
                spec["volumes"].append({"name": mount["name"], "emptyDir": {}})
            mount["name"] = f"{name}-{mount['name']}"
        for leave_out in ("startupProbe", "livenessProbe", "readinessProbe", "ports"):
            container.pop(leave_out, None)  # podman would take ports of this machine for them
        container["image"] = _IMAGES.get(container["image"], container["image"])
        _fill_in(container, fields, variables)
    for volume in spec["volumes"]:  # podman knows an empty folder by its name alone, whatever pod it is of
        volume["name"] = f"{name}-{volume['name']}"
    labels = template["metadata"]["labels"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def _volume(volume: dict[str, Any], secrets: Mapping[str, Path]) -> dict[str, Any]:
    if "secret" in volume:
        path = str(secrets[volume["secret"]["secretName"]])
        return {"name": volume["name"], "hostPath": {"path": path, "type": "Directory"}}
    if "persistentVolumeClaim" in volume:
        path = str(secrets[volume["persistentVolumeClaim"]["claimName"]])
        return {"name": volume["name"], "hostPath": {"path": path, "type": "Directory"}}
    return volume


def _fill_in(container: dict[str, Any], fields: Mapping[str, str], variables: Mapping[str, str]) -> None:
    known: dict[str, str] = {}

    def expanded(text: str) -> str:
        for name, value in known.items():
            text = text.replace(f"$({name})", value)
        return text

    for variable in container.get("env", []):
        source = variable.pop("valueFrom", None)
        value = fields[source["fieldRef"]["fieldPath"]] if source else expanded(variable["value"])
        variable["value"] = known[variable["name"]] = value
    container["env"] += [{"name": name, "value": value} for name, value in variables.items()]
    for words in ("command", "args"):
        if words in container:
            container[words] = [expanded(each) for each in container[words]]


def eventually(holds: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)
