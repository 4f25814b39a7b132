"""Translate torch's tensors and reductions into arguments of the compiled core: numbers, addresses, sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp

BARRIER, ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, REDUCE = range(6)
SUM, PRODUCT, MINIMUM, MAXIMUM, BIT_AND, BIT_OR, BIT_XOR = range(7)

_ELEMENTS = {
    torch.float64: 0,
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int64: 4,
    torch.int32: 5,
    torch.int16: 6,
    torch.int8: 7,
    torch.uint8: 8,
    torch.bool: 9,
}
_HALVES = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_BYTE = _ELEMENTS[torch.uint8]
_FLOATS = range(4)

KIND: Any = ReduceOp.RedOpType  # torch's type stubs do not list its members
# torch's reductions, as numbers of the core. AVG is a sum that is divided afterwards.
REDUCTIONS = {
    KIND.SUM: SUM,
    KIND.AVG: SUM,
    KIND.MAX: MAXIMUM,
    KIND.MIN: MINIMUM,
    KIND.PRODUCT: PRODUCT,
    KIND.BAND: BIT_AND,
    KIND.BOR: BIT_OR,
    KIND.BXOR: BIT_XOR,
}
_MOSTKINDS = 16  # torch has ten


@dataclass(frozen=True, slots=True)
class Reduction:
    element: int
    element_size: int
    how: int
    divisor: float


class Reductions(dict[torch.dtype, "tuple[Reduction | None, ...]"]):
    """For each dtype, the core's reductions, indexed by the number of torch's reduction kind.

    The index is a number because torch's enumeration is slow to hash. None: the core does not support the reduction.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size

    def __missing__(self, dtype: torch.dtype) -> tuple[Reduction | None, ...]:
        kinds = {int(kind): kind for kind in REDUCTIONS}
        row = tuple(_reduction(kinds.get(number), dtype, self._world_size) for number in range(_MOSTKINDS))
        self[dtype] = row
        return row


def _reduction(kind: Any, dtype: torch.dtype, world_size: int) -> Reduction | None:
    how = REDUCTIONS.get(kind)
    real = _HALVES.get(dtype, dtype)
    element = _ELEMENTS.get(real)
    if how is None or element is None:
        return None
    averaged = kind == KIND.AVG
    if (how > SUM and real is not dtype) or (how > MAXIMUM and element in _FLOATS):
        return None
    if averaged and element not in _FLOATS:
        return None
    return Reduction(element, real.itemsize, how, float(world_size) if averaged else 1.0)


def averaging(dtype: torch.dtype, divisor: float) -> Reduction | None:
    real = _HALVES.get(dtype, dtype)
    element = _ELEMENTS.get(real)
    if element is None or element not in _FLOATS:
        return None
    return Reduction(element, real.itemsize, SUM, divisor)


BYTES = Reduction(_BYTE, 1, SUM, 1.0)


def suits(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the core supports these tensors: strided, on the CPU, and of one dtype."""
    if len(tensors) == 1:
        return tensors[0].layout is torch.strided and tensors[0].is_cpu
    if not tensors:
        return False
    dtype = tensors[0].dtype
    return all(t.layout is torch.strided and t.is_cpu and t.dtype is dtype for t in tensors)


@dataclass(slots=True)
class Operands:
    """Addresses and sizes of tensors, alternating in `numbers`. `kept` must live as long as they are in use."""

    numbers: list[int]
    size: int
    kept: list[torch.Tensor]
    after: Callable[[], None] | None


def in_order(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def operands(tensors: Sequence[torch.Tensor], written: bool, read: bool = True) -> Operands:
    """Return the operands of a collective. Non-contiguous tensors are copied first, and written back afterwards."""
    if len(tensors) == 1 and in_order(tensors[0]):
        (only,) = tensors
        size = only.nbytes
        return Operands([only.data_ptr(), size], size, list(tensors), None)
    numbers: list[int] = []
    kept: list[torch.Tensor] = []
    replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
    size = 0
    for tensor in tensors:
        whole = tensor
        if not in_order(tensor):
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            if read:
                whole.copy_(tensor.detach())
            if written:
                replaced.append((tensor.detach(), whole))
        numbers += (whole.data_ptr(), whole.nbytes)
        size += whole.nbytes
        kept.append(whole)

    def write_back() -> None:
        for tensor, whole in replaced:
            tensor.copy_(whole)

    return Operands(numbers, size, kept, write_back if replaced else None)


def reduce_options(kind: Any, opts: Any, named: dict[str, Any]) -> Any:
    """Build options from torch's other signatures, which take the reduction itself, or keyword arguments."""
    if type(opts) is kind:
        return opts
    made = kind()
    chosen = named.get("op", opts)
    if chosen is not None:
        made.reduceOp = ReduceOp(chosen) if isinstance(chosen, ReduceOp.RedOpType) else chosen
    if "root" in named:
        made.rootRank = named["root"]
    return made
