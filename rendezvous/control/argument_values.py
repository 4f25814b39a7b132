"""The values of ddpctl's arguments. A function raises `argparse.ArgumentTypeError`, whose text argparse shows."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_MOST_RANKS = 1000
_MOST_S = 400 * 86_400.0


def duration(text: str) -> float:
    """A duration in seconds: "90", "90s", "5m", "2h", "1d"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text, re.ASCII)
    if not found:
        raise ArgumentTypeError(f"{text!r} is not a duration: use a number with s, m, h or d, for example 5m")
    return min(float(found[1]) * _UNITS[found[2]], _MOST_S)


def ranks(text: str) -> tuple[int, ...]:
    """Ranks: "0,4-7"."""
    found: dict[int, None] = {}
    for word in text.split(","):
        span = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", word.strip(), re.ASCII)
        first, last = (int(span[1]), int(span[2] or span[1])) if span else (1, 0)
        if first > last:
            raise ArgumentTypeError(f"{text!r} is not a list of ranks: use for example 3, or 0,4-7")
        if last - first + len(found) >= _MOST_RANKS:
            raise ArgumentTypeError(
                f"{text!r} names more than {_MOST_RANKS} ranks: name fewer, or omit the option"
            )
        found |= dict.fromkeys(range(first, last + 1))
    return tuple(found)


def rank(text: str) -> int:
    if not re.fullmatch(r"\d{1,7}", text, re.ASCII):
        raise ArgumentTypeError(f"{text!r} is not a rank: use a number from 0")
    return int(text)


def lines(text: str) -> int:
    """A number of lines; 0 for "all"."""
    if text == "all":
        return 0
    if not re.fullmatch(r"\d{1,7}", text, re.ASCII) or not int(text):
        raise ArgumentTypeError(f"{text!r} is not a number of lines: use a number from 1, or all")
    return int(text)


def steps(text: str) -> int:
    if not re.fullmatch(r"\d{1,7}", text, re.ASCII) or int(text) > 1_000_000:
        raise ArgumentTypeError(f"{text!r} is not a number of steps: use a number from 0 to 1000000")
    return int(text)


def generation(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not int(text):
        raise ArgumentTypeError(f"{text!r} is not a generation: use a number from 1, as in `ddpctl events`")
    return int(text)


def seconds(text: str) -> float:
    found = duration(text)
    if not 0 < found <= 600:
        raise ArgumentTypeError(f"{text!r}: use a duration above 0, and at most 10m")
    return found


def nodes(text: str) -> tuple[int, int]:
    few, colon, many = text.partition(":")
    if not text.isascii() or not few.isdigit() or (colon and not many.isdigit()) or len(text) > 15:
        raise ArgumentTypeError(f"invalid number of nodes {text!r}: use N or MIN:MAX, for example 4 or 2:8")
    return int(few), int(many or few)
