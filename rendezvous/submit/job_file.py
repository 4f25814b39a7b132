"""`ddp.toml`: what a job is, said once for every place it may run at. Pure.

name = "train"
image = "registry.example/train:7"       # Kubernetes only
script = ["train.py", "--epochs", "3"]   # or after `--` on the command line
nodes = "4"                              # or "2:4", elastic
ranks_per_node = "auto"
spares = 0
max_restarts = 5
options = ["--log-dir", "/logs"]         # further words for ddp-launch
rendezvous = "HOST:PORT"                 # a deployed service; without it the first node serves

[resources]  cpu, memory, gpus, gpu_resource, shm
[env]        NAME = "value"
[[volumes]]  claim or size, path, read_only
[kubernetes] kind (job, jobset, trainjob), namespace, queue, priority_class, service_account, token_secret,
             tls_secret, grace_s, replace, keep_s, node_selector, tolerations, image_pull_secrets
[slurm]      partition, account, qos, time, reservation, requeue, signal_s, setup, options
[ssh]        hosts, options
"""

from __future__ import annotations

import difflib
import re
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|[KMGTP]i?)?")
_MEMORY_UNITS = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


class BadJobFile(ValueError):
    """In words, with the place and what to write instead."""


@dataclass(frozen=True, slots=True)
class Resources:
    cpu: str = "4"
    memory: str = "8Gi"
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    shm: str = "1Gi"  # ranks of a node, and their data loaders, share memory through /dev/shm


@dataclass(frozen=True, slots=True)
class Volume:
    path: str
    claim: str = ""  # a PersistentVolumeClaim; without one an empty folder of `size`
    size: str = "1Gi"
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Kubernetes:
    kind: str = "job"
    namespace: str = "default"
    rendezvous: str = ""  # where jobs of this cluster meet; "": as the file says for all
    queue: str = ""  # of Kueue
    priority_class: str = ""
    service_account: str = ""
    token_secret: str = ""  # with the key `token`
    tls_secret: str = ""  # with ca.crt, and tls.crt and tls.key where the service asks for certificates
    grace_s: int = 120  # from SIGTERM to SIGKILL: a checkpoint must fit in
    replace: int = 10  # how often a pod of one index is replaced
    keep_s: int = 86_400  # a finished job stays to be looked at
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: list[dict[str, Any]] = field(default_factory=list)
    image_pull_secrets: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Slurm:
    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    reservation: str = ""
    requeue: bool = True
    signal_s: int = 120  # so long before the end of its time the ranks are asked for a checkpoint
    setup: list[str] = field(default_factory=list)  # lines of shell: modules, an environment
    options: list[str] = field(default_factory=list)  # further #SBATCH words


@dataclass(frozen=True, slots=True)
class Ssh:
    hosts: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)  # further words for ddp-launch


@dataclass(frozen=True, slots=True)
class JobFile:
    name: str
    script: tuple[str, ...]
    image: str = ""
    nodes: str = "1"
    ranks_per_node: str = "auto"
    spares: int = 0
    max_restarts: int = 3
    options: tuple[str, ...] = ()
    rendezvous: str = ""
    resources: Resources = Resources()
    env: dict[str, str] = field(default_factory=dict)
    volumes: tuple[Volume, ...] = ()
    kubernetes: Kubernetes = Kubernetes()
    slurm: Slurm = Slurm()
    ssh: Ssh = Ssh()

    @property
    def machines(self) -> int:
        """How many are asked for: the largest world, and those that wait."""
        return int(self.nodes.rpartition(":")[2]) + self.spares

    @property
    def is_elastic(self) -> bool:
        return ":" in self.nodes

    def launch(self, *more: str) -> list[str]:
        """The words after `ddp-launch`, up to and with the script's own."""
        words = ["--nnodes", self.nodes, "--nproc-per-node", self.ranks_per_node]
        words += ["--max-restarts", str(self.max_restarts)]
        if self.spares:
            words += ["--spares", str(self.spares)]
        return [*words, *more, *self.options, *self.script]


_SECTIONS = {"resources": Resources, "kubernetes": Kubernetes, "slurm": Slurm, "ssh": Ssh}


