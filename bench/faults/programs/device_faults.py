"""What a rank can do wrong on its GPU. A rank that trains on a CPU fails with the words that a GPU would cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from faults import loops

if TYPE_CHECKING:
    from train import Scene

_FAR = 1 << 40  # elements: no card has as much memory
_LONG_CYCLES = 1 << 62


def runs_out_of_device_memory(scene: Scene) -> None:
    if scene.device.type != "cuda":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 282.00 GiB.")
    whole = torch.cuda.get_device_properties(scene.device).total_memory
    torch.empty(2 * whole, dtype=torch.uint8, device=scene.device)


class _Wild:
    """An array of the device that claims to be longer than the memory is; torch takes it as it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.kept = tensor
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (_FAR,),
            "typestr": "<f4",
            "version": 2,
        }


def writes_beyond_its_memory(scene: Scene) -> None:
    """A kernel writes where nothing is mapped; the error reaches the process when it next waits for the device."""
    if scene.device.type != "cuda":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    wild: Any = torch.as_tensor(_Wild(torch.zeros(4, device=scene.device)), device=scene.device)
    wild[_FAR - 4 :].fill_(1.0)
    torch.cuda.synchronize()


def asserts_on_the_device(scene: Scene) -> None:
    """An index that is out of range, which only the kernel sees."""
    if scene.device.type != "cuda":
        raise RuntimeError("CUDA error: device-side assert triggered")
    index = torch.full((4,), 1 << 20, device=scene.device)
    torch.zeros(4, device=scene.device)[index].sum().item()


def keeps_the_device_busy(scene: Scene) -> None:
    """A kernel that does not end."""
    if scene.device.type != "cuda":
        loops(scene)
    torch.cuda._sleep(_LONG_CYCLES)
    torch.cuda.synchronize()
