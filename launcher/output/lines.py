"""Turns the bytes that a rank writes into the lines that a person reads. Pure, and without a loop over lines.

A rank may write anything at any time: half a line, a megabyte at once, a progress bar that overwrites itself, bytes
that are not text. `feed` takes each chunk as it was read and returns whole lines. Text without a newline yet is `Held`.
Four rules limit what is held, whatever a rank does:

* A line is held until its newline or the end of the stream, but at most LINE_LIMIT bytes. A longer line is shown in
  pieces of that size, each as a line.
* A carriage return that is not part of a line end overwrites what precedes it, as on a terminal. Only the latest state
  of a progress bar is held. It is shown as a line at most once per UPDATE_INTERVAL_S. The state at its newline is
  always shown, once.
* If one rank talks to one person (`eager`), text that stays unfinished for PROMPT_AFTER_S counts as a prompt, and is
  shown as a piece of its own.
* The rank's own file gets the raw bytes elsewhere, so nothing here can lose any of them.
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
# Anchored: without the anchor, a long line without a carriage return would take quadratic time.
_OVERWRITTEN = re.compile(rb"^[^\n]*\r", re.MULTILINE)
# Every escape sequence except colours (CSI ... m): the others need a terminal that only one process uses.
_MOVEMENT = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-ln-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-Z\\^-~])",
)
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


@dataclass(frozen=True, slots=True)
class Held:
    """What a stream has written since its last newline."""

    text: bytes = b""  # for a progress bar: a carriage return, then its latest state
    shown: bytes = b""  # the last state of this bar that was shown, to avoid showing it again
    updated_at: float = float("-inf")
    prompt_at: float | None = None  # when to show unfinished text as it is


def feed(held: Held, chunk: bytes, now: float, eager: bool = False) -> tuple[Held, bytes]:
    """Return the whole lines that `chunk` completes, each with its newline, and what is held after it."""
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
        rest, pieces = cut_to_pieces(held.text.lstrip(b"\r"))
        held = Held(rest, b"", held.updated_at)
        lines += pieces
    if eager and held.text and not held.text.startswith(b"\r"):
        held = replace(held, prompt_at=now + PROMPT_AFTER_S)
    return held, lines


def due_at(held: Held) -> float | None:
    """Return when to call `update` if the stream writes nothing more until then."""
    if not held.text.startswith(b"\r"):
        return held.prompt_at
    state = held.text.strip(b"\r")
    return held.updated_at + UPDATE_INTERVAL_S if state and state != held.shown else None


def update(held: Held, now: float) -> tuple[Held, bytes]:
    """Return the state of a progress bar, or a prompt, if it is time to show it."""
    due = due_at(held)
    if due is None or due > now:
        return held, b""
    if not held.text.startswith(b"\r"):
        return Held(updated_at=held.updated_at), held.text + b"\n"
    state = held.text.strip(b"\r")
    return Held(held.text, state, now), state + b"\n"


def finish(held: Held) -> bytes:
    """Return the last line of a stream that ended without a newline."""
    text = held.text.strip(b"\r")
    return text + b"\n" if text and text != held.shown else b""


def _latest_state(text: bytes) -> bytes:
    """Keep a trailing carriage return: the next byte decides whether it overwrites or ends the line."""
    states = text.rstrip(b"\r")
    state = states[states.rfind(b"\r") + 1 :]
    if not _MOVEMENT.sub(b"", state).strip():  # a bar that was erased
        return b"\r"
    return b"\r" + state + (b"\r" if len(states) < len(text) else b"")


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


def presentable(lines: bytes, on_terminal: bool) -> bytes:
    """Return valid UTF-8 (U+FFFD for invalid bytes), without anything that moves the cursor off its line."""
    if b"\x1b" in lines:
        lines = _MOVEMENT.sub(b"", lines)
    if on_terminal:
        lines = lines.translate(None, _CONTROL)
    if lines.isascii():
        return lines
    return lines.decode("utf-8", "replace").encode()


def without_color(lines: bytes) -> bytes:
    return _COLOR.sub(b"", lines) if b"\x1b" in lines else lines


def printable(text: str) -> str:
    """Replace control characters: text from elsewhere must not control the terminal or imitate further lines."""
    return "".join(char if char.isprintable() else " " for char in text)


def prefixed(lines: bytes, prefix: bytes) -> bytes:
    """Put the prefix before each line. `lines` must end in a newline."""
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n" if lines else b""


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


def is_shown(log: LogSpec, local_rank: int, stream: Streams) -> bool:
    """Return whether the terminal gets this stream. As in torchrun, tee overrides redirect, the filter both."""
    if log.local_ranks_filter and local_rank not in log.local_ranks_filter:
        return False
    return bool(log.tee.of(local_rank) & stream) or not log.redirects.of(local_rank) & stream
