"""The lines of ranks as text for people: labels, colours, filters, equal lines, and which streams are shown. Pure.

`launcher.output.live_area` turns the bytes of a rank into these lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from launcher.settings.spec import LogSpec, Streams


LINE_LIMIT = 64 * 1024

# Every escape sequence except colours (CSI ... m): the others need a terminal that only one process uses.
_MOVEMENT = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-ln-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-Z\\^-~])",
)
_C1 = re.compile(rb"\xc2[\x80-\x9f]")  # in UTF-8: some terminals take them for escape sequences
_COLOR = re.compile(rb"\x1b\[[0-?]*m")
_CONTROL = bytes(b for b in range(32) if b not in b"\t\n\x1b") + b"\x7f"
# No red: it reads as an error.
_COLORS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)

# Kept whole when a long output is shortened. Readers of a failed process's output look for it.
TRACEBACK_HEADER = "Traceback (most recent call last):"
CUT = "  ... (left out: more than is kept) ..."  # marks where a long output was shortened


@dataclass(frozen=True, slots=True)
class RankLabel:
    """What the label of a line contains."""

    node: str
    rank: int
    local_rank: int
    role: str
    generation: int


def cut_to_pieces(text: bytes) -> tuple[bytes, bytes]:
    """Cut a line that is too long. Return the rest, and the pieces as lines."""
    pieces: list[bytes] = []
    start = 0
    while len(text) - start > LINE_LIMIT:
        end = _character_start(text, start + LINE_LIMIT)
        pieces += (text[start:end], b"\n")
        start = end
    return text[start:], b"".join(pieces)


def _character_start(text: bytes, at: int) -> int:
    for start in range(at, at - 4, -1):
        if text[start] & 0xC0 != 0x80:
            return start
    return at  # not UTF-8


def presentable(text: bytes) -> bytes:
    """Return valid UTF-8 (U+FFFD for invalid bytes), without anything that moves a terminal's cursor off its line."""
    if b"\x1b" in text:
        text = _MOVEMENT.sub(b"", text)
    text = text.translate(None, _CONTROL)
    return text if text.isascii() else without_c1(text.decode("utf-8", "replace").encode())


def without_c1(text: bytes) -> bytes:
    return _C1.sub(b"", text) if b"\xc2" in text else text


def without_color(lines: bytes) -> bytes:
    return _COLOR.sub(b"", lines) if b"\x1b" in lines else lines


def printable(text: str) -> str:
    """Replace control characters: text from other nodes must not control the terminal or add lines."""
    return "".join(char if char.isprintable() else " " for char in text)


def prefixed(lines: bytes, prefix: bytes) -> bytes:
    """Put the prefix before each line. The last one may lack its newline."""
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + lines[-1:] if lines else b""


def any_of(needles: Sequence[str]) -> re.Pattern[bytes] | None:
    """Return a pattern for `matching`, or None if there is nothing to look for."""
    return re.compile(b"|".join(re.escape(needle.encode()) for needle in needles)) if needles else None


def matching(lines: bytes, needle: re.Pattern[bytes]) -> bytes:
    """Return the lines that contain a needle. The cost depends on the number of these lines only."""
    kept: list[bytes] = []
    end = 0
    while end < len(lines) and (found := needle.search(lines, end)):
        start = lines.rfind(b"\n", end, found.start()) + 1 or end
        end = lines.find(b"\n", found.start()) + 1
        kept.append(lines[start:end])
    return b"".join(kept)


def prefix_of(template: str, label: RankLabel) -> str:
    """Raise ValueError, with text for the user, if the template is invalid."""
    fields = {
        "node": label.node,
        "rank": label.rank,
        "local_rank": label.local_rank,
        "role": label.role,
        "generation": label.generation,
    }
    try:
        return template.format_map(fields)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        known = ", ".join(f"{{{name}}}" for name in fields)
        raise ValueError(f"{template!r} is not a line prefix ({error}); the fields are {known}") from None


def color_of(rank: int) -> str:
    """Return the parameter of the escape sequence."""
    return str(_COLORS[rank % len(_COLORS)])


def painted(prefix: str, rank: int) -> str:
    return f"\x1b[{color_of(rank)}m{prefix}\x1b[0m" if prefix else ""


def is_colored(when: str, is_terminal: bool, environ: Mapping[str, str]) -> bool:
    """Decide `--color` (auto, always, never) for one stream. NO_COLOR and TERM=dumb turn `auto` off."""
    if when != "auto":
        return when == "always"
    return is_terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def can_redraw(is_terminal: bool, environ: Mapping[str, str]) -> bool:
    """Return whether an output understands escape sequences."""
    return is_terminal and environ.get("TERM") != "dumb"


def draws_bars(log: LogSpec, local_rank: int) -> bool:
    """Return whether the progress bars of this rank are redrawn on a terminal."""
    match log.bars:
        case "first":
            return local_rank == min(log.local_ranks_filter, default=0)
        case "all" | "none":
            return log.bars == "all"
        case _:
            return local_rank in log.bars


