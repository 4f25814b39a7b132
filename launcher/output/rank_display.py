"""What one stream of a rank shows: on which output, with which label, and what its log file gets of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from launcher.output import lines, live_area
from launcher.output.live_area import LiveBlock, PlainView, StreamView, Texts
from launcher.output.screen import Screen, cells_of
from launcher.output.terminal import Terminal, ends_lines

if TYPE_CHECKING:
    from launcher.output.lines import RankLabel
    from launcher.settings.spec import LogSpec


class ShownText(NamedTuple):
    """Text without its label: whole lines, except where nothing can be redrawn (`launcher.output.live_area`)."""

    text: bytes  # for the output
    record: bytes = b""  # for the log file of a rank with a terminal, without colours


def label_columns(log: LogSpec, label: RankLabel) -> int:
    return len(cells_of(lines.printable(lines.prefix_of(log.prefix, label)), "", 0))


def display_of(log: LogSpec, label: RankLabel, terminal: Terminal, has_terminal: bool) -> RankDisplay:
    if terminal.is_drawn:
        return DrawnDisplay(log, label, terminal, has_terminal)
    return RankDisplay(log, label, terminal)


class RankDisplay:
    """On an output where nothing can be redrawn: a pipe, a file, a simple terminal."""

    def __init__(self, log: LogSpec, label: RankLabel, terminal: Terminal) -> None:
        self.terminal = terminal
        self._is_colored = lines.is_colored(log.color, terminal.is_tty, os.environ)
        self.relabel(log, label)
        self._plain = PlainView(shows_prompts=terminal.is_tty)

    def relabel(self, log: LogSpec, label: RankLabel) -> None:
        """A rank that keeps its process over a failure may get another number."""
        prefix = lines.prefix_of(log.prefix, label)
        self.rank = label.rank
        self.order = (label.local_rank, label.rank)
        self.prefix = prefix.encode("utf-8", "replace")
        shown_prefix = lines.painted(prefix, label.rank) if self._is_colored else prefix
        self._painted = shown_prefix.encode("utf-8", "replace")
        color = lines.color_of(label.rank) if self._is_colored else ""
        self._label = tuple(cells_of(lines.printable(prefix), color, 0))

    def labelled(self, text: bytes) -> bytes:
        """Put the label before each line that begins in this text. It ends the unfinished line of another stream."""
        before = self.terminal.writer
        self.terminal.writer = None if text.endswith(b"\n") else self
        shown = lines.prefixed(text, self._painted)
        if before is self:
            return shown[len(self._painted) :]
        return b"\n" + shown if before is not None else shown

    def block(self, _input_wait: Callable[[int], int | None]) -> LiveBlock | None:
        """Return what to draw in the live area."""
        return None

    @property
    def is_unfinished(self) -> bool:
        """Whether it shows a prompt in the live area."""
        return False

    def due_at(self) -> float | None:
        return self._plain.due_at

    def feed(self, chunk: bytes, now: float) -> ShownText:
        self._plain, text = live_area.feed_plain(self._plain, chunk, now)
        return self._as_it_is(text)

    def update(self, now: float) -> ShownText:
        self._plain, text = live_area.update_plain(self._plain, now)
        return self._as_it_is(text)

    def finish(self, _now: float) -> ShownText:
        self._plain, text = PlainView(), self._plain.held
        return self._as_it_is(text)

    def _as_it_is(self, text: bytes) -> ShownText:
        return ShownText(lines.presentable(text) if self.terminal.is_tty else text)


class DrawnDisplay(RankDisplay):
    """On a terminal, with rows at its bottom that are redrawn."""

    def __init__(self, log: LogSpec, label: RankLabel, terminal: Terminal, has_terminal: bool) -> None:
        super().__init__(log, label, terminal)
        self._draws_bars = lines.draws_bars(log, label.local_rank)
        # Programs on a pipe decide about colours without us, so theirs stay.
        self._strips_color = has_terminal and not self._is_colored
        self._question = (
            0  # as `input_wait`: the rank waits for a line, which the terminal itself shows and ends
        )
        self._input_wait: Callable[[int], int | None] = lambda _rank: None
        self._view = StreamView(is_recorded=has_terminal)

    def block(self, input_wait: Callable[[int], int | None]) -> LiveBlock | None:
        """Return what to draw in the live area. Unfinished text is a prompt if the rank may wait for the answer."""
        self._input_wait = input_wait
        rows = live_area.live_rows(self._view) if self._draws_bars else ()
        unfinished = live_area.prompt(self._view)
        if unfinished is not None and (wait := input_wait(self.rank)) != 0:
            self._question = wait if wait and ends_lines() else 0
            return LiveBlock(self._label, rows, unfinished, live_area.column(self._view))
        if unfinished is not None and self._draws_bars:
            rows = (*rows, unfinished)
        return LiveBlock(self._label, rows) if rows else None

    @property
    def is_unfinished(self) -> bool:
        return live_area.prompt(self._view) is not None

    def due_at(self) -> float | None:
        return live_area.due_at(self._view)

    def feed(self, chunk: bytes, now: float) -> ShownText:
        """A defect in the interpretation must not end the thread that all ranks wait for: the text is shown plainly."""
        try:
            before = self._end_prompt()
            self._view, texts = live_area.feed(self._view, chunk, now)
        except Exception as error:
            return self._display_text(self._begin_again(chunk, error))
        return self._display_text(Texts(before.lines + texts.lines, before.record + texts.record))

    def update(self, now: float) -> ShownText:
        try:
            self._view, texts = live_area.update(self._view, now)
        except Exception as error:
            return self._display_text(self._begin_again(b"", error))
        return self._display_text(texts)

    def _begin_again(self, chunk: bytes, error: Exception) -> Texts:
        self._view = replace(self._view, screen=Screen())
        told = f"ddp-launch: cannot interpret this output, which is a defect ({error!r})\n".encode()
        text = told + (chunk if chunk.endswith(b"\n") or not chunk else chunk + b"\n")
        return Texts(text, text)

    def finish(self, _now: float) -> ShownText:
        before, texts = self._end_prompt(), live_area.finish(self._view)
        self._view = StreamView(self._view.is_recorded)
        return self._display_text(Texts(before.lines + texts.lines, before.record + texts.record))

    def _end_prompt(self) -> Texts:
        """What a rank writes after it has asked begins a new line: its question and the answer are on the terminal."""
        is_answered = self._question and self._input_wait(self.rank) != self._question
        if not is_answered or live_area.prompt(self._view) is None:
            return Texts(b"", b"")
        self._question = 0
        self._view, texts = live_area.answered(self._view)
        return texts

    def _display_text(self, texts: Texts) -> ShownText:
        text = lines.presentable(texts.lines)
        if self._strips_color:
            text = lines.without_color(text)
        return ShownText(text, lines.without_color(texts.record))


# --- live display -----------------------------------------------------------------------------------
#
# Collects the live rows of all ranks for their terminals, and redraws them at most twenty times per second.

_PAUSE_S = 0.05


class LiveDisplay:
    """Used by the pump's thread, except `prompting_ranks`."""

    def __init__(self, input_wait: Callable[[int], int | None]) -> None:
        self._input_wait = input_wait
        self._unfinished: dict[RankDisplay, None] = {}
        self._blocks: dict[RankDisplay, LiveBlock] = {}
        self._changed: dict[Terminal, None] = {}
        self._prompting: set[int] = set()
        self._next_at = float("-inf")

    def update(self, display: RankDisplay, at_once: bool) -> None:
        """Take over what the display shows now. `at_once`: lines of it come with this change, or a prompt."""
        if display.is_unfinished:
            self._unfinished[display] = None
        else:
            self._unfinished.pop(display, None)
        block = display.block(self._input_wait)
        if block == self._blocks.get(display):
            return
        if block is None:
            del self._blocks[display]
        else:
            self._blocks[display] = block
        self._prompting = {shown.rank for shown, its in self._blocks.items() if its.prompt is not None}
        self._changed[display.terminal] = None
        if at_once or (block is not None and block.prompt is not None):
            self._next_at = float("-inf")

    def look_again(self) -> None:
        """Whether a rank waits for input can change without output."""
        for display in list(self._unfinished):
            self.update(display, at_once=False)

    def prompting_ranks(self) -> set[int]:
        """Return the global ranks that show a prompt. For any thread."""
        return self._prompting

    def due_at(self) -> float | None:
        return self._next_at if self._changed else None

    def draw(self, now: float) -> None:
        if not self._changed or now < self._next_at:
            return
        shown = sorted(self._blocks.items(), key=lambda item: item[0].order)
        for terminal in self._changed:
            terminal.set_area(tuple(block for display, block in shown if display.terminal is terminal))
        self._changed.clear()
        self._next_at = now + _PAUSE_S
