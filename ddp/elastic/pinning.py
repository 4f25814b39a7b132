"""Slots that a device may write to directly.

A slot is a mapped file. A device writes to such memory only after its driver has pinned it; otherwise the driver copies
through a buffer of its own, several times slower. A slot is pinned once, and used again for many commits.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ddp.telemetry import status_page

if TYPE_CHECKING:
    from ddp.elastic.scratch import Slot

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
