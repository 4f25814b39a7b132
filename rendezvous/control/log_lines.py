"""Pieces of the ranks' output as lines for a terminal or a program."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rendezvous.values.questions import LogPiece, LogStream

# On a terminal, colours are kept. All other escape sequences and control characters could control the terminal.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-ln-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-Z\\^-~])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[[0-?]*m)")
_COLORS = re.compile(r"\x1b\[[0-?]*m")


@dataclass(frozen=True, slots=True)
class LogLine:
    at: float
    node: str
    generation: int
    rank: int
    stream: LogStream
    text: str


def lines_of(pieces: Iterable[tuple[str, LogPiece]]) -> Iterator[LogLine]:
    """The lines of pieces with their nodes, in the order of time; those of one stream stay in order."""
    for node, piece in sorted(pieces, key=lambda each: each[1].at):
        rank, stream = piece.rank, piece.stream
        if piece.lost:
            gone = f"[{piece.lost} bytes are gone: the log file of this rank has a size limit]"
            yield LogLine(piece.at, node, piece.generation, rank, stream, gone)
        data = piece.data[:-1] if piece.data.endswith(b"\n") else piece.data
        for text in data.split(b"\n"):
            yield LogLine(piece.at, node, piece.generation, rank, stream, text.decode(errors="replace"))


def on_terminal(text: str, *, color: bool) -> str:
    """The line as a terminal would show it at last: what a carriage return has overwritten is left out."""
    shown = text.rstrip("\r").rpartition("\r")[2]
    shown = _CONTROLS.sub("", _ESCAPES.sub("", shown))
    if not color:
        return _COLORS.sub("", shown)
    return f"{shown}\x1b[0m" if "\x1b" in shown else shown


def prefix(line: LogLine) -> str:
    return f"[{line.node}:{line.rank}] "


def as_dict(line: LogLine) -> dict[str, Any]:
    return {
        "at": line.at,
        "node": line.node,
        "generation": line.generation,
        "rank": line.rank,
        "stream": str(line.stream),
        "text": line.text,
    }
