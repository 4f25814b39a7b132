"""`ddp.toml`: what a job is, said once for every place it may run at. Pure; what makes no sense: `job_rules`.

name = "train"
image = "registry.example/train:7"       # Kubernetes only
script = ["train.py", "--epochs", "3"]   # or after `--` on the command line
workdir = "/work"                        # where it runs; "": as the image says, or where the command was given
nodes = "4"                              # or "2:4", elastic
ranks_per_node = "auto"
spares = 0
max_restarts = 5                         # or "5/1h": so many within any hour
options = ["--log-dir", "/logs"]         # further words for ddp-launch
rendezvous = "HOST:PORT"                 # a deployed service; without it the first node serves

[resources]  cpu, memory, gpus, gpu_resource, shm, extra
[env]        NAME = "value"              # a secret never: see secret_env, and DDP_RENDEZVOUS_TOKEN_FILE
[[volumes]]  path, read_only, and one of: claim, config_map, secret, host_path, size (an empty folder)
[kubernetes] kind (job, jobset, trainjob), context, namespace, rendezvous, queue, priority_class, scheduler,
             service_account, token_secret, tls_secret, secret_env, grace_s, replace, wait, deadline_s, keep_s, labels,
             annotations, node_selector, tolerations, apart, together, runtime_class, user, fenced,
             host_network, capabilities, image_pull_secrets
[slurm]      partition, account, qos, time, reservation, constraint, exclude, gres, array, requeue, signal_s, setup,
             options
[ssh]        hosts, options
"""

from __future__ import annotations

import difflib
from dataclasses import MISSING, dataclass, field, fields
from math import isfinite
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from rendezvous.submit.job_rules import objection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class BadJobFile(ValueError):
    """In words, with the place and what to write instead."""


@dataclass(frozen=True, slots=True)
class Resources:
    cpu: str = "4"
    memory: str = "8Gi"
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    shm: str = ""  # what ranks and data loaders may put into /dev/shm; "": as much as there is memory
    extra: dict[str, str] = field(default_factory=dict)  # "rdma/hca" = 1; Kubernetes only


@dataclass(frozen=True, slots=True)
class Volume:
    path: str
    claim: str = ""  # a PersistentVolumeClaim
    config_map: str = ""  # each of its keys is a file
    secret: str = ""
    host_path: str = ""  # a folder of the machine
    size: str = "1Gi"  # without any of these: an empty folder of this size, gone with the pod
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Kubernetes:
    kind: str = "job"
    context: str = ""  # of the user's kubeconfig; "": the current one
    namespace: str = "default"
    rendezvous: str = ""  # where jobs of this cluster meet; "": as the file says for all
    queue: str = ""  # of Kueue
    priority_class: str = ""
    scheduler: str = ""
    service_account: str = ""
    token_secret: str = ""  # with the key `token`
    tls_secret: str = ""  # with ca.crt, and tls.crt and tls.key where the service asks for certificates
    secret_env: dict[str, str] = field(default_factory=dict)  # NAME = "SECRET/KEY"
    grace_s: int = 120  # from SIGTERM to SIGKILL: a checkpoint must fit in
    replace: int = 10  # how often a pod of one index is replaced
    wait: str = "1d"  # how long pods wait for those that the cluster has no place for yet
    deadline_s: int = 0  # the job ends after so long, whatever it does; 0: never
    keep_s: int = 86_400  # a finished job stays to be looked at
    labels: dict[str, str] = field(default_factory=dict)  # of the job and its pods, as annotations
    annotations: dict[str, str] = field(default_factory=dict)
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: list[dict[str, Any]] = field(default_factory=list)
    apart: str = ""  # a label of nodes: pods are spread evenly over its values
    together: str = ""  # a label of nodes: pods go where its value is the same, if they can
    runtime_class: str = ""
    user: int = 10_001  # who owns what the job writes; the group is the same number
    fenced: bool = True  # nobody but its own pods reaches the ports of its ranks
    host_network: bool = False
    capabilities: list[str] = field(default_factory=list)  # IPC_LOCK, where RDMA asks for it
    image_pull_secrets: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Slurm:
    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    reservation: str = ""
    constraint: str = ""
    exclude: str = ""
    gres: str = ""  # in place of what [resources] gpus asks for
    array: str = ""  # so many jobs, each of them this one
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
    workdir: str = ""
    nodes: str = "1"
    ranks_per_node: str = "auto"
    spares: int = 0
    max_restarts: str = "3"
    options: tuple[str, ...] = ()
    rendezvous: str = ""
    resources: Resources = Resources()
    env: dict[str, str] = field(default_factory=dict)
    volumes: tuple[Volume, ...] = ()
    kubernetes: Kubernetes = Kubernetes()
    slurm: Slurm = Slurm()
    ssh: Ssh = Ssh()

    @property
    def least(self) -> int:
        """With so many machines the job can go on."""
        return int(self.nodes.partition(":")[0])

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
        words += ["--max-restarts", self.max_restarts]
        if self.spares:
            words += ["--spares", str(self.spares)]
        return [*words, *more, *self.options, *self.script]


