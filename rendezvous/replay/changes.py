"""What `ddpctl replay --what-if KEY=VALUE` changes: settings of the job, and nodes that stand by."""

from __future__ import annotations

import re
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.types import (
    UNLIMITED,
    FailureClass,
    PolicyAction,
    PolicyRule,
    Recover,
    RestartBudget,
    ScaleUp,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rendezvous.values.state import JobState
    from rendezvous.values.types import JobSpec

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
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
    found = _number(text, where, "a duration, such as 90s, 5m or 2h", r"(\d{1,12}(?:\.\d+)?)([smhd]?)")
    return min(float(found[1]) * _UNITS[found[2]], _MOST_S)


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
        window_s = _duration(f"1{window}" if window in _UNITS else window, where) if slash else None
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
