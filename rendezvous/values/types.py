"""The values of the rendezvous, which all its modules and the launcher use.

They are frozen and hashable, and compute only derived values. docs/architecture.md defines the terms.
"""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum

from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_time import JobTime
from rendezvous.values.text_limits import Sentence, ShortenedSentence, Traceback, Words


@dataclass(frozen=True, slots=True, order=True)
class AgentId:
    """One agent process. After a restart of the agent, the node has the same name and another incarnation."""

    node: str
    incarnation: str

    def __str__(self) -> str:
        return self.node


class ScaleUp(StrEnum):
    """When to add nodes that join after the first world was formed (up to max_nodes)."""

    NEVER = "never"
    ON_RESTART = "on-restart"
    IMMEDIATE = "immediate"
    AT_CHECKPOINT = "at-checkpoint"


class Recover(StrEnum):
    """`--recover`: whether the ranks that survive a failure keep their processes."""

    AUTO = "auto"  # in place, if the script and the failure allow it
    IN_PLACE = "in-place"  # the same; if it is not possible, the decision says why
    RESTART = "restart"  # all ranks are started again


class FailureClass(StrEnum):
    """The class of a failure. `--failure-policy` sets an action per class."""

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
    """What is uncertain about a cause. An uncertain cause is not counted as a failure of the node."""

    MAY_WAIT = "may-wait"  # its rank has stalled and may wait for other ranks; its own stack can show it
    CULPRIT = "culprit"  # the cause is one or more of the suspects
    NO_RANK = "no-rank"  # no rank is the cause
    SHARED_ERROR = "shared-error"  # ranks raised errors that do not show which rank is wrong


UNLIMITED = 1_000_000  # restarts: more than any job can use
OPTIONAL = {"optional": True}  # a field with the default value if the sender does not know it


@dataclass(frozen=True, slots=True)
class RestartBudget:
    """At most `limit` restarts, in total (`window_s` None) or within any `window_s` seconds."""

    limit: int = 0
    window_s: float | None = None

    @property
    def is_unlimited(self) -> bool:
        return self.limit >= UNLIMITED

    def __str__(self) -> str:
        return str(self.limit) if self.window_s is None else f"{self.limit}/{self.window_s:g}s"


@dataclass(frozen=True, slots=True)
class CrashLoop:
    """When failures in a row end the job. 0 switches a rule off.

    The job ends if a rank is the first to fail, within `within_s` of its start, in `times` generations in a row. It
    also ends if `without_step` generations in a row failed and no step was finished that was not finished before.
    """

    times: int = 0
    within_s: float = 1.0
    without_step: int = 0

    @property
    def is_on(self) -> bool:
        return self.times > 0 or self.without_step > 0


class PolicyAction(StrEnum):
    """The actions of `--failure-policy CLASS=ACTION`."""

    RESTART = "restart"
    RESTART_WITHOUT_NODE = "exclude"
    FAIL = "fail"
    IGNORE = "ignore"
    HEAL = "heal"  # in place, also after failures of this class that are otherwise not healed in place


@dataclass(frozen=True, slots=True)
class PolicyRule:
    """A rule of the failure policy. `exit_code` limits a rule of class EXIT_CODE to one code."""

    failure: FailureClass
    action: PolicyAction
    exit_code: int | None = None


class StragglerPolicy(StrEnum):
    """The reaction to a rank that is slower than its peers for several windows."""

    OFF = "off"
    REPORT = "report"
    EXCLUDE = "exclude"  # its node is excluded at the next restart, if enough nodes are left


@dataclass(frozen=True, slots=True)
class StragglerRule:
    policy: StragglerPolicy = StragglerPolicy.REPORT
    factor: float = 1.4
    window_s: float = 4.0


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The settings of a job. Every agent of the job must send the same spec."""

    job_id: Words
    min_nodes: int = 1
    max_nodes: int = 1
    entry_point: Sentence = ""
    nproc: str = ""  # as requested ("auto", "8"); NodeFacts has the count of the node
    version: str = ""
    budget: RestartBudget = RestartBudget()
    crash_loop: CrashLoop = CrashLoop()
    join_timeout_s: float = 600.0
    last_call_s: float = 2.0
    last_call_bound_s: float = 30.0
    replacement_timeout_s: float = 60.0
    lease_s: float = 15.0  # three keep-alives of 5 s, as under torchrun
    stop_budget_s: float = 45.0  # an agent that does not answer a stop within this time is lost
    spares: int = 0
    scale_up: ScaleUp = ScaleUp.ON_RESTART
    node_failure_limit: int = 3  # a node with this many failures is excluded ...
    node_cooldown_s: float = 600.0  # ... for this time
    rules: tuple[PolicyRule, ...] = ()
    shrink_after_s: float = 0.0  # after a loss, with enough nodes left: wait this long for a replacement
    stragglers: StragglerRule = StragglerRule()
    # Agents of the release before do not send these two. The defaults are what they do.
    recover: Recover = Recover.RESTART
    heal_budget: RestartBudget = field(default=RestartBudget(UNLIMITED), metadata=OPTIONAL)

    @property
    def heartbeat_s(self) -> float:
        """How often an agent shows that it is alive: less often in a large job, as each heartbeat costs the service."""
        return min(max(1.0, min(self.max_nodes / _HEARTBEATS_PER_S, 3.0)), self.lease_s / 4.0)


_HEARTBEATS_PER_S = 3000.0  # of all agents of a job


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The facts that a node reports when it joins."""

    host: str
    address: str  # its address for its peers
    nproc: int
    role: str = "default"
    node_rank: int | None = None  # explicit --node-rank
    scheduler_index: int | None = None  # SLURM_NODEID, JOB_COMPLETION_INDEX
    healthy: bool = True
    health_note: Sentence = ""
    versions: str = ""  # "torch=2.13.0 python=3.11.7": should be equal on all nodes
    script_args: Words = ""  # a checksum of the arguments of the script: usually equal on all nodes
    block: str = ""  # its place in the network, from the largest unit to the smallest: "pod1/rack7"
    hardware: Sentence = ""  # its GPUs, their NUMA nodes and links, for users


