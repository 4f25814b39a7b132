"""State as a tree whose leaves are tensors, and each tensor as the part of it that this process holds.

A state dictionary is taken apart into its tensors, in the order in which they are met, and a *skeleton*:
the same nesting with a marker in the place of each tensor. The skeleton holds plain values only and is
small; it is stored by torch.save and read with weights_only=True, so that no file can make a reader execute
anything.

A tensor is described by a `Leaf`: its whole shape, and which *region* of it lies here. For an ordinary
tensor that is all of it. For a DTensor, as FSDP2 has them, it is this rank's shard. A leaf with another
region is filled from all the images that overlap it; that is what makes state fit into a world of another
size.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.tensor import DTensor

_MARK = "\0tensor "
Region = tuple[tuple[int, int], ...]  # of each dimension: where it begins, and how long it is


@dataclass(frozen=True, slots=True)
class Leaf:
    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # of the region as it lay here
    region: Region
    sharded: bool

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(length for _start, length in self.region)

    @property
    def n_bytes(self) -> int:
        return self.dtype.itemsize * _product(self.local_shape)


def _product(numbers: tuple[int, ...]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def whole(shape: tuple[int, ...]) -> Region:
    return tuple((0, length) for length in shape)


# --- taking apart, putting together ------------------------------------------------------------------


def taken_apart(tree: Any) -> tuple[Any, list[torch.Tensor], list[str]]:
    """The skeleton, the tensors, and their paths."""
    tensors: list[torch.Tensor] = []
    paths: list[str] = []

    def visit(node: Any, path: str) -> Any:
        if isinstance(node, torch.Tensor) and _is_plain(node):
            tensors.append(node)
            paths.append(path)
            return f"{_MARK}{len(tensors) - 1}"
        if isinstance(node, str) and node.startswith(_MARK):
            raise ValueError(f"{path}: text that begins with {_MARK!r} cannot be kept")
        return _rebuilt(node, path, visit)

    return visit(tree, ""), tensors, paths


def put_together(skeleton: Any, tensor: Callable[[int], Any]) -> Any:
    def visit(node: Any, path: str) -> Any:
        if isinstance(node, str) and node.startswith(_MARK):
            return tensor(int(node.removeprefix(_MARK)))
        return _rebuilt(node, path, visit)

    return visit(skeleton, "")


def _rebuilt(node: Any, path: str, visit: Callable[[Any, str], Any]) -> Any:
    kind = type(node)
    if kind in (dict, OrderedDict):
        return kind((key, visit(value, f"{path}.{key}" if path else str(key))) for key, value in node.items())
    if kind in (list, tuple):
        return kind(visit(value, f"{path}[{number}]") for number, value in enumerate(node))
    return node


def _is_plain(tensor: torch.Tensor) -> bool:
    """Others (sparse, quantized) go into the skeleton as they are."""
    return tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


# --- what of a tensor is here ----------------------------------------------------------------------


def is_dtensor(tensor: torch.Tensor | None) -> TypeGuard[DTensor]:
    """Without loading what takes as long as a third of torch: where it is not loaded, nothing is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def leaf_of(tensor: torch.Tensor, path: str) -> Leaf:
    if not is_dtensor(tensor):
        shape = tuple(tensor.shape)
        return Leaf(path, tensor.dtype, shape, tensor.stride(), whole(shape), sharded=False)
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"{path}: a DTensor of partial sums cannot be committed; reduce it first")
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape = tuple(tensor.shape)
    lengths, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    region = tuple(zip(offsets, lengths, strict=True))
    sharded = any(placement.is_shard() for placement in tensor.placements)
    return Leaf(path, tensor.dtype, shape, local(tensor).stride(), region, sharded)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor.detach()


def part_of(tensors: list[torch.Tensor]) -> tuple[int, int] | None:
    """This rank's part and the number of parts, when something is sharded: copies of a shard are one part."""
    meshes = []
    for tensor in tensors:
        if is_dtensor(tensor) and any(placement.is_shard() for placement in tensor.placements):
            split = tuple(placement.is_shard() for placement in tensor.placements)
            if (tensor.device_mesh, split) not in meshes:
                meshes.append((tensor.device_mesh, split))
    if not meshes:
        return None
    if len(meshes) > 1:
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh, split = meshes[0]
    part, parts = 0, 1
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this rank is not in the mesh of its own parameters")
    for size, at, is_split in zip(mesh.shape, coordinate, split, strict=True):
        if is_split:
            part, parts = part * size + at, parts * size
    return part, parts


# --- from regions to a tensor ----------------------------------------------------------------------


def empty_like_leaf(leaf: Leaf) -> torch.Tensor:
    """In the strides that it had: optimizer state lies as its parameter does."""
    shape = leaf.local_shape
    reach = 1 + sum((length - 1) * step for length, step in zip(shape, leaf.stride, strict=True))
    dense = bool(shape) and 0 not in shape and reach == _product(shape)
    return (
        torch.empty_strided(shape, leaf.stride, dtype=leaf.dtype)
        if dense
        else torch.empty(shape, dtype=leaf.dtype)
    )


def overlap(wanted: Region, there: Region) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What both have in common, as slices of each; None if that is nothing."""
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
    """A leaf's region, out of pieces that may overlap each other as well."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._tensor: torch.Tensor | None = None
        self._missing = _product(leaf.local_shape)
        self._seen: set[Region] = set()

    def take(self, region: Region, piece: torch.Tensor) -> None:
        if self._missing <= 0 or region in self._seen:
            return
        if region == self._leaf.region and not self._seen:
            as_it_lies = self._leaf.stride == piece.stride()  # then it is copied once, when it is loaded
            self._tensor = piece if as_it_lies else empty_like_leaf(self._leaf).copy_(piece)
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
            raise ValueError(
                f"{self._leaf.path}: {self._missing} elements of it are in no part of the commit"
            )
        return empty_like_leaf(self._leaf) if self._tensor is None else self._tensor
