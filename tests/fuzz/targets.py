"""What may be fed with bytes of a stranger's making, and what it promises then.

A target takes any bytes, and returns or raises one of its own errors, which it names; whatever else comes out is a
finding. Where something can be written again, what was read once must read the same afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import at_home
import from_journals
import on_the_wire

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    feed: Callable[[bytes], None]
    errors: tuple[type[Exception], ...]  # what it may raise
    seeds: tuple[bytes, ...] = field(default=(), repr=False)  # where to begin
    longest: int = 2048
    change: Callable[[bytes, Random], bytes] | None = (
        None  # makes another input of one, beside what is done blindly
    )

    def __call__(self, data: bytes) -> None:
        try:
            self.feed(data)
        except self.errors:
            pass


TARGETS = {
    each[0]: Target(*each) for module in (on_the_wire, at_home, from_journals) for each in module.TARGETS
}