@dataclass(frozen=True, slots=True)
class Cause:
    """Why one rank ended, as its own agent reports it. CONSEQUENCE: it ended only because another rank failed."""

    node: str
    rank: int
    local_rank: int
    failure: FailureClass
    reason: ShortenedSentence  # one line: "ValueError: bad batch", "killed by SIGKILL (out of memory)"
    exit_code: int  # as in a shell: 128 + signal for a signal
    signal: int = 0
    traceback: Traceback = ""
    step: int | None = None
    ran_s: float = 0.0
    at: str = ""  # wall clock of its node, for users; no decision uses it
    log: ShortenedSentence = ""
    hint: ShortenedSentence = ""  # what usually helps, in one line
    doubt: Doubt | None = None  # None: the cause is certain
    suspects: tuple[int, ...] = ()  # for MAY_WAIT and CULPRIT: the ranks that may be the cause
    stopped: bool = (
        False  # a CONSEQUENCE because the launcher stopped the rank; otherwise it lost its connections
    )
    place: Sentence = ""  # where its script was: "in its backward pass, bucket 3 of 7"
    final: bool = False  # a condition of --stop-when: the job ends, whatever the policy says
    # The other end has closed a connection of the rank's own. The cause is a CONSEQUENCE if another rank failed before.
    lost_peer: bool = False

    @property
    def uncertain(self) -> bool:
        """The rank may not be the cause. The failure is not counted for its node."""
        return self.doubt is not None

    @property
    def may_be_a_consequence(self) -> bool:
        """The reports of all ranks together may show another cause: see rendezvous/diagnosing/diagnosis.py."""
        is_doubtful = self.uncertain and self.failure is not FailureClass.HANG  # a hang was already examined
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
    """A fixed set of nodes with their ranks. Placements are in order of node_rank. The ranks are 0 to size-1."""

    generation: int
    placements: tuple[Placement, ...]

    @property
    def size(self) -> int:
        return sum(p.facts.nproc for p in self.placements)


@dataclass(frozen=True, slots=True)
class Assignment:
    """One node's part of a world: with the store, all that the node needs to start its ranks."""

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
    store_node: str = ""  # the name of that node, for users
    reason: ShortenedSentence = ""  # why the previous generation ended
    in_place: bool = False  # some nodes of this world have ranks that were paused: new ranks join these
    can_heal: bool = False  # the service uses reports whether ranks can be paused (`HealReady`)
    heals: int = 0  # how many of the restarts in `restart_count` were in place
    parked: tuple[int, ...] = ()  # local ranks of this node that the service counts as paused
    # Steps that earlier ranks had finished, and that these finish again: by their own count, ...
    repeat_steps: int = 0
    repeat_up_to: int = 0  # ... and as the script numbers them; 0: it does not
    wants_times: bool = False  # the service uses reports of the time of ranks (`RankTimesReported`)
    resume_path: str = ""  # what ranks of an earlier generation have saved last (`ddp.on_failure`)
    check_first: bool = (
        False  # the ranks before hung, and the culprit is uncertain: check the node before the start
    )


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
    """A decision with its reason as text. Each failed generation ends with exactly one decision."""

    kind: DecisionKind
    reason: ShortenedSentence
    generation: int  # the generation that it is about
    cause: Cause | None = None
    # RESTART_WITH_SPARE: the spares used. SHRINK: the nodes left. WAIT: the nodes missing. Otherwise, or unknown: 0.
    nodes: int = 0
    is_interrupt: bool = False  # a person pressed Ctrl-C on some node: ranks get SIGINT first
    in_place: bool = False  # ranks that can be paused keep their processes
    is_crash_loop: bool = False  # FAIL: a rule of --crash-loop ends the job

    @property
    def title(self) -> str:
        """The kind as users see it."""
        if not self.in_place:
            return str(self.kind)
        return _IN_PLACE_TITLES.get(self.kind, f"{self.kind}-in-place")


_IN_PLACE_TITLES = {
    DecisionKind.RESTART: "heal",
    DecisionKind.RESTART_WITH_SPARE: "heal-with-spare",
    DecisionKind.WAIT: str(DecisionKind.WAIT),
}


@dataclass(frozen=True, slots=True)
class Reached:
    """The number of steps that a rank has finished. `numbered`: the script counts them, over all its restarts."""

    step: int
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class SavedState:
    """Where a rank has saved its state after a failure, and after how many steps of its process."""

    step: int
    path: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the job ended. `causes` are the reports of the failed generation, sorted: the first cause comes first."""

    succeeded: bool
    reason: ShortenedSentence
    exit_code: int
    first_cause: Cause | None = None
    causes: tuple[Cause, ...] = ()
    restarts: int = 0
    decisions: tuple[Decision, ...] = field(default=())
    heals: int = 0
    time: JobTime | None = None  # None: no rank has shown what it does
    is_crash_loop: bool = False  # --crash-loop has ended the job: another start would fail in the same way
