"""As much of a cluster as it takes to run rendered objects on one machine, whatever it is that runs containers.

Controllers: pods of sets and of Indexed Jobs, their names and addresses. A kubelet: secrets as files that change all
at once, claims, probes. What runs the containers is an `Engine`: podman, or processes in the network lab.
"""

from __future__ import annotations

import http.client
import itertools
import os
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lab_host import eventually
from pods import names, pods_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from certificates import Authority
    from pods import Object, Pod

T = TypeVar("T")

LONG_S = 120.0  # on a machine that is busy with other things; what is waited for comes within seconds
_PROBE_S = 5.0
_FIRST_NUMBER = 11
_TOLD_CHARS = 2000


@dataclass(frozen=True)
class Mount:
    path: str
    source: Path | None  # None: an empty folder that goes with the pod
    read_only: bool
    in_memory: bool


class Engine(Protocol):
    what: str  # that runs, and what of the manifests it does not honour

    def address(self, number: int) -> str: ...

    def start(self, pod: Pod, mounts: Sequence[Mount]) -> None: ...

    def publish(self, hosts: Mapping[str, str]) -> None:
        """Names of services and of pods -> addresses: for all pods that run, and for those to come."""

    def signal(self, pod: Pod, signum: int) -> None: ...

    def remove(self, pod: Pod) -> None:
        """At once, as if its node had lost its power; its logs stay."""

    def logs(self, pod: Pod) -> str: ...

    def exit_code(self, pod: Pod) -> int | None:
        """None while it runs."""

    def execute(self, pod: Pod, *command: str, env: Mapping[str, str]) -> tuple[int, str]:
        """In its container, as its user: exit code and output."""

    def reach(self, pod: Pod, ask: Callable[[], T]) -> T:
        """Calls `ask` from where the pod's address can be reached."""

    def close(self) -> None: ...


