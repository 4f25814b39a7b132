"""State as a tree whose leaves are tensors, and the region of each tensor that this process has.

A state dictionary is split into a list of its tensors and a *skeleton*: the same tree with a marker in place of each
tensor. The skeleton is small and has only plain values. It is saved with torch.save and loaded with weights_only=True,
so that a file cannot execute code in its reader.

A `Leaf` describes a tensor: its full shape, and the *region* of it in this process. The region of an ordinary tensor is
the whole tensor. The region of a DTensor, as used by FSDP2, is the shard of this rank. If a leaf needs another region,
it is filled from all images that overlap the region. This makes state fit a world of another size.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from ddp.telemetry import torch_api
from ddp.telemetry.coded import WrongValue

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MARK = "\0tensor "
OWN = "own"  # the first step of paths to what belongs to one rank
Region = tuple[tuple[int, int], ...]  # start and length in each dimension


@dataclass(frozen=True, slots=True)
class Leaf:
    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # of the region, in the memory of the rank that wrote it
    region: Region
    sharded: bool

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(length for _start, length in self.region)

    @property
    def is_own(self) -> bool:
        """Whether it belongs to the rank that wrote it, so that other ranks have another one, or none."""
        return self.path.startswith(f"{OWN}.")

    @property
    def n_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.local_shape)


def whole(shape: tuple[int, ...]) -> Region:
    return tuple((0, length) for length in shape)


# --- trees and skeletons -----------------------------------------------------------------------------


def disassemble(tree: Any) -> tuple[Any, list[Any], list[str]]:
    """Split a tree into its skeleton, its tensors, and their paths."""
    found = _Disassembly([], [])
    return found(tree, ""), found.tensors, found.paths


# Visitors are objects, because a function that calls itself is a cycle. It would keep what it has seen until Python
# looks for garbage, which many training loops turn off: whole commits, with their memory.
@dataclass(frozen=True, slots=True)
class _Disassembly:
    tensors: list[Any]
    paths: list[str]

    def __call__(self, node: Any, path: str) -> Any:
        if isinstance(node, torch.Tensor):
            if not _is_plain(node):
                return node
            self.tensors.append(node)
            self.paths.append(path)
            return f"{_MARK}{len(self.tensors) - 1}"
        if isinstance(node, str) and node.startswith(_MARK):
            raise WrongValue(
                f"cannot commit {path}: its text starts with the reserved marker {_MARK!r}. Change the text"
            )
        return _rebuild(node, path, self)


def marked(node: Any) -> int | None:
    """The number of the tensor whose place in a skeleton this is; None if it is something else."""
    return int(node.removeprefix(_MARK)) if isinstance(node, str) and node.startswith(_MARK) else None


def assemble(skeleton: Any, tensor: Callable[[int], Any]) -> Any:
    def at(node: Any) -> Any:
        number = marked(node)
        return KEEP if number is None else tensor(number)

    return replaced(skeleton, at)


KEEP = object()


def replaced(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The tree with `change(node)` in place of each node for which it does not return KEEP."""
    return _Replacement(change)(tree, "")


@dataclass(frozen=True, slots=True)
class _Replacement:
    change: Callable[[Any], Any]

    def __call__(self, node: Any, path: str) -> Any:
        new = self.change(node)
        return _rebuild(node, path, self) if new is KEEP else new


def _rebuild(node: Any, path: str, visit: Callable[[Any, str], Any]) -> Any:
    """A commit does this with thousands of values, which the training waits for. So numbers are not visited."""
    kind = type(node)
    if kind in (dict, OrderedDict):
        to_key = f"{path}." if path else ""
        found = kind()
        for key, value in node.items():
            found[key] = value if type(value) in _NUMBERS else visit(value, f"{to_key}{key}")
        return found
    if kind in (list, tuple):
        return kind(
            [
                value if type(value) in _NUMBERS else visit(value, f"{path}[{number}]")
                for number, value in enumerate(node)
            ]
        )
    return node


_NUMBERS = {int, float, bool, type(None)}


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor becomes a leaf; others (sparse, quantized) stay in the skeleton."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


# --- regions of tensors ----------------------------------------------------------------------------


