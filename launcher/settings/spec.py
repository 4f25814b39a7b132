"""What one `ddp-launch` command asks for, after every option was merged and checked.

Built once, by `launcher.settings.config`; nothing behind it reads an option, a file or the environment again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntFlag, StrEnum

from launcher.settings.budgets import Budgets
from rendezvous.values.types import CrashLoop, PolicyRule, RestartBudget, ScaleUp, StragglerRule


class EntryKind(StrEnum):
    SCRIPT = "script"  # python script.py (also a folder or zip with __main__.py)
    MODULE = "module"  # python -m module
    PROGRAM = "program"  # --no-python: executed as it is
    RUN_PATH = "run-path"  # --run-path: runpy.run_path in the rank


@dataclass(frozen=True, slots=True)
class EntryPoint:
    kind: EntryKind
    target: str
    args: tuple[str, ...] = ()


class Streams(IntFlag):
    """Which of a rank's streams; the values are torchrun's."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True, slots=True)
class StreamChoice:
    """`-r 3` for every local rank, `-r 0:1,1:2` for some; the rest get `default`."""

    default: Streams = Streams.NONE
    by_local_rank: tuple[tuple[int, Streams], ...] = ()

    def of(self, local_rank: int) -> Streams:
        return dict(self.by_local_rank).get(local_rank, self.default)


@dataclass(frozen=True, slots=True)
class LogSpec:
    directory: str = ""  # "": a private temporary folder, removed when the job succeeds
    redirects: StreamChoice = StreamChoice()  # these streams go to their file only
    tee: StreamChoice = StreamChoice()  # accepted as torchrun's; both places is our default anyway
    local_ranks_filter: tuple[int, ...] = ()  # only these local ranks reach the terminal; empty: all
    stdout_filters: tuple[str, ...] = ()  # torchrun's --duplicate-stdout-filters
    stderr_filters: tuple[str, ...] = ()
    prefix: str = "[{node}:{rank}] "
    color: str = "auto"  # auto, always, never


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    entry: EntryPoint
    run_id: str
    nproc: int = 1
    nproc_asked: str = "auto"
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = None
    role: str = "default"
    rendezvous: str = ""  # HOST:PORT[,HOST:PORT...]; "": the embedded service
    secret_file: str = ""
    insecure: bool = False  # serve the rendezvous to other machines unprotected
    local_addr: str = ""
    interface: str = ""
    tethered: bool = False  # started, and its end told, by a `ddp-launch --hosts`
    master_addr: str = ""
    master_port: int = 0  # 0: any free port, chosen by the one who binds it
    budget: RestartBudget = RestartBudget()
    crash_loop: CrashLoop = CrashLoop()
    rules: tuple[PolicyRule, ...] = ()
    scale_up: ScaleUp = ScaleUp.ON_RESTART
    spares: int = 0
    join_timeout_s: float = 600.0
    last_call_s: float = 2.0
    replacement_timeout_s: float = 60.0
    shrink_after_s: float = 0.0
    reserved_exit_codes: tuple[int, ...] = ()  # no failed job ends with one of these
    isolation_timeout_s: float = 300.0
    hang: Budgets = Budgets()
    shutdown_timeout_s: float = 30.0
    signals: tuple[int, ...] = ()  # those that end the job
    forwarded_signals: tuple[int, ...] = ()  # those that are handed on to the ranks while the job goes on
    # These ask the ranks for a checkpoint first; one of `signals` then stops the job.
    checkpoint_signals: tuple[int, ...] = ()
    checkpoint_if_watched: bool = False  # only where the ranks look for requests
    checkpoint_grace_s: float = 60.0
    signals_asked: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # as written; ranks see it in the environment
    warm_start: bool = True
    preload: tuple[str, ...] = ()  # modules that ranks find imported
    rank_timers: bool = False  # torch.distributed.elastic.timer
    preflight: str = "quick"  # off, quick, full
    preflight_paths: tuple[str, ...] = ()  # folders beside that of the logs
    trace_collectives: bool = True
    stragglers: StragglerRule = StragglerRule()
    health_address: tuple[str, int] | None = None
    python: str = ""  # interpreter of the ranks
    numa_binding: str = ""  # "", node, socket, exclusive, core-complex
    cpu_affinity: bool = False  # CPU-only nodes: a disjoint share of CPUs per rank, OMP threads to match
    virtual_local_rank: bool = False
    numa_warnings: tuple[str, ...] = ()
    log: LogSpec = field(default_factory=LogSpec)
    progress: str = "auto"  # the live line: auto, always, never

    @property
    def awaited_signals(self) -> tuple[int, ...]:
        """All that the agent answers."""
        return tuple(dict.fromkeys((*self.signals, *self.forwarded_signals, *self.checkpoint_signals)))
