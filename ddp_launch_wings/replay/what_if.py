"""What the service would have decided with other settings, or with one spare more.

Theory of operation
-------------------
The machine with the changes gets what the recorded one got, except for deadlines: it has its own. Both make decisions,
and the first one that differs, in what it is or by more than a moment, is where they part. What follows cannot be
known: all that the agents did afterwards, they did because of the recorded decision. So the comparison ends there. If
the recorded machine decides first, the other one gets nothing more but its deadlines, until it decides as well.

A journal has only the last heartbeat of each agent before each deadline. Between two of them that are no further apart
than a lease, an agent counts as alive. So a change to a shorter lease does not find short interruptions.
"""

from __future__ import annotations

import re
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from ddp_launch_wings.replay.player import Line, decided, event_words
from rendezvous.machine import step
from rendezvous.replay.records import Do, Hear, Load, Record, Start
from rendezvous.rounds.admission import renew_leases, resume
from rendezvous.values.durations import UNITS, seconds_in
from rendezvous.values.events import (
    AgentHeard,
    AgentJoined,
    AgentLeft,
    AgentLost,
    DeadlineReached,
    Effect,
    Event,
    Tell,
)
from rendezvous.values.job_state import JobState, Phase, member_of
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.types import (
    UNLIMITED,
    AgentId,
    FailureClass,
    JobSpec,
    NodeFacts,
    PolicyAction,
    PolicyRule,
    Recover,
    RestartBudget,
    ScaleUp,
)

_MOMENT_S = 0.25
_LOOK_AHEAD_S = 3600.0
_MOST_DEADLINES = 100_000


@dataclass(frozen=True, slots=True)
class Choice:
    """Something that was decided about the job, and because of what."""

    now: float
    event: str
    lines: tuple[Line, ...]

    def is_like(self, other: Choice) -> bool:
        mine, others = ([(line.what, line.nodes) for line in each.lines] for each in (self, other))
        return mine == others and abs(self.now - other.now) <= _MOMENT_S


@dataclass(frozen=True, slots=True)
class Parting:
    """`equal`: the decisions before. None: nothing more is decided."""

    equal: int
    recorded: Choice | None
    changed: Choice | None


def compare(records: Sequence[Record], changes: Changes) -> tuple[int, Parting | None]:
    """Return the number of equal decisions, and where they part, if they do."""
    contacts = _Contacts()
    recorded = list(_recorded(records, contacts))
    other, equal = _Other(contacts, changes), 0
    for record in records:
        at = record.now if not isinstance(record, Hear) else None
        due = recorded[equal] if equal < len(recorded) else None
        if at is not None and due is not None and due.now + _MOMENT_S < at:
            return equal, Parting(equal, due, other.alone(due.now))
        for choice in other.take(record):
            due = recorded[equal] if equal < len(recorded) else None
            if due is None or not choice.is_like(due):
                return equal, Parting(equal, due, choice)
            equal += 1
    due = recorded[equal] if equal < len(recorded) else None
    return equal, None if due is None else Parting(equal, due, other.alone(due.now))


def _recorded(records: Sequence[Record], contacts: _Contacts) -> Iterator[Choice]:
    """Make the recorded decisions once more, and note when agents were heard."""
    state = JobState()
    for record in records:
        match record:
            case Start():
                state = record.state
            case Hear(heartbeats):
                state = renew_leases(state, heartbeats)
                for agent, at in heartbeats.items():
                    contacts.heard_at(agent, at)
            case Load(now):
                state, _ = resume(record.state, now)  # it repeats what was decided before
            case Do(now, event):
                state, effects = step(state, event, now)
                contacts.note(event, now, state)
                if (lines := decided(effects)) and not isinstance(event, AgentHeard):
                    yield Choice(now, event_words(event), lines)


