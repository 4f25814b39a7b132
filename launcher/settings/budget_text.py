"""Parse `--hang-timeout` into the time limits of the ranks."""

from __future__ import annotations

from dataclasses import replace

from launcher.settings.spec import Budgets
from launcher.settings.values import BadValue, positive_duration, quote

_FORM = (
    "auto, off, or TIME, which ,NAME=TIME may follow for start, first-step, checkpoint or evaluation",
    "30s,first-step=20m",
)


def hang_timeout(value: str) -> Budgets:
    first, *rest = (part.strip() for part in value.split(","))
    if first.lower() in ("auto", "off"):
        if rest:
            raise BadValue(
                f"{quote(','.join(rest))} has no effect after {first}: without TIME, no phase has a limit",
                *_FORM,
            )
        return Budgets(enabled=first.lower() == "auto")
    budgets = Budgets(step_s=_time(first))
    for part in rest:
        budgets = _with(budgets, part)
    return budgets


def _with(budgets: Budgets, part: str) -> Budgets:
    name, equals, text = part.partition("=")
    time_s = _time(text) if equals else 0.0
    match name.strip():
        case "start" if equals:
            return replace(budgets, start_s=time_s)
        case "first-step" if equals:
            return replace(budgets, first_step_s=time_s)
        case "checkpoint" if equals:
            return replace(budgets, checkpoint_s=time_s)
        case "evaluation" if equals:
            return replace(budgets, evaluation_s=time_s)
        case _:
            raise BadValue(
                f"unknown part {quote(part)}",
                *_FORM,
            )


def _time(text: str) -> float:
    try:
        return positive_duration(text)
    except BadValue:
        raise BadValue(f"{quote(text)} must be a duration greater than 0", *_FORM) from None
