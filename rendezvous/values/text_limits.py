"""The length limit of a text, as part of the declaration of its field.

A text field without a declaration is treated as a name (an identifier, an address, a path). Its limit is
`NAME.max_chars`.

Journals for `ddpctl replay` do not contain the texts of declared fields (`rendezvous/replay/records.py`). So what a
script or a person may have written is declared, also if it is short.
"""

from __future__ import annotations

from typing import Annotated

from rendezvous.values.late_dataclass import dataclass


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