class _Other:
    """The machine with the changes."""

    def __init__(self, contacts: _Contacts, changes: Changes) -> None:
        self._changes, self._state, self._contacts = changes, JobState(), contacts
        self._spares = tuple(
            AgentId(f"spare-{number + 1}", "what-if") for number in range(changes.more_spares)
        )
        self._facts: NodeFacts | None = None
        self._have_joined = False
        self._since: float | None = None  # when the recorded machine has decided something else

    def take(self, record: Record) -> Iterator[Choice]:
        match record:
            case Start():
                self._state = self._changes.of_state(record.state)
            case Load(now):
                self._state, _ = resume(self._changes.of_state(record.state), now)
            case Hear():
                pass
            case Do(now, event):
                yield from self._deadlines(now - _MOMENT_S)
                if isinstance(event, DeadlineReached):
                    yield from self._deadlines(now, at=now)
                elif isinstance(event, AgentHeard):
                    self._state, _ = step(self._state, event, now)
                else:
                    yield from self._step(self._changed(event), now)
                    yield from self._spares_join(now)

    def alone(self, since: float) -> Choice | None:
        """What it decides next, if nothing more happens."""
        self._since = since
        return next(self._deadlines(since + _LOOK_AHEAD_S), None)

    def _deadlines(self, until: float, at: float | None = None) -> Iterator[Choice]:
        for _ in range(_MOST_DEADLINES):
            due = self._state.deadline_at
            if due is None or due > until:
                return
            now = due if at is None else at
            alive = self._contacts.heard(now, self._since) | dict.fromkeys(self._spares, now)
            self._state = renew_leases(self._state, alive)
            yield from self._step(DeadlineReached(), now)

    def _changed(self, event: Event) -> Event:
        if not isinstance(event, AgentJoined):
            return event
        self._facts = event.facts
        return replace(event, spec=self._changes.of_spec(event.spec))

    def _spares_join(self, now: float) -> Iterator[Choice]:
        spec = self._state.spec
        if self._have_joined or spec is None or self._state.phase is not Phase.RUNNING:
            return
        self._have_joined = True
        facts = self._facts or next((each.facts for each in self._state.members.values()), None)
        if facts is None:
            return
        for agent in self._spares:
            own = replace(facts, host=agent.node, address=agent.node, node_rank=None, scheduler_index=None)
            yield from self._step(AgentJoined(agent, spec, own), now)

    def _step(self, event: Event, now: float) -> Iterator[Choice]:
        self._state, effects = step(self._state, event, now)
        if lines := decided(self._without_spares(effects)):
            yield Choice(now, event_words(event), lines)

    def _without_spares(self, effects: tuple[Effect, ...]) -> tuple[Effect, ...]:
        """The recorded machine knows none of them; what it decides shows elsewhere."""
        return tuple(e for e in effects if not (isinstance(e, Tell) and e.agent in self._spares))


class _Contacts:
    """When each agent was heard. `signs`: everything else that it has sent, which renews no lease."""

    def __init__(self) -> None:
        self._beats: dict[AgentId, list[float]] = {}
        self._signs: dict[AgentId, list[float]] = {}
        self._joins: set[tuple[AgentId, float]] = (
            set()
        )  # those of `_beats` that say nothing of the time before
        self._lease_s = 0.0

    def heard_at(self, agent: AgentId, at: float) -> None:
        insort(self._beats.setdefault(agent, []), at)

    def note(self, event: Event, now: float, after: JobState) -> None:
        """A heartbeat counts for agents that have not been lost before."""
        self._lease_s = self._lease_s if after.spec is None else after.spec.lease_s
        agent = getattr(event, "agent", None)
        if agent is None or isinstance(event, AgentLost | AgentLeft):
            return
        if not isinstance(event, AgentJoined | AgentHeard):
            insort(self._signs.setdefault(agent, []), now)
        elif member_of(after, agent) is not None:
            self.heard_at(agent, now)
            if isinstance(event, AgentJoined):
                self._joins.add((agent, now))

    def heard(self, now: float, alone_since: float | None) -> dict[AgentId, float]:
        """The last contacts until `now`. Agents that live when the machine is alone are taken to live on."""
        known = now if alone_since is None else min(now, alone_since)
        found: dict[AgentId, float] = {}
        for agent, times in self._beats.items():
            last, following = _around(times, known)
            if following is not None and (agent, following) in self._joins:
                following = None
            if alone_since is not None and following is None:
                following = _around(self._signs.get(agent, []), known)[1]
            if (
                following is not None
                and following - (known if last is None else last) <= self._lease_s + _MOMENT_S
            ):
                found[agent] = now
            elif last is not None:
                found[agent] = last
        return found


def _around(times: Sequence[float], at: float) -> tuple[float | None, float | None]:
    """The last one until then, and the first one after it."""
    after = bisect_right(times, at)
    return times[after - 1] if after else None, times[after] if after < len(times) else None


# --- changes ----------------------------------------------------------------------------------------
#
# What `ddpctl replay --what-if KEY=VALUE` changes: settings of the job, and nodes that stand by.

_MOST = 1_000_000
_MOST_S = 366 * 86_400.0
_MOST_SPARES = 64


class BadChange(ValueError):
    """The text of a change is wrong. The message is for a user."""


@dataclass(frozen=True, slots=True)
class Changes:
    fields: Mapping[str, Any] = field(default_factory=dict)  # of `JobSpec`
    more_spares: int = 0  # nodes that join after the first world has started

    def of_spec(self, spec: JobSpec) -> JobSpec:
        return replace(spec, **self.fields)

    def of_state(self, state: JobState) -> JobState:
        if state.spec is None:
            return state
        sizes = {name: self.fields[name] for name in ("min_nodes", "max_nodes") if name in self.fields}
        return replace(state, spec=self.of_spec(state.spec), **sizes)


