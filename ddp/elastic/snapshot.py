"""A copy of the state on its device, from which a commit is made while the training goes on.

Theory of operation
-------------------
The host runs ahead of the device: when it calls commit(), the last optimizer step may not have run, and the kernels of
the next step follow at once. So the state is copied *on the device and in the current stream*. The copy lies behind
everything that made the state, and in front of everything that the script launches later, on this stream or on one that
is ordered after it. It does not matter who writes to the state next: an optimizer, a fused kernel, a forward pass with
buffers, or the replay of a graph, which no hook in Python sees. The host waits for nothing.

The copy has the bytes as the image will have them. When the device has passed it, a thread sends them to the host: one
copy for each span (`spans`), in a stream of its own, while the kernels of the next step run. Tensors in the memory of
the host have no kernels that are still to come: they are copied at once.

The memory of a snapshot is used again by the next commit. Its owner waits until it was sent (`overlap`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from ddp.elastic import image, spans
from ddp.telemetry import torch_api

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddp.elastic.leaves import Leaf

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
            spans.Stored(at, leaf.n_bytes, "" if tensor.device.type == "cpu" else str(tensor.device))
            for (leaf, at), tensor in zip(places, tensors, strict=True)
        ]
        self._spans = spans.spans(stored)
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

    def _copy_of(self, leaf: Leaf, stored: spans.Stored) -> torch.Tensor:
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


def _allocated(wanted: Iterable[spans.Span]) -> list[torch.Tensor]:
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
