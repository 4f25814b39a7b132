"""Derive settings for the next backward from the last one: the gradient order and the watch mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp.reducer.chunks import Mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp.reducer.round import Round


@dataclass(frozen=True)
class Observation:
    """The settings for the next backward: hooks, order of gradients, and how often each gradient arrives."""

    mode: Mode
    order: tuple[int, ...]
    expected: tuple[int, ...]


def observe(seen: Round, end_task: int, *, dynamic: bool, lacking: Sequence[int]) -> Observation:
    """Return what was observed in a backward. `dynamic`: the set of used parameters may change with every step."""
    simple = all(count == 1 for count in seen.counts) and seen.tasks == {end_task}
    in_order = simple and seen.end_known and not seen.early and not seen.in_context
    mode = Mode.SENTINEL if in_order and not dynamic and not lacking else Mode.COUNT
    arrived = set(seen.order)
    rest = [i for i in range(len(seen.counts)) if i not in arrived]
    return Observation(mode, (*seen.order, *rest), tuple(seen.counts))


def unobserved(count: int) -> Observation:
    """Return the settings of a rank that has not observed a backward of its `count` parameters."""
    return Observation(Mode.COUNT, tuple(reversed(range(count))), (1,) * count)
