"""Decides whether a condition of `--stop-when` is true. Pure: of output in pieces."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.output.lines import without_color

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.settings.spec import StopCondition

_LONGEST_LINE = 4096
_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class Met:
    """A condition is true, because of this."""

    condition: str
    because: str

    def __str__(self) -> str:
        return f'the condition "{self.condition}" of --stop-when is true: {self.because}'


class LineRules:
    def __init__(self, conditions: Sequence[StopCondition]) -> None:
        self._rules = [(each.text, re.compile(each.pattern.encode(), re.MULTILINE)) for each in conditions]

    def __bool__(self) -> bool:
        return bool(self._rules)

    def scan(self, rest: bytes, chunk: bytes) -> tuple[Met | None, bytes]:
        """Look at the lines that the chunk completes. Return the unfinished line, for the next call."""
        data = (rest + chunk).replace(b"\r", b"\n")
        end = data.rfind(b"\n") + 1
        whole, rest = data[:end], data[end:]
        if len(rest) > _LONGEST_LINE:
            whole, rest = data, b""
        return self.found_in(without_color(whole)), rest

    def found_in(self, text: bytes) -> Met | None:
        for condition, pattern in self._rules:
            if text and (found := pattern.search(text)):
                start = text.rfind(b"\n", 0, found.start()) + 1
                line = text[start:].partition(b"\n")[0].decode(errors="replace").strip()
                return Met(condition, f"{line[:_SHOWN_CHARS]!r}")
        return None
