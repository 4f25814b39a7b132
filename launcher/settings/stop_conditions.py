"""Parses `--stop-when`: conditions that end the job, separated by semicolons."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.settings.values import BadValue, positive_duration

_FORM = (
    '"NAME is nan", "output matches REGEX" or "throughput < PERCENT% for TIME", separated by ;',
    "loss is nan; throughput < 50% for 10m",
)
_IS_NAN = re.compile(r"([\w./ -]*[\w./-])\s+is\s+nan", re.IGNORECASE)
_MATCHES = re.compile(r"output\s+matches\s+(\S.*)", re.DOTALL)
_SLOW = re.compile(r"throughput\s*<\s*([0-9.]+)\s*%\s+for\s+(\S+)")


@dataclass(frozen=True, slots=True)
class Logged:
    """A rank prints this, or passes it to `ddp.status`."""

    text: str  # the condition as the user wrote it
    pattern: str


@dataclass(frozen=True, slots=True)
class Slow:
    """Over `for_s`, the ranks took fewer steps than `share` of what they took in the best time of this length."""

    text: str
    share: float
    for_s: float


StopCondition = Logged | Slow


def stop_conditions(value: str) -> tuple[StopCondition, ...]:
    found = tuple(_condition(part.strip()) for part in value.split(";") if part.strip())
    if not found:
        raise BadValue("no condition", *_FORM)
    return found


def _condition(text: str) -> StopCondition:
    if found := _SLOW.fullmatch(text):
        share = _share(found[1]) / 100
        return Slow(text, share, positive_duration(found[2]))
    if found := _MATCHES.fullmatch(text):
        try:
            re.compile(found[1].encode())
        except re.error as error:
            raise BadValue(f"{found[1]!r} is not a regular expression: {error}", *_FORM) from None
        return Logged(text, found[1])
    if found := _IS_NAN.fullmatch(text):
        return Logged(text, nan_of(found[1]))
    raise BadValue(f"{text!r} is not a condition", *_FORM)


def _share(text: str) -> float:
    try:
        percent = float(text)
    except ValueError:
        percent = 0.0
    if not 0 < percent < 100:
        raise BadValue(f"{text}% is not a share", *_FORM)
    return percent


def nan_of(name: str) -> str:
    """A pattern for the ways in which scripts and libraries print that a number with this name is not a number.

    For example "train_loss=nan", "Loss: NaN", "{'loss': nan}", "loss tensor(nan, device='cuda:0')".
    """
    words = r"[ _]".join(map(re.escape, re.split(r"[ _]+", name)))
    return rf"(?i)(?<![a-z0-9]){words}[\"']?[ \t]*[:=]?[ \t]*(?:tensor\()?[-+]?nan\b"