_SECTIONS = {"resources": Resources, "kubernetes": Kubernetes, "slurm": Slurm, "ssh": Ssh}


def read(data: Mapping[str, Any], script: Sequence[str] = ()) -> JobFile:
    """`script`: from the command line; it comes before the file's. Raises `BadJobFile`."""
    given = dict(data)
    if script:
        given["script"] = list(script)
    for name, kind in _SECTIONS.items():
        if name in given:
            given[name] = _table(kind, given[name], f"[{name}]")
    volumes = given.get("volumes", [])
    if not isinstance(volumes, list):
        raise BadJobFile("volumes is a list of tables; write [[volumes]]")
    given["volumes"] = tuple(_table(Volume, each, f"[[volumes]] {i}") for i, each in enumerate(volumes, 1))
    job: JobFile = _table(JobFile, given, "the job file")
    if words := objection(job):
        raise BadJobFile(words)
    return job


def _table(kind: type, found: Any, where: str) -> Any:
    if not isinstance(found, dict):
        raise BadJobFile(f"{where} is a table")
    known = {each.name: each for each in fields(kind)}
    hints = get_type_hints(kind)
    for key, value in found.items():
        if key not in known:
            raise BadJobFile(f"{where}: unknown key {key!r}{_meant(key, known)}")
        found = found | {key: _value(hints[key], value, f"{where}: {key}")}
    missing = [name for name, each in known.items() if _needed(each) and name not in found]
    if missing:
        raise BadJobFile(f"{where}: {' and '.join(missing)} must be given")
    return kind(**found)


def _meant(key: str, known: Mapping[str, Any]) -> str:
    places = [name for name, kind in _SECTIONS.items() if key in {each.name for each in fields(kind)}]
    if places:
        return f"; it belongs below [{'] or ['.join(places)}]"
    close = difflib.get_close_matches(key, known, 1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there are {', '.join(known)}"


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
    if hint is Any:
        return _handed_on(value, where)
    if isinstance(value, origin) and not (origin is int and isinstance(value, bool)):
        return value
    shown = {str: "a text", int: "a whole number", bool: "true or false", list: "a list", tuple: "a list"}
    raise BadJobFile(f"{where} is {shown.get(origin, 'a table')}, not {value!r}")


def _handed_on(value: Any, where: str) -> Any:
    """What Kubernetes is to understand, and not we; it knows nothing of TOML's times."""
    if isinstance(value, list):
        return [_handed_on(each, where) for each in value]
    if isinstance(value, dict):
        return {key: _handed_on(each, f"{where}.{key}") for key, each in value.items()}
    if not isinstance(value, str | int | float) or not isfinite(value if isinstance(value, float) else 0.0):
        raise BadJobFile(f"{where} is {value}, which cannot be handed on; write it in quotes")
    return value