class Cluster:
    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self._folder = engine, folder
        folder.mkdir()
        self.pods: dict[str, Pod] = {}
        self._services: list[Object] = []
        self._secrets: dict[str, dict[str, bytes]] = {}
        self._mounts: dict[str, list[Mount]] = {}
        self._lost: set[str] = set()
        self._numbers = itertools.count(_FIRST_NUMBER)

    # --- objects -----------------------------------------------------------------------------------

    def apply(self, objects: Sequence[Object]) -> list[str]:
        """The names of the pods that run now."""
        self._services += [each for each in objects if each["kind"] == "Service"]
        made = [replace(pod, number=next(self._numbers)) for each in objects for pod in pods_of(each)]
        self.pods |= {pod.name: pod for pod in made}
        self._publish()
        for pod in made:
            self._start(pod)
        return [pod.name for pod in made]

    def put_secret(self, name: str, files: Mapping[str, bytes]) -> None:
        """Pods that have it mounted see the new content, all of it at once."""
        self._secrets[name] = dict(files)
        for pod in self.pods.values():
            self._project_secrets(pod, name)

    def issue(self, certificates: Sequence[Object], authority: Authority, *trusted: Authority) -> None:
        """As cert-manager does it for every Certificate that is not an authority's own."""
        for each in certificates:
            if each["kind"] == "Certificate" and not each["spec"].get("isCA"):
                self.put_secret(each["spec"]["secretName"], authority.issue(each["spec"], *trusted))

    def claim(self, name: str, group: int) -> Path:
        """A folder for the pods of this group, which outlives them."""
        path = self._folder / "claims" / name
        if not path.exists():
            path.mkdir(parents=True)
            os.chown(path, 0, group)
            path.chmod(0o2770)
        return path

    # --- pods --------------------------------------------------------------------------------------

    def lose(self, name: str) -> None:
        self._lost.add(name)
        self.engine.remove(self.pods[name])
        self._publish()

    def bring_back(self, name: str) -> None:
        """A pod of a job comes back with another address, under the same index."""
        pod = self.pods[name]
        if not pod.keeps_its_place:
            pod = replace(pod, number=next(self._numbers))
        shutil.rmtree(self._folder / "volumes" / name)
        self.pods[name] = pod
        self._lost.remove(name)
        self._publish()
        self._start(pod)

    def evict(self, name: str, signum: int) -> int:
        """The exit code of its container, which is told to end and has all the time that it needs."""
        self.engine.signal(self.pods[name], signum)
        (code,) = self.await_end(name)
        self.lose(name)
        return code

    def await_end(self, *names: str) -> list[int]:
        """Their exit codes."""
        self.until(lambda: set(names) <= self._ended(), f"{', '.join(names)} ended", may_end=names)
        return [int(self.engine.exit_code(self.pods[name]) or 0) for name in names]

    def await_ready(self, *pods: str) -> None:
        """First what its startup probe asks, then its readiness probe."""
        for name in pods:
            for probe in ("startupProbe", "readinessProbe"):
                self.until(lambda p=probe, n=name: self.holds(n, p), f"the {probe} of {name} holds")

    def holds(self, name: str, probe: str) -> bool:
        pod = self.pods[name]
        get = pod.container[probe]["httpGet"]
        return 200 <= self.get(name, pod.port(get["port"]), get["path"])[0] < 400

    def get(self, name: str, port: int, path: str) -> tuple[int, str]:
        """(0, "") where nothing answers."""
        if name in self._lost:
            return 0, ""
        address = self.engine.address(self.pods[name].number)

        def ask() -> tuple[int, str]:
            connection = http.client.HTTPConnection(address, port, timeout=_PROBE_S)
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()
            except (OSError, http.client.HTTPException):
                return 0, ""
            finally:
                connection.close()

        return self.engine.reach(self.pods[name], ask)

    def execute(self, name: str, *command: str, **variables: str) -> tuple[int, str]:
        pod = self.pods[name]
        env = {each["name"]: each["value"] for each in pod.container.get("env", [])}
        return self.engine.execute(pod, *command, env=env | variables)

    def until(self, condition: Callable[[], Any], what: str, may_end: Sequence[str] = ()) -> None:
        """Waits no longer when a pod has ended that should not have."""

        def so_or_over() -> bool:
            return bool(condition()) or bool(self._ended() - set(may_end))

        try:
            eventually(so_or_over, LONG_S, what, look_every_s=0.1)
            ended = self._ended() - set(may_end)
            assert not ended, f"{', '.join(sorted(ended))} ended before {what}"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.told()}") from None

    def _ended(self) -> set[str]:
        there = (pod for name, pod in self.pods.items() if name not in self._lost)
        return {pod.name for pod in there if self.engine.exit_code(pod) is not None}

    def told(self) -> str:
        """The last words of all pods, for a test that failed."""
        parts = (f"--- {pod.name}\n{self.engine.logs(pod)[-_TOLD_CHARS:]}" for pod in self.pods.values())
        return "\n".join(parts)

    # ------------------------------------------------------------------------------------------------

    def _start(self, pod: Pod) -> None:
        volumes = {each["name"]: each for each in pod.spec.get("volumes", [])}
        volumes |= {
            name: {"persistentVolumeClaim": {"claimName": claim}} for name, claim in pod.claims.items()
        }
        mounts = pod.container["volumeMounts"]
        self._mounts[pod.name] = [self._mount(pod, each, volumes[each["name"]]) for each in mounts]
        for name in self._secrets:
            self._project_secrets(pod, name)
        self.engine.start(pod, self._mounts[pod.name])

    def _publish(self) -> None:
        """A pod that is lost is no endpoint of its services."""
        there = [pod for name, pod in self.pods.items() if name not in self._lost]
        known = names(there, self._services)
        self.engine.publish({name: self.engine.address(pod.number) for name, pod in known.items()})

    def _mount(self, pod: Pod, mount: Object, volume: Object) -> Mount:
        read_only = bool(mount.get("readOnly"))
        if "persistentVolumeClaim" in volume:
            return Mount(
                mount["mountPath"],
                self.claim(volume["persistentVolumeClaim"]["claimName"], pod.group),
                read_only,
                in_memory=False,
            )
        if "secret" in volume:
            assert volume["secret"]["secretName"] in self._secrets, volume
            folder = self._folder / "volumes" / pod.name / volume["name"]
            folder.mkdir(parents=True)
            return Mount(mount["mountPath"], folder, read_only, in_memory=True)
        medium = volume["emptyDir"].get("medium", "")
        return Mount(mount["mountPath"], None, read_only, in_memory=medium == "Memory")

    def _project_secrets(self, pod: Pod, name: str) -> None:
        for volume in pod.spec.get("volumes", []):
            secret = volume.get("secret", {})
            folder = self._folder / "volumes" / pod.name / volume["name"]
            if secret.get("secretName") == name and folder.exists():
                project(folder, self._secrets[name], secret.get("defaultMode", 0o644), pod.group)


def project(folder: Path, files: Mapping[str, bytes], mode: int, group: int) -> None:
    """As a kubelet writes it: names lead through a link to a folder, and the link is replaced."""
    data, number = folder / "..data", len(list(folder.glob("..[0-9]*")))
    made = folder / f"..{number}"
    made.mkdir()
    for name, content in files.items():
        path = made / name
        path.write_bytes(content)
        os.chown(path, 0, group)
        path.chmod(mode)
    part = folder / "..data_tmp"
    part.symlink_to(made.name)
    part.rename(data)
    for name in files:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
