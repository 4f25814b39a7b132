"""Build the `LaunchSpec` from the settings: maps torchrun's options to ours and rejects contradictory options.

Without I/O: the caller passes the data of the node (devices, clock, scheduler) as `HostEnvironment`. Each option that
was given and has no effect adds exactly one warning.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from launcher.settings.arguments import UsageError
from launcher.settings.options import OPTIONS
from launcher.settings.spec import Budgets, EntryKind, EntryPoint, LaunchSpec, LogSpec
from launcher.settings.values import BadValue, count, join_endpoint, nearest, positive_duration
from rendezvous.values.contracts import VERSION
from rendezvous.values.error_codes import Code
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.types import JobSpec, StragglerPolicy, StragglerRule

if TYPE_CHECKING:
    from launcher.settings.config import Settings

_USER_SIGNALS = (int(signal.SIGUSR1), int(signal.SIGUSR2))
_CONF_TIMES = {"join_timeout": "join_timeout", "timeout": "join_timeout", "last_call_timeout": "last_call"}
_CONF_KEYS = (*_CONF_TIMES, "keep_alive_interval", "keep_alive_max_attempt")
_TORCH_CONF = (
    "close_timeout",
    "heartbeat_timeout",
    "read_timeout",
    "is_host",
    "store_type",
)
_OUR_BACKENDS = ("static", "ddp")
_STOP_MARGIN_S = 15.0  # after the ranks' grace period: to kill and reap them, and to send the reply
_MASTER_PORT = 29500  # torchrun's default if only --master-addr is given


@dataclass(frozen=True, slots=True)
class HostEnvironment:
    nproc: int
    python: str
    stamp: str  # date, time and a few random letters, so that the run ID is unique
    scheduler_job: str = ""  # the same on every node of the job
    user: str = ""  # who starts the job


@dataclass(slots=True)
class Assembly:
    """The settings, and the warnings collected while the spec is built."""

    settings: Settings
    warnings: list[str]

    def warn(self, dest: str, why: str) -> None:
        self.warnings.append(f"{self.settings.of(dest).quoted}: {why}")


def entry_point(settings: Settings, words: tuple[str, ...]) -> EntryPoint:
    if not words:
        raise UsageError(
            "missing script. Use ddp-launch [options] script.py [args ...]. Run ddp-launch --help to see examples.",
            code=Code.MISSING_SCRIPT,
        )
    target, args = words[0], words[1:]
    if settings["run_path"]:  # takes precedence over the other two, as in torchrun
        return EntryPoint(EntryKind.RUN_PATH, target, args)
    if settings["no_python"] and settings["module"]:
        raise settings.of("no_python").wrong(
            f"contradicts {settings.of('module').quoted}, because a module needs Python",
            "use either --no-python or --module",
            code=Code.CONTRADICTING_OPTIONS,
        )
    if settings["no_python"]:
        return EntryPoint(EntryKind.PROGRAM, target, args)
    return EntryPoint(EntryKind.MODULE if settings["module"] else EntryKind.SCRIPT, target, args)


def assemble(settings: Settings, entry: EntryPoint, here: HostEnvironment) -> tuple[LaunchSpec, list[str]]:
    """Most options are fields under their own name; the others, and those that depend on each other, are named here."""
    work = Assembly(settings, [])
    _warn_of_options_without_effect(work)
    job = _job(work, entry, here)
    several = job.max_nodes > 1
    ends_job: tuple[int, ...] = settings["signals_to_handle"]
    checkpoint_signals, if_watched = _checkpoint_signals(settings)
    forwarded = tuple(each for each in _USER_SIGNALS if each not in ends_job)
    spec = _fields(settings, LaunchSpec) | {
        "entry": entry,
        "job": job,
        "log": _log(settings),
        "id_may_be_shared": is_named_after_script(settings, job.max_nodes, here),
        "nproc": here.nproc,
        "python": here.python,
        "node_rank": _node_rank(work, job.max_nodes),
        "rendezvous": _rendezvous(work, job.max_nodes),
        "rendezvous_option": _rendezvous_option(settings),
        "master_port": 0 if several else settings["master_port"] or 0,
        "hang": _hang(settings),
        "preflight": _preflight(settings),
        "trace_collectives": settings["trace_collectives"] == "on",
        "cpu_affinity": _cpu_affinity(work),
        "signals": ends_job,
        "signals_asked": settings.of("signals_to_handle").text or "",
        "forwarded_signals": tuple(
            each for each in forwarded if if_watched or each not in checkpoint_signals
        ),
        "checkpoint_signals": checkpoint_signals,
        "checkpoint_if_watched": if_watched,
    }
    return LaunchSpec(**spec), work.warnings


def _fields(settings: Settings, of: type) -> dict[str, Any]:
    """The options that are fields of this class. One without a value leaves the field its default."""
    found = {}
    for option in OPTIONS:
        names = {option.field or option.dest, option.dest + "_s"} & of.__annotations__.keys()
        if settings[option.dest] is not None:
            found.update(dict.fromkeys(names, settings[option.dest]))
    return found


def _job(work: Assembly, entry: EntryPoint, here: HostEnvironment) -> JobSpec:
    settings = work.settings
    min_nodes, max_nodes = _nodes(work)
    join_timeout_s, last_call_s, lease_s = _times(work)
    job = _fields(settings, JobSpec) | {
        "job_id": run_id(settings, entry, max_nodes, here),
        "min_nodes": min_nodes,
        "max_nodes": max_nodes,
        "entry_point": entry.target,
        "nproc": settings["nproc_per_node"],
        "version": VERSION,
        "join_timeout_s": join_timeout_s,
        "last_call_s": last_call_s,
        "lease_s": lease_s,
        "shrink_after_s": _shrink_after_s(settings),
        "stop_budget_s": settings["shutdown_timeout"] + _STOP_MARGIN_S,
        "stragglers": _stragglers(settings),
    }
    return JobSpec(**job)


def _hang(settings: Settings) -> Budgets:
    """While a rank is debugged, no rank is called hung or slow."""
    asked: Budgets = settings["hang_timeout"]
    return asked if settings["debug"] is None else replace(asked, enabled=False)


def _stragglers(settings: Settings) -> StragglerRule:
    asked: StragglerRule = settings["stragglers"]
    return asked if settings["debug"] is None else replace(asked, policy=StragglerPolicy.OFF)


def _preflight(settings: Settings) -> str:
    """A check that the user asks for is a condition; one that runs by itself only reports."""
    named = settings["preflight_paths"] and not settings.of("preflight").given
    return "quick" if named else str(settings["preflight"])


def _shrink_after_s(settings: Settings) -> float:
    """The time of --shrink-after or --replacement-timeout; 0 if the user gave neither and so expects no replacement."""
    if settings["shrink_after"] is not None:
        return float(settings["shrink_after"])
    asked = settings.of("replacement_timeout")
    return float(asked.value) if asked.given else 0.0


def _checkpoint_signals(settings: Settings) -> tuple[tuple[int, ...], bool]:
    """The signals that the user named, else those that schedulers send, if the ranks poll for requests."""
    asked: tuple[int, ...] | None = settings["checkpoint_signal"]
    if asked is not None:
        return asked, False
    stopping = (int(signal.SIGTERM),) if signal.SIGTERM in settings["signals_to_handle"] else ()
    return (*stopping, int(signal.SIGUSR1)), True


def _log(settings: Settings) -> LogSpec:
    journal_limit = settings["journal_limit"] << 20 if settings["journal"] else 0
    fields = _fields(settings, LogSpec) | {"journal_limit": journal_limit}
    if settings["log_line_prefix_template"] and not settings.of("log_prefix").given:
        fields["prefix"] = settings["log_line_prefix_template"]
    return LogSpec(**fields)


def _warn_of_options_without_effect(work: Assembly) -> None:
    settings = work.settings
    for option in OPTIONS:
        setting = settings.of(option.dest)
        if option.without_effect and setting.given and setting.value not in _OUR_BACKENDS:
            work.warn(option.dest, f"has no effect: {option.without_effect}")
    if settings["preload"] and not settings["warm_start"]:
        work.warn("preload", f"has no effect: with {settings.of('warm_start').quoted} ranks are not forked")
    if settings["run_path"]:
        for dest in ("module", "no_python"):
            if settings[dest]:
                work.warn(dest, f"has no effect: {settings.of('run_path').quoted} takes precedence")


def _nodes(work: Assembly) -> tuple[int, int]:
    least, most = work.settings["nnodes"]
    if not work.settings["standalone"] or most == 1:
        return least, most
    if least > 1:
        raise work.settings.of("nnodes").wrong(
            f"contradicts {work.settings.of('standalone').quoted}, which runs the job on one node",
            "use either --nnodes or --standalone",
            code=Code.CONTRADICTING_OPTIONS,
        )
    work.warn("nnodes", f"has no effect: {work.settings.of('standalone').quoted} runs the job on one node")
    return 1, 1


def _node_rank(work: Assembly, max_nodes: int) -> int | None:
    rank: int | None = work.settings["node_rank"]
    if rank is not None and rank >= max_nodes:
        last = max_nodes - 1
        ranks = f"use a node rank from 0 to {last}" if last else "use node rank 0"
        raise work.settings.of("node_rank").wrong(f"out of range for --nnodes {max_nodes}", ranks)
    return rank


def _rendezvous(work: Assembly, max_nodes: int) -> str:
    """Address of the rendezvous: --rendezvous, else torchrun's endpoint, else the address of node rank 0."""
    settings = work.settings
    ours: str | None = settings["rendezvous"]
    if settings["standalone"]:
        for dest in ("rendezvous", "rdzv_endpoint", "rdzv_id"):
            if settings.of(dest).given:
                work.warn(dest, f"has no effect: {settings.of('standalone').quoted} takes precedence")
        return ""
    endpoint = _torch_endpoint(work, max_nodes, ours)
    if max_nodes == 1 or ours or endpoint:
        return ours or endpoint
    if settings.of("master_addr").given:
        return join_endpoint(settings["master_addr"], settings["master_port"] or _MASTER_PORT)
    if settings.of("master_port").given:
        work.warn("master_port", "has no effect without --master-addr")
    return ""