def is_shown(log: LogSpec, local_rank: int, stream: Streams) -> bool:
    """Return whether the terminal gets this stream. As in torchrun, --tee overrides --redirects, and
    --local-ranks-filter overrides both.
    """
    if log.local_ranks_filter and local_rank not in log.local_ranks_filter:
        return False
    return bool(log.tee.of(local_rank) & stream) or not log.redirects.of(local_rank) & stream


# --- tracebacks of ranks that end because a peer is gone -------------------------------------------
#
# torch begins each line of an uncaught exception with the rank. A traceback that only says that a peer is gone is a
# consequence of an event that is reported in one line, so the terminal shows nothing of it. The log has all of it.

_OF_A_RANK = re.compile(rb"\[rank\d+\]:")
_HEADER = TRACEBACK_HEADER.encode()
_BETWEEN = (b"During handling of", b"The above exception")


# A traceback whose exception has not come yet, and whether what follows belongs to one that is not shown.
Fold = tuple[bytes, bool]
NO_FOLD: Fold = (b"", False)


def folded(fold: Fold, text: bytes, is_consequence: Callable[[bytes], bool]) -> tuple[Fold, bytes, bytes]:
    """The next state, what is to be shown, and what only says that a peer is gone."""
    if fold == NO_FOLD and _HEADER not in text:
        return fold, text, b""
    (held, is_folding), shown, left_out = fold, b"", b""
    for line in text.splitlines(keepends=True):
        found = _OF_A_RANK.match(line)
        said = line[found.end() :].lstrip(b" ").rstrip() if found else b""
        if found is None and is_folding and not line.strip():
            held += line  # between the exceptions of a chain
        elif found is None:
            shown, held, is_folding = shown + held + line, b"", False
        elif held or said == _HEADER:
            held += line
            if said and said != _HEADER and not line[found.end() + 1 :].startswith((b" ", *_BETWEEN)):
                is_folding = is_consequence(held)
                shown, left_out = (shown, left_out + held) if is_folding else (shown + held, left_out)
                held = b""
        elif is_folding:
            left_out += line
        else:
            shown += line
    return (held, is_folding), shown, left_out


# --- equal lines of many ranks ----------------------------------------------------------------------
#
# On a terminal, a line waits for equal lines of other ranks, and is shown once for all of them. All other lines keep
# their order and their labels: an equal line moves forward to the first of its kind, but never before a line that its
# own rank has written earlier. A line waits HELD_S for a second rank, and one of several as long as ranks still write
# it: LONGEST_HELD_S after each of them, but not over MOST_HELD_S, since on a busy machine ranks come one by one. A line
# that one rank alone has written never waits over LONGEST_HELD_S for those before it.

HELD_S, LONGEST_HELD_S, MOST_HELD_S = 0.2, 0.7, 5.0
MOST_HELD = 256  # lines
Writer = TypeVar("Writer")


class HeldLine(NamedTuple, Generic[Writer]):
    text: bytes
    kind: str  # of the stream
    since: float
    until: float
    by: tuple[Writer, ...]  # in the order of arrival


def hold(
    held: list[HeldLine[Writer]], who: Writer, kind: str, text: bytes, now: float
) -> list[HeldLine[Writer]]:
    """Add the lines of this text, which ends with a newline."""
    held = list(held)
    start = max((at for at, line in enumerate(held) if who in line.by), default=-1) + 1
    for line in text[:-1].split(b"\n"):
        same = (at for at in range(start, len(held)) if held[at].text == line and held[at].kind == kind)
        at = next(same, len(held))
        if at < len(held):
            alone = [line.since for line in held[at + 1 :] if len(line.by) == 1]
            until = min(held[at].since + MOST_HELD_S, min([now, *alone]) + LONGEST_HELD_S)
            held[at] = held[at]._replace(by=(*held[at].by, who), until=until)
        else:
            held.append(HeldLine(line, kind, now, now + HELD_S, (who,)))
        start = at + 1
    return held


def count_of_due(
    held: Sequence[HeldLine[Writer]], now: float, writers: Mapping[str, frozenset[Writer]]
) -> int:
    """Return how many lines to show now: those that waited, and before them those that all have written."""
    waiting = (
        at for at, line in enumerate(held) if now < line.until and writers[line.kind].difference(line.by)
    )
    return next(waiting, len(held))


def shown_once(
    held: Sequence[HeldLine[Writer]], order: Callable[[Writer], int]
) -> list[tuple[Writer, bytes]]:
    """Return the text, and who shows it: for a line of several ranks the first one in this order."""
    shown = [(min(line.by, key=order), _with_count(line)) for line in held]
    parts = groupby(shown, lambda each: each[0])
    return [(who, b"".join(text for _, text in part)) for who, part in parts]


def _with_count(line: HeldLine[Writer]) -> bytes:
    return line.text + (b" (x %d ranks)\n" % len(line.by) if len(line.by) > 1 else b"\n")


# Framed JSON objects in the output of an agent: messages to the `ddp-launch --hosts` process.

FRAME = "\x1e"  # begins such a line


def framed(kind: str, **fields: str) -> str:
    return f"{FRAME}{json.dumps({'kind': kind, **fields})}"


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the content of a framed line, or None."""
    if not line.startswith(FRAME.encode()):
        return None
    try:
        found = json.loads(line[1:])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