def parse(texts: Iterable[str]) -> Changes:
    """Raises `BadChange`."""
    found: dict[str, Any] = {}
    spares = 0
    for text in texts:
        key, equals, value = text.partition("=")
        read = KEYS.get(key.strip().lstrip("-"))
        if not equals or read is None:
            raise BadChange(f"--what-if {text}: use KEY=VALUE; the keys are {', '.join(KEYS)}")
        if read is _spares and value.startswith("+"):
            spares += _count(value[1:], "--what-if spares", _MOST_SPARES)
        else:
            found |= read(value.strip(), f"--what-if {text}")
    return Changes(found, spares)


def _number(text: str, where: str, what: str, pattern: str) -> re.Match[str]:
    found = re.fullmatch(pattern, text, re.ASCII)
    if found is None:
        raise BadChange(f"{where}: {text!r} is not {what}")
    return found


def _count(text: str, where: str, most: int = _MOST) -> int:
    number = int(_number(text, where, "a whole number", r"\d{1,9}")[0])
    if number > most:
        raise BadChange(f"{where}: use {most} at most")
    return number


def _duration(text: str, where: str) -> float:
    found = seconds_in(text)
    if found is None or found < 0:
        raise BadChange(f"{where}: {text!r} is not a duration, such as 90s, 5m or 2h")
    return min(found, _MOST_S)


def _seconds(name: str, least_s: float = 0.0) -> Callable[[str, str], dict[str, Any]]:
    def read(text: str, where: str) -> dict[str, Any]:
        seconds = _duration(text, where)
        if seconds < least_s:
            raise BadChange(f"{where}: use {least_s:g} s or more")
        return {name: seconds}

    return read


def _whole(name: str) -> Callable[[str, str], dict[str, Any]]:
    return lambda text, where: {name: _count(text, where)}


def _choice(name: str, kind: Any) -> Callable[[str, str], dict[str, Any]]:
    def read(text: str, where: str) -> dict[str, Any]:
        if text not in tuple(kind):
            raise BadChange(f"{where}: use one of {', '.join(kind)}")
        return {name: kind(text)}

    return read


def _budget(name: str) -> Callable[[str, str], dict[str, Any]]:
    def read(text: str, where: str) -> dict[str, Any]:
        if text == "unlimited":
            return {name: RestartBudget(UNLIMITED)}
        limit, slash, window = text.partition("/")
        window_s = _duration(f"1{window}" if window in UNITS else window, where) if slash else None
        if window_s is not None and window_s < 0.1:
            raise BadChange(f"{where}: the window must be 0.1 s or more")
        return {name: RestartBudget(_count(limit, where), window_s)}

    return read


def _spares(text: str, where: str) -> dict[str, Any]:
    return {"spares": _count(text, where)}


def _nodes(text: str, where: str) -> dict[str, Any]:
    least, colon, most = text.partition(":")
    low = _count(least, where)
    high = _count(most, where) if colon else low
    if not 1 <= low <= high:
        raise BadChange(f"{where}: use N, or MIN:MAX with 1 <= MIN <= MAX")
    return {"min_nodes": low, "max_nodes": high}


def _policy(text: str, where: str) -> dict[str, Any]:
    """As `--failure-policy`: CLASS=ACTION[,...]; empty for none."""
    return {"rules": tuple(_rule(part.strip(), where) for part in text.split(",") if part.strip())}


def _rule(text: str, where: str) -> PolicyRule:
    left, _, action = text.partition("=")
    name, colon, code = left.partition(":")
    if name not in tuple(FailureClass) or action not in tuple(PolicyAction):
        raise BadChange(
            f"{where}: use CLASS=ACTION; the classes are {', '.join(FailureClass)}; the actions are "
            f"{', '.join(PolicyAction)}"
        )
    if colon and name != FailureClass.EXIT_CODE:
        raise BadChange(f"{where}: only exit-code has a number, as in exit-code:3=ignore")
    return PolicyRule(FailureClass(name), PolicyAction(action), _count(code, where) if colon else None)


KEYS: Mapping[str, Callable[[str, str], dict[str, Any]]] = {
    "lease": _seconds("lease_s", 0.1),
    "spares": _spares,
    "nnodes": _nodes,
    "max-restarts": _budget("budget"),
    "max-heals": _budget("heal_budget"),
    "failure-policy": _policy,
    "recover": _choice("recover", Recover),
    "scale-up": _choice("scale_up", ScaleUp),
    "join-timeout": _seconds("join_timeout_s"),
    "last-call": _seconds("last_call_s"),
    "replacement-timeout": _seconds("replacement_timeout_s"),
    "shrink-after": _seconds("shrink_after_s"),
    "node-failures": _whole("node_failure_limit"),
    "node-cooldown": _seconds("node_cooldown_s", 0.1),
}
