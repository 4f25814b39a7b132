"""Make a commit: copy tensors to an image in a slot, and pass it to the disk writer if needed.

The cost of each step is one copy of the state: into mapped memory, or on an accelerator into its own memory, from where
a thread brings it into mapped memory (`overlap`). Everything that does not change between commits (the layout, and the
views into the slots) is created once. It is reused as long as the tensors keep their shapes, types and devices.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

import _ddp_launch_entry as doors
from ddp.elastic import commits, generators
from ddp.elastic.files.writer import CommitError, Writer
from ddp.elastic.images import copies, image, leaves
from ddp.groups import accelerator
from ddp.telemetry import capture, guard, status_page, torch_api
from ddp.telemetry.coded import CodedError, WrongType, WrongUse
from ddp.telemetry.contracts import GENERATION, REDUNDANCY

if TYPE_CHECKING:
    from pathlib import Path

    from ddp.elastic.contents import Captured
    from ddp.elastic.files.dcp import Names
    from ddp.elastic.images.kept_images import Slot, Slots
    from ddp.elastic.images.leaves import Leaf
    from ddp.elastic.resume import LocalImages
    from ddp.elastic.team import Team


# Which bytes of an image come from which device, so that each device sends few pieces instead of each tensor.

_LARGEST_GAP = 64 << 10  # the bytes of other tensors inside a span, which its device has memory for as well


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in the data of an image."""

    begin: int
    n_bytes: int
    device: str  # "" if it is in the memory of the host


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """Bytes of the data of an image that one device sends in one piece."""

    device: str
    begin: int
    end: int

    def has(self, tensor: Stored) -> bool:
        return tensor.device == self.device and self.begin <= tensor.begin < self.end


def spans(tensors: Sequence[Stored]) -> tuple[DeviceSpan, ...]:
    """Return the spans that have all tensors of devices, in order; `tensors`: ordered by where they begin.

    Small tensors of the host may lie inside of a span, such as the counts of steps in the state of Adam. Their bytes
    are written after those of the span.
    """
    found: list[DeviceSpan] = []
    between = 0  # bytes of the host's tensors since the last span
    for each in tensors:
        if not each.n_bytes:
            continue
        if not each.device:
            between += each.n_bytes
            continue
        end = each.begin + each.n_bytes
        if found and found[-1].device == each.device and between <= _LARGEST_GAP:
            found[-1] = DeviceSpan(each.device, found[-1].begin, end)
        else:
            found.append(DeviceSpan(each.device, each.begin, end))
        between = 0
    return tuple(found)


# --- pinned memory ---------------------------------------------------------------------------------
#
# Slots that a device may write to directly.
#
# A slot is a mapped file. A device writes to such memory only after its driver has pinned it; otherwise the driver
# copies through a buffer of its own, several times slower. A slot is pinned once, and used again for many commits.

log = logging.getLogger("ddp.elastic")
_FOR_ALL_CONTEXTS = 1  # cudaHostRegisterPortable
_SLOWER = (
    "ddp.elastic: the memory of commits (%s) cannot be pinned: %s. Copies from the device take longer, in the "
    "background. Raise the limit of locked memory (ulimit -l), or enlarge /dev/shm if the memory is not there"
)


def pin(slot: Slot, device_type: str) -> None:
    """Pin a slot for devices of this type, once. Without success it is used as it is, and one warning says why."""
    if slot.was_offered:
        return
    slot.was_offered = True
    problem = _pinned(slot, device_type)
    if problem and status_page.once("unpinned commits"):
        log.warning(_SLOWER, slot.path, problem)


def _pinned(slot: Slot, device_type: str) -> str:
    """Pin it and return "", or what is wrong."""
    offer = getattr(torch.get_device_module(device_type), "cudart", None)
    if offer is None:
        return f"torch.{device_type} does not offer it"
    runtime: Any = offer()
    address = torch.frombuffer(slot.buffer, dtype=torch.uint8).data_ptr()
    error = runtime.cudaHostRegister(address, len(slot.buffer), _FOR_ALL_CONTEXTS)
    if int(error):
        return f"cudaHostRegister: {error}"
    # Before the memory is unmapped. At the end of the process, the driver does it.
    weakref.finalize(slot, runtime.cudaHostUnregister, address).atexit = False
    return ""


