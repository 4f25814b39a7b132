"""An emulated accelerator for tests: a second device type, `emu`, with two devices (tests/accelerator/README.md).

Importing this module compiles it if need be, and registers it with torch under the names that torch expects of a
device's module: `torch.emu`. It raises `CannotBuild` where it cannot be compiled.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.machinery
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from emu_build import CannotBuild, built

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "BACKEND",
    "CannotBuild",
    "Gate",
    "counters",
    "launch",
    "no_host_sync",
    "set_kernel_delay",
    "synchronize",
]

NAME = "emu"
BACKEND = "eccl"  # as NCCL treats streams, for this device


def _loaded() -> Any:
    loader = importlib.machinery.ExtensionFileLoader("_emu", str(built()))
    spec = importlib.util.spec_from_loader("_emu", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


_emu = _loaded()


def autoload() -> None:
    """The entry point `torch.backends`: to import this module is all."""


# --- what torch calls ----------------------------------------------------------------------------------


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    in_use: bool = _emu.in_use()
    return in_use


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    count: int = _emu.DEVICES
    return count


def _index(device: Any = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def current_device() -> int:
    index: int = _emu.current_device()
    return index


def set_device(device: Any) -> None:
    _emu.set_device(_index(device))


class device(torch.accelerator.device_index):
    """The current device of a context, as torch.cuda.device."""

    def __init__(self, device: Any) -> None:
        super().__init__(_index(device))


Stream, Event = torch.Stream, torch.Event


def get_device_name(device: Any = None) -> str:
    return f"emulated accelerator {_index(device)}"


def synchronize(device: Any = None) -> None:
    _emu.synchronize(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def manual_seed(seed: int) -> None:
    _emu.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _emu.default_generator(index).manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    state: torch.Tensor = _emu.default_generator(_index(device)).get_state()
    return state


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _emu.default_generator(_index(device)).set_state(state)


def memory_allocated(device: Any = None) -> int:
    used: int = _emu.memory_allocated(_index(device))
    return used


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """What is free, and what there is."""
    whole: int = _emu.memory_limit(_index(device))
    return whole - memory_allocated(device), whole


class _Runtime:
    """What `torch.cuda.cudart()` offers for memory that exists already."""

    @staticmethod
    def cudaHostRegister(address: int, size: int, _flags: int) -> int:
        _emu.pin(address, size)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        _emu.unpin(address)
        return 0


def cudart() -> type[_Runtime]:
    return _Runtime


# --- what tests call -----------------------------------------------------------------------------------


def counters() -> dict[str, int]:
    """kernels, copies, collectives; host_syncs: how often a thread had to wait; queries: how often one only asked;
    unforeseen_waits: waits of this emulation that a real device would not have, so not counted among host_syncs."""
    found: dict[str, int] = _emu.counters()
    return found


def take_sync_reasons() -> list[str]:
    """What made the host wait since the last call."""
    reasons: list[str] = _emu.take_sync_reasons()
    return reasons


@contextlib.contextmanager
def no_host_sync() -> Iterator[None]:
    """In this context, an operation that makes the host wait raises an error, in whatever thread it is."""
    before = _emu.set_sync_is_error(True)
    try:
        yield
    finally:
        _emu.set_sync_is_error(before)


@contextlib.contextmanager
def slow(kernels: float = 0.0, collectives: float = 0.0) -> Iterator[None]:
    """In this context each kernel, each collective, takes so many seconds longer."""
    set_kernel_delay(kernels)
    set_collective_delay(collectives)
    try:
        yield
    finally:
        set_kernel_delay(0.0)
        set_collective_delay(0.0)


def set_kernel_delay(seconds: float) -> None:
    _emu.set_kernel_delay(seconds)


def set_collective_delay(seconds: float) -> None:
    _emu.set_collective_delay(seconds)


def set_poison(on: bool) -> None:
    """Whether new memory is filled with NaN; for measurements it is not."""
    _emu.set_poison(on)


def set_memory_limit(size: int, device: Any = None) -> None:
    _emu.set_memory_limit(_index(device), size)


def launch(function: Callable[[], object], stream: torch.Stream | None = None) -> None:
    """Call a Python function as a kernel of a stream; it may use `kernel_view` of tensors made before."""
    _emu.launch(stream or current_stream(), function)


def kernel_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of this one. Only what runs on a stream may read or write it."""
    view: torch.Tensor = _emu.kernel_view(tensor)
    return view


class Gate:
    """A stream stands still from here on until `open`."""

    def __init__(self, stream: torch.Stream | None = None) -> None:
        self._gate = _emu.Gate(stream or current_stream())

    def open(self) -> None:
        self._gate.open()


# --- registration --------------------------------------------------------------------------------------


def _group(options: Any, _backend_options: Any) -> Any:
    over = [
        dist.ProcessGroupGloo(
            dist.PrefixStore(f"{NAME}{index}", options.store),
            options.group_rank,
            options.group_size,
            options.timeout,
        )
        for index in range(device_count())
    ]
    return _emu.Group(over, BACKEND)


torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, sys.modules[__name__])  # documented, in spite of its name
torch.utils.generate_methods_for_privateuse1_backend()
dist.Backend.register_backend(BACKEND, _group, extended_api=True, devices=[NAME])
atexit.register(_emu.close)