def read(data: Mapping[str, Any], script: Sequence[str] = ()) -> JobFile:
    """`script`: from the command line; it comes before the file's. Raises `BadJobFile`."""
    given = dict(data)
    if script:
        given["script"] = list(script)
    if isinstance(given.get("nodes"), int):
        given["nodes"] = str(given["nodes"])
    if isinstance(given.get("ranks_per_node"), int):
        given["ranks_per_node"] = str(given["ranks_per_node"])
    for name, kind in _SECTIONS.items():
        if name in given:
            given[name] = _table(kind, given[name], f"[{name}]")
    volumes = given.get("volumes", [])
    if not isinstance(volumes, list):
        raise BadJobFile("volumes is a list of tables; write [[volumes]]")
    given["volumes"] = tuple(_table(Volume, each, f"[[volumes]] {i}") for i, each in enumerate(volumes, 1))
    job: JobFile = _table(JobFile, given, "the job file")
    _check(job)
    return job


def _table(kind: type, found: Any, where: str) -> Any:
    if not isinstance(found, dict):
        raise BadJobFile(f"{where} is a table")
    known = {each.name: each for each in fields(kind)}
    hints = get_type_hints(kind)
    for key, value in found.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            meant = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
            raise BadJobFile(f"{where}: unknown key {key!r}{meant}")
        found = found | {key: _value(hints[key], value, f"{where}: {key}")}
    missing = [name for name, each in known.items() if _needed(each) and name not in found]
    if missing:
        raise BadJobFile(f"{where}: {' and '.join(missing)} must be given")
    return kind(**found)


def _needed(each: Any) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in (tuple, list) and isinstance(value, list | tuple):
        return origin(_value(arguments[0], each, where) for each in value)
    if origin is dict and isinstance(value, dict):
        return {key: _value(arguments[1], each, f"{where}.{key}") for key, each in value.items()}
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)  # cpu = 4
    if hint is Any or (isinstance(value, origin) and not (origin is int and isinstance(value, bool))):
        return value
    shown = {str: "a text", int: "a whole number", bool: "true or false", list: "a list", tuple: "a list"}
    raise BadJobFile(f"{where} is {shown.get(origin, 'a table')}, not {value!r}")


def _check(job: JobFile) -> None:
    if not _NAME.fullmatch(job.name):
        raise BadJobFile(
            f"name = {job.name!r}: up to 52 small letters, digits and dashes, for it becomes a host name"
        )
    if not job.script:
        raise BadJobFile('no script; write script = ["train.py"], or the script after `--`')
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", job.nodes):
        raise BadJobFile(f'nodes = {job.nodes!r}: write "4", or "2:4" for an elastic job')
    low, _, high = job.nodes.rpartition(":")
    if low and int(low) > int(high):
        raise BadJobFile(f"nodes = {job.nodes!r}: the smaller number comes first")
    for name in job.env:
        if not _VARIABLE.fullmatch(name):
            raise BadJobFile(f"[env]: {name!r} is no name of a variable")
    for name in ("cpu", "memory", "shm"):
        if not _QUANTITY.fullmatch(getattr(job.resources, name)):
            raise BadJobFile(f"[resources]: {name} is a quantity such as 500m, 8 or 16Gi")
    if job.kubernetes.kind not in ("job", "jobset", "trainjob"):
        raise BadJobFile(f"[kubernetes]: kind = {job.kubernetes.kind!r}: write job, jobset or trainjob")
    if min(job.spares, job.max_restarts, job.resources.gpus) < 0:
        raise BadJobFile("spares, max_restarts and gpus are no smaller than 0")


def megabytes(quantity: str) -> int:
    """16Gi -> 16384, as Slurm counts memory (of 1,048,576 bytes), rounded up."""
    number, unit = re.fullmatch(r"([\d.]+)(.*)", quantity).groups()  # type: ignore[union-attr]  # checked before
    if unit.endswith("i"):
        scale = 1024.0 ** ("KMGTP".index(unit[0]) + 1)
    else:
        scale = _MEMORY_UNITS.get(unit, 1e-3 if unit == "m" else 1.0)
    return -int(-float(number) * scale // 1048576)
