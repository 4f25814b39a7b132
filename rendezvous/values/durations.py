"""Texts: durations as people write and read them, and how long a text of a field may be. Pure."""

from __future__ import annotations

import re
from typing import Annotated

from rendezvous.values.late_dataclass import dataclass

# --- durations -------------------------------------------------------------------------------------
#
# Durations as people write and read them: "90s", "5m", "2 h 10 min". Pure.

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


# --- lengths of texts ------------------------------------------------------------------------------
#
# The length limit of a text, as part of the declaration of its field.
#
# A text field without a declaration is treated as a name (an identifier, an address, a path). Its limit is
# `NAME.max_chars`.
#
# Journals for `ddpctl replay` do not contain the texts of declared fields (`rendezvous/replay/records.py`). So what a
# script or a person may have written is declared, also if it is short.


@dataclass(frozen=True, slots=True)
class TextLimit:
    """The limit of a text. A longer text is shortened if `is_shortened`; otherwise the codec rejects its message."""

    max_chars: int
    is_shortened: bool = False

    def applied(self, text: str) -> str:
        """Return the text, shortened if allowed. Raise `ValueError` if it is too long and must not be shortened."""
        if len(text) <= self.max_chars:
            return text
        if not self.is_shortened:
            raise ValueError(f"{len(text)} characters, the limit is {self.max_chars}")
        return shortened(text, self.max_chars)


def shortened(text: str, max_chars: int) -> str:
    """Shorten a text. Keep more of its end: a traceback names the exception at its end."""
    head = max_chars // 4
    cut = "\n[...]\n"
    return text[:head] + cut + text[len(text) - (max_chars - head - len(cut)) :]


NAME = TextLimit(256)

Words = Annotated[str, TextLimit(NAME.max_chars)]
Sentence = Annotated[str, TextLimit(4096)]
ShortenedSentence = Annotated[str, TextLimit(4096, is_shortened=True)]
Traceback = Annotated[str, TextLimit(16 * 1024, is_shortened=True)]
