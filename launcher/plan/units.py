"""Values of the plan's options as people write them: 100gbit, 20us, 30min."""

from __future__ import annotations

import re

from launcher.settings.arguments import UsageError
from launcher.settings.values import printable
from rendezvous.values.error_codes import Code

_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z/]*)")
# Bits per second, as tc and the makers of networks write them; bytes per second, as the makers of GPUs do.
_RATES = {
    "kbit": 1e3 / 8,
    "mbit": 1e6 / 8,
    "gbit": 1e9 / 8,
    "tbit": 1e12 / 8,
    "mb/s": 1e6,
    "gb/s": 1e9,
    "tb/s": 1e12,
}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_MOST_NODES, _MOST_RANKS = 100_000, 1_000_000


def rate(option: str, text: str) -> float:
    """Bytes per second."""
    return _measure(option, text, _RATES, "a rate such as 100gbit, 400mbit or 300GB/s")


def seconds(option: str, text: str) -> float:
    return _measure(option, text, _TIMES, "a time such as 20us, 5s, 30m or 6000h")


def node_counts(option: str, text: str) -> tuple[int, ...]:
    """One number gives its powers of two as well: 32 is 1,2,4,8,16,32."""
    try:
        counts = tuple(int(word) for word in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1 or max(counts) > _MOST_NODES:
        raise _wrong(option, text, f"numbers of nodes from 1 to {_MOST_NODES:,}, such as 32 or 1,4,16")
    if len(counts) > 1:
        return tuple(sorted(set(counts)))
    powers = (1 << exponent for exponent in range(counts[0].bit_length()))
    return (*(power for power in powers if power < counts[0]), counts[0])


def ranks_per_node(option: str, text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= _MOST_RANKS // _MOST_NODES * 100:
        raise _wrong(option, text, "a number of ranks, such as 8")
    return int(text)


def _measure(option: str, text: str, units: dict[str, float], expected: str) -> float:
    matched = _NUMBER.fullmatch(text.strip())
    factor = units.get(matched[2].lower()) if matched else None
    if matched is None or factor is None or float(matched[1]) <= 0:
        raise _wrong(option, text, expected)
    return float(matched[1]) * factor


def _wrong(option: str, text: str, expected: str) -> UsageError:
    return UsageError(f"{option} {printable(text)} is not valid. Give {expected}.", code=Code.INVALID_VALUE)
