"""Which rows of its display a program may still redraw: how far it goes back, and whether it hides the cursor. Pure.

* `reach` is how many rows above the last one the program has gone back. The rows above these are finished.
* What it has written since it went back may be a display that has grown, or lines above the display. So these rows are
  kept until it goes back again, and thereby shows where its display begins.
* A program that hides the cursor redraws all that follows (rich). Its rows are kept until it goes back or shows the
  cursor again. If it writes below its display instead of going back, the display is finished.

Rows are counted from the first row that is kept.
"""

from __future__ import annotations

from dataclasses import replace

from rendezvous.values.late_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class RedrawnRows:
    reach: int = 0
    top: int | None = None  # the row to which the program went back the last time
    ascent: int | None = None  # the same while it may still go further back
    hides_cursor: bool = False

    @property
    def exist(self) -> bool:
        return bool(self.reach) or self.hides_cursor

    def went_back(self, at: int, last: int) -> RedrawnRows:
        return replace(self, ascent=at, reach=max(self.reach, last - at))

    def went_down(self) -> RedrawnRows:
        return self if self.ascent is None else replace(self, top=self.ascent, ascent=None)

    def without(self, count: int) -> RedrawnRows:
        """Count the rows anew after some at the top are finished."""
        if not count or self.top is self.ascent is None:
            return self
        top, ascent = (None if at is None else max(0, at - count) for at in (self.top, self.ascent))
        return replace(self, top=top, ascent=ascent)

    def forgotten(self) -> RedrawnRows:
        return RedrawnRows(hides_cursor=self.hides_cursor)

    def first(self, at: int, last: int) -> int:
        """Return the first row that the program may still redraw. `at`: the cursor's row, `last`: the last row."""
        if not self.hides_cursor:
            # No more of the ascent follows: tqdm goes back in one write.
            begin = self.top if self.ascent is None else self.ascent
            return max(0, min(at, last - self.reach, at if begin is None else begin))
        if self.top is None:
            return 0
        return min(at, self.top, at if self.ascent is None else self.ascent)