def is_dtensor(tensor: torch.Tensor | None) -> TypeGuard[DTensor]:
    """Check without importing DTensor, which is slow to import. If it is not imported yet, no tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def leaf_of(tensor: torch.Tensor, path: str) -> Leaf:
    if not is_dtensor(tensor):
        shape = tuple(tensor.shape)
        return Leaf(path, tensor.dtype, shape, tensor.stride(), whole(shape), sharded=False)
    if any(placement.is_partial() for placement in tensor.placements):
        raise WrongValue(
            f"cannot commit {path}: it is a DTensor with a Partial placement. Reduce it first, with redistribute()"
        )
    shape = tuple(tensor.shape)
    lengths, offsets = torch_api.shard_of_dtensor()(shape, tensor.device_mesh, tensor.placements)
    region = tuple(zip(offsets, lengths, strict=True))
    sharded = any(placement.is_shard() for placement in tensor.placements)
    return Leaf(path, tensor.dtype, shape, local(tensor).stride(), region, sharded)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor.detach()


def all_local(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return what `local` does, quickly; parameters may still require gradients."""
    return [each if type(each) in _ORDINARY else local(each) for each in tensors]


_ORDINARY = {torch.Tensor, torch.nn.Parameter}


def with_sharding(region: torch.Tensor, template: torch.Tensor | None) -> torch.Tensor:
    """Make a DTensor of this rank's region if the template is one."""
    if not is_dtensor(template):
        return region
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        region.to(template.device),
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )


def part_of(tensors: list[torch.Tensor], of_all: tuple[int, int]) -> tuple[int, int] | None:
    """Return this rank's part and the number of parts if any tensor is sharded.

    Replicas of a shard have the same part. `of_all`: this rank and the number of ranks. With several meshes, each rank
    is a part.
    """
    meshes = []
    for tensor in tensors:
        if is_dtensor(tensor) and any(placement.is_shard() for placement in tensor.placements):
            split = tuple(placement.is_shard() for placement in tensor.placements)
            if (tensor.device_mesh, split) not in meshes:
                meshes.append((tensor.device_mesh, split))
    if not meshes:
        return None
    if len(meshes) > 1:
        return of_all
    mesh, split = meshes[0]
    part, parts = 0, 1
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise WrongValue(
            "cannot commit: this rank is not in the device mesh of its parameters. Use a mesh of all ranks"
        )
    for size, at, is_split in zip(mesh.shape, coordinate, split, strict=True):
        if is_split:
            part, parts = part * size + at, parts * size
    return part, parts


# --- tensors from regions --------------------------------------------------------------------------


def empty_like_leaf(leaf: Leaf) -> torch.Tensor:
    """An empty tensor with the leaf's strides, because optimizer state uses the strides of its parameter."""
    shape = leaf.local_shape
    return (
        torch.empty_strided(shape, leaf.stride, dtype=leaf.dtype)
        if shape and is_dense(leaf)
        else torch.empty(shape, dtype=leaf.dtype)
    )


def is_dense(leaf: Leaf) -> bool:
    """Whether its elements lie side by side, in any order."""
    shape = leaf.local_shape
    reach = 1 + sum((length - 1) * step for length, step in zip(shape, leaf.stride, strict=True))
    return 0 not in shape and reach == math.prod(shape)


def overlap(wanted: Region, there: Region) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The intersection as slices of both regions; None if it is empty."""
    into, out_of = [], []
    for (start, length), (other_start, other_length) in zip(wanted, there, strict=True):
        first = max(start, other_start)
        last = min(start + length, other_start + other_length)
        if first >= last:
            return None
        into.append(slice(first - start, last - start))
        out_of.append(slice(first - other_start, last - other_start))
    return tuple(into), tuple(out_of)


class Filled:
    """The region of a leaf, filled from pieces that may overlap each other."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._tensor: torch.Tensor | None = None
        self._missing = math.prod(leaf.local_shape)
        self._seen: set[Region] = set()

    def take(self, region: Region, piece: torch.Tensor) -> None:
        if self._missing <= 0 or region in self._seen:
            return
        if region == self._leaf.region and not self._seen:
            same_stride = self._leaf.stride == piece.stride()  # the caller copies it when it loads it
            self._tensor = piece if same_stride else empty_like_leaf(self._leaf).copy_(piece)
            self._missing = 0
            return
        common = overlap(self._leaf.region, region)
        if common is None:
            return
        if self._tensor is None:
            self._tensor = empty_like_leaf(self._leaf)
        self._seen.add(region)
        into = self._tensor[common[0]]
        into.copy_(piece[common[1]])
        self._missing -= into.numel()

    def result(self) -> torch.Tensor:
        if self._missing > 0:
            raise WrongValue(
                f"cannot resume {self._leaf.path}: the commit lacks {self._missing} of its elements. To resume from an "
                "older one, delete the newest (the files commit-NUMBER-* with the highest number). Otherwise use "
                "an empty folder"
            )
        return empty_like_leaf(self._leaf) if self._tensor is None else self._tensor
