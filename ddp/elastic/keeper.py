"""Make a commit: copy tensors to an image in a slot, and pass it to the disk writer if needed.

The cost of each step is one copy of the state into mapped memory. Everything that does not change between commits (the
layout, and the views into the slots) is created once. It is reused as long as the tensors keep their shapes and types.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ddp.elastic import commits, generators, image, leaves
from ddp.elastic.writer import CommitError
from ddp.telemetry import guard, torch_api
from ddp.telemetry.coded import WrongType

if TYPE_CHECKING:
    from ddp.elastic.contents import Captured
    from ddp.elastic.protection import Protection
    from ddp.elastic.scratch import Slot, Slots
    from ddp.elastic.writer import Writer


@dataclass(frozen=True, slots=True)
class Signature:
    """The metadata that is the same in all images of this rank in this generation."""

    lineage: str
    role: commits.Role
    rank: int
    world_size: int
    regions: int
    live: bool = False

    def head(self, number: int) -> image.Head:
        role = self.role
        return image.Head(
            number, self.lineage, role.part, role.parts, self.rank, self.world_size, self.regions, self.live
        )


@dataclass(eq=False)
class _Description:
    """The layout of tensors with these shapes, strides and dtypes."""

    looks: list[Any]
    layout: image.Layout
    packed: bytes


class Keeper:
    """Makes the commits of one rank in one generation."""

    def __init__(
        self,
        slots: Slots,
        writer: Writer | None,
        signature: Signature,
        protection: Protection | None = None,
    ) -> None:
        self._slots, self._writer, self._signature = slots, writer, signature
        self._protection = protection
        self._described: _Description | None = None
        self._packed_objects: tuple[Any, bytes] = (None, b"")
        self._readable: set[Any] = set()  # types of values in skeletons that have proved readable
        self.newest: int | None = None  # the number of the last commit

    def keep_live(self, captured: Captured, number: int) -> None:
        """Keep the whole replicated state, whatever this rank keeps otherwise."""
        captured = replace(
            captured, own={}
        )  # the interrupted step has changed the errors of communication hooks
        role = replace(self._signature.role, part=0, keeps_replicas=True, writes_disk=False)
        Keeper(self._slots, None, replace(self._signature, role=role, live=True)).keep(
            captured, number, False
        )

    def keep(self, captured: Captured, number: int, to_disk: bool) -> None:
        tensors = [leaves.local(each) for each in captured.tensors]
        described = self._describe(captured, tensors)
        objects = self._objects(captured.skeleton["objects"])
        skeleton, _kinds = self._pack(captured.skeleton | {"objects": objects})
        private, _kinds = self._pack(generators.get() | {leaves.OWN: captured.own})
        head = self._signature.head(number)
        index = image.index_of(head, skeleton, private, described.packed, described.layout.n_bytes)
        slot = self._slots.next(index.n_bytes)
        image.begin(slot.buffer)
        _copy(self._views(slot, index.data_at, described), tensors, described.layout)
        if not self._signature.live:
            _refuse_garbage()  # after the copy, which waits for the collectives that have made the state
        image.finish(slot.buffer, index)
        self._slots.keep(slot)
        self.newest = number
        if self._protection is not None:
            self._protection.committed(number, slot)
        if to_disk and self._writer is not None and head.part is not None:
            name = commits.DiskName(commits.CommitName(number, head.lineage), head.part, head.parts)
            self._writer.write(slot, name, captured.names())

    def _objects(self, skeleton: Any) -> bytes:
        """Pack the objects' skeletons, and reuse the last result:

        the skeleton of an optimizer is long and rarely changes.
        """
        known, packed = self._packed_objects
        if known is None or known != skeleton:
            packed, kinds = self._pack(skeleton)
            # state_dict() returns new containers, but maybe the same leaves: a mutable leaf may change unnoticed.
            self._packed_objects = (skeleton if kinds <= _NEVER_CHANGE else None, packed)
        return packed

    def _pack(self, skeleton: Any) -> tuple[bytes, set[Any]]:
        """Pack a skeleton. Raise now if a value cannot be loaded again, instead of at the resume."""
        packed, kinds = image.serialize(skeleton), _kinds_in(skeleton)
        if not kinds <= self._readable:
            _check_readable(packed)
            self._readable |= kinds
        return packed, kinds

    def _describe(self, captured: Captured, tensors: list[torch.Tensor]) -> _Description:
        looks = [captured.paths, [(each.shape, each.stride(), each.dtype) for each in tensors]]
        if self._described is None or self._described.looks != looks:
            pairs = zip(captured.tensors, captured.paths, strict=True)
            found = [leaves.leaf_of(tensor, path) for tensor, path in pairs]
            role = self._signature.role
            kept = [
                leaf.is_own or (role.part is not None and (leaf.sharded or role.keeps_replicas))
                for leaf in found
            ]
            layout = image.Layout.of(found, kept)
            self._described = _Description(looks, layout, layout.pack())
        return self._described

    def _views(self, slot: Slot, data_at: int, described: _Description) -> list[torch.Tensor]:
        if slot.views is None or slot.views[:2] != (data_at, described):
            layout = described.layout
            data = slot.buffer[data_at : data_at + layout.n_bytes]
            kept = [(leaf, at) for leaf, at in zip(layout.leaves, layout.offsets, strict=True) if at >= 0]
            slot.views = (data_at, described, [image.view(data, leaf, at) for leaf, at in kept])
        views: list[torch.Tensor] = slot.views[2]
        return views

    def takes(self, number: int, every: int) -> bool:
        """Whether to write a commit to disk that is due at every so many."""
        return self._writer is None or self._writer.takes(number, every)

    def leave(self) -> None:
        self.end_protection()
        if self._writer is not None:
            self._writer.leave()

    def end_protection(self) -> None:
        """Other nodes keep what they have, and get nothing more."""
        if self._protection is not None:
            self._protection.stop()

    @property
    def protected(self) -> int | None:
        protector = None if self._protection is None else self._protection.protector
        return None if protector is None else protector.protected

    def flush(self, first: int = 0) -> None:
        if self._writer is not None:
            self._writer.flush(first)

    def raise_error(self, before: int | None = None) -> None:
        if self._writer is not None:
            self._writer.raise_error(before=before)

    def remove(self) -> None:
        self._described = None
        if self._protection is not None:
            self._protection.remove()
        self._slots.remove()


_SCALARS = {type(None), bool, int, float, str, bytes}
_NEVER_CHANGE = {dict, OrderedDict, list, tuple, *_SCALARS}


def _refuse_garbage() -> None:
    if reason := guard.why_broken(ask=True):
        raise CommitError(
            f"{reason}. The state may be garbage, so it is not committed. The last commit is still valid"
        )


def _kinds_in(skeleton: Any) -> set[Any]:
    """The types of all values in a skeleton. An empty `bytes` is a separate type: it is stored differently."""
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
            torch_api.copy_all(views, kept)


def _check_readable(skeleton: bytes) -> None:
    """Raise if torch cannot read the skeleton safely: reading a file must not execute code in it."""
    try:
        image.read_plain(skeleton)
    except Exception as error:
        raise WrongType(
            "cannot commit the state: it has values that torch.load(weights_only=True) does not read. Use only plain "
            f"values and tensors, or allow the class with torch.serialization.add_safe_globals(): {error}"
        ) from error