def _rendezvous_option(settings: Settings) -> str:
    given = (settings.of(dest) for dest in ("rendezvous", "rdzv_endpoint", "master_addr"))
    return next((setting.quoted for setting in given if setting.given), "--rendezvous")


def _torch_endpoint(work: Assembly, max_nodes: int, ours: str | None) -> str:
    settings = work.settings
    endpoint: str = settings["rdzv_endpoint"] or ""
    if not endpoint:
        return ""
    if ours:
        work.warn("rdzv_endpoint", f"has no effect: {settings.of('rendezvous').quoted} takes precedence")
    elif max_nodes == 1:
        work.warn("rdzv_endpoint", "has no effect: a job on one node does not need an endpoint")
    elif (settings["rdzv_backend"] or "").startswith("etcd"):
        work.warn(
            "rdzv_endpoint", "has no effect: an etcd server cannot serve as the rendezvous; use --rendezvous"
        )
    elif endpoint.endswith(":0"):
        raise settings.of("rdzv_endpoint").wrong(
            "port 0 means any free port, and other nodes cannot know which one",
            "use a free port, for example --rdzv-endpoint node0:29400",
        )
    else:
        return endpoint
    return ""


def _times(work: Assembly) -> tuple[float, float, float]:
    """--join-timeout, --last-call and the lease of a node; the values of --rdzv-conf replace their defaults."""
    settings = work.settings
    conf: dict[str, str] = settings["rdzv_conf"] or {}
    replaced = [key for key, dest in _CONF_TIMES.items() if settings.of(dest).given]
    unused = [key for key in conf if key not in _CONF_KEYS or key in replaced]
    if unused:
        close = nearest(unused[0], [key for key in _CONF_KEYS if key != unused[0]])
        typo = close is not None and unused[0] not in (*_CONF_KEYS, *_TORCH_CONF)
        work.warn(
            "rdzv_conf",
            f"{', '.join(unused)} has no effect" + (f"; did you mean {close}?" if typo else ""),
        )
    join_key = "join_timeout" if "join_timeout" in conf else "timeout"
    return (
        _time(settings, "join_timeout", join_key, conf.get(join_key)),
        _time(settings, "last_call", "last_call_timeout", conf.get("last_call_timeout")),
        _lease_s(settings, conf),
    )


