"""The part of the table of options with the warm pool (`ddp-launch warm`)."""

from __future__ import annotations

from functools import partial

from launcher.settings import values
from launcher.settings.option import ours as _ours
from launcher.settings.option import switch as _switch

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_FORM = ("a number with a unit (MiB, GiB)", "2GiB")


def memory(value: str) -> int:
    """Parse an amount of memory: 512MiB, 1.5GiB."""
    number, unit = value.strip()[:-3], value.strip()[-3:]
    try:
        size = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise values.BadValue("not an amount of memory", *_FORM) from None
    if size <= 0:
        raise values.BadValue("the amount must be greater than 0", *_FORM)
    return size


POOL = (
    _switch(
        "--warm-pool",
        "fork the ranks from a template of the warm pool, if `ddp-launch warm start` has turned it on",
        default="1",
        negatable=True,
    ),
    _ours(
        "--warm-idle",
        "TIME",
        "30m",
        values.positive_duration,
        "for `ddp-launch warm start`: a template ends when no command has used it for this time, and the pool with its "
        "last template",
    ),
    _ours(
        "--warm-templates",
        "N",
        "2",
        partial(values.count, least=1, most=64),
        "for `ddp-launch warm start`: how many templates there may be at a time; each serves one script in one "
        "environment",
    ),
    _ours(
        "--warm-memory",
        "SIZE",
        "2GiB",
        memory,
        "for `ddp-launch warm start`: how much memory the templates may take together when a new one is started",
    ),
    _ours(
        "--warm-dir",
        "DIR",
        None,
        values.path,
        "private folder of the pool (default: ddp-launch-warm in /run/user/UID, or /tmp/ddp-launch-warm-UID)",
    ),
)
