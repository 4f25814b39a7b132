"""The properties of a collective that must be the same on all ranks, read from its arguments.

Only tensors that must match on all ranks are read: the input of a gather, the output of a scatter. An all-to-all has
no such tensor, because all its tensors may differ from rank to rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from . import torch_api, torch_names

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Facts:
    op: str
    matching: int | None = None  # index of the argument with the tensors that must match on all ranks
    root: bool = False  # all other ranks wait for one root rank
    peer: int | None = None  # index of the argument with the rank on the other side
    timeout: bool = False  # the first argument is, or has, a timeout of this call


# By method of ProcessGroup; no version of torch has all of them.
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
    "gather_single": Facts("gather", 1),
    "gather_into_tensor": Facts("gather", 1),
    "scatter": Facts("scatter", 0),
    "alltoall": Facts("all_to_all"),
    "alltoall_base": Facts("all_to_all"),
    "all_to_all_single": Facts("all_to_all"),
    "barrier": Facts("barrier", timeout=True),
    "monitored_barrier": Facts("monitored_barrier", timeout=True),
    "send": Facts("send", 0, peer=1),
    "recv": Facts("recv", 0, peer=1),
    "recv_anysource": Facts("recv", 0),
}


def given_timeout_s(given: Any) -> float:
    """Return a timeout that the script has given, otherwise 0. torch's defaults are objects of their own.

    `given`: the timeout, or options that contain it.
    """
    from torch.distributed import constants

    timeout = getattr(given, "timeout", given)
    defaults = (constants.default_pg_timeout, constants.default_pg_nccl_timeout)
    is_given = isinstance(timeout, timedelta) and not any(timeout is default for default in defaults)
    return timedelta.total_seconds(timeout) if is_given else 0.0


@functools.cache
def options_with_mode() -> frozenset[type]:
    """The classes of torch's options that say whether a call returns only when it is done."""
    from torch.distributed import distributed_c10d

    options = (getattr(distributed_c10d, name) for name in dir(distributed_c10d) if name.endswith("Options"))
    return frozenset(each for each in options if isinstance(each, type) and hasattr(each, "asyncOp"))


NO_FACTS = ("", 0, 0)
UNKNOWN = "?"  # the dtype of tensors that are not torch's own
_dtypes: dict[Any, str] = {}


def tensor_facts(held: Any) -> tuple[str, int, int]:
    """Return dtype, number of elements and hash of the shapes, for one tensor or for a list of tensors.

    No code of the script runs here: neither a class that inherits from torch's Tensor nor a mode of torch notices.
    """
    torchs = _torchs()
    if type(held) in (list, tuple):
        if len(held) != 1:
            return _facts_of_all(held, torchs) if held else NO_FACTS
        held = held[0]
    kind = torchs.tensor
    if type(held) is kind:
        with torchs.without_overrides():
            dtype, numel, shape = held.dtype, held.numel(), held.shape
    elif _is_plain(held, kind):
        with torchs.without_overrides():
            dtype, numel, shape = kind.dtype.__get__(held), kind.numel(held), kind.shape.__get__(held)
    else:
        return UNKNOWN, 0, 0
    name = _dtypes.get(dtype)
    if name is None:
        name = _dtypes[dtype] = str(dtype).removeprefix("torch.")
    return name, numel, hash(shape) & 0xFFFFFFFF


def _facts_of_all(tensors: Sequence[Any], torchs: _Torchs) -> tuple[str, int, int]:
    kind = torchs.tensor
    if not all(_is_plain(tensor, kind) for tensor in tensors):
        return UNKNOWN, 0, 0
    with torchs.without_overrides():
        shapes = tuple(kind.shape.__get__(tensor) for tensor in tensors)
    return tensor_facts(tensors[0])[0], sum(map(prod, shapes)), hash(shapes) & 0xFFFFFFFF


def _is_plain(tensor: Any, kind: Any) -> bool:
    """Whether its properties are those of its C++ object: a class with a `__torch_dispatch__` may compute them."""
    own = type(tensor)
    return any(each is kind for each in own.__mro__) and own.__torch_dispatch__ is kind.__torch_dispatch__


@dataclass(frozen=True, slots=True)
class _Torchs:
    tensor: Any
    without_overrides: Any


@functools.cache
def _torchs() -> _Torchs:
    from torch import Tensor

    return _Torchs(Tensor, torch_api.get(torch_names.WITHOUT_OVERRIDES))


def format_ranks(ranks: Sequence[int]) -> str:
    """Format 0,1,2,3 as "0-3", 0,2,4 as "0-4/2", and all others one by one."""
    if len(ranks) > 1:
        step = ranks[1] - ranks[0]
        if step > 0 and all(b - a == step for a, b in pairwise(ranks)):
            return f"{ranks[0]}-{ranks[-1]}" + (f"/{step}" if step > 1 else "")
    return ",".join(map(str, ranks))


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0-3"."""
    return f"rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)}"
