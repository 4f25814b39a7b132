"""What the arguments of a collective say of it: the facts that all ranks which do the same thing have in common.

Only tensors that must be alike on all ranks are looked at: of a gather the input, of a scatter the output. An
all-to-all may differ from rank to rank in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Facts:
    op: str
    alike: int | None = None  # which argument holds the tensors that are alike on all ranks
    root: bool = False  # the others wait for this one rank
    peer: int | None = None  # which argument is the rank on the other side


# By the names of ProcessGroup's methods, in all the versions of torch that have them.
FACTS: dict[str, Facts] = {
    "allreduce": Facts("all_reduce", 0),
    "allreduce_coalesced": Facts("all_reduce", 0),
    "ddp_average": Facts("all_reduce", 0),
    "allgather": Facts("all_gather", 1),
    "allgather_coalesced": Facts("all_gather", 1),
    "all_gather_single": Facts("all_gather", 1),
    "all_gather_single_coalesced": Facts("all_gather", 1),
    "_allgather_base": Facts("all_gather", 1),
    "allgather_into_tensor_coalesced": Facts("all_gather", 1),
    "reduce": Facts("reduce", 0),
    "reduce_scatter": Facts("reduce_scatter", 0),
    "reduce_scatter_single": Facts("reduce_scatter", 0),
    "reduce_scatter_single_coalesced": Facts("reduce_scatter", 0),
    "_reduce_scatter_base": Facts("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": Facts("reduce_scatter", 0),
    "broadcast": Facts("broadcast", 0, root=True),
    "gather": Facts("gather", 1),
    "scatter": Facts("scatter", 0),
    "alltoall": Facts("all_to_all"),
    "alltoall_base": Facts("all_to_all"),
    "all_to_all_single": Facts("all_to_all"),
    "barrier": Facts("barrier"),
    "monitored_barrier": Facts("monitored_barrier"),
    "send": Facts("send", 0, peer=1),
    "recv": Facts("recv", 0, peer=1),
    "recv_anysource": Facts("recv", 0),
}

_dtypes: dict[Any, str] = {}


def tensor_facts(held: Any) -> tuple[str, int, int]:
    """-> dtype, number of elements, hash of the shapes; of one tensor, or of all in a list."""
    if not isinstance(held, list | tuple):
        return _dtype(held), held.numel(), hash(held.shape) & 0xFFFFFFFF
    if len(held) == 1:
        return tensor_facts(held[0])
    if not held:
        return "", 0, 0
    shapes = hash(tuple(tensor.shape for tensor in held))
    return _dtype(held[0]), sum(tensor.numel() for tensor in held), shapes & 0xFFFFFFFF


def _dtype(tensor: Any) -> str:
    dtype = tensor.dtype
    name = _dtypes.get(dtype)
    if name is None:
        name = _dtypes[dtype] = str(dtype).removeprefix("torch.")
    return name


def spelled(ranks: Sequence[int]) -> str:
    """0,1,2,3 as "0-3"; 0,2,4 as "0-4/2"; any others one by one."""
    if len(ranks) > 1:
        step = ranks[1] - ranks[0]
        if step > 0 and all(b - a == step for a, b in pairwise(ranks)):
            return f"{ranks[0]}-{ranks[-1]}" + (f"/{step}" if step > 1 else "")
    return ",".join(map(str, ranks))
