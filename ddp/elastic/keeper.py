"""From tensors to an image in a slot; and from there to disk, if it is to go there.

What costs time at every step is one copy of the state into mapped memory. Everything that stays the same
from commit to commit (the layout, and the views into the slots) is made once and kept for as long as the
tensors look alike.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ddp.elastic import commits, generators, image, leaves

if TYPE_CHECKING:
    from ddp.elastic.contents import Captured
    from ddp.elastic.scratch import Slot, Slots
    from ddp.elastic.writer import Writer


@dataclass(frozen=True, slots=True)
class Signature:
    """What every image of this rank in this generation says of itself."""

    lineage: str
    role: commits.Role
    rank: int
    world_size: int
    regions: int

    def head(self, number: int) -> image.Head:
        role = self.role
        return image.Head(
            number, self.lineage, role.part, role.parts, self.rank, self.world_size, self.regions
        )


@dataclass(eq=False)
class _Description:
    """Of tensors that look like these."""

    looks: list[Any]
    layout: image.Layout
    packed: bytes


class Keeper:
    def __init__(self, slots: Slots, writer: Writer | None, signature: Signature) -> None:
        self._slots, self._writer, self._signature = slots, writer, signature
        self._described: _Description | None = None
        self._packed_objects: tuple[Any, bytes] = (None, b"")
        self._readable: set[Any] = set()  # kinds of values in skeletons that were seen to be readable

    def keep(self, captured: Captured, number: int, to_disk: bool) -> None:
        tensors = [leaves.local(each) for each in captured.tensors]
        described = self._describe(captured, tensors)
        objects = self._objects(captured.skeleton["objects"])
        skeleton, _kinds = self._packed(captured.skeleton | {"objects": objects})
        private = image.saved(generators.get())
        head = self._signature.head(number)
        index = image.index_of(head, skeleton, private, described.packed, described.layout.n_bytes)
        slot = self._slots.next(index.n_bytes)
        image.begin(slot.buffer)
        _copy(self._views(slot, index.data_at, described), tensors, described.layout)
        image.finish(slot.buffer, index)
        self._slots.keep(slot)
        if to_disk and self._writer is not None and head.part is not None:
            name = commits.DiskName(commits.CommitName(number, head.lineage), head.part, head.parts)
            self._writer.write(slot, name)

    def _objects(self, skeleton: Any) -> bytes:
        """Of an optimizer it is long, and the same from step to step."""
        known, packed = self._packed_objects
        if known is None or known != skeleton:
            packed, kinds = self._packed(skeleton)
            # It is made anew for each commit, but not what it has for leaves: a counter in it may count on.
            self._packed_objects = (skeleton if kinds <= _NEVER_CHANGE else None, packed)
        return packed

    def _packed(self, skeleton: Any) -> tuple[bytes, set[Any]]:
        """Refused now, and not when it is needed, if it has values that cannot be read back."""
        packed, kinds = image.saved(skeleton), _kinds_in(skeleton)
        if not kinds <= self._readable:
            _must_be_readable(packed)
            self._readable |= kinds
        return packed, kinds

    def _describe(self, captured: Captured, tensors: list[torch.Tensor]) -> _Description:
        looks = [captured.paths, [(each.shape, each.stride(), each.dtype) for each in tensors]]
        if self._described is None or self._described.looks != looks:
            pairs = zip(captured.tensors, captured.paths, strict=True)
            found = [leaves.leaf_of(tensor, path) for tensor, path in pairs]
            role = self._signature.role
            kept = [role.part is not None and (leaf.sharded or role.keeps_replicas) for leaf in found]
            layout = image.Layout.of(found, kept)
            self._described = _Description(looks, layout, layout.packed())
        return self._described

    def _views(self, slot: Slot, data_at: int, described: _Description) -> list[torch.Tensor]:
        if slot.views is None or slot.views[:2] != (data_at, described):
            layout = described.layout
            data = slot.buffer[data_at : data_at + layout.n_bytes]
            kept = [(leaf, at) for leaf, at in zip(layout.leaves, layout.offsets, strict=True) if at >= 0]
            slot.views = (data_at, described, [image.view(data, leaf, at) for leaf, at in kept])
        views: list[torch.Tensor] = slot.views[2]
        return views

    def flush(self, first: int = 0) -> None:
        if self._writer is not None:
            self._writer.flush(first)

    def raise_error(self, before: int | None = None) -> None:
        if self._writer is not None:
            self._writer.raise_error(before=before)

    def remove(self) -> None:
        self._described = None
        self._slots.remove()


_SCALARS = {type(None), bool, int, float, str, bytes}
_NEVER_CHANGE = {dict, OrderedDict, list, tuple, *_SCALARS}


def _kinds_in(skeleton: Any) -> set[Any]:
    """The types of all that is in it. Bytes that are empty are stored in a way of their own, and so are a kind."""
    found: set[Any] = {type(skeleton)}
    rest = [skeleton]
    while rest:
        node = rest.pop()
        inside = [*node, *node.values()] if isinstance(node, dict) else node
        kinds = set(map(type, inside))
        found |= kinds
        if not kinds <= _SCALARS:
            rest += [each for each in inside if isinstance(each, (dict, list, tuple, set, frozenset))]
        if bytes in kinds and any(type(each) is bytes and not each for each in inside):
            found.add(b"")
    return found


def _copy(views: list[torch.Tensor], tensors: list[torch.Tensor], layout: image.Layout) -> None:
    kept = [tensor for tensor, at in zip(tensors, layout.offsets, strict=True) if at >= 0]
    with torch.no_grad():
        if kept:
            torch._foreach_copy_(views, kept)


def _must_be_readable(skeleton: bytes) -> None:
    """Files are read without executing anything that is in them."""
    try:
        torch.load(io.BytesIO(skeleton), weights_only=True)
    except Exception as error:
        raise TypeError(
            "the state has values that torch.load(weights_only=True) will not read back; keep plain values and "
            f"tensors, or allow the class with torch.serialization.add_safe_globals: {error}"
        ) from error
