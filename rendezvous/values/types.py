"""The values of the rendezvous: what every other module of it, and the launcher, speaks in.

Frozen, hashable, free of behaviour beyond derivation. Words are those of docs/architecture.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rendezvous.values.text_limits import Sentence, ShortenedSentence, Traceback  # noqa: TC001 - the codec reads it


@dataclass(frozen=True, slots=True, order=True)
class AgentId:
    """One life of one agent: a node that restarts its agent joins as another incarnation."""

    node: str
    incarnation: str

    def __str__(self) -> str:
        return self.node


class ScaleUp(StrEnum):
    """When nodes that arrive after the first seal enlarge the world (up to max_nodes)."""

    NEVER = "never"
    ON_RESTART = "on-restart"
    IMMEDIATE = "immediate"
    AT_CHECKPOINT = "at-checkpoint"


class FailureClass(StrEnum):
    """What kind of failure a cause is; `--failure-policy` decides per class."""

    OUT_OF_MEMORY = "out-of-memory"
    HARDWARE = "hardware"
    NETWORK = "network"
    USER_EXCEPTION = "user-exception"
    SIGNAL = "signal"
    EXIT_CODE = "exit-code"
    HANG = "hang"
    NODE_LOST = "node-lost"
    CONSEQUENCE = "consequence"


class Doubt(StrEnum):
    """What is uncertain about a cause. No doubt counts against a node."""

    MAY_WAIT = "may-wait"  # its rank has stalled and may wait for other ranks; its own stack can tell
    CULPRIT = "culprit"  # the culprit is among the suspects
    NO_RANK = "no-rank"  # the cause is not in a rank
    SHARED_ERROR = "shared-error"  # ranks raised errors that do not tell which rank is wrong


UNLIMITED = 1_000_000  # restarts: more than anybody will see


@dataclass(frozen=True, slots=True)
class RestartBudget:
    """At most `limit` restarts, in all (`window_s` None) or within any `window_s` seconds."""

    limit: int = 0
    window_s: float | None = None

    @property
    def is_unlimited(self) -> bool:
        return self.limit >= UNLIMITED

    def __str__(self) -> str:
        return str(self.limit) if self.window_s is None else f"{self.limit}/{self.window_s:g}s"


@dataclass(frozen=True, slots=True)
class CrashLoop:
    """A rank that is the first to fail within `within_s` of its start, `times` rounds running, ends the job."""

    times: int = 3  # 0 switches the rule off
    within_s: float = 1.0


class PolicyAction(StrEnum):
    """What `--failure-policy CLASS=ACTION` may ask for."""

    RESTART = "restart"
    RESTART_WITHOUT_NODE = "exclude"
    FAIL = "fail"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class PolicyRule:
    """`exit_code` narrows a rule of class EXIT_CODE to one code."""

    failure: FailureClass
    action: PolicyAction
    exit_code: int | None = None


class StragglerPolicy(StrEnum):
    """What follows when a rank is slower than its peers for a while."""

    OFF = "off"
    REPORT = "report"
    EXCLUDE = "exclude"  # its node sits out at the next restart, if enough nodes are left


@dataclass(frozen=True, slots=True)
class StragglerRule:
    policy: StragglerPolicy = StragglerPolicy.REPORT
    factor: float = 1.5
    window_s: float = 20.0


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a job asks of the rendezvous. Every agent of the job must bring the same one."""

    job_id: str
    min_nodes: int = 1
    max_nodes: int = 1
    entry_point: Sentence = ""
    nproc: str = ""  # as asked for ("auto", "8"); the count of this node is in NodeFacts
    version: str = ""
    budget: RestartBudget = RestartBudget()
    crash_loop: CrashLoop = CrashLoop()
    join_timeout_s: float = 600.0
    last_call_s: float = 2.0
    last_call_bound_s: float = 30.0
    replacement_timeout_s: float = 60.0
    lease_s: float = 4.0  # outlasts a link that is cut for 2 s, and what TCP needs to find its way back
    stop_budget_s: float = 45.0  # after a stop order, an agent silent about its reaping is treated as lost
    spares: int = 0
    scale_up: ScaleUp = ScaleUp.ON_RESTART
    node_failure_limit: int = 3  # a node that failed this often sits out ...
    node_cooldown_s: float = 600.0  # ... for this long
    rules: tuple[PolicyRule, ...] = ()
    shrink_after_s: float = 0.0  # enough nodes are left after a loss: wait so long for a replacement first
    stragglers: StragglerRule = StragglerRule()


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node tells of itself when it joins."""

    host: str
    address: str  # where its peers reach it
    nproc: int
    role: str = "default"
    node_rank: int | None = None  # explicit --node-rank
    scheduler_index: int | None = None  # SLURM_NODEID, JOB_COMPLETION_INDEX
    healthy: bool = True
    health_note: Sentence = ""
    versions: str = ""  # "torch=2.13.0 python=3.11.7": what should be the same on all nodes


@dataclass(frozen=True, slots=True)
class Cause:
    """Why one rank ended, as its own agent saw it. `failure` CONSEQUENCE: it only suffered another's failure."""

    node: str
    rank: int
    local_rank: int
    failure: FailureClass
    reason: ShortenedSentence  # one line: "ValueError: bad batch", "killed by SIGKILL (out of memory)"
    exit_code: int  # as a shell would see it: 128 + signal for a signal
    signal: int = 0
    traceback: Traceback = ""
    step: int | None = None
    ran_s: float = 0.0
    at: str = ""  # wall clock of its node, for people only; nothing is decided by it
    log: ShortenedSentence = ""
    hint: ShortenedSentence = ""  # what usually helps, in one line
    doubt: Doubt | None = None  # None: the cause is certain
    suspects: tuple[int, ...] = ()  # for MAY_WAIT and CULPRIT: the ranks among which the culprit is
    stopped: bool = False  # a CONSEQUENCE because the launcher stopped the rank; otherwise it lost its peers
    place: Sentence = ""  # where its script was: "in backward, bucket 3 of 7"

    @property
    def uncertain(self) -> bool:
        """The rank may be innocent, and its node is."""
        return self.doubt is not None

    @property
    def may_be_a_consequence(self) -> bool:
        """Of something that only the views of all ranks together show: see rendezvous/diagnosing/post_mortem.py."""
        is_doubtful = (
            self.uncertain and self.failure is not FailureClass.HANG
        )  # which was looked into already
        return is_doubtful or self.failure is FailureClass.CONSEQUENCE


