"""The contents of a job file as dataclasses; see `job_file` for the format."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from math import isfinite
from typing import Any, get_args, get_origin, get_type_hints

from rendezvous.values.error_codes import Code, Coded


@dataclass(frozen=True, slots=True)
class Resources:
    cpu: str = "4"
    memory: str = "8Gi"
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    shm: str = ""  # size of /dev/shm; "": limited by memory only
    extra: dict[str, str] = field(default_factory=dict)  # "rdma/hca" = 1; Kubernetes only


@dataclass(frozen=True, slots=True)
class Volume:
    path: str
    claim: str = ""  # a PersistentVolumeClaim
    config_map: str = ""  # each of its keys is a file
    secret: str = ""
    host_path: str = ""  # a folder of the machine
    size: str = "1Gi"  # without any of these: an empty folder of this size, deleted with the pod
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Kubernetes:
    kind: str = "job"
    context: str = ""  # of the user's kubeconfig; "": the current one
    namespace: str = "default"
    rendezvous: str = ""  # the service for this cluster; "": the `rendezvous` of the job
    queue: str = ""  # of Kueue
    priority_class: str = ""
    scheduler: str = ""
    service_account: str = ""
    token_secret: str = ""  # with the key `token`
    tls_secret: str = (
        ""  # with ca.crt, and with tls.crt and tls.key if the service requires client certificates
    )
    secret_env: dict[str, str] = field(default_factory=dict)  # NAME = "SECRET/KEY"
    grace_s: int = 120  # from SIGTERM to SIGKILL; must be long enough for a checkpoint
    replace: int = 10  # how many times a pod of one index is replaced
    wait: str = "1d"  # how long pods wait for pods that are not scheduled yet
    deadline_s: int = 0  # the job is ended after this time; 0: never
    keep_s: int = 86_400  # how long a finished job is kept
    labels: dict[str, str] = field(default_factory=dict)  # of the job and its pods, as annotations
    annotations: dict[str, str] = field(default_factory=dict)
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: list[dict[str, Any]] = field(default_factory=list)
    apart: str = ""  # anti-affinity: the key of a node label; pods are spread evenly over its values
    together: str = ""  # affinity: the key of a node label; pods prefer nodes with the same value
    runtime_class: str = ""
    user: int = 10_001  # the user id of the job; the group id is the same
    fenced: bool = True  # a network policy: only the pods of the job can reach the ports of its ranks
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
    gres: str = ""  # replaces [resources] gpus
    array: str = ""  # a job array, each element runs this job
    requeue: bool = True
    signal_s: int = 120  # how long before the time limit the ranks are asked for a checkpoint
    setup: list[str] = field(default_factory=list)  # lines of shell: modules, an environment
    options: list[str] = field(default_factory=list)  # more #SBATCH options


@dataclass(frozen=True, slots=True)
class Ssh:
    hosts: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)  # more options of ddp-launch


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
    def min_machines(self) -> int:
        """The smallest number of machines with which the job can continue."""
        return int(self.nodes.partition(":")[0])

    @property
    def machines(self) -> int:
        """The number of machines to request: the largest world and the spares."""
        return int(self.nodes.rpartition(":")[2]) + self.spares

    @property
    def is_elastic(self) -> bool:
        return ":" in self.nodes

    def launch(self, *more: str) -> list[str]:
        """The arguments of `ddp-launch`, including the script and its arguments."""
        words = ["--nnodes", self.nodes, "--nproc-per-node", self.ranks_per_node]
        words += ["--max-restarts", self.max_restarts]
        if self.spares:
            words += ["--spares", str(self.spares)]
        return [*words, *more, *self.options, *self.script]


# --- job file ---------------------------------------------------------------------------------------
#
# `ddp.toml`: one description of a job for every place where it may run. The rules below check the values.
#
# name = "train"
# image = "registry.example/train:7"       # Kubernetes only
# script = ["train.py", "--epochs", "3"]   # or after `--` on the command line
# workdir = "/work"                       # "": that of the image (Kubernetes), or the current directory
# nodes = "4"                            # or "2:4", elastic
# ranks_per_node = "auto"
# spares = 0
# max_restarts = 5                        # or "5/1h": at most 5 restarts within any hour
# options = ["--log-dir", "/logs"]         # more options of ddp-launch
# rendezvous = "HOST:PORT"                # a deployed service; without it the first node runs the rendezvous
#
# [resources]  cpu, memory, gpus, gpu_resource, shm, extra
# [env]        NAME = "value"             # do not put secrets here: see secret_env, and DDP_RENDEZVOUS_TOKEN_FILE
# [[volumes]]  path, read_only, and one of: claim, config_map, secret, host_path, size (an empty folder)
# [kubernetes] kind (job, jobset, trainjob), context, namespace, rendezvous, queue, priority_class, scheduler,
#             service_account, token_secret, tls_secret, secret_env, grace_s, replace, wait, deadline_s, keep_s, labels,
#             annotations, node_selector, tolerations, apart, together, runtime_class, user, fenced,
#             host_network, capabilities, image_pull_secrets
# [slurm]      partition, account, qos, time, reservation, constraint, exclude, gres, array, requeue, signal_s, setup,
#             options
# [ssh]        hosts, options
#
# The comments of `Job` explain each key, for example `apart`, `together` and `fenced`.


class BadJobFile(Coded, ValueError):
    """The job file is invalid. The message says where, and what to write instead."""

    code = Code.JOB_FILE_INVALID


_SECTIONS = {"resources": Resources, "kubernetes": Kubernetes, "slurm": Slurm, "ssh": Ssh}


def read(data: Mapping[str, Any], script: Sequence[str] = ()) -> JobFile:
    """Read a job. `script` from the command line replaces that of the file. Raises `BadJobFile`."""
    given = dict(data)
    if script:
        given["script"] = list(script)
    for name, kind in _SECTIONS.items():
        if name in given:
            given[name] = _table(kind, given[name], f"[{name}]")
    volumes = given.get("volumes", [])
    if not isinstance(volumes, list):
        raise BadJobFile("invalid volumes: expected a list of tables; write [[volumes]]")
    given["volumes"] = tuple(_table(Volume, each, f"[[volumes]] {i}") for i, each in enumerate(volumes, 1))
    job: JobFile = _table(JobFile, given, "the job file")
    if words := first_problem(job):
        raise BadJobFile(words)
    return job


def _table(kind: type, found: Any, where: str) -> Any:
    if not isinstance(found, dict):
        raise BadJobFile(
            f"{where}: expected a table; write {where if where.startswith('[') else 'KEY = VALUE lines'}"
        )
    known = {each.name: each for each in fields(kind)}
    hints = get_type_hints(kind)
    for key, value in found.items():
        if key not in known:
            raise BadJobFile(f"{where}: unknown key {key!r}{_meant(key, known)}")
        found = found | {key: _value(hints[key], value, f"{where}: {key}")}
    missing = [name for name, each in known.items() if _needed(each) and name not in found]
    if missing:
        raise BadJobFile(f"{where}: missing: {', '.join(missing)}")
    return kind(**found)


def _meant(key: str, known: Mapping[str, Any]) -> str:
    places = [name for name, kind in _SECTIONS.items() if key in {each.name for each in fields(kind)}]
    if places:
        return f"; it belongs below [{'] or ['.join(places)}]"
    close = difflib.get_close_matches(key, known, 1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known keys: {', '.join(known)}"


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
        return _passed_through(value, where)
    if isinstance(value, origin) and not (origin is int and isinstance(value, bool)):
        return value
    shown = {str: "a string", int: "a whole number", bool: "true or false", list: "a list", tuple: "a list"}
    raise BadJobFile(f"{where} = {value!r}: expected {shown.get(origin, 'a table')}")


def _passed_through(value: Any, where: str) -> Any:
    """A value that is passed to Kubernetes without a check. Dates of TOML have no equivalent there."""
    if isinstance(value, list):
        return [_passed_through(each, where) for each in value]
    if isinstance(value, dict):
        return {key: _passed_through(each, f"{where}.{key}") for key, each in value.items()}
    if not isinstance(value, str | int | float) or not isfinite(value if isinstance(value, float) else 0.0):
        raise BadJobFile(f"{where} = {value}: dates and times are not supported; write it in quotes")
    return value


# --- check a job file before the job is queued, with messages for the user. Pure --------------------

# It becomes a service name, which begins with a letter, and host names: NAME-node-0-INDEX has at most 63 characters.
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAME_CHARS, _HOST_CHARS = 52, 63
_OBJECT = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_OBJECT_CHARS = 253
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_KEY = re.compile(r"([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_KUBERNETES = re.compile(r"ephemeral-storage|hugepages-[0-9]+[KMG]i")
_QUANTITY = re.compile(r"\d{1,15}(\.\d{1,9})?(m|k|Ki|[MGTP]i?)?", re.ASCII)
_SPAN = re.compile(r"\d+(\.\d+)?(s|m|h|d)?")
_MEMORY_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_KINDS = ("job", "jobset", "trainjob")
_INT32 = 2**31 - 1
_WORD_BYTES = 131_071  # Linux's limit on one argument or one NAME=value
_TOO_LONG = f"longer than {_WORD_BYTES} bytes, which is the limit of Linux; put it into a file"
_STOPPING_S = 15  # of a pod's grace: what is left when the checkpoint is written
# These options are keys of the file; as options they could contradict the keys.
_KEY_OF_OPTION = {
    "--nnodes": "nodes",
    "--nproc-per-node": "ranks_per_node",
    "--max-restarts": "max_restarts",
    "--spares": "spares",
    "--rendezvous": "rendezvous",
    "--rdzv-endpoint": "rendezvous",
    "--rdzv-id": "name",
    "--hosts": "[ssh] hosts",
    "--hostfile": "[ssh] hosts",
}
_OURS_IN_PODS = {
    "JOB_UID": "the uid of the job, set by ddp-launch",
    "JOB_COMPLETION_INDEX": "the index of the pod, set by Kubernetes",
}
_TAKEN_PATHS = {"/", "/dev/shm", "/etc/ddp-launch", "/proc", "/sys", "/dev"}


def first_problem(job: JobFile) -> str:
    """The first error; "" if there is none."""
    return next(_problems(job), "")


def _problems(job: JobFile) -> Iterator[str]:
    yield from _of_texts(asdict(job), "")
    yield from _of_the_name(job)
    yield from _of_the_world(job)
    yield from _of_words(job)
    yield from _of_variables(job)
    yield from _of_resources(job)
    yield from _of_volumes(job)
    yield from _of_kubernetes(job)
    yield from _of_slurm(job)


def _of_texts(found: Any, where: str) -> Iterator[str]:
    """Arguments cannot contain NUL, and YAML cannot contain an invalid Unicode character (a lone surrogate)."""
    if isinstance(found, dict):
        for key, each in found.items():
            yield from _of_texts(each, f"{where}.{key}" if where else str(key))
    elif isinstance(found, list | tuple):
        for each in found:
            yield from _of_texts(each, where)
    elif isinstance(found, str) and ("\0" in found or any("\ud800" <= c <= "\udfff" for c in found)):
        yield f"{where}: {found!r} contains a NUL or an invalid Unicode character; remove it"


def _of_the_name(job: JobFile) -> Iterator[str]:
    if not _NAME.fullmatch(job.name) or len(job.name) > _NAME_CHARS:
        yield (
            f"invalid name {job.name!r}: it is used as a host name. Use up to {_NAME_CHARS} lowercase letters, digits "
            "and dashes, beginning with a letter"
        )


def _of_the_world(job: JobFile) -> Iterator[str]:
    if not re.fullmatch(r"[1-9]\d{0,5}(:[1-9]\d{0,5})?", job.nodes):
        yield f'nodes = {job.nodes!r}: write "4", or "2:4" for an elastic job'
        return
    low, _, high = job.nodes.rpartition(":")
    if low and int(low) > int(high):
        yield f"nodes = {job.nodes!r}: write MIN:MAX, with MIN not above MAX"
    if min(job.spares, job.resources.gpus) < 0:
        yield "spares and gpus must be 0 or more"
    if not re.fullmatch(r"\d{1,6}(/\d+(\.\d+)?[smhd]?)?", job.max_restarts):
        yield f'max_restarts = {job.max_restarts!r}: write "5", or "5/1h" for five within any hour'
    longest = f"{job.name}-node-0-{job.machines - 1}"
    if len(longest) > _HOST_CHARS:
        over = len(longest) - _HOST_CHARS
        yield (
            f"name = {job.name!r} is {over} characters too long for {job.machines} machines: host names also contain "
            "the number of the machine. Use a shorter name"
        )
    if not re.fullmatch(r"auto|gpu|cpu|xpu|[1-9]\d*", job.ranks_per_node):
        yield f"ranks_per_node = {job.ranks_per_node!r}: write a number, auto, gpu, cpu or xpu"


def _of_words(job: JobFile) -> Iterator[str]:
    if not job.script or not job.script[0]:
        yield 'script is missing; write script = ["train.py"], or the script after `--`'
    for where, given in (("script", job.script), ("options", job.options)):
        if any(len(word.encode()) > _WORD_BYTES for word in given):
            yield f"{where}: an argument is {_TOO_LONG}"
    for where, words in (("options", job.options), ("[ssh]: options", job.ssh.options)):
        for word in words:
            flag = word.partition("=")[0].replace("_", "-")
            if flag in _KEY_OF_OPTION:
                yield f"{where}: instead of {flag}, set `{_KEY_OF_OPTION[flag]}` in the job file"
            if word == "--":
                yield f"{where}: remove `--`; set the script with the key `script`"


def _of_variables(job: JobFile) -> Iterator[str]:
    for name in (*job.env, *job.kubernetes.secret_env):
        if not _VARIABLE.fullmatch(name):
            yield f"[env]: invalid variable name {name!r}: use letters, digits and underscores"
        if len(f"{name}={job.env.get(name, '')}".encode()) > _WORD_BYTES:
            yield f"[env]: {name} is {_TOO_LONG}"
        if name in _OURS_IN_PODS:
            yield f"[env]: {name} is reserved for {_OURS_IN_PODS[name]}; use another name"
    for name in ("DDP_RENDEZVOUS_TOKEN", "DDP_RENDEZVOUS_SECRET"):
        if name in job.env:
            yield (
                f"[env]: do not set the secret {name} here: others can read manifests and scripts. Use {name}_FILE"
                f"{', or [kubernetes] token_secret' if name.endswith('TOKEN') else ''}"
            )
    for name, source in job.kubernetes.secret_env.items():
        secret, slash, key = source.partition("/")
        if not (slash and _OBJECT.fullmatch(secret) and re.fullmatch(r"[-._A-Za-z0-9]+", key)):
            yield f'[kubernetes]: secret_env.{name} = {source!r}: write "SECRET/KEY"'
        if name in job.env:
            yield f"{name} is in [env] and in secret_env; remove one of them"


def _of_resources(job: JobFile) -> Iterator[str]:
    wanted = job.resources
    for name in ("cpu", "memory", *(("shm",) if wanted.shm else ())):
        if not _QUANTITY.fullmatch(getattr(wanted, name)) or amount_of(getattr(wanted, name)) <= 0:
            yield f"[resources]: {name} = {getattr(wanted, name)!r} is invalid; write a quantity, for example 8 or 16Gi"
        elif name != "cpu" and amount_of(getattr(wanted, name)) < 2**20:
            yield f"[resources]: {name} = {getattr(wanted, name)!r} is less than 1Mi; add a unit, for example 16Gi"
    if not re.fullmatch(r"\d+(\.\d+)?m?", wanted.cpu):
        yield f"[resources]: cpu = {wanted.cpu!r}: write a number of CPUs, for example 8 or 500m"
    if amount_of(wanted.shm) > amount_of(wanted.memory):
        yield (
            f"[resources]: shm = {wanted.shm!r} is more than memory = {wanted.memory!r}, which includes "
            "it; use less shm or more memory"
        )
    devices = [(wanted.gpu_resource, "1")]
    for name, amount in wanted.extra.items():
        if not _OF_KUBERNETES.fullmatch(name):
            devices.append((name, amount))
        elif not _QUANTITY.fullmatch(amount):
            yield f"[resources]: {name} = {amount!r} is invalid; write a quantity, for example 16Gi"
    for name, amount in devices:
        whole = _QUANTITY.fullmatch(amount) and amount_of(amount).is_integer()  # devices are not divided
        if "/" not in name or not _KEY.fullmatch(name) or not whole:
            yield f'[resources]: {name} = {amount!r}: write it as "rdma/hca" = 1'


def _of_volumes(job: JobFile) -> Iterator[str]:
    seen: set[str] = set()
    for i, volume in enumerate(job.volumes, 1):
        where, path = f"[[volumes]] {i}", volume.path.rstrip("/") or "/"
        if not path.startswith("/") or ":" in path or ".." in path.split("/"):
            yield f"{where}: path = {volume.path!r}: use an absolute path, for example /data"
        elif path in _TAKEN_PATHS or path in seen:
            yield f"{where}: {path} is already in use; choose another path"
        seen.add(path)
        yield from _of_a_volume(volume, where)


def _of_a_volume(volume: Volume, where: str) -> Iterator[str]:
    sources = [name for name in ("claim", "config_map", "secret", "host_path") if getattr(volume, name)]
    if len(sources) > 1:
        yield f"{where}: {' and '.join(sources)} exclude each other; keep one"
    for name in ("claim", "config_map", "secret"):
        yield from _of_an_object(getattr(volume, name), f"{where}: {name}")
    if volume.host_path and not volume.host_path.startswith("/"):
        yield f"{where}: host_path = {volume.host_path!r}: use an absolute path"
    if not _QUANTITY.fullmatch(volume.size) or amount_of(volume.size) <= 0:
        yield f"{where}: size = {volume.size!r} is invalid; write a quantity, for example 16Gi"
    if volume.read_only and not sources:
        yield f"{where}: read_only cannot be used for an empty folder; set a claim, config_map, secret or host_path"


def _of_kubernetes(job: JobFile) -> Iterator[str]:
    where = job.kubernetes
    if where.kind not in _KINDS:
        yield f"[kubernetes]: kind = {where.kind!r}: write job, jobset or trainjob"
    if not where.namespace or "." in where.namespace or len(where.namespace) > _HOST_CHARS:
        yield f"[kubernetes]: namespace = {where.namespace!r} is invalid; use lowercase letters, digits and dashes"
    names = ("namespace", "priority_class", "service_account", "token_secret", "tls_secret", "runtime_class")
    for name in names:
        yield from _of_an_object(getattr(where, name), f"[kubernetes]: {name}")
    for secret in where.image_pull_secrets:
        yield from _of_an_object(secret, "[kubernetes]: image_pull_secrets")
    if not _LABEL.fullmatch(where.queue):
        yield f"[kubernetes]: queue = {where.queue!r} is invalid; use letters, digits, '-', '_' and '.'"
    for name in ("labels", "node_selector"):
        for key, text in getattr(where, name).items():
            if not _KEY.fullmatch(key) or not _LABEL.fullmatch(text):
                yield f"[kubernetes]: {name}: {key} = {text!r} is invalid; use letters, digits, '-', '_' and '.'"
    for key in (*where.annotations, *(each for each in (where.apart, where.together) if each)):
        if not _KEY.fullmatch(key):
            yield f"[kubernetes]: invalid key {key!r} of a label or an annotation; write NAME or DOMAIN/NAME"
    yield from _of_times_and_numbers(job)
    if where.host_network and not (where.rendezvous or job.rendezvous):
        yield "[kubernetes]: with host_network, the job cannot run its own rendezvous; set rendezvous to a service"
    if not re.fullmatch(r"\S*", job.image):
        yield f"image = {job.image!r} is invalid; remove the spaces"


def _of_times_and_numbers(job: JobFile) -> Iterator[str]:
    where = job.kubernetes
    if where.grace_s < 3 * _STOPPING_S:
        yield (
            f"[kubernetes]: grace_s = {where.grace_s}: use {3 * _STOPPING_S} seconds or more, so that there is time "
            "for a checkpoint"
        )
    if min(where.replace, where.deadline_s, where.keep_s) < 0:
        yield "[kubernetes]: replace, deadline_s and keep_s must be 0 or more"
    if not _SPAN.fullmatch(where.wait):
        yield f"[kubernetes]: invalid wait = {where.wait!r}; write for example 30m, 12h or 1d"
    if max(where.grace_s, where.deadline_s, where.keep_s, where.replace, where.user) > _INT32:
        yield f"[kubernetes]: grace_s, deadline_s, keep_s, replace and user must be at most {_INT32}"
    if where.user < 1:
        yield "[kubernetes]: user must be a user id of 1 or more; root is not permitted"
    for capability in where.capabilities:
        if not re.fullmatch(r"[A-Z_]+", capability):
            yield f"[kubernetes]: capabilities: {capability!r}: write the name without CAP_, for example IPC_LOCK"


def _of_an_object(name: str, where: str) -> Iterator[str]:
    if name and (not _OBJECT.fullmatch(name) or len(name) > _OBJECT_CHARS):
        yield f"{where} = {name!r} is not a Kubernetes object name; use lowercase letters, digits, '-' and '.'"


def _of_slurm(job: JobFile) -> Iterator[str]:
    where = job.slurm
    names = ("partition", "account", "qos", "time", "reservation", "constraint", "exclude", "gres", "array")
    for name in names:
        if re.search(r"\s", getattr(where, name)):
            yield f"[slurm]: {name} = {getattr(where, name)!r}: remove the spaces"
    for option in where.options:
        if not option.startswith("-") or "\n" in option or "\r" in option:
            yield f"[slurm]: options: {option!r}: write it as --name=value"
    if not 0 < where.signal_s <= 65535:
        yield f"[slurm]: signal_s = {where.signal_s}: use 1 to 65535"
    if "\n" in job.workdir:
        yield f"workdir = {job.workdir!r}: remove the line breaks"


def megabytes(quantity: str) -> int:
    """16Gi -> 16384, as Slurm counts memory (of 1,048,576 bytes), rounded up."""
    return -int(-amount_of(quantity) // 1048576)


def amount_of(quantity: str) -> float:
    found = re.fullmatch(r"([\d.]+)(.*)", quantity)
    if found is None:
        return 0.0
    number, unit = found.groups()
    if unit.endswith("i"):
        return float(number) * 1024.0 ** ("KMGTP".index(unit[0]) + 1)
    return float(number) * _MEMORY_UNITS.get(unit, 1e-3 if unit == "m" else 1.0)
