"""Make a commit: copy tensors to an image in a slot, and pass it to the disk writer if needed.

The cost of each step is one copy of the state: into mapped memory, or on an accelerator into its own memory, from where
a thread brings it into mapped memory (`overlap`). Everything that does not change between commits (the layout, and the
views into the slots) is created once. It is reused as long as the tensors keep their shapes, types and devices.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ddp.elastic import bulk_copy, commits, generators, image, leaves, pinning
from ddp.elastic.overlap import Overlap
from ddp.elastic.writer import CommitError
from ddp.telemetry import guard
from ddp.telemetry.coded import WrongType

if TYPE_CHECKING:
    from ddp.elastic.contents import Captured
    from ddp.elastic.dcp_keys import Names
    from ddp.elastic.leaves import Leaf
    from ddp.elastic.protection import Protection
    from ddp.elastic.scratch import Slot, Slots
    from ddp.elastic.snapshot import Snapshot
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

    def places(self) -> list[tuple[Leaf, int]]:
        """The tensors that are stored, and where."""
        layout = self.layout
        return [(leaf, at) for leaf, at in zip(layout.leaves, layout.offsets, strict=True) if at >= 0]

    def stored(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [each for each, at in zip(tensors, self.layout.offsets, strict=True) if at >= 0]


@dataclass(frozen=True, slots=True)
class _Commit:
    """All of a commit but the tensors."""

    head: image.Head
    index: image.Index
    described: _Description
    names: Names | None  # if it is to be written to disk


@dataclass(frozen=True, slots=True)
class CopiedAhead:
    """A commit whose tensors are in a slot, and which does not exist yet."""

    keeper: Keeper
    commit: _Commit
    slot: Slot

    def is_of(self, commit: _Commit) -> bool:
        """Whether a commit of the same tensors would have them in the same place."""
        return (commit.described, commit.index.data_at) == (self.commit.described, self.commit.index.data_at)


class Keeper:
    """Makes the commits of one rank in one generation."""

    def __init__(
        self,
        slots: Slots,
        writer: Writer | None,
        signature: Signature,
        protection: Protection | None = None,
        overlap: bool = False,
    ) -> None:
        self._slots, self._writer, self._signature = slots, writer, signature
        self._protection, self._overlap = protection, Overlap(overlap)
        self._generation = _generation()
        self._described: _Description | None = None
        self._packed_objects: tuple[Any, bytes] = (None, b"")
        self._readable: set[Any] = set()  # types of values in skeletons that have proved readable
        self.newest: int | None = None  # the number of the last commit

    @property
    def keeps_all(self) -> bool:
        """Whether this rank keeps the replicated state on its node, and no rank has another part of it."""
        return self._signature.role.keeps_replicas and self._signature.role.parts == 1

    def copy_live(self, captured: Captured, number: int, most_bytes: int) -> CopiedAhead | None:
        """Copy the tensors that `keep_live` will keep. None if they have more bytes than that."""
        keeper, captured = self._of_live(), replace(captured, own={})
        tensors = leaves.all_local(captured.tensors)
        described = keeper._describe(captured, tensors)
        if described.layout.n_bytes > most_bytes:
            return None
        commit = keeper._prepared(captured, described, number, to_disk=False)
        slot = keeper._begin(commit)
        _copy(keeper._views(slot, commit), described.stored(tensors))
        return CopiedAhead(keeper, commit, slot)

    def keep_live(self, captured: Captured, number: int, ahead: CopiedAhead | None = None) -> None:
        """Keep the whole replicated state, whatever this rank keeps otherwise.

        `ahead`: what `copy_live` has returned, if no tensor has changed since.
        """
        # The interrupted step has changed the errors of communication hooks.
        captured = replace(captured, own={})
        if ahead is not None:
            described = ahead.keeper._describe(captured, leaves.all_local(captured.tensors))
            commit = ahead.keeper._prepared(captured, described, number, to_disk=False)
            if ahead.is_of(commit):
                return ahead.keeper._complete(commit, ahead.slot)
        return self._of_live().keep(captured, number, to_disk=False)

    def _of_live(self) -> Keeper:
        role = replace(self._signature.role, part=0, keeps_replicas=True, writes_disk=False)
        return Keeper(self._slots, None, replace(self._signature, role=role, live=True))

    def keep(self, captured: Captured, number: int, to_disk: bool) -> None:
        """Make a commit. If it is overlapped, it is complete some time after this call has returned."""
        tensors = leaves.all_local(captured.tensors)
        described = self._describe(captured, tensors)
        commit = self._prepared(captured, described, number, to_disk)
        stored = described.stored(tensors)
        self.settle()
        snapshot = self._overlap.take(described, described.places(), stored)
        if snapshot is None:
            slot = self._begin(commit)
            _copy(self._views(slot, commit), stored)
            if self._overlap.is_on:
                _wait_for_device()  # a rank that stores no tensors must not be ahead of the others either
            self._complete(commit, slot)
        else:
            self._overlap.start(number, lambda: self._send(commit, snapshot))

    def _prepared(self, captured: Captured, described: _Description, number: int, to_disk: bool) -> _Commit:
        objects = self._objects(captured.skeleton["objects"])
        skeleton, _kinds = self._pack(captured.skeleton | {"objects": objects})
        private, _kinds = self._pack(generators.get() | {leaves.OWN: captured.own})
        head = self._signature.head(number)
        index = image.index_of(head, skeleton, private, described.packed, described.layout.n_bytes)
        is_written = to_disk and self._writer is not None and head.part is not None
        return _Commit(head, index, described, captured.names() if is_written else None)

    def _send(self, commit: _Commit, snapshot: Snapshot) -> None:
        """Complete a commit from a snapshot, in a thread."""
        snapshot.wait()
        self._refuse_garbage()  # now, because what happens later does no harm to the snapshot
        slot = self._begin(commit)
        if snapshot.n_bytes:
            pinning.pin(slot, snapshot.device_type)
        data_at = commit.index.data_at
        snapshot.send(slot.buffer[data_at : data_at + commit.index.data_bytes], self._views(slot, commit))
        self._complete(commit, slot, is_checked=True)

    def _begin(self, commit: _Commit) -> Slot:
        slot = self._slots.next(commit.index.n_bytes)
        image.begin(slot.buffer)
        return slot

    def _complete(self, commit: _Commit, slot: Slot, is_checked: bool = False) -> None:
        """Let a commit exist, whose tensors are in the slot."""
        if not is_checked:
            self._refuse_garbage()  # after the copy, which waits for the collectives that have made the state
        image.finish(slot.buffer, commit.index)
        self._slots.keep(slot)
        head = commit.head
        self.newest = head.number
        if self._protection is not None:
            self._protection.committed(head.number, slot)
        if commit.names is not None:
            assert self._writer is not None
            assert head.part is not None
            name = commits.DiskName(commits.CommitName(head.number, head.lineage), head.part, head.parts)
            self._writer.write(slot, name, commit.names)

    def _refuse_garbage(self) -> None:
        if self._signature.live:
            return
        reason = guard.why_broken(ask=True)
        if not reason and _generation() != self._generation:
            reason = "this process has gone on in another generation before the device had made the state"
        if reason:
            raise CommitError(
                f"{reason}. The state may be garbage, so it is not committed. The last commit is still valid"
            )

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
        looks = [captured.paths, [(each.shape, each.stride(), each.dtype, each.device) for each in tensors]]
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

    def _views(self, slot: Slot, commit: _Commit) -> list[torch.Tensor]:
        data_at, described = commit.index.data_at, commit.described
        if slot.views is None or slot.views[:2] != (data_at, described):
            data = slot.buffer[data_at : data_at + described.layout.n_bytes]
            slot.views = (
                data_at,
                described,
                [image.view(data, leaf, at) for leaf, at in described.places()],
            )
        views: list[torch.Tensor] = slot.views[2]
        return views

    def takes(self, number: int, every: int) -> bool:
        """Whether to write a commit to disk that is due at every so many."""
        return self._writer is None or self._writer.takes(number, every)

    def begin(self) -> None:
        """Prepare the first commits. All ranks have read what they resume from."""
        self._slots.replace_old()

    def settle(self) -> None:
        """Wait until all commits are complete in memory."""
        self._overlap.settle()

    def leave(self) -> None:
        self.settle()
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
        """Wait for all commits, and raise the errors of those with this number or a later one."""
        self.settle()
        self._overlap.raise_error(CommitError, first)
        if self._writer is not None:
            self._writer.flush(first)

    def raise_error(self, before: int | None = None) -> None:
        self._overlap.raise_error(CommitError)
        if self._writer is not None:
            self._writer.raise_error(before=before)

    def end(self) -> None:
        """Another generation begins. What is complete stays."""
        self.settle()
        self._slots.settle()
        self.end_protection()
        self._overlap.end()

    def remove(self) -> None:
        self._overlap.end()
        if self._writer is not None:
            self._writer.finish()
        self._described = None
        if self._protection is not None:
            self._protection.remove()
        self._slots.remove()


_SCALARS = {type(None), bool, int, float, str, bytes}
_NEVER_CHANGE = {dict, OrderedDict, list, tuple, *_SCALARS}


def _generation() -> str:
    return os.environ.get("DDP_GENERATION", "")


def _wait_for_device() -> None:
    event = torch.Event(device=torch.accelerator.current_accelerator())
    event.record()
    event.synchronize()


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


def _copy(views: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    with torch.no_grad():
        if tensors:
            bulk_copy.copy_all(views, tensors)


def _check_readable(skeleton: bytes) -> None:
    """Raise if torch cannot read the skeleton safely: reading a file must not execute code in it."""
    try:
        image.read_plain(skeleton)
    except Exception as error:
        raise WrongType(
            "cannot commit the state: it has values that torch.load(weights_only=True) does not read. Use only plain "
            f"values and tensors, or allow the class with torch.serialization.add_safe_globals(): {error}"
        ) from error
