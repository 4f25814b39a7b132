from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RefusalKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_KIND_UNSPECIFIED: _ClassVar[RefusalKind]
    REFUSAL_KIND_JOB_OVER: _ClassVar[RefusalKind]
    REFUSAL_KIND_DISAGREEMENT: _ClassVar[RefusalKind]

class LogStream(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOG_STREAM_UNSPECIFIED: _ClassVar[LogStream]
    LOG_STREAM_STDOUT: _ClassVar[LogStream]
    LOG_STREAM_STDERR: _ClassVar[LogStream]

class ScaleUp(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCALE_UP_UNSPECIFIED: _ClassVar[ScaleUp]
    SCALE_UP_NEVER: _ClassVar[ScaleUp]
    SCALE_UP_ON_RESTART: _ClassVar[ScaleUp]
    SCALE_UP_IMMEDIATE: _ClassVar[ScaleUp]
    SCALE_UP_AT_CHECKPOINT: _ClassVar[ScaleUp]

class FailureClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_CLASS_UNSPECIFIED: _ClassVar[FailureClass]
    FAILURE_CLASS_OUT_OF_MEMORY: _ClassVar[FailureClass]
    FAILURE_CLASS_HARDWARE: _ClassVar[FailureClass]
    FAILURE_CLASS_NETWORK: _ClassVar[FailureClass]
    FAILURE_CLASS_USER_EXCEPTION: _ClassVar[FailureClass]
    FAILURE_CLASS_SIGNAL: _ClassVar[FailureClass]
    FAILURE_CLASS_EXIT_CODE: _ClassVar[FailureClass]
    FAILURE_CLASS_HANG: _ClassVar[FailureClass]
    FAILURE_CLASS_NODE_LOST: _ClassVar[FailureClass]
    FAILURE_CLASS_CONSEQUENCE: _ClassVar[FailureClass]

class Doubt(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DOUBT_UNSPECIFIED: _ClassVar[Doubt]
    DOUBT_MAY_WAIT: _ClassVar[Doubt]
    DOUBT_CULPRIT: _ClassVar[Doubt]
    DOUBT_NO_RANK: _ClassVar[Doubt]
    DOUBT_SHARED_ERROR: _ClassVar[Doubt]

class PolicyAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POLICY_ACTION_UNSPECIFIED: _ClassVar[PolicyAction]
    POLICY_ACTION_RESTART: _ClassVar[PolicyAction]
    POLICY_ACTION_RESTART_WITHOUT_NODE: _ClassVar[PolicyAction]
    POLICY_ACTION_FAIL: _ClassVar[PolicyAction]
    POLICY_ACTION_IGNORE: _ClassVar[PolicyAction]
    POLICY_ACTION_HEAL: _ClassVar[PolicyAction]

class Recover(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RECOVER_RESTART: _ClassVar[Recover]
    RECOVER_AUTO: _ClassVar[Recover]
    RECOVER_IN_PLACE: _ClassVar[Recover]

class DecisionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECISION_KIND_UNSPECIFIED: _ClassVar[DecisionKind]
    DECISION_KIND_IGNORE: _ClassVar[DecisionKind]
    DECISION_KIND_RESTART: _ClassVar[DecisionKind]
    DECISION_KIND_RESTART_WITH_SPARE: _ClassVar[DecisionKind]
    DECISION_KIND_SHRINK: _ClassVar[DecisionKind]
    DECISION_KIND_GROW: _ClassVar[DecisionKind]
    DECISION_KIND_WAIT: _ClassVar[DecisionKind]
    DECISION_KIND_FAIL: _ClassVar[DecisionKind]
    DECISION_KIND_FINISH: _ClassVar[DecisionKind]

class RankPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RANK_PHASE_UNSPECIFIED: _ClassVar[RankPhase]
    RANK_PHASE_STARTING: _ClassVar[RankPhase]
    RANK_PHASE_DATA: _ClassVar[RankPhase]
    RANK_PHASE_FORWARD: _ClassVar[RankPhase]
    RANK_PHASE_BACKWARD: _ClassVar[RankPhase]
    RANK_PHASE_COMMUNICATE: _ClassVar[RankPhase]
    RANK_PHASE_OPTIMIZER: _ClassVar[RankPhase]
    RANK_PHASE_CHECKPOINT: _ClassVar[RankPhase]
    RANK_PHASE_EVALUATION: _ClassVar[RankPhase]
    RANK_PHASE_SECTION: _ClassVar[RankPhase]
    RANK_PHASE_IDLE: _ClassVar[RankPhase]
    RANK_PHASE_EXITING: _ClassVar[RankPhase]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_FORMING: _ClassVar[Phase]
    PHASE_SEALED: _ClassVar[Phase]
    PHASE_RUNNING: _ClassVar[Phase]
    PHASE_STOPPING: _ClassVar[Phase]
    PHASE_ENDED: _ClassVar[Phase]

class StragglerPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STRAGGLER_POLICY_UNSPECIFIED: _ClassVar[StragglerPolicy]
    STRAGGLER_POLICY_OFF: _ClassVar[StragglerPolicy]
    STRAGGLER_POLICY_REPORT: _ClassVar[StragglerPolicy]
    STRAGGLER_POLICY_EXCLUDE: _ClassVar[StragglerPolicy]
REFUSAL_KIND_UNSPECIFIED: RefusalKind
REFUSAL_KIND_JOB_OVER: RefusalKind
REFUSAL_KIND_DISAGREEMENT: RefusalKind
LOG_STREAM_UNSPECIFIED: LogStream
LOG_STREAM_STDOUT: LogStream
LOG_STREAM_STDERR: LogStream
SCALE_UP_UNSPECIFIED: ScaleUp
SCALE_UP_NEVER: ScaleUp
SCALE_UP_ON_RESTART: ScaleUp
SCALE_UP_IMMEDIATE: ScaleUp
SCALE_UP_AT_CHECKPOINT: ScaleUp
FAILURE_CLASS_UNSPECIFIED: FailureClass
FAILURE_CLASS_OUT_OF_MEMORY: FailureClass
FAILURE_CLASS_HARDWARE: FailureClass
FAILURE_CLASS_NETWORK: FailureClass
FAILURE_CLASS_USER_EXCEPTION: FailureClass
FAILURE_CLASS_SIGNAL: FailureClass
FAILURE_CLASS_EXIT_CODE: FailureClass
FAILURE_CLASS_HANG: FailureClass
FAILURE_CLASS_NODE_LOST: FailureClass
FAILURE_CLASS_CONSEQUENCE: FailureClass
DOUBT_UNSPECIFIED: Doubt
DOUBT_MAY_WAIT: Doubt
DOUBT_CULPRIT: Doubt
DOUBT_NO_RANK: Doubt
DOUBT_SHARED_ERROR: Doubt
POLICY_ACTION_UNSPECIFIED: PolicyAction
POLICY_ACTION_RESTART: PolicyAction
POLICY_ACTION_RESTART_WITHOUT_NODE: PolicyAction
POLICY_ACTION_FAIL: PolicyAction
POLICY_ACTION_IGNORE: PolicyAction
POLICY_ACTION_HEAL: PolicyAction
RECOVER_RESTART: Recover
RECOVER_AUTO: Recover
RECOVER_IN_PLACE: Recover
DECISION_KIND_UNSPECIFIED: DecisionKind
DECISION_KIND_IGNORE: DecisionKind
DECISION_KIND_RESTART: DecisionKind
DECISION_KIND_RESTART_WITH_SPARE: DecisionKind
DECISION_KIND_SHRINK: DecisionKind
DECISION_KIND_GROW: DecisionKind
DECISION_KIND_WAIT: DecisionKind
DECISION_KIND_FAIL: DecisionKind
DECISION_KIND_FINISH: DecisionKind
RANK_PHASE_UNSPECIFIED: RankPhase
RANK_PHASE_STARTING: RankPhase
RANK_PHASE_DATA: RankPhase
RANK_PHASE_FORWARD: RankPhase
RANK_PHASE_BACKWARD: RankPhase
RANK_PHASE_COMMUNICATE: RankPhase
RANK_PHASE_OPTIMIZER: RankPhase
RANK_PHASE_CHECKPOINT: RankPhase
RANK_PHASE_EVALUATION: RankPhase
RANK_PHASE_SECTION: RankPhase
RANK_PHASE_IDLE: RankPhase
RANK_PHASE_EXITING: RankPhase
PHASE_UNSPECIFIED: Phase
PHASE_FORMING: Phase
PHASE_SEALED: Phase
PHASE_RUNNING: Phase
PHASE_STOPPING: Phase
PHASE_ENDED: Phase
STRAGGLER_POLICY_UNSPECIFIED: StragglerPolicy
STRAGGLER_POLICY_OFF: StragglerPolicy
STRAGGLER_POLICY_REPORT: StragglerPolicy
STRAGGLER_POLICY_EXCLUDE: StragglerPolicy

class AgentMessage(_message.Message):
    __slots__ = ("join", "heartbeat", "leave", "store_opened", "rank_failed", "ranks_finished", "agent_stopped", "checkpoint_taken", "ranks_stalled", "examined", "phase_times", "node_health", "heal_ready", "rank_times")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    STORE_OPENED_FIELD_NUMBER: _ClassVar[int]
    RANK_FAILED_FIELD_NUMBER: _ClassVar[int]
    RANKS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    AGENT_STOPPED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_TAKEN_FIELD_NUMBER: _ClassVar[int]
    RANKS_STALLED_FIELD_NUMBER: _ClassVar[int]
    EXAMINED_FIELD_NUMBER: _ClassVar[int]
    PHASE_TIMES_FIELD_NUMBER: _ClassVar[int]
    NODE_HEALTH_FIELD_NUMBER: _ClassVar[int]
    HEAL_READY_FIELD_NUMBER: _ClassVar[int]
    RANK_TIMES_FIELD_NUMBER: _ClassVar[int]
    join: Join
    heartbeat: Heartbeat
    leave: Leave
    store_opened: StoreOpened
    rank_failed: RankFailed
    ranks_finished: RanksFinished
    agent_stopped: AgentStopped
    checkpoint_taken: CheckpointTaken
    ranks_stalled: RanksStalled
    examined: Examined
    phase_times: PhaseTimesReported
    node_health: NodeHealth
    heal_ready: HealReady
    rank_times: RankTimesReported
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., store_opened: _Optional[_Union[StoreOpened, _Mapping]] = ..., rank_failed: _Optional[_Union[RankFailed, _Mapping]] = ..., ranks_finished: _Optional[_Union[RanksFinished, _Mapping]] = ..., agent_stopped: _Optional[_Union[AgentStopped, _Mapping]] = ..., checkpoint_taken: _Optional[_Union[CheckpointTaken, _Mapping]] = ..., ranks_stalled: _Optional[_Union[RanksStalled, _Mapping]] = ..., examined: _Optional[_Union[Examined, _Mapping]] = ..., phase_times: _Optional[_Union[PhaseTimesReported, _Mapping]] = ..., node_health: _Optional[_Union[NodeHealth, _Mapping]] = ..., heal_ready: _Optional[_Union[HealReady, _Mapping]] = ..., rank_times: _Optional[_Union[RankTimesReported, _Mapping]] = ...) -> None: ...

class ServiceMessage(_message.Message):
    __slots__ = ("waiting", "refused", "assigned", "store_at", "stop", "ended", "redirect", "checkpoint", "examine", "accused", "notice")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    STORE_AT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    REDIRECT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    EXAMINE_FIELD_NUMBER: _ClassVar[int]
    ACCUSED_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    waiting: Waiting
    refused: Refused
    assigned: Assigned
    store_at: StoreAt
    stop: Stop
    ended: Ended
    redirect: Redirect
    checkpoint: CheckpointRequested
    examine: Examine
    accused: Accused
    notice: Notice
    def __init__(self, waiting: _Optional[_Union[Waiting, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., assigned: _Optional[_Union[Assigned, _Mapping]] = ..., store_at: _Optional[_Union[StoreAt, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., redirect: _Optional[_Union[Redirect, _Mapping]] = ..., checkpoint: _Optional[_Union[CheckpointRequested, _Mapping]] = ..., examine: _Optional[_Union[Examine, _Mapping]] = ..., accused: _Optional[_Union[Accused, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ...) -> None: ...

class AgentId(_message.Message):
    __slots__ = ("node", "incarnation")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: str
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("agent", "spec", "facts", "generation", "running")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    agent: AgentId
    spec: JobSpec
    facts: NodeFacts
    generation: int
    running: Assignment
    def __init__(self, agent: _Optional[_Union[AgentId, _Mapping]] = ..., spec: _Optional[_Union[JobSpec, _Mapping]] = ..., facts: _Optional[_Union[NodeFacts, _Mapping]] = ..., generation: _Optional[int] = ..., running: _Optional[_Union[Assignment, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("progress",)
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    progress: bool
    def __init__(self, progress: bool = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("reason", "ends_job")
    REASON_FIELD_NUMBER: _ClassVar[int]
    ENDS_JOB_FIELD_NUMBER: _ClassVar[int]
    reason: str
    ends_job: bool
    def __init__(self, reason: _Optional[str] = ..., ends_job: bool = ...) -> None: ...

class StoreOpened(_message.Message):
    __slots__ = ("generation", "store")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    store: StoreAddress
    def __init__(self, generation: _Optional[int] = ..., store: _Optional[_Union[StoreAddress, _Mapping]] = ...) -> None: ...

class RankFailed(_message.Message):
    __slots__ = ("generation", "cause")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    cause: Cause
    def __init__(self, generation: _Optional[int] = ..., cause: _Optional[_Union[Cause, _Mapping]] = ...) -> None: ...

class RanksFinished(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class AgentStopped(_message.Message):
    __slots__ = ("generation", "reports", "parked", "reached", "saved")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    generation: int
    reports: _containers.RepeatedCompositeFieldContainer[RankReport]
    parked: _containers.RepeatedScalarFieldContainer[int]
    reached: Reached
    saved: SavedState
    def __init__(self, generation: _Optional[int] = ..., reports: _Optional[_Iterable[_Union[RankReport, _Mapping]]] = ..., parked: _Optional[_Iterable[int]] = ..., reached: _Optional[_Union[Reached, _Mapping]] = ..., saved: _Optional[_Union[SavedState, _Mapping]] = ...) -> None: ...

class SavedState(_message.Message):
    __slots__ = ("step", "path")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    step: int
    path: str
    def __init__(self, step: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class Reached(_message.Message):
    __slots__ = ("step", "numbered")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUMBERED_FIELD_NUMBER: _ClassVar[int]
    step: int
    numbered: bool
    def __init__(self, step: _Optional[int] = ..., numbered: bool = ...) -> None: ...

class HealReady(_message.Message):
    __slots__ = ("generation", "ready", "refusal")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    generation: int
    ready: bool
    refusal: str
    def __init__(self, generation: _Optional[int] = ..., ready: bool = ..., refusal: _Optional[str] = ...) -> None: ...

class CheckpointTaken(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class RanksStalled(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class PhaseTimesReported(_message.Message):
    __slots__ = ("generation", "ranks")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    ranks: _containers.RepeatedCompositeFieldContainer[PhaseTimes]
    def __init__(self, generation: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[PhaseTimes, _Mapping]]] = ...) -> None: ...

class NodeHealth(_message.Message):
    __slots__ = ("news", "complaints", "unfit", "is_asked")
    NEWS_FIELD_NUMBER: _ClassVar[int]
    COMPLAINTS_FIELD_NUMBER: _ClassVar[int]
    UNFIT_FIELD_NUMBER: _ClassVar[int]
    IS_ASKED_FIELD_NUMBER: _ClassVar[int]
    news: str
    complaints: _containers.RepeatedScalarFieldContainer[str]
    unfit: str
    is_asked: bool
    def __init__(self, news: _Optional[str] = ..., complaints: _Optional[_Iterable[str]] = ..., unfit: _Optional[str] = ..., is_asked: bool = ...) -> None: ...

class RankTimesReported(_message.Message):
    __slots__ = ("ranks", "imports")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    IMPORTS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankTime]
    imports: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankTime, _Mapping]]] = ..., imports: _Optional[_Iterable[str]] = ...) -> None: ...

class Examined(_message.Message):
    __slots__ = ("generation", "reports")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    reports: _containers.RepeatedCompositeFieldContainer[RankReport]
    def __init__(self, generation: _Optional[int] = ..., reports: _Optional[_Iterable[_Union[RankReport, _Mapping]]] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("reason", "present", "wanted", "stands_by", "imports")
    REASON_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    STANDS_BY_FIELD_NUMBER: _ClassVar[int]
    IMPORTS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    present: int
    wanted: int
    stands_by: bool
    imports: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reason: _Optional[str] = ..., present: _Optional[int] = ..., wanted: _Optional[int] = ..., stands_by: bool = ..., imports: _Optional[_Iterable[str]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "exit_code", "retryable", "kind", "disagreement")
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DISAGREEMENT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    exit_code: int
    retryable: bool
    kind: RefusalKind
    disagreement: Disagreement
    def __init__(self, reason: _Optional[str] = ..., exit_code: _Optional[int] = ..., retryable: bool = ..., kind: _Optional[_Union[RefusalKind, str]] = ..., disagreement: _Optional[_Union[Disagreement, _Mapping]] = ...) -> None: ...

class Disagreement(_message.Message):
    __slots__ = ("setting", "of_job", "of_node")
    SETTING_FIELD_NUMBER: _ClassVar[int]
    OF_JOB_FIELD_NUMBER: _ClassVar[int]
    OF_NODE_FIELD_NUMBER: _ClassVar[int]
    setting: str
    of_job: str
    of_node: str
    def __init__(self, setting: _Optional[str] = ..., of_job: _Optional[str] = ..., of_node: _Optional[str] = ...) -> None: ...

class Assigned(_message.Message):
    __slots__ = ("assignment",)
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ...) -> None: ...

class CheckpointRequested(_message.Message):
    __slots__ = ("generation", "reason")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: int
    reason: str
    def __init__(self, generation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class StoreAt(_message.Message):
    __slots__ = ("generation", "store")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    store: StoreAddress
    def __init__(self, generation: _Optional[int] = ..., store: _Optional[_Union[StoreAddress, _Mapping]] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("generation", "decision")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    decision: Decision
    def __init__(self, generation: _Optional[int] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ...) -> None: ...

class Examine(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class Accused(_message.Message):
    __slots__ = ("generation", "cause")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    cause: Cause
    def __init__(self, generation: _Optional[int] = ..., cause: _Optional[_Union[Cause, _Mapping]] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("generation", "text")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    text: str
    def __init__(self, generation: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    def __init__(self, outcome: _Optional[_Union[Outcome, _Mapping]] = ...) -> None: ...

class Redirect(_message.Message):
    __slots__ = ("address", "after_s", "reason")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    AFTER_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    address: str
    after_s: float
    reason: str
    def __init__(self, address: _Optional[str] = ..., after_s: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class Question(_message.Message):
    __slots__ = ("id", "ranks", "stacks", "logs", "checkpoint", "profile", "trace", "step", "logged", "drill")
    ID_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOGGED_FIELD_NUMBER: _ClassVar[int]
    DRILL_FIELD_NUMBER: _ClassVar[int]
    id: int
    ranks: RanksWanted
    stacks: StacksWanted
    logs: LogsWanted
    checkpoint: CheckpointWanted
    profile: ProfileWanted
    trace: TraceWanted
    step: StepWanted
    logged: LoggedWanted
    drill: DrillWanted
    def __init__(self, id: _Optional[int] = ..., ranks: _Optional[_Union[RanksWanted, _Mapping]] = ..., stacks: _Optional[_Union[StacksWanted, _Mapping]] = ..., logs: _Optional[_Union[LogsWanted, _Mapping]] = ..., checkpoint: _Optional[_Union[CheckpointWanted, _Mapping]] = ..., profile: _Optional[_Union[ProfileWanted, _Mapping]] = ..., trace: _Optional[_Union[TraceWanted, _Mapping]] = ..., step: _Optional[_Union[StepWanted, _Mapping]] = ..., logged: _Optional[_Union[LoggedWanted, _Mapping]] = ..., drill: _Optional[_Union[DrillWanted, _Mapping]] = ...) -> None: ...

class AgentAnswer(_message.Message):
    __slots__ = ("id", "present", "cannot", "ranks", "stacks", "logs", "remark", "checkpointed", "trace", "restart_times", "step", "logged", "drilled")
    ID_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    CANNOT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    REMARK_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTED_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    RESTART_TIMES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOGGED_FIELD_NUMBER: _ClassVar[int]
    DRILLED_FIELD_NUMBER: _ClassVar[int]
    id: int
    present: Present
    cannot: CannotAnswer
    ranks: RanksSeen
    stacks: Stacks
    logs: LogPieces
    remark: Remark
    checkpointed: Checkpointed
    trace: TracePart
    restart_times: RestartTimes
    step: StepSeen
    logged: LoggedSeen
    drilled: Drilled
    def __init__(self, id: _Optional[int] = ..., present: _Optional[_Union[Present, _Mapping]] = ..., cannot: _Optional[_Union[CannotAnswer, _Mapping]] = ..., ranks: _Optional[_Union[RanksSeen, _Mapping]] = ..., stacks: _Optional[_Union[Stacks, _Mapping]] = ..., logs: _Optional[_Union[LogPieces, _Mapping]] = ..., remark: _Optional[_Union[Remark, _Mapping]] = ..., checkpointed: _Optional[_Union[Checkpointed, _Mapping]] = ..., trace: _Optional[_Union[TracePart, _Mapping]] = ..., restart_times: _Optional[_Union[RestartTimes, _Mapping]] = ..., step: _Optional[_Union[StepSeen, _Mapping]] = ..., logged: _Optional[_Union[LoggedSeen, _Mapping]] = ..., drilled: _Optional[_Union[Drilled, _Mapping]] = ...) -> None: ...

class Present(_message.Message):
    __slots__ = ("agent", "job_id")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    agent: AgentId
    job_id: str
    def __init__(self, agent: _Optional[_Union[AgentId, _Mapping]] = ..., job_id: _Optional[str] = ...) -> None: ...

class CannotAnswer(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Remark(_message.Message):
    __slots__ = ("generation", "kind", "text")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    kind: str
    text: str
    def __init__(self, generation: _Optional[int] = ..., kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class RanksWanted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RanksSeen(_message.Message):
    __slots__ = ("generation", "restarts", "ranks", "node_use")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    NODE_USE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    restarts: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankSeen]
    node_use: _containers.RepeatedCompositeFieldContainer[LoggedValue]
    def __init__(self, generation: _Optional[int] = ..., restarts: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankSeen, _Mapping]]] = ..., node_use: _Optional[_Iterable[_Union[LoggedValue, _Mapping]]] = ...) -> None: ...

class RankSeen(_message.Message):
    __slots__ = ("rank", "local_rank", "pid", "known", "alive", "process", "phase", "phase_s", "quiet_s", "step", "step_s", "last_step_s", "mean_step_s", "spent_s", "waited_s", "memory", "gpu", "starts", "doing", "message", "logged")
    RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PHASE_S_FIELD_NUMBER: _ClassVar[int]
    QUIET_S_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    MEAN_STEP_S_FIELD_NUMBER: _ClassVar[int]
    SPENT_S_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LOGGED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    local_rank: int
    pid: int
    known: bool
    alive: bool
    process: str
    phase: RankPhase
    phase_s: float
    quiet_s: float
    step: int
    step_s: float
    last_step_s: float
    mean_step_s: float
    spent_s: float
    waited_s: float
    memory: int
    gpu: GpuSeen
    starts: int
    doing: str
    message: str
    logged: _containers.RepeatedCompositeFieldContainer[LoggedValue]
    def __init__(self, rank: _Optional[int] = ..., local_rank: _Optional[int] = ..., pid: _Optional[int] = ..., known: bool = ..., alive: bool = ..., process: _Optional[str] = ..., phase: _Optional[_Union[RankPhase, str]] = ..., phase_s: _Optional[float] = ..., quiet_s: _Optional[float] = ..., step: _Optional[int] = ..., step_s: _Optional[float] = ..., last_step_s: _Optional[float] = ..., mean_step_s: _Optional[float] = ..., spent_s: _Optional[float] = ..., waited_s: _Optional[float] = ..., memory: _Optional[int] = ..., gpu: _Optional[_Union[GpuSeen, _Mapping]] = ..., starts: _Optional[int] = ..., doing: _Optional[str] = ..., message: _Optional[str] = ..., logged: _Optional[_Iterable[_Union[LoggedValue, _Mapping]]] = ...) -> None: ...

class LoggedValue(_message.Message):
    __slots__ = ("name", "step", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    step: int
    value: str
    def __init__(self, name: _Optional[str] = ..., step: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...

class LoggedWanted(_message.Message):
    __slots__ = ("after", "of_node")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    OF_NODE_FIELD_NUMBER: _ClassVar[int]
    after: int
    of_node: bool
    def __init__(self, after: _Optional[int] = ..., of_node: bool = ...) -> None: ...

class LoggedPoint(_message.Message):
    __slots__ = ("number", "name", "step", "value", "generation", "at")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    number: int
    name: str
    step: int
    value: str
    generation: int
    at: float
    def __init__(self, number: _Optional[int] = ..., name: _Optional[str] = ..., step: _Optional[int] = ..., value: _Optional[str] = ..., generation: _Optional[int] = ..., at: _Optional[float] = ...) -> None: ...

class LoggedSeen(_message.Message):
    __slots__ = ("points", "last")
    POINTS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    points: _containers.RepeatedCompositeFieldContainer[LoggedPoint]
    last: int
    def __init__(self, points: _Optional[_Iterable[_Union[LoggedPoint, _Mapping]]] = ..., last: _Optional[int] = ...) -> None: ...

class GpuSeen(_message.Message):
    __slots__ = ("index", "memory_used", "memory_total", "utilization")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    index: int
    memory_used: int
    memory_total: int
    utilization: int
    def __init__(self, index: _Optional[int] = ..., memory_used: _Optional[int] = ..., memory_total: _Optional[int] = ..., utilization: _Optional[int] = ...) -> None: ...

class StepWanted(_message.Message):
    __slots__ = ("rank",)
    RANK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    def __init__(self, rank: _Optional[int] = ...) -> None: ...

class StepPhase(_message.Message):
    __slots__ = ("phase", "start_s", "end_s")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    phase: RankPhase
    start_s: float
    end_s: float
    def __init__(self, phase: _Optional[_Union[RankPhase, str]] = ..., start_s: _Optional[float] = ..., end_s: _Optional[float] = ...) -> None: ...

class StepCall(_message.Message):
    __slots__ = ("op", "group", "dtype", "numel", "is_async", "start_s", "end_s")
    OP_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUMEL_FIELD_NUMBER: _ClassVar[int]
    IS_ASYNC_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    op: str
    group: str
    dtype: str
    numel: int
    is_async: bool
    start_s: float
    end_s: float
    def __init__(self, op: _Optional[str] = ..., group: _Optional[str] = ..., dtype: _Optional[str] = ..., numel: _Optional[int] = ..., is_async: bool = ..., start_s: _Optional[float] = ..., end_s: _Optional[float] = ...) -> None: ...

class StepSeen(_message.Message):
    __slots__ = ("step", "duration_s", "phases", "calls")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    step: int
    duration_s: float
    phases: _containers.RepeatedCompositeFieldContainer[StepPhase]
    calls: _containers.RepeatedCompositeFieldContainer[StepCall]
    def __init__(self, step: _Optional[int] = ..., duration_s: _Optional[float] = ..., phases: _Optional[_Iterable[_Union[StepPhase, _Mapping]]] = ..., calls: _Optional[_Iterable[_Union[StepCall, _Mapping]]] = ...) -> None: ...

class StacksWanted(_message.Message):
    __slots__ = ("rank", "native")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NATIVE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    native: bool
    def __init__(self, rank: _Optional[int] = ..., native: bool = ...) -> None: ...

class Stacks(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class LogsWanted(_message.Message):
    __slots__ = ("ranks", "generation", "since_s", "tail", "places", "most_bytes", "wait_s")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    MOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    generation: int
    since_s: float
    tail: int
    places: _containers.RepeatedCompositeFieldContainer[LogPlace]
    most_bytes: int
    wait_s: float
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., generation: _Optional[int] = ..., since_s: _Optional[float] = ..., tail: _Optional[int] = ..., places: _Optional[_Iterable[_Union[LogPlace, _Mapping]]] = ..., most_bytes: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class LogPlace(_message.Message):
    __slots__ = ("generation", "rank", "stream", "offset")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    stream: LogStream
    offset: int
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ..., stream: _Optional[_Union[LogStream, str]] = ..., offset: _Optional[int] = ...) -> None: ...

class LogPieces(_message.Message):
    __slots__ = ("pieces", "places", "more", "ended")
    PIECES_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    pieces: _containers.RepeatedCompositeFieldContainer[LogPiece]
    places: _containers.RepeatedCompositeFieldContainer[LogPlace]
    more: bool
    ended: bool
    def __init__(self, pieces: _Optional[_Iterable[_Union[LogPiece, _Mapping]]] = ..., places: _Optional[_Iterable[_Union[LogPlace, _Mapping]]] = ..., more: bool = ..., ended: bool = ...) -> None: ...

class CheckpointWanted(_message.Message):
    __slots__ = ("reason", "wait_s")
    REASON_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    reason: str
    wait_s: float
    def __init__(self, reason: _Optional[str] = ..., wait_s: _Optional[float] = ...) -> None: ...

class Checkpointed(_message.Message):
    __slots__ = ("taken", "took_s")
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    taken: bool
    took_s: float
    def __init__(self, taken: bool = ..., took_s: _Optional[float] = ...) -> None: ...

class DrillWanted(_message.Message):
    __slots__ = ("rank", "generation", "freeze_s", "reason", "by")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FREEZE_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    rank: int
    generation: int
    freeze_s: float
    reason: str
    by: str
    def __init__(self, rank: _Optional[int] = ..., generation: _Optional[int] = ..., freeze_s: _Optional[float] = ..., reason: _Optional[str] = ..., by: _Optional[str] = ...) -> None: ...

class Drilled(_message.Message):
    __slots__ = ("pid",)
    PID_FIELD_NUMBER: _ClassVar[int]
    pid: int
    def __init__(self, pid: _Optional[int] = ...) -> None: ...

class ProfileWanted(_message.Message):
    __slots__ = ("rank", "seconds")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    seconds: float
    def __init__(self, rank: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class TraceWanted(_message.Message):
    __slots__ = ("rank", "name", "offset")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    rank: int
    name: str
    offset: int
    def __init__(self, rank: _Optional[int] = ..., name: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class TracePart(_message.Message):
    __slots__ = ("name", "size", "offset", "data", "steps")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    offset: int
    data: bytes
    steps: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., steps: _Optional[int] = ...) -> None: ...

class RestartTimes(_message.Message):
    __slots__ = ("generation", "detect_s", "stop_s", "meet_s", "fork_s", "init_s", "first_step_s", "redo_s", "node")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DETECT_S_FIELD_NUMBER: _ClassVar[int]
    STOP_S_FIELD_NUMBER: _ClassVar[int]
    MEET_S_FIELD_NUMBER: _ClassVar[int]
    FORK_S_FIELD_NUMBER: _ClassVar[int]
    INIT_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    REDO_S_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    detect_s: float
    stop_s: float
    meet_s: float
    fork_s: float
    init_s: float
    first_step_s: float
    redo_s: float
    node: str
    def __init__(self, generation: _Optional[int] = ..., detect_s: _Optional[float] = ..., stop_s: _Optional[float] = ..., meet_s: _Optional[float] = ..., fork_s: _Optional[float] = ..., init_s: _Optional[float] = ..., first_step_s: _Optional[float] = ..., redo_s: _Optional[float] = ..., node: _Optional[str] = ...) -> None: ...

class LogPiece(_message.Message):
    __slots__ = ("generation", "rank", "stream", "at", "data", "lost")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    stream: LogStream
    at: float
    data: bytes
    lost: int
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ..., stream: _Optional[_Union[LogStream, str]] = ..., at: _Optional[float] = ..., data: _Optional[bytes] = ..., lost: _Optional[int] = ...) -> None: ...

class RestartBudget(_message.Message):
    __slots__ = ("limit", "window_s")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    limit: int
    window_s: float
    def __init__(self, limit: _Optional[int] = ..., window_s: _Optional[float] = ...) -> None: ...

class CrashLoop(_message.Message):
    __slots__ = ("times", "within_s", "without_step")
    TIMES_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_STEP_FIELD_NUMBER: _ClassVar[int]
    times: int
    within_s: float
    without_step: int
    def __init__(self, times: _Optional[int] = ..., within_s: _Optional[float] = ..., without_step: _Optional[int] = ...) -> None: ...

class PolicyRule(_message.Message):
    __slots__ = ("failure", "action", "exit_code")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    failure: FailureClass
    action: PolicyAction
    exit_code: int
    def __init__(self, failure: _Optional[_Union[FailureClass, str]] = ..., action: _Optional[_Union[PolicyAction, str]] = ..., exit_code: _Optional[int] = ...) -> None: ...

class JobSpec(_message.Message):
    __slots__ = ("job_id", "min_nodes", "max_nodes", "entry_point", "nproc", "version", "budget", "crash_loop", "join_timeout_s", "last_call_s", "last_call_bound_s", "replacement_timeout_s", "lease_s", "stop_budget_s", "spares", "scale_up", "node_failure_limit", "node_cooldown_s", "rules", "shrink_after_s", "stragglers", "recover", "heal_budget")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MIN_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    ENTRY_POINT_FIELD_NUMBER: _ClassVar[int]
    NPROC_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    CRASH_LOOP_FIELD_NUMBER: _ClassVar[int]
    JOIN_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    LAST_CALL_S_FIELD_NUMBER: _ClassVar[int]
    LAST_CALL_BOUND_S_FIELD_NUMBER: _ClassVar[int]
    REPLACEMENT_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    STOP_BUDGET_S_FIELD_NUMBER: _ClassVar[int]
    SPARES_FIELD_NUMBER: _ClassVar[int]
    SCALE_UP_FIELD_NUMBER: _ClassVar[int]
    NODE_FAILURE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    NODE_COOLDOWN_S_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    SHRINK_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    STRAGGLERS_FIELD_NUMBER: _ClassVar[int]
    RECOVER_FIELD_NUMBER: _ClassVar[int]
    HEAL_BUDGET_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    min_nodes: int
    max_nodes: int
    entry_point: str
    nproc: str
    version: str
    budget: RestartBudget
    crash_loop: CrashLoop
    join_timeout_s: float
    last_call_s: float
    last_call_bound_s: float
    replacement_timeout_s: float
    lease_s: float
    stop_budget_s: float
    spares: int
    scale_up: ScaleUp
    node_failure_limit: int
    node_cooldown_s: float
    rules: _containers.RepeatedCompositeFieldContainer[PolicyRule]
    shrink_after_s: float
    stragglers: StragglerRule
    recover: Recover
    heal_budget: RestartBudget
    def __init__(self, job_id: _Optional[str] = ..., min_nodes: _Optional[int] = ..., max_nodes: _Optional[int] = ..., entry_point: _Optional[str] = ..., nproc: _Optional[str] = ..., version: _Optional[str] = ..., budget: _Optional[_Union[RestartBudget, _Mapping]] = ..., crash_loop: _Optional[_Union[CrashLoop, _Mapping]] = ..., join_timeout_s: _Optional[float] = ..., last_call_s: _Optional[float] = ..., last_call_bound_s: _Optional[float] = ..., replacement_timeout_s: _Optional[float] = ..., lease_s: _Optional[float] = ..., stop_budget_s: _Optional[float] = ..., spares: _Optional[int] = ..., scale_up: _Optional[_Union[ScaleUp, str]] = ..., node_failure_limit: _Optional[int] = ..., node_cooldown_s: _Optional[float] = ..., rules: _Optional[_Iterable[_Union[PolicyRule, _Mapping]]] = ..., shrink_after_s: _Optional[float] = ..., stragglers: _Optional[_Union[StragglerRule, _Mapping]] = ..., recover: _Optional[_Union[Recover, str]] = ..., heal_budget: _Optional[_Union[RestartBudget, _Mapping]] = ...) -> None: ...

class StragglerRule(_message.Message):
    __slots__ = ("policy", "factor", "window_s")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    policy: StragglerPolicy
    factor: float
    window_s: float
    def __init__(self, policy: _Optional[_Union[StragglerPolicy, str]] = ..., factor: _Optional[float] = ..., window_s: _Optional[float] = ...) -> None: ...

class PhaseTimes(_message.Message):
    __slots__ = ("rank", "steps", "data_s", "forward_s", "backward_s", "optimizer_s", "idle_s", "waiting_s")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DATA_S_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_S_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_S_FIELD_NUMBER: _ClassVar[int]
    rank: int
    steps: int
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    idle_s: float
    waiting_s: float
    def __init__(self, rank: _Optional[int] = ..., steps: _Optional[int] = ..., data_s: _Optional[float] = ..., forward_s: _Optional[float] = ..., backward_s: _Optional[float] = ..., optimizer_s: _Optional[float] = ..., idle_s: _Optional[float] = ..., waiting_s: _Optional[float] = ...) -> None: ...

class TimeSpent(_message.Message):
    __slots__ = ("start", "data", "forward", "backward", "communication", "optimizer", "checkpoint", "evaluation", "waiting", "detect", "stop", "meet", "fork", "init", "redo", "idle")
    START_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATION_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DETECT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MEET_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    INIT_FIELD_NUMBER: _ClassVar[int]
    REDO_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    start: float
    data: float
    forward: float
    backward: float
    communication: float
    optimizer: float
    checkpoint: float
    evaluation: float
    waiting: float
    detect: float
    stop: float
    meet: float
    fork: float
    init: float
    redo: float
    idle: float
    def __init__(self, start: _Optional[float] = ..., data: _Optional[float] = ..., forward: _Optional[float] = ..., backward: _Optional[float] = ..., communication: _Optional[float] = ..., optimizer: _Optional[float] = ..., checkpoint: _Optional[float] = ..., evaluation: _Optional[float] = ..., waiting: _Optional[float] = ..., detect: _Optional[float] = ..., stop: _Optional[float] = ..., meet: _Optional[float] = ..., fork: _Optional[float] = ..., init: _Optional[float] = ..., redo: _Optional[float] = ..., idle: _Optional[float] = ...) -> None: ...

class RankTime(_message.Message):
    __slots__ = ("rank", "spent", "steps", "saved_steps", "numbers_steps", "has_page", "hidden")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SAVED_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_STEPS_FIELD_NUMBER: _ClassVar[int]
    HAS_PAGE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    rank: int
    spent: TimeSpent
    steps: int
    saved_steps: int
    numbers_steps: bool
    has_page: bool
    hidden: float
    def __init__(self, rank: _Optional[int] = ..., spent: _Optional[_Union[TimeSpent, _Mapping]] = ..., steps: _Optional[int] = ..., saved_steps: _Optional[int] = ..., numbers_steps: bool = ..., has_page: bool = ..., hidden: _Optional[float] = ...) -> None: ...

class JobTime(_message.Message):
    __slots__ = ("ranks", "spent", "hidden")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    ranks: int
    spent: TimeSpent
    hidden: float
    def __init__(self, ranks: _Optional[int] = ..., spent: _Optional[_Union[TimeSpent, _Mapping]] = ..., hidden: _Optional[float] = ...) -> None: ...

class NodeFacts(_message.Message):
    __slots__ = ("host", "address", "nproc", "role", "node_rank", "scheduler_index", "healthy", "health_note", "versions", "script_args", "block", "hardware")
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NPROC_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_INDEX_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    HEALTH_NOTE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_ARGS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    host: str
    address: str
    nproc: int
    role: str
    node_rank: int
    scheduler_index: int
    healthy: bool
    health_note: str
    versions: str
    script_args: str
    block: str
    hardware: str
    def __init__(self, host: _Optional[str] = ..., address: _Optional[str] = ..., nproc: _Optional[int] = ..., role: _Optional[str] = ..., node_rank: _Optional[int] = ..., scheduler_index: _Optional[int] = ..., healthy: bool = ..., health_note: _Optional[str] = ..., versions: _Optional[str] = ..., script_args: _Optional[str] = ..., block: _Optional[str] = ..., hardware: _Optional[str] = ...) -> None: ...

class Cause(_message.Message):
    __slots__ = ("node", "rank", "local_rank", "failure", "reason", "exit_code", "signal", "traceback", "step", "ran_s", "at", "log", "hint", "place", "doubt", "suspects", "stopped", "final", "lost_peer")
    NODE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RAN_S_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    DOUBT_FIELD_NUMBER: _ClassVar[int]
    SUSPECTS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    LOST_PEER_FIELD_NUMBER: _ClassVar[int]
    node: str
    rank: int
    local_rank: int
    failure: FailureClass
    reason: str
    exit_code: int
    signal: int
    traceback: str
    step: int
    ran_s: float
    at: str
    log: str
    hint: str
    place: str
    doubt: Doubt
    suspects: _containers.RepeatedScalarFieldContainer[int]
    stopped: bool
    final: bool
    lost_peer: bool
    def __init__(self, node: _Optional[str] = ..., rank: _Optional[int] = ..., local_rank: _Optional[int] = ..., failure: _Optional[_Union[FailureClass, str]] = ..., reason: _Optional[str] = ..., exit_code: _Optional[int] = ..., signal: _Optional[int] = ..., traceback: _Optional[str] = ..., step: _Optional[int] = ..., ran_s: _Optional[float] = ..., at: _Optional[str] = ..., log: _Optional[str] = ..., hint: _Optional[str] = ..., place: _Optional[str] = ..., doubt: _Optional[_Union[Doubt, str]] = ..., suspects: _Optional[_Iterable[int]] = ..., stopped: bool = ..., final: bool = ..., lost_peer: bool = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("generation", "node_rank", "n_nodes", "rank_offset", "nproc", "world_size", "role", "role_rank_offset", "role_world_size", "restart_count", "max_restarts", "store_host", "store_node", "reason", "in_place", "can_heal", "heals", "repeat_steps", "repeat_up_to", "wants_times", "parked", "resume_path", "check_first")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    N_NODES_FIELD_NUMBER: _ClassVar[int]
    RANK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NPROC_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ROLE_RANK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    ROLE_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RESTART_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    STORE_HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_NODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    CAN_HEAL_FIELD_NUMBER: _ClassVar[int]
    HEALS_FIELD_NUMBER: _ClassVar[int]
    REPEAT_STEPS_FIELD_NUMBER: _ClassVar[int]
    REPEAT_UP_TO_FIELD_NUMBER: _ClassVar[int]
    WANTS_TIMES_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    RESUME_PATH_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIRST_FIELD_NUMBER: _ClassVar[int]
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
    store_host: str
    store_node: str
    reason: str
    in_place: bool
    can_heal: bool
    heals: int
    repeat_steps: int
    repeat_up_to: int
    wants_times: bool
    parked: _containers.RepeatedScalarFieldContainer[int]
    resume_path: str
    check_first: bool
    def __init__(self, generation: _Optional[int] = ..., node_rank: _Optional[int] = ..., n_nodes: _Optional[int] = ..., rank_offset: _Optional[int] = ..., nproc: _Optional[int] = ..., world_size: _Optional[int] = ..., role: _Optional[str] = ..., role_rank_offset: _Optional[int] = ..., role_world_size: _Optional[int] = ..., restart_count: _Optional[int] = ..., max_restarts: _Optional[int] = ..., store_host: _Optional[str] = ..., store_node: _Optional[str] = ..., reason: _Optional[str] = ..., in_place: bool = ..., can_heal: bool = ..., heals: _Optional[int] = ..., repeat_steps: _Optional[int] = ..., repeat_up_to: _Optional[int] = ..., wants_times: bool = ..., parked: _Optional[_Iterable[int]] = ..., resume_path: _Optional[str] = ..., check_first: bool = ...) -> None: ...

class RankReport(_message.Message):
    __slots__ = ("rank", "known", "stalled_s", "limit_s", "phase", "phase_s", "step", "section", "message", "calls", "groups", "alive", "process", "busy", "wchan", "recorded", "recorder", "idle_s", "idle_limit_s")
    RANK_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    STALLED_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PHASE_S_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SECTION_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    WCHAN_FIELD_NUMBER: _ClassVar[int]
    RECORDED_FIELD_NUMBER: _ClassVar[int]
    RECORDER_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    rank: int
    known: bool
    stalled_s: float
    limit_s: float
    phase: RankPhase
    phase_s: float
    step: int
    section: str
    message: str
    calls: _containers.RepeatedCompositeFieldContainer[Collective]
    groups: _containers.RepeatedCompositeFieldContainer[GroupView]
    alive: bool
    process: str
    busy: bool
    wchan: str
    recorded: _containers.RepeatedCompositeFieldContainer[Collective]
    recorder: _containers.RepeatedCompositeFieldContainer[GroupView]
    idle_s: float
    idle_limit_s: float
    def __init__(self, rank: _Optional[int] = ..., known: bool = ..., stalled_s: _Optional[float] = ..., limit_s: _Optional[float] = ..., phase: _Optional[_Union[RankPhase, str]] = ..., phase_s: _Optional[float] = ..., step: _Optional[int] = ..., section: _Optional[str] = ..., message: _Optional[str] = ..., calls: _Optional[_Iterable[_Union[Collective, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[GroupView, _Mapping]]] = ..., alive: bool = ..., process: _Optional[str] = ..., busy: bool = ..., wchan: _Optional[str] = ..., recorded: _Optional[_Iterable[_Union[Collective, _Mapping]]] = ..., recorder: _Optional[_Iterable[_Union[GroupView, _Mapping]]] = ..., idle_s: _Optional[float] = ..., idle_limit_s: _Optional[float] = ...) -> None: ...

class Collective(_message.Message):
    __slots__ = ("number", "group", "seq", "op", "dtype", "numel", "shape", "peer", "is_async", "entered_s", "finished_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUMEL_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    IS_ASYNC_FIELD_NUMBER: _ClassVar[int]
    ENTERED_S_FIELD_NUMBER: _ClassVar[int]
    FINISHED_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    group: str
    seq: int
    op: str
    dtype: str
    numel: int
    shape: int
    peer: int
    is_async: bool
    entered_s: float
    finished_s: float
    def __init__(self, number: _Optional[int] = ..., group: _Optional[str] = ..., seq: _Optional[int] = ..., op: _Optional[str] = ..., dtype: _Optional[str] = ..., numel: _Optional[int] = ..., shape: _Optional[int] = ..., peer: _Optional[int] = ..., is_async: bool = ..., entered_s: _Optional[float] = ..., finished_s: _Optional[float] = ...) -> None: ...

class GroupView(_message.Message):
    __slots__ = ("name", "size", "members", "entered", "finished")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ENTERED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    members: str
    entered: int
    finished: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., members: _Optional[str] = ..., entered: _Optional[int] = ..., finished: _Optional[int] = ...) -> None: ...

class StoreAddress(_message.Message):
    __slots__ = ("host", "port", "kept")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    kept: bool
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., kept: bool = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("kind", "reason", "generation", "cause", "nodes", "is_interrupt", "in_place", "is_crash_loop")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    IS_INTERRUPT_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    IS_CRASH_LOOP_FIELD_NUMBER: _ClassVar[int]
    kind: DecisionKind
    reason: str
    generation: int
    cause: Cause
    nodes: int
    is_interrupt: bool
    in_place: bool
    is_crash_loop: bool
    def __init__(self, kind: _Optional[_Union[DecisionKind, str]] = ..., reason: _Optional[str] = ..., generation: _Optional[int] = ..., cause: _Optional[_Union[Cause, _Mapping]] = ..., nodes: _Optional[int] = ..., is_interrupt: bool = ..., in_place: bool = ..., is_crash_loop: bool = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("succeeded", "reason", "exit_code", "first_cause", "causes", "restarts", "decisions", "heals", "time", "is_crash_loop")
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    FIRST_CAUSE_FIELD_NUMBER: _ClassVar[int]
    CAUSES_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    HEALS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    IS_CRASH_LOOP_FIELD_NUMBER: _ClassVar[int]
    succeeded: bool
    reason: str
    exit_code: int
    first_cause: Cause
    causes: _containers.RepeatedCompositeFieldContainer[Cause]
    restarts: int
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    heals: int
    time: JobTime
    is_crash_loop: bool
    def __init__(self, succeeded: bool = ..., reason: _Optional[str] = ..., exit_code: _Optional[int] = ..., first_cause: _Optional[_Union[Cause, _Mapping]] = ..., causes: _Optional[_Iterable[_Union[Cause, _Mapping]]] = ..., restarts: _Optional[int] = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., heals: _Optional[int] = ..., time: _Optional[_Union[JobTime, _Mapping]] = ..., is_crash_loop: bool = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("jobs", "elsewhere")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobSummary]
    elsewhere: _containers.RepeatedCompositeFieldContainer[JobElsewhere]
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobSummary, _Mapping]]] = ..., elsewhere: _Optional[_Iterable[_Union[JobElsewhere, _Mapping]]] = ...) -> None: ...

class JobElsewhere(_message.Message):
    __slots__ = ("job_id", "address")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    address: str
    def __init__(self, job_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class GetJobRequest(_message.Message):
    __slots__ = ("job_id", "points_after")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    POINTS_AFTER_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    points_after: float
    def __init__(self, job_id: _Optional[str] = ..., points_after: _Optional[float] = ...) -> None: ...

class GetJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: JobView
    def __init__(self, job: _Optional[_Union[JobView, _Mapping]] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("job_id", "after_seq", "follow", "journal_id")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    after_seq: int
    follow: bool
    journal_id: str
    def __init__(self, job_id: _Optional[str] = ..., after_seq: _Optional[int] = ..., follow: bool = ..., journal_id: _Optional[str] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("note", "journal_id")
    NOTE_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_ID_FIELD_NUMBER: _ClassVar[int]
    note: Note
    journal_id: str
    def __init__(self, note: _Optional[_Union[Note, _Mapping]] = ..., journal_id: _Optional[str] = ...) -> None: ...

class DrainNodeRequest(_message.Message):
    __slots__ = ("job_id", "node", "reason")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    node: str
    reason: str
    def __init__(self, job_id: _Optional[str] = ..., node: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainNodeResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: JobSummary
    def __init__(self, job: _Optional[_Union[JobSummary, _Mapping]] = ...) -> None: ...

class ResumeNodeRequest(_message.Message):
    __slots__ = ("job_id", "node")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    node: str
    def __init__(self, job_id: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...

class ResumeNodeResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: JobSummary
    def __init__(self, job: _Optional[_Union[JobSummary, _Mapping]] = ...) -> None: ...

class ResizeJobRequest(_message.Message):
    __slots__ = ("job_id", "min_nodes", "max_nodes")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MIN_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    min_nodes: int
    max_nodes: int
    def __init__(self, job_id: _Optional[str] = ..., min_nodes: _Optional[int] = ..., max_nodes: _Optional[int] = ...) -> None: ...

class ResizeJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: JobSummary
    def __init__(self, job: _Optional[_Union[JobSummary, _Mapping]] = ...) -> None: ...

class RestartJobRequest(_message.Message):
    __slots__ = ("job_id", "reason")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    reason: str
    def __init__(self, job_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RestartJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: JobSummary
    def __init__(self, job: _Optional[_Union[JobSummary, _Mapping]] = ...) -> None: ...

class AbortJobRequest(_message.Message):
    __slots__ = ("job_id", "reason")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    reason: str
    def __init__(self, job_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: JobSummary
    def __init__(self, job: _Optional[_Union[JobSummary, _Mapping]] = ...) -> None: ...

class AskRequest(_message.Message):
    __slots__ = ("job_id", "nodes", "ranks", "question", "wait_s")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    nodes: _containers.RepeatedScalarFieldContainer[str]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    question: Question
    wait_s: float
    def __init__(self, job_id: _Optional[str] = ..., nodes: _Optional[_Iterable[str]] = ..., ranks: _Optional[_Iterable[int]] = ..., question: _Optional[_Union[Question, _Mapping]] = ..., wait_s: _Optional[float] = ...) -> None: ...

class AskResponse(_message.Message):
    __slots__ = ("answers", "left_out")
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[NodeAnswer]
    left_out: int
    def __init__(self, answers: _Optional[_Iterable[_Union[NodeAnswer, _Mapping]]] = ..., left_out: _Optional[int] = ...) -> None: ...

class NodeAnswer(_message.Message):
    __slots__ = ("node", "answer")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    node: str
    answer: AgentAnswer
    def __init__(self, node: _Optional[str] = ..., answer: _Optional[_Union[AgentAnswer, _Mapping]] = ...) -> None: ...

class GetRestartsRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class GetRestartsResponse(_message.Message):
    __slots__ = ("times",)
    TIMES_FIELD_NUMBER: _ClassVar[int]
    times: _containers.RepeatedCompositeFieldContainer[RestartTimes]
    def __init__(self, times: _Optional[_Iterable[_Union[RestartTimes, _Mapping]]] = ...) -> None: ...

class JobSummary(_message.Message):
    __slots__ = ("job_id", "phase", "generation", "nodes", "members", "min_nodes", "max_nodes", "world_size", "restarts", "reason", "succeeded", "heals", "began_at", "ended_at", "goodput")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MIN_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    HEALS_FIELD_NUMBER: _ClassVar[int]
    BEGAN_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    phase: Phase
    generation: int
    nodes: int
    members: int
    min_nodes: int
    max_nodes: int
    world_size: int
    restarts: int
    reason: str
    succeeded: bool
    heals: int
    began_at: float
    ended_at: float
    goodput: float
    def __init__(self, job_id: _Optional[str] = ..., phase: _Optional[_Union[Phase, str]] = ..., generation: _Optional[int] = ..., nodes: _Optional[int] = ..., members: _Optional[int] = ..., min_nodes: _Optional[int] = ..., max_nodes: _Optional[int] = ..., world_size: _Optional[int] = ..., restarts: _Optional[int] = ..., reason: _Optional[str] = ..., succeeded: bool = ..., heals: _Optional[int] = ..., began_at: _Optional[float] = ..., ended_at: _Optional[float] = ..., goodput: _Optional[float] = ...) -> None: ...

class JobView(_message.Message):
    __slots__ = ("summary", "spec", "nodes", "store", "decisions", "failures", "outcome", "ranks", "time", "points")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    summary: JobSummary
    spec: JobSpec
    nodes: _containers.RepeatedCompositeFieldContainer[NodeView]
    store: StoreAddress
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    outcome: Outcome
    ranks: _containers.RepeatedCompositeFieldContainer[RankTime]
    time: JobTime
    points: _containers.RepeatedCompositeFieldContainer[TimePoint]
    def __init__(self, summary: _Optional[_Union[JobSummary, _Mapping]] = ..., spec: _Optional[_Union[JobSpec, _Mapping]] = ..., nodes: _Optional[_Iterable[_Union[NodeView, _Mapping]]] = ..., store: _Optional[_Union[StoreAddress, _Mapping]] = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[RankTime, _Mapping]]] = ..., time: _Optional[_Union[JobTime, _Mapping]] = ..., points: _Optional[_Iterable[_Union[TimePoint, _Mapping]]] = ...) -> None: ...

class TimePoint(_message.Message):
    __slots__ = ("at", "generation", "steps", "time")
    AT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    at: float
    generation: int
    steps: float
    time: JobTime
    def __init__(self, at: _Optional[float] = ..., generation: _Optional[int] = ..., steps: _Optional[float] = ..., time: _Optional[_Union[JobTime, _Mapping]] = ...) -> None: ...

class NodeView(_message.Message):
    __slots__ = ("node", "incarnation", "address", "nproc", "role", "node_rank", "rank_offset", "heard_s", "present", "excluded", "failures", "pending", "health", "block", "hardware", "slow_ranks")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NPROC_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    RANK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    HEARD_S_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    SLOW_RANKS_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: str
    address: str
    nproc: int
    role: str
    node_rank: int
    rank_offset: int
    heard_s: float
    present: bool
    excluded: str
    failures: int
    pending: bool
    health: _containers.RepeatedScalarFieldContainer[str]
    block: str
    hardware: str
    slow_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., nproc: _Optional[int] = ..., role: _Optional[str] = ..., node_rank: _Optional[int] = ..., rank_offset: _Optional[int] = ..., heard_s: _Optional[float] = ..., present: bool = ..., excluded: _Optional[str] = ..., failures: _Optional[int] = ..., pending: bool = ..., health: _Optional[_Iterable[str]] = ..., block: _Optional[str] = ..., hardware: _Optional[str] = ..., slow_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("generation", "cause")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    cause: Cause
    def __init__(self, generation: _Optional[int] = ..., cause: _Optional[_Union[Cause, _Mapping]] = ...) -> None: ...

class Note(_message.Message):
    __slots__ = ("seq", "at", "generation", "kind", "node", "text")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    seq: int
    at: float
    generation: int
    kind: str
    node: str
    text: str
    def __init__(self, seq: _Optional[int] = ..., at: _Optional[float] = ..., generation: _Optional[int] = ..., kind: _Optional[str] = ..., node: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class GetValueRequest(_message.Message):
    __slots__ = ("job_id", "key", "after_version", "wait_s")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    AFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    key: str
    after_version: int
    wait_s: float
    def __init__(self, job_id: _Optional[str] = ..., key: _Optional[str] = ..., after_version: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class GetValueResponse(_message.Message):
    __slots__ = ("value", "version")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    version: int
    def __init__(self, value: _Optional[bytes] = ..., version: _Optional[int] = ...) -> None: ...

class PutValueRequest(_message.Message):
    __slots__ = ("job_id", "key", "value", "expected_version")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    key: str
    value: bytes
    expected_version: int
    def __init__(self, job_id: _Optional[str] = ..., key: _Optional[str] = ..., value: _Optional[bytes] = ..., expected_version: _Optional[int] = ...) -> None: ...

class PutValueResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class DeleteValueRequest(_message.Message):
    __slots__ = ("job_id", "key")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    key: str
    def __init__(self, job_id: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class DeleteValueResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: bool
    def __init__(self, deleted: bool = ...) -> None: ...

class EnterBarrierRequest(_message.Message):
    __slots__ = ("job_id", "name", "member", "parties", "wait_s")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    PARTIES_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    name: str
    member: str
    parties: int
    wait_s: float
    def __init__(self, job_id: _Optional[str] = ..., name: _Optional[str] = ..., member: _Optional[str] = ..., parties: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class EnterBarrierResponse(_message.Message):
    __slots__ = ("arrived",)
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    arrived: int
    def __init__(self, arrived: _Optional[int] = ...) -> None: ...
