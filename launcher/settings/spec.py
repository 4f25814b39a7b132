"""The request of one `ddp-launch` command, after all options are merged and validated.

`launcher.settings.assemble` builds it once. Code that receives it does not read options, files or variables again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from enum import IntFlag, StrEnum
from typing import TYPE_CHECKING, Literal

from launcher.template.contracts import DEBUG_IN_TERMINAL, DEBUG_OTHER
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from rendezvous.values.types import JobSpec


# --- names of files in the node's scratch folder that several modules use ---------------------------


def timer_file(scratch: str, environ: Mapping[str, str]) -> str:
    """A named pipe; see launcher/health/node_watch.py."""
    return environ.get("TORCHELASTIC_TIMER_FILE") or f"{scratch}/timers"


# --- budgets ----------------------------------------------------------------------------------------
#
# The time limits of hang detection: `--hang-timeout`. `launcher.health.stall_detection` applies them.

_LONG_S = 1800.0
# By default, a rank that others wait for, and that shows no sign of life for so long, hangs: torch's shortest default
# timeout of a process group.
ASLEEP_S = 600.0
_CHECKS_PER_LIMIT = 10
_LONGEST_PERIOD_S, _SHORTEST_PERIOD_S = 1.0, 0.1


@dataclass(frozen=True, slots=True)
class Budgets:
    """The user's time limits per phase. They apply if `step_s` is set. If it is None, only evidence ends a job."""

    enabled: bool = True
    step_s: float | None = None
    start_s: float = _LONG_S
    first_step_s: float = _LONG_S
    checkpoint_s: float = _LONG_S
    evaluation_s: float = _LONG_S

    @property
    def by_evidence(self) -> bool:
        return self.enabled and self.step_s is None

    @property
    def period_s(self) -> float:
        """Time between two checks."""
        shortest = min(self.step_s, self.start_s, self.first_step_s) if self.step_s else ASLEEP_S
        return min(_LONGEST_PERIOD_S, max(_SHORTEST_PERIOD_S, shortest / _CHECKS_PER_LIMIT))


# --- debugging --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Debug:
    rank: int
    address: str = ""  # HOST:PORT where it waits for an editor; empty: it uses the terminal

    def of(self, rank: int) -> str:
        """What this rank finds in the variable."""
        return (self.address or DEBUG_IN_TERMINAL) if rank == self.rank else DEBUG_OTHER


# --- conditions that end the job: `--stop-when` -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class StopCondition:
    """A rank prints this, or passes it to `ddp.status`."""

    text: str  # the condition as the user wrote it
    pattern: str


# --- spec -------------------------------------------------------------------------------------------


class EntryKind(StrEnum):
    SCRIPT = "script"  # python script.py (also a directory or a zip file with __main__.py)
    MODULE = "module"  # python -m module
    PROGRAM = "program"  # --no-python: executed directly
    RUN_PATH = "run-path"  # --run-path: runpy.run_path in the rank


_OF_FUNCTIONS = (
    "ddp.launching.rank"  # runs a function of `ddp.launch`; its argument is the name of the function
)


@dataclass(frozen=True, slots=True)
class EntryPoint:
    kind: EntryKind
    target: str
    args: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What people call it: the file, the module, or the function of `ddp.launch`."""
        name = self.target.rstrip("/").rpartition("/")[2]
        return self.args[0] if name == _OF_FUNCTIONS and self.args else name


class Streams(IntFlag):
    """Output streams of a rank; the values are torchrun's."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True, slots=True)
class StreamChoice:
    """`-r 3` applies to all local ranks, `-r 0:1,1:2` to the listed ones; all others use the field `default`."""

    default: Streams = Streams.NONE
    by_local_rank: tuple[tuple[int, Streams], ...] = ()

    def of(self, local_rank: int) -> Streams:
        return dict(self.by_local_rank).get(local_rank, self.default)


