"""Which bytes of an image come from which device, so that each device sends few pieces instead of each tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

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