# --- a snapshot on the device ----------------------------------------------------------------------
#
# A copy of the state on its device, from which a commit is made while the training goes on.
#
# Theory of operation
# -------------------
# The host runs ahead of the device: when it calls commit(), the last optimizer step may not have run, and the
# kernels of the next step follow at once. So the state is copied *on the device and in the current stream*. The
# copy lies behind everything that made the state, and in front of everything that the script launches later, on
# this stream or on one that is ordered after it. It does not matter who writes to the state next: an optimizer, a
# fused kernel, a forward pass with buffers, or the replay of a graph, which no hook in Python sees. The host waits
# for nothing.
#
# The copy has the bytes as the image will have them. When the device has passed it, a thread sends them to the
# host: one copy for each span (`spans`), in a stream of its own, while the kernels of the next step run. Tensors in
# the memory of the host have no kernels that are still to come: they are copied at once.
#
# The memory of a snapshot is used again by the next commit. Its owner waits until it was sent (`overlap`).

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.002
# Tensors of these types are copied by one kernel for many. torch refuses some of the others.
_COPIED_TOGETHER = {torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32}


class NoRoom(Exception):
    """The device has no memory for a snapshot; the text says how much is missing."""


class Snapshot:
    """The memory for copies of tensors with these places in an image. `device`: the accelerator of this rank."""

    def __init__(
        self, places: Sequence[tuple[Leaf, int]], tensors: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        stored = [
            Stored(at, leaf.n_bytes, "" if tensor.device.type == "cpu" else str(tensor.device))
            for (leaf, at), tensor in zip(places, tensors, strict=True)
        ]
        self._spans = spans(stored)
        self._devices = sorted({torch.device(each.device) for each in self._spans}, key=str) or [device]
        self._buffers = _allocated(self._spans)
        self._copies = [self._copy_of(leaf, each) for (leaf, _at), each in zip(places, stored, strict=True)]
        self._of_host = [number for number, each in enumerate(stored) if not each.device]
        self._groups = [
            (numbers, [self._copies[number] for number in numbers])
            for numbers in _copied_together(tensors, self._copies)
        ]
        self._streams = {each: torch.Stream(each) for each in self._devices}
        self._passed: list[torch.Event] = []

    def _copy_of(self, leaf: Leaf, stored: Stored) -> torch.Tensor:
        for span, buffer in zip(self._spans, self._buffers, strict=True):
            if span.has(stored):
                return image.part(buffer, leaf, stored.begin - span.begin)
        return torch.empty(leaf.local_shape, dtype=leaf.dtype, device=stored.device or "cpu")

    @property
    def device_type(self) -> str:
        return self._devices[0].type

    @property
    def n_bytes(self) -> int:
        """The memory of devices that it takes."""
        return sum(each.numel() for each in self._buffers)

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors, in the order of the current streams. The host does not wait."""
        with torch.no_grad():
            for numbers, copies in self._groups:
                torch_api.copy_all(copies, [tensors[number] for number in numbers])
        self._passed = [_event_of(torch.accelerator.current_stream(each)) for each in self._devices]

    def wait(self) -> None:
        """Wait until the devices have made the copies. Raise what a device reports."""
        # A new thread begins on the first device. Whatever it asks there would open a context on it.
        torch.accelerator.set_stream(self._streams[self._devices[-1]])
        _wait_for(self._passed)

    def send(self, data: memoryview, views: Sequence[torch.Tensor]) -> None:
        """Write what was copied to the data of an image, and wait until it is there. `views`: of its tensors."""
        sent = []
        with torch.no_grad():
            for span, buffer in zip(self._spans, self._buffers, strict=True):
                stream = self._streams[buffer.device]
                torch.accelerator.set_stream(stream)
                into = torch.frombuffer(data, dtype=torch.uint8, count=buffer.numel(), offset=span.begin)
                into.copy_(buffer, non_blocking=True)
                sent.append(_event_of(stream))
            _wait_for(sent)
            if self._of_host:
                copies = [self._copies[number] for number in self._of_host]
                torch_api.copy_all([views[number] for number in self._of_host], copies)


def _allocated(wanted: Iterable[DeviceSpan]) -> list[torch.Tensor]:
    """Allocate the memory of all spans, from what the training has never used: it would be missed at its next peak."""
    buffers = []
    for span in wanted:
        device, n_bytes = torch.device(span.device), span.end - span.begin
        ask = getattr(torch.get_device_module(device), "mem_get_info", None)
        if ask is not None:
            free, whole = ask(device)
            spare = whole // 20
            if free - n_bytes < spare:
                raise NoRoom(
                    f"{span.device} has {free >> 20} MiB free, and {(n_bytes + spare) >> 20} MiB are needed"
                )
        try:
            buffers.append(torch.zeros(n_bytes, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError as error:
            raise NoRoom(f"{span.device} has no {n_bytes >> 20} MiB free") from error
    return buffers


def _copied_together(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> list[list[int]]:
    """Divide tensors into groups, each of which a device copies with few kernels."""
    groups: dict[Any, list[int]] = {}
    for number, (tensor, copy) in enumerate(zip(tensors, copies, strict=True)):
        together = tensor.dtype in _COPIED_TOGETHER and tensor.stride() == copy.stride()
        key = (tensor.device, tensor.dtype) if together else (tensor.device, number)
        if tensor.numel():
            groups.setdefault(key, []).append(number)
    return list(groups.values())


def _event_of(stream: torch.Stream) -> torch.Event:
    event = torch.Event(device=stream.device)
    event.record(stream)
    return event


def _wait_for(events: Sequence[torch.Event]) -> None:
    """Wait without a processor: a wait for an event of CUDA keeps one busy, and the step may take seconds."""
    pause_s = _SHORTEST_PAUSE_S
    while not all(each.query() for each in events):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


# --- commits beside the training -------------------------------------------------------------------
#
# The part of a commit that runs while the training goes on: at most one commit at a time.
#
# The thread of the training takes a snapshot (`snapshot`) and goes on. A thread waits until the device has made it,
# copies it to the host, and completes the image there. Only then does the commit exist, for this rank and for all
# others.
#
# - The next commit waits until this one is complete: there is one snapshot. So a rank is at most two commits ahead of
#   the slowest one, and keeps three (docs/decisions/0025-commits-beside-the-training.md).
# - What goes wrong is raised by the next call of commit(), flush() or checkpoint().
# - The first commits of a generation are made before the training goes on. What memory the device has to spare is known
#   only after a step or two.

_BEFORE = 2  # commits before the first one that is overlapped
_NO_ROOM = (
    "ddp.elastic: commit() waits for the device: a copy of the state does not fit into its memory: %s. Training "
    "continues. State(overlap=False) turns these copies off; State(every=N) makes fewer commits"
)


class Overlap:
    """The commits of one rank and generation. `is_on`: whether they may be overlapped."""

    def __init__(self, is_on: bool = False) -> None:
        self.is_on = is_on
        self._n_commits = 0
        self._for: Any = None  # what the snapshot fits
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._failed: dict[int, Exception] = {}  # by the number of the commit

    def take(
        self, layout: object, places: Sequence[tuple[Leaf, int]], tensors: Sequence[torch.Tensor]
    ) -> Snapshot | None:
        """Take a snapshot; None: this commit is made at once. `layout`: changes if places or devices do."""
        if not self.is_on:
            return None
        if capture.is_capturing():
            raise WrongUse(
                "commit() during the capture of a graph: the state does not exist yet. Call it after the replay"
            )
        self._n_commits += 1
        if self._n_commits <= _BEFORE:
            return None
        if self._for is not layout:
            self._for, self._snapshot = layout, None  # the old memory is free before the new one is asked for
            self._snapshot = _new_snapshot(places, tensors)
        if self._snapshot is not None:
            self._snapshot.take(tensors)
        return self._snapshot

    def start(self, number: int, finish: Callable[[], None]) -> None:
        """Let a thread finish a commit."""
        thread = threading.Thread(target=self._run, args=(number, finish), name="ddp-copy", daemon=True)
        _running.add(self)
        try:
            thread.start()
        except RuntimeError:  # the process cannot start another thread
            stream = torch.accelerator.current_stream()
            self._run(number, finish)
            torch.accelerator.set_stream(stream)
        else:
            self._thread = thread

    def _run(self, number: int, finish: Callable[[], None]) -> None:
        try:
            finish()
        except Exception as error:
            self._failed[number] = error

    def settle(self) -> None:
        """Wait until the last commit is complete, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def end(self) -> None:
        """Free the memory of the device."""
        self.settle()
        self._for = self._snapshot = None

    def raise_error(self, failure: type[CodedError], first: int = 0) -> None:
        """Raise an error if a commit from `first` on has failed and was not reported yet."""
        numbers = [number for number in list(self._failed) if number >= first]
        if not numbers:
            return
        number, error = numbers[-1], [self._failed.pop(each) for each in numbers][-1]
        if isinstance(error, CodedError):
            raise error
        raise failure(
            f"commit {number} could not be copied from the device: {error}. The commits before it are still valid. "
            "If the device has failed, end this process: the restarted ranks resume from them"
        ) from error


def _new_snapshot(places: Sequence[tuple[Leaf, int]], tensors: Sequence[torch.Tensor]) -> Snapshot | None:
    device = accelerator.current()
    assert device is not None
    try:
        found = Snapshot(places, tensors, torch.device(device.type, torch.accelerator.current_device_index()))
    except NoRoom as error:
        if status_page.once("no room for snapshots"):
            log.warning(_NO_ROOM, error)
        return None
    _settle_before_captures(device.type)
    return found


# --- captures of graphs ---------------------------------------------------------------------------

_running: weakref.WeakSet[Overlap] = weakref.WeakSet()


@functools.cache
def _settle_before_captures(device_type: str) -> None:
    """Complete commits before a capture begins: by default, any thread that asks the device for something breaks it."""
    module = torch.get_device_module(device_type)
    graphs: list[Any] = [getattr(module, name, None) for name in ("CUDAGraph", "XPUGraph")]
    for graph in (*graphs, getattr(torch.accelerator, "Graph", None)):
        if hasattr(graph, "capture_begin"):
            graph.capture_begin = _after_settling(graph.capture_begin)


def _after_settling(begin: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin)
    def capture_begin(*arguments: Any, **more: Any) -> Any:
        for each in list(_running):
            each.settle()
        return begin(*arguments, **more)

    return capture_begin


# --- the keeper ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Signature:
    """The metadata that is the same in all images of this rank in this generation."""

    lineage: str
    role: commits.CommitRole
    rank: int
    world_size: int
    regions: int
    live: bool = False

    def head(self, number: int) -> image.ImageHead:
        role = self.role
        return image.ImageHead(
            number, self.lineage, role.part, role.parts, self.rank, self.world_size, self.regions, self.live
        )


@dataclass(eq=False)
class _Description:
    """The layout of tensors with these shapes, strides and dtypes."""

    looks: list[Any]
    layout: image.ImageLayout
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

    head: image.ImageHead
    index: image.ImageIndex
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


# --- the door of what keeps commits in memory although nodes are lost ------------------------------


class CommitShield(Protocol):
    """The door `ddp_launch.commit_shield`: one for each generation. `rebuild` and `begin` are collective."""

    @property
    def more_slots(self) -> int: ...

    @property
    def is_active(self) -> bool: ...

    @property
    def protected(self) -> int | None:
        """The number of the last protected commit."""

    def rebuild(self, local: LocalImages, /) -> None:
        """Compute the lost images that this rank is to have."""

    def begin(self, slots: Slots, lineage: str, spared: set[str], /) -> None: ...

    def committed(self, number: int, slot: Slot, /) -> None: ...

    def stop(self) -> None: ...

    def remove(self) -> None: ...


class OpenShield(Protocol):
    """Collective. `parts`: of the state."""

    def __call__(self, team: Team, node: str, places: list[Path], parts: int, /) -> CommitShield: ...


def asked_shield(option: str | None, environ: Mapping[str, str]) -> OpenShield | None:
    """What the script asks for, otherwise the launcher."""
    text = environ.get(REDUNDANCY, "") if option is None else option
    if text == "":
        return None
    found: OpenShield | None = doors.find(doors.COMMIT_SHIELD, "redundancy")(text, environ)
    return found


class Keeper:
    """Makes the commits of one rank in one generation."""

    def __init__(
        self,
        slots: Slots,
        writer: Writer | None,
        signature: Signature,
        protection: CommitShield | None = None,
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
    def lineage(self) -> str:
        return self._signature.lineage

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
            pin(slot, snapshot.device_type)
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
            reason = "this process continued in another generation before the device had made the state"
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
            layout = image.ImageLayout.of(found, kept)
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
        return None if self._protection is None else self._protection.protected

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
    return os.environ.get(GENERATION, "")


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
            copies.copy_all(views, tensors)


def _check_readable(skeleton: bytes) -> None:
    """Raise if torch cannot read the skeleton safely: reading a file must not execute code in it."""
    try:
        image.read_plain(skeleton)
    except Exception as error:
        raise WrongType(
            "cannot commit the state: it has values that torch.load(weights_only=True) does not read. Use only plain "
            f"values and tensors, or allow the class with torch.serialization.add_safe_globals(): {error}"
        ) from error
