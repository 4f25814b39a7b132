"""What one stream of a rank shows: on which output, with which label, and what its log file gets of it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from launcher.output import keyboard, lines, stream_view
from launcher.output.live_area import Block
from launcher.output.screen import Screen
from launcher.output.screen_row import cells_of
from launcher.output.stream_view import StreamView, Texts
from launcher.output.thinning import Thinning

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.output.lines import RankLabel
    from launcher.output.terminal import Terminal
    from launcher.settings.spec import LogSpec


class Shown(NamedTuple):
    """Whole lines, without their prefix."""

    text: bytes  # for the output
    record: bytes  # for the log file of a rank with a terminal, without colours


def label_columns(log: LogSpec, label: RankLabel) -> int:
    return len(cells_of(lines.printable(lines.prefix_of(log.prefix, label)), "", 0))


class RankDisplay:
    def __init__(self, log: LogSpec, label: RankLabel, terminal: Terminal, has_terminal: bool) -> None:
        self.terminal = terminal
        self._is_colored = lines.is_colored(log.color, terminal.is_tty, os.environ)
        self.relabel(log, label)
        self._draws_bars = terminal.is_drawn and lines.draws_bars(log, label.local_rank)
        # Programs on a pipe decide about colours without us, so theirs stay.
        self._strips_color = has_terminal and not self._is_colored
        self._question = (
            0  # as `input_wait`: the rank waits for a line, which the terminal itself shows and ends
        )
        self._input_wait: Callable[[int], int | None] = lambda _rank: None
        self._view = StreamView(
            is_drawn=terminal.is_drawn,
            is_recorded=has_terminal or not terminal.is_drawn,
            shows_prompts=terminal.is_tty and not terminal.is_drawn,
        )

    def relabel(self, log: LogSpec, label: RankLabel) -> None:
        """A rank that keeps its process over a failure may get another number."""
        prefix = lines.prefix_of(log.prefix, label)
        self.rank = label.rank
        self.order = (label.local_rank, label.rank)
        self.prefix = prefix.encode("utf-8", "replace")
        shown_prefix = lines.painted(prefix, label.rank) if self._is_colored else prefix
        self.painted = shown_prefix.encode("utf-8", "replace")
        color = lines.color_of(label.rank) if self._is_colored else ""
        self._label = tuple(cells_of(lines.printable(prefix), color, 0))

    def block(self, input_wait: Callable[[int], int | None]) -> Block | None:
        """Return what to draw in the live area. Unfinished text is a prompt if the rank may wait for the answer."""
        self._input_wait = input_wait
        rows = stream_view.live_rows(self._view) if self._draws_bars else ()
        unfinished = stream_view.prompt(self._view)
        if unfinished is not None and (wait := input_wait(self.rank)) != 0:
            self._question = wait if wait and keyboard.ends_lines() else 0
            return Block(self._label, rows, unfinished, stream_view.column(self._view))
        if unfinished is not None and self._draws_bars:
            rows = (*rows, unfinished)
        return Block(self._label, rows) if rows else None

    @property
    def is_unfinished(self) -> bool:
        """Whether it shows text without a newline."""
        return stream_view.prompt(self._view) is not None

    def feed(self, chunk: bytes, now: float) -> Shown:
        """A defect in the interpretation must not end the thread that all ranks wait for: the text is shown plainly."""
        try:
            before = self._end_prompt(now)
            self._view, texts = stream_view.feed(self._view, chunk, now)
        except Exception as error:
            return self._shown(self._begin_again(chunk, error))
        return self._shown(Texts(before.lines + texts.lines, before.record + texts.record))

    def update(self, now: float) -> Shown:
        try:
            self._view, texts = stream_view.update(self._view, now)
        except Exception as error:
            return self._shown(self._begin_again(b"", error))
        return self._shown(texts)

    def _begin_again(self, chunk: bytes, error: Exception) -> Texts:
        self._view = replace(self._view, screen=Screen(), thinning=Thinning())
        told = f"ddp-launch: cannot interpret this output, which is a defect ({error!r})\n".encode()
        text = told + (chunk if chunk.endswith(b"\n") or not chunk else chunk + b"\n")
        return Texts(text, text)

    def finish(self, now: float) -> Shown:
        before, texts = self._end_prompt(now), stream_view.finish(self._view)
        shown = self._shown(Texts(before.lines + texts.lines, before.record + texts.record))
        self._view = StreamView()
        return shown

    def _end_prompt(self, now: float) -> Texts:
        """What a rank writes after it has asked begins a new line: its question and the answer are on the terminal."""
        is_answered = self._question and self._input_wait(self.rank) != self._question
        if not is_answered or stream_view.prompt(self._view) is None:
            return Texts(b"", b"")
        self._question = 0
        self._view, texts = stream_view.answered(self._view, now)
        return texts

    def due_at(self) -> float | None:
        return stream_view.due_at(self._view)

    def _shown(self, texts: Texts) -> Shown:
        text = texts.lines if self._view.is_drawn else texts.record
        if text:
            text = lines.presentable(text, self.terminal.is_tty)
        if self._strips_color:
            text = lines.without_color(text)
        return Shown(text, lines.without_color(texts.record))
