"""The state of an optimizer whose ranks each keep a share of it (`ddp.ShardedOptimizer`), as regions of whole tensors.

Such a rank owns ranges of elements of parameters, in the order in which they lie in memory. A commit describes regions
of tensors: a start and a length in each dimension. A range is at most 2 * dimensions - 1 of these: the end of a row,
whole rows, the begin of another row, and the same again within these rows. So a commit has the format of an optimizer
that is not sharded, in pieces. Everything that reads commits in pieces reads it into another world, with or without
sharding.

What an optimizer keeps once for a whole parameter, such as the number of steps, is kept by each rank that owns a piece.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from ddp.elastic.leaves import Filled, Leaf, Piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddp.elastic.leaves import Region


@dataclass(frozen=True, slots=True)
class Range:
    """Elements [start, end) of a parameter, in memory order. `strides`: of the whole parameter in that memory."""

    number: int  # of the parameter in the optimizer
    start: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def boxes(self) -> list[Box]:
        """The regions that make up the range, in memory order."""
        order = sorted(range(len(self.shape)), key=lambda dimension: -self.strides[dimension])
        return [
            Box(tuple(order), lengths)
            for lengths in _split([self.shape[each] for each in order], self.start, self.end)
        ]


@dataclass(frozen=True, slots=True)
class Box:
    """A region whose elements are one range of memory."""

    order: tuple[int, ...]  # of the dimensions, from the slowest to the fastest in memory
    spans: Region  # in this order

    @property
    def numel(self) -> int:
        return math.prod(length for _start, length in self.spans)

    @property
    def region(self) -> Region:
        return tuple(self.spans[self.order.index(dimension)] for dimension in range(len(self.order)))

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """These elements, which lie one after the other, with the dimensions of the parameter."""
        inverse = [self.order.index(dimension) for dimension in range(len(self.order))]
        return flat.view([length for _start, length in self.spans]).permute(inverse)


def _split(shape: Sequence[int], start: int, end: int) -> list[Region]:
    if start >= end:
        return []
    if not shape:
        return [()]
    row, inner = math.prod(shape[1:]), shape[1:]
    (first, begin), (last, rest) = divmod(start, row), divmod(end, row)
    if first == last:
        return [((first, 1), *each) for each in _split(inner, begin, rest)]
    found: list[Region] = []
    if begin:
        found += [((first, 1), *each) for each in _split(inner, begin, row)]
        first += 1
    if first < last:
        found.append(((first, last - first), *((0, length) for length in inner)))
    return found + [((last, 1), *each) for each in _split(inner, 0, rest)]


@runtime_checkable
class SharedOut(Protocol):
    """An optimizer of which this rank keeps a share."""

    def whole_parameters(self) -> list[torch.Tensor]: ...
    def part(self) -> tuple[int, int]:
        """Which of how many shares this is."""

    def ranges(self) -> list[tuple[int, int, int, tuple[int, ...]]]:
        """Number of the parameter, start, end, and strides of the parameter, for each piece."""

    def state_of_ranges(self) -> list[Mapping[str, Any]]: ...
    def numbered_groups(self) -> list[dict[str, Any]]: ...
    def is_elementwise(self, number: int, name: str, shape: tuple[int, ...]) -> bool: ...
    def load_ranges(self, states: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None: ...


def ranges_of(optimizer: SharedOut) -> list[Range]:
    whole = optimizer.whole_parameters()
    return [
        Range(number, start, end, tuple(whole[number].shape), strides)
        for number, start, end, strides in optimizer.ranges()
    ]


# --- committing ------------------------------------------------------------------------------------


def tree_of(optimizer: SharedOut) -> dict[str, Any]:
    """The state in the format of the optimizer without sharding; of each tensor only the pieces of this rank."""
    state: dict[int, dict[str, Any]] = {}
    for each, held in zip(ranges_of(optimizer), optimizer.state_of_ranges(), strict=True):
        for name, value in held.items():
            slots = state.setdefault(each.number, {})
            if not isinstance(value, torch.Tensor):
                slots[name] = value
            elif value.shape == (each.end - each.start,) and optimizer.is_elementwise(
                each.number, name, each.shape
            ):
                slots.setdefault(name, []).extend(_pieces(each, value))
            else:
                shape = tuple(value.shape)
                slots[name] = [Piece(value, shape, tuple((0, length) for length in shape))]
    return {"state": state, "param_groups": optimizer.numbered_groups()}


def _pieces(each: Range, flat: torch.Tensor) -> Iterable[Piece]:
    at = 0
    for box in each.boxes():
        yield Piece(box.view(flat[at : at + box.numel]), each.shape, box.region)
        at += box.numel


def merge(state: dict[Any, dict[str, Any]], other: Mapping[Any, Mapping[str, Any]]) -> None:
    """Add what another rank's part of the commit knows: parameters, or slots, of which the first part has no piece."""
    for number, slots in other.items():
        mine = state.setdefault(number, {})
        for name, value in slots.items():
            mine.setdefault(name, value)


# --- restoring ---------------------------------------------------------------------------------------


class Targets:
    """What a rank wants of one tensor of the state: the ranges that it owns of this parameter."""

    def __init__(self, leaf: Leaf, ranges: Sequence[Range]) -> None:
        self._dtype = leaf.dtype
        self._boxes = [(each, [(box, Filled(_of_box(leaf, box))) for box in each.boxes()]) for each in ranges]

    def take(self, region: Region, piece: torch.Tensor) -> None:
        for _range, boxes in self._boxes:
            for _box, filled in boxes:
                filled.take(region, piece)

    def result(self) -> dict[tuple[int, int], torch.Tensor]:
        """The elements of each range, by its start and end."""
        found = {}
        for each, boxes in self._boxes:
            flat, at = torch.empty(each.end - each.start, dtype=self._dtype), 0
            for box, filled in boxes:
                box.view(flat[at : at + box.numel]).copy_(filled.result())
                at += box.numel
            found[each.start, each.end] = flat
        return found


def _of_box(leaf: Leaf, box: Box) -> Leaf:
    lengths = tuple(length for _start, length in box.region)
    strides = torch.empty(lengths, device="meta").stride()
    return Leaf(leaf.path, leaf.dtype, leaf.shape, strides, box.region, sharded=True)


def load(optimizer: SharedOut, tree: Mapping[str, Any]) -> None:
    """Load a state in the format of the optimizer without sharding; of each tensor only the ranges of this rank."""
    states: list[dict[str, Any]] = []
    for each in ranges_of(optimizer):
        slots = tree["state"].get(each.number, {})
        states.append(
            {
                name: value[each.start, each.end] if isinstance(value, dict) else _own(value)
                for name, value in slots.items()
                if not isinstance(value, dict) or (each.start, each.end) in value
            }
        )
    optimizer.load_ranges(states, list(tree["param_groups"]))


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
