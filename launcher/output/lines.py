"""From the bytes a rank writes to the lines a person reads: pure, and without a loop over lines.

A rank writes when and what it likes: half a line, a megabyte at once, a progress bar that overwrites itself,
bytes that are no text. `feed` takes each chunk as it was read and gives back whole lines; what has no
newline yet is `Held`. Four rules bound what is held, whatever a rank does:

* a line is held until its newline or the end of the stream, but at most LINE_LIMIT bytes: a longer one is
  shown in pieces of that size, each as a line;
* a carriage return that is not part of a line end overwrites what stood before it, as on a terminal. Of a
  progress bar only the latest state is held; it is shown as a line of its own at most once per
  UPDATE_INTERVAL_S, and what it reads when its newline comes is always shown, once;
* where one rank talks to one person (`eager`), what stays unfinished for PROMPT_AFTER_S is taken for a prompt and
  shown as a piece of its own;
* the rank's own file is written elsewhere, from the raw bytes; nothing here can lose anything from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from launcher.settings.spec import LogSpec, Streams

LINE_LIMIT = 64 * 1024
UPDATE_INTERVAL_S = 1.0
PROMPT_AFTER_S = 0.2

_LINE_END = re.compile(rb"\r+\n")
# Anchored: without the anchor, a long line that has no carriage return would cost the square of its length.
_OVERWRITTEN = re.compile(rb"^[^\n]*\r", re.MULTILINE)
# Every escape sequence but colours (CSI ... m): the others are meant for a terminal of one's own.
_MOVEMENT = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-ln-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-Z\\^-~])",
)
_CONTROL = bytes(b for b in range(32) if b not in b"\t\n\x1b") + b"\x7f"
# No red: it reads as an error.
_COLORS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)

# Kept whole where a long output is shortened, and looked for by whoever reads what a dying process printed.
TRACEBACK_HEADER = "Traceback (most recent call last):"
CUT = "  ... (left out: more than is kept) ..."  # stands where a long output was shortened as it was read


@dataclass(frozen=True, slots=True)
class RankLabel:
    """What a line is labelled with."""

    node: str
    rank: int
    local_rank: int
    role: str
    generation: int


@dataclass(frozen=True, slots=True)
class Held:
    """What a stream has said since its last newline."""

    text: bytes = b""  # of a progress bar: a carriage return, then its latest state
    shown: bytes = b""  # the state of this bar that was shown last, so as not to show it again
    updated_at: float = float("-inf")
    prompt_at: float | None = None  # when unfinished text is to be shown as it stands


def feed(held: Held, chunk: bytes, now: float, eager: bool = False) -> tuple[Held, bytes]:
    """The whole lines that `chunk` completes, each ending in a newline, and what is held after it."""
    cut = chunk.rfind(b"\n") + 1
    if cut:
        lines = held.text + chunk[:cut]
        if b"\r" in lines:
            lines = _OVERWRITTEN.sub(b"", _LINE_END.sub(b"\n", lines))
        if held.shown and lines.startswith(held.shown + b"\n"):
            lines = lines[len(held.shown) + 1 :]
        held = Held(chunk[cut:], b"", held.updated_at)
    else:
        lines = b""
        held = Held(held.text + chunk, held.shown, held.updated_at)
    if b"\r" in held.text:
        held, shown = update(Held(_latest_state(held.text), held.shown, held.updated_at), now)
        lines += shown
    if len(held.text) > LINE_LIMIT:
        rest, pieces = _cut_to_pieces(held.text.lstrip(b"\r"))
        held = Held(rest, b"", held.updated_at)
        lines += pieces
    if eager and held.text and not held.text.startswith(b"\r"):
        held = replace(held, prompt_at=now + PROMPT_AFTER_S)
    return held, lines


def due_at(held: Held) -> float | None:
    """When `update` should be called, if the stream has said nothing more until then."""
    if not held.text.startswith(b"\r"):
        return held.prompt_at
    state = held.text.strip(b"\r")
    return held.updated_at + UPDATE_INTERVAL_S if state and state != held.shown else None


def update(held: Held, now: float) -> tuple[Held, bytes]:
    """The state of a progress bar, or a prompt, if it is time to show it."""
    due = due_at(held)
    if due is None or due > now:
        return held, b""
    if not held.text.startswith(b"\r"):
        return Held(updated_at=held.updated_at), held.text + b"\n"
    state = held.text.strip(b"\r")
    return Held(held.text, state, now), state + b"\n"


def finish(held: Held) -> bytes:
    """The last line of a stream that ended without a newline."""
    text = held.text.strip(b"\r")
    return text + b"\n" if text and text != held.shown else b""


def _latest_state(text: bytes) -> bytes:
    """A trailing carriage return is kept: the next byte decides whether it overwrites or ends the line."""
    states = text.rstrip(b"\r")
    state = states[states.rfind(b"\r") + 1 :]
    if not _MOVEMENT.sub(b"", state).strip():  # a bar that was wiped
        return b"\r"
    return b"\r" + state + (b"\r" if len(states) < len(text) else b"")


def _cut_to_pieces(text: bytes) -> tuple[bytes, bytes]:
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
    return at  # no UTF-8


def presentable(lines: bytes, on_terminal: bool) -> bytes:
    """Valid UTF-8 (U+FFFD for what is not), and nothing that moves the cursor off its line."""
    if b"\x1b" in lines:
        lines = _MOVEMENT.sub(b"", lines)
    if on_terminal:
        lines = lines.translate(None, _CONTROL)
    if lines.isascii():
        return lines
    return lines.decode("utf-8", "replace").encode()


def printable(text: str) -> str:
    """What a rank, another machine or the service says must not steer the terminal, nor pass for further lines."""
    return "".join(char if char.isprintable() else " " for char in text)


def prefixed(lines: bytes, prefix: bytes) -> bytes:
    """`lines` must end in a newline."""
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n" if lines else b""


def any_of(needles: Sequence[str]) -> re.Pattern[bytes] | None:
    """A pattern for `matching`. None: there is nothing to look for."""
    return re.compile(b"|".join(re.escape(needle.encode()) for needle in needles)) if needles else None


def matching(lines: bytes, needle: re.Pattern[bytes]) -> bytes:
    """The lines that contain a needle. Costs a step for each of these, none for the others."""
    kept: list[bytes] = []
    end = 0
    while end < len(lines) and (found := needle.search(lines, end)):
        start = lines.rfind(b"\n", end, found.start()) + 1 or end
        end = lines.find(b"\n", found.start()) + 1
        kept.append(lines[start:end])
    return b"".join(kept)


def prefix_of(template: str, label: RankLabel) -> str:
    """Raises ValueError, in words for the user, when the template is not one."""
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


def painted(prefix: str, rank: int) -> str:
    return f"\x1b[{_COLORS[rank % len(_COLORS)]}m{prefix}\x1b[0m" if prefix else ""


def is_colored(when: str, is_terminal: bool, environ: Mapping[str, str]) -> bool:
    """Decide `--color` (auto, always, never) for one stream. NO_COLOR and TERM=dumb turn `auto` off."""
    if when != "auto":
        return when == "always"
    return is_terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def is_shown(log: LogSpec, local_rank: int, stream: Streams) -> bool:
    """Whether the terminal gets this stream. As in torchrun, tee beats redirect, the filter beats both."""
    if log.local_ranks_filter and local_rank not in log.local_ranks_filter:
        return False
    return bool(log.tee.of(local_rank) & stream) or not log.redirects.of(local_rank) & stream
