"""Which commits are written to a store that cannot take them all.

A commit has all its parts only if all ranks write it, and they decide without communication. So a rank that is still
busy when a commit is due doubles its stride: it then writes only each 2nd, 4th, 8th commit. All commits of the slowest
rank, which has the longest stride, are also written by all others. After some commits in time, the stride is halved.
"""

from __future__ import annotations

from dataclasses import dataclass

_GOOD_ENOUGH = 4  # commits in time, before the stride is halved
_LONGEST = 1 << 16


@dataclass(frozen=True, slots=True)
class Thinning:
    stride: int = 1
    in_time: int = 0  # commits since the stride has changed

    def ask(self, index: int, is_busy: bool) -> tuple[bool, Thinning]:
        """Whether to write the commit of this index, and what to ask next."""
        if index % self.stride:
            return False, self
        if is_busy:
            return False, Thinning(min(2 * self.stride, _LONGEST))
        if self.stride > 1 and self.in_time + 1 >= _GOOD_ENOUGH:
            return True, Thinning(self.stride // 2)
        return True, Thinning(self.stride, self.in_time + 1)
