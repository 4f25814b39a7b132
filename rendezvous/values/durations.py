"""Durations as people write and read them: "90s", "5m", "2 h 10 min". Pure."""

from __future__ import annotations

import re

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_FORM = re.compile(rf"\s*(-?(?:\d{{1,15}}\.?\d*|\.\d+))\s*({'|'.join(UNITS)})?\s*", re.ASCII)
_MOST_CHARS = 40


def seconds_in(text: str) -> float | None:
    """A number of seconds, or a number with its unit; None if it is something else."""
    found = _FORM.fullmatch(text)
    if found is None or len(text) > _MOST_CHARS:
        return None
    return float(found[1]) * UNITS[found[2] or "s"]


def duration_text(seconds: float) -> str:
    """For example "2.5 s", "12 min", "3 h 5 min"."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def short_duration(seconds: float) -> str:
    """At most eight characters, for example "850 us", "12.3 ms", "1.53 s", "2.5 min"."""
    large = next((unit for unit in ("d", "h", "min") if seconds >= 2 * UNITS[unit]), None)
    unit = large or next((unit for unit in ("s", "ms") if seconds >= UNITS[unit]), "us")
    value = seconds / UNITS[unit]
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