@dataclass(frozen=True, slots=True)
class LogSpec:
    directory: str = ""  # empty: a private temporary directory, removed when the job succeeds
    redirects: StreamChoice = StreamChoice()  # streams that are written to their file only
    tee: StreamChoice = StreamChoice()  # torchrun's option; file and terminal is our default
    local_ranks_filter: tuple[int, ...] = ()  # local ranks shown on the terminal; empty: all
    stdout_filters: tuple[str, ...] = ()  # torchrun's --duplicate-stdout-filters
    stderr_filters: tuple[str, ...] = ()
    prefix: str = "[{node}:{rank}] "
    color: str = "auto"  # auto, always, never
    terminal: str = "auto"  # whether ranks get a terminal: auto, never
    bars: Literal["first", "all", "none"] | tuple[int, ...] = "first"  # local ranks whose bars are redrawn
    collapse: bool = True  # on a terminal, equal lines of several ranks are shown once
    merged_log: bool = False
    verbose: bool = False  # also show tracebacks of ranks that only end because a peer is gone
    journal_limit: int = 8 << 20  # bytes; 0: no journals for `ddpctl replay`
    history_dir: str = ""  # where finished jobs are kept; empty: a folder of the user in /var/tmp
    history_jobs: int = 100  # how many; 0: none


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    entry: EntryPoint
    job: JobSpec  # what the whole job is asked for; every node sends the same
    nproc: int = 1
    node_rank: int | None = None
    role: str = "default"
    rendezvous_option: str = "--rendezvous"  # or what set it instead, for messages
    rendezvous: str = ""  # HOST:PORT[,HOST:PORT...]; empty: the embedded service
    secret_file: str = ""
    insecure: bool = False  # serve the embedded rendezvous to other nodes without a secret
    local_addr: str = ""
    interface: str = ""
    has_ssh_control: bool = False  # `ddp-launch --hosts` started this agent and controls it over ssh
    master_addr: str = ""
    master_port: int = 0  # 0: any free port; the process that binds it chooses it
    reserved_exit_codes: tuple[int, ...] = ()  # a failed job never exits with one of these
    isolation_timeout_s: float = 300.0
    hang: Budgets = Budgets()
    debug: Debug | None = None  # the rank that a person debugs; the others wait for it without a time limit
    shutdown_timeout_s: float = 30.0
    signals: tuple[int, ...] = ()  # signals that stop the job
    forwarded_signals: tuple[int, ...] = ()  # signals that are forwarded to the ranks; the job continues
    # Signals that request a checkpoint from the ranks; one that is also in `signals` then stops the job.
    checkpoint_signals: tuple[int, ...] = ()
    checkpoint_if_watched: bool = False  # request a checkpoint only if the ranks poll for requests
    id_may_be_shared: bool = (
        False  # the ID was made from user and script: another such job would have the same
    )
    checkpoint_grace_s: float = 60.0
    signals_asked: str = (
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # the text of the option, for the environment of the ranks
    )
    warm_start: bool = True
    preload: tuple[str, ...] = ()  # modules that are imported before the ranks are forked
    learn_imports: bool = True  # after a restart, ranks have what the ranks before them have imported
    warm_pool: bool = True  # use a template of `ddp-launch warm`, if there is one
    warm_dir: str = ""  # of its pool; empty: the usual place
    rank_timers: bool = False  # torch.distributed.elastic.timer
    resume_arg: str = (
        ""  # arguments for the script after a failure, with {path} for what its ranks have saved
    )
    resume_file: str = ""  # where a job that starts later finds that path
    share_compiled: str = (
        ""  # memory, or a folder: what torch.compile has made is carried to ranks that start later
    )
    redundancy: str = ""  # what other nodes keep of commits of ddp.elastic
    preflight: str = "report"  # off, report, quick, full
    preflight_paths: tuple[str, ...] = ()  # directories to check besides the log directory
    trace_collectives: bool = True
    allow_drill: bool = False  # `ddpctl drill` may kill and freeze ranks of this node
    topology: str = ""  # "slurm", "nvlink", or the place of this node in the network: "pod1/rack7"
    health_address: tuple[str, int] | None = None
    health_sources: tuple[str, ...] = ()  # "kubernetes", URLs, paths of files
    health_ignored: tuple[str, ...] = ()  # names of findings of these sources
    stop_when: tuple[StopCondition, ...] = ()
    web: bool = False
    on_event: str = ""  # a command for the shell, which gets events as JSON
    otlp_endpoint: str = ""  # empty: what the variables of OpenTelemetry say
    python: str = ""  # interpreter of the ranks
    numa_binding: str = ""  # "", node, socket, exclusive, core-complex
    cpu_affinity: bool = False  # nodes without GPUs: disjoint CPUs for each rank, one OpenMP thread per CPU
    virtual_local_rank: bool = False
    log: LogSpec = field(default_factory=LogSpec)
    progress: str = "auto"  # progress line: auto, always, never

    @property
    def open_files(self) -> int:
        """The number of open files that the agent needs: its own, and for each rank pipes, log files, status page,
        guard.
        """
        return 100 + 9 * self.nproc

    @property
    def handled_signals(self) -> tuple[int, ...]:
        """All signals that the agent handles."""
        return tuple(dict.fromkeys((*self.signals, *self.forwarded_signals, *self.checkpoint_signals)))

    def named(self, job_id: str) -> LaunchSpec:
        """The same under another name."""
        return replace(self, job=replace(self.job, job_id=job_id))
