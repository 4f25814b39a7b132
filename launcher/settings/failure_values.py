"""Parse `--max-restarts`, `--max-heals`, `--crash-loop` and `--failure-policy`."""

from __future__ import annotations

from dataclasses import replace

from launcher.settings.values import MAX_COUNT, UNITS, BadValue, duration, parse_int, positive_duration, quote
from rendezvous.values.types import (
    UNLIMITED,
    CrashLoop,
    FailureClass,
    PolicyAction,
    PolicyRule,
    RestartBudget,
)

_CRASH_LOOP_FORM = ("TIMES/TIME, TIMES/step, both with a comma, or off", "3/1s,5/step")


def budget(value: str) -> RestartBudget:
    return _budget(value, "restarts", "N, or N/WINDOW")


def _budget(value: str, what: str, words: str) -> RestartBudget:
    form = (words, "5/1h")
    limit_text, slash, window = value.partition("/")
    limit = parse_int(limit_text)
    if limit is None or limit > MAX_COUNT:
        raise BadValue(f"not a number of {what}", *form)
    if limit < 0:
        raise BadValue(f"the number of {what} cannot be negative", *form)
    if not slash:
        return RestartBudget(limit)
    unit = window.strip()
    try:  # "3/m" means three per minute
        seconds = positive_duration("1" + unit if unit in UNITS else unit)
    except BadValue:
        raise BadValue(f"the window {quote(window)} must be a duration greater than 0", *form) from None
    return RestartBudget(limit, seconds)


def heals(value: str) -> RestartBudget:
    """Parse the budget of decisions in place: as `budget`, or `unlimited`."""
    if value.strip().lower() == "unlimited":
        return RestartBudget(UNLIMITED)
    return _budget(value, "heals", "N, N/WINDOW, or unlimited")


def crash_loop(value: str) -> CrashLoop:
    if value.strip().lower() == "off":
        return CrashLoop()
    rule, parts = CrashLoop(), value.split(",")
    if len(parts) > 2 or (len(parts) == 2 and _is_of_steps(parts[0]) == _is_of_steps(parts[1])):
        raise BadValue("it has more than one part TIMES/TIME or TIMES/step", *_CRASH_LOOP_FORM)
    for part in parts:
        rule = _with_part(rule, part)
    return rule


def _is_of_steps(part: str) -> bool:
    return part.partition("/")[2].strip() == "step"


def _with_part(rule: CrashLoop, part: str) -> CrashLoop:
    times_text, slash, within = part.partition("/")
    times = parse_int(times_text.strip())
    if not slash or times is None or not 0 <= times <= MAX_COUNT:
        raise BadValue(f"{quote(part)} does not have the form TIMES/TIME or TIMES/step", *_CRASH_LOOP_FORM)
    if _is_of_steps(part):
        return replace(rule, without_step=times)
    try:
        return replace(rule, times=times, within_s=duration(within))
    except BadValue:
        raise BadValue(f"{quote(within)} is not a duration", *_CRASH_LOOP_FORM) from None


def rules(value: str) -> tuple[PolicyRule, ...]:
    found = tuple(_rule(part.strip()) for part in value.split(","))
    seen: list[tuple[FailureClass, int | None]] = []
    for rule in found:
        if (rule.failure, rule.exit_code) in seen:
            raise BadValue(
                f"class {rule.failure} is listed twice",
                "each class once",
                "hang=restart,hardware=exclude",
            )
        seen.append((rule.failure, rule.exit_code))
    return found


def _rule(text_: str) -> PolicyRule:
    form = ("CLASS=ACTION[,...]", "out-of-memory=fail,exit-code:3=ignore")
    left, equals, action = (part.strip() for part in text_.partition("="))
    name, colon, code_text = left.partition(":")
    if not equals:
        raise BadValue(f"{quote(text_)} does not have the form CLASS=ACTION", *form)
    if name not in tuple(FailureClass):
        raise BadValue(
            f"unknown failure class {quote(name)}; the classes are {', '.join(FailureClass)}", *form
        )
    if action not in tuple(PolicyAction):
        raise BadValue(f"unknown action {quote(action)}; the actions are {', '.join(PolicyAction)}", *form)
    if not colon:
        return PolicyRule(FailureClass(name), PolicyAction(action))
    code = parse_int(code_text)
    if name != FailureClass.EXIT_CODE or code is None or not 1 <= code <= 255:
        raise BadValue(f"invalid {quote(left)}: use exit-code:N, N from 1 to 255", *form)
    return PolicyRule(FailureClass.EXIT_CODE, PolicyAction(action), code)
