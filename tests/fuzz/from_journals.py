"""What comes from a journal that somebody has attached to a bug report."""

from __future__ import annotations

from ddp_launch_wings.replay.player import answers, event_words, play
from rendezvous.machine import step
from rendezvous.replay.journal import service_machine
from rendezvous.replay.records import Hiding, RecordUnreadable, Scribe, read_header, records
from rendezvous.rounds.admission import resume
from rendezvous.values.events import (
    AgentJoined,
    AgentStopped,
    DeadlineReached,
    Event,
    RankFailed,
    StoreOpened,
)
from rendezvous.values.job_state import JobState
from rendezvous.values.types import (
    AgentId,
    Cause,
    FailureClass,
    JobSpec,
    NodeFacts,
    StoreAddress,
)

_AGENT = AgentId("n", "1")
_EVENTS: tuple[Event, ...] = (
    AgentJoined(_AGENT, JobSpec("job"), NodeFacts("n", "n.lan", 1)),
    DeadlineReached(),
    StoreOpened(_AGENT, 1, StoreAddress("n.lan", 1)),
    RankFailed(_AGENT, 1, Cause("n", 0, 0, FailureClass.USER_EXCEPTION, "ValueError: bad", 1)),
    AgentStopped(_AGENT, 1),
)


def _seed() -> bytes:
    scribe, state = Scribe(service_machine(), Hiding(b"key")), JobState()
    lines = [scribe.header("0.1", 1.0), scribe.load(state, 1.0, resume(state, 1.0)[1])]
    for event in _EVENTS:
        state, effects = step(state, event, 2.0)
        lines += [scribe.hear({_AGENT: 1.5}), scribe.do(event, 2.0, effects)]
    return b"\n".join(lines)


def journal(data: bytes) -> None:
    machine = service_machine()
    first, _, rest = data.partition(b"\n")
    for each in play(machine, records(machine, read_header(first), rest.split(b"\n"))):
        assert all(str(line) for line in answers(machine, each.effects))
        assert event_words(each.event)


TARGETS = (
    (
        "journal",
        journal,
        (RecordUnreadable,),
        (_seed(), _seed().replace(b"n.lan", b"m"), _seed()[:-40]),
        16_384,
    ),
)