@dataclass(frozen=True, slots=True)
class Placement:
    """One node's place in a sealed world."""

    agent: AgentId
    facts: NodeFacts
    node_rank: int
    rank_offset: int
    role_rank_offset: int


@dataclass(frozen=True, slots=True)
class World:
    """Sealed membership: placements in order of node_rank; ranks are 0..size-1 without a gap."""

    generation: int
    placements: tuple[Placement, ...]

    @property
    def size(self) -> int:
        return sum(p.facts.nproc for p in self.placements)


@dataclass(frozen=True, slots=True)
class Assignment:
    """One node's slice of a world: all it needs, with the store, to start its ranks."""

    generation: int
    node_rank: int
    n_nodes: int
    rank_offset: int
    nproc: int
    world_size: int
    role: str
    role_rank_offset: int
    role_world_size: int
    restart_count: int
    max_restarts: int
    store_host: str  # address of node rank 0, whose agent keeps the store
    store_node: str = ""  # its name, for people
    reason: ShortenedSentence = ""  # why the generation before this one ended, in words


@dataclass(frozen=True, slots=True)
class StoreAddress:
    host: str
    port: int
    kept: bool = True  # by node rank 0's agent; False: the port is free for rank 0 to host a store itself


class DecisionKind(StrEnum):
    IGNORE = "ignore"
    RESTART = "restart"  # with the same nodes
    RESTART_WITH_SPARE = "restart-with-spare"
    SHRINK = "shrink"
    GROW = "grow"
    WAIT = "wait-for-replacement"
    FAIL = "fail"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice with its reason in words; each failure of a generation ends in exactly one."""

    kind: DecisionKind
    reason: ShortenedSentence
    generation: int  # the generation it was taken about
    cause: Cause | None = None
    # RESTART_WITH_SPARE: the spares used. SHRINK: the nodes left. WAIT: the nodes missing. Otherwise, or unknown: 0.
    nodes: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the job ended. `causes` are all reports of the failed generation, first cause first."""

    succeeded: bool
    reason: ShortenedSentence
    exit_code: int
    first_cause: Cause | None = None
    causes: tuple[Cause, ...] = ()
    restarts: int = 0
    decisions: tuple[Decision, ...] = field(default=())