def _time(settings: Settings, dest: str, key: str, text: str | None) -> float:
    own: float = settings[dest]
    if text is None or settings.of(dest).given:
        return own
    return _conf_value(settings, key, text, positive_duration)


def _lease_s(settings: Settings, conf: dict[str, str]) -> float:
    """As torchrun: a node is lost after so many keep-alives that do not arrive."""
    interval, attempts = "keep_alive_interval", "keep_alive_max_attempt"
    interval_s = _conf_value(settings, interval, conf.get(interval, "5"), positive_duration)
    return interval_s * _conf_value(settings, attempts, conf.get(attempts, "3"), lambda text: count(text, 1))


def _conf_value(settings: Settings, key: str, text: str, parse: Callable[[str], float]) -> float:
    try:
        return parse(text)
    except BadValue as bad:
        raise settings.of("rdzv_conf").wrong(f"{key}: {bad.problem}", f"use for example {key}=30") from None


def _cpu_affinity(work: Assembly) -> bool:
    settings = work.settings
    if settings["cpu_affinity"] and settings["numa_binding"]:
        raise settings.of("cpu_affinity").wrong(
            f"contradicts {settings.of('numa_binding').quoted}: both bind ranks to CPUs",
            "use either --cpu-affinity or --numa-binding",
            code=Code.CONTRADICTING_OPTIONS,
        )
    return bool(settings["cpu_affinity"])


def run_id(settings: Settings, entry: EntryPoint, max_nodes: int, here: HostEnvironment) -> str:
    """A unique name if the job has one node; with more nodes, a name that every node computes to the same value.

    Without a scheduler, nothing on the nodes tells one job from another but the script and the user who starts it.
    """
    asked: str | None = settings["rdzv_id"]
    if asked and not settings["standalone"]:
        return asked
    name = entry.name
    name = name if entry.kind is EntryKind.MODULE else name.partition(".")[0]
    name = _part_of_id(name, 60) or "job"
    if max_nodes == 1:
        return f"{name}-{here.stamp}"
    if here.scheduler_job:
        return f"{name}-{here.scheduler_job}"
    user = _part_of_id(here.user, 40)
    return f"{user}-{name}" if user else name


def is_named_after_script(settings: Settings, max_nodes: int, here: HostEnvironment) -> bool:
    """Whether another job of the same user and script would have the same ID."""
    return max_nodes > 1 and not here.scheduler_job and not settings["rdzv_id"]


def _part_of_id(text: str, most_chars: int) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:most_chars]
