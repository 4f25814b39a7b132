"""Collects the live rows of all ranks for their terminals, and redraws them at most twenty times per second."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.output.live_area import Block
    from launcher.output.rank_display import RankDisplay
    from launcher.output.terminal import Terminal

_PAUSE_S = 0.05


class LiveDisplay:
    """Used by the pump's thread, except `prompting_ranks`."""

    def __init__(self, input_wait: Callable[[int], int | None]) -> None:
        self._input_wait = input_wait
        self._unfinished: dict[RankDisplay, None] = {}
        self._blocks: dict[RankDisplay, Block] = {}
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
