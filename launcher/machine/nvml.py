"""NVML, the library of the NVIDIA driver, through its C interface: no Python package is needed.

`Nvml` calls the functions of nvml.h. A function that this driver does not have, or that does not apply to a model,
gives None. The layouts of the structures are those of nvml.h; they have not changed since the names of the functions
got their suffixes (`_v2`, `_v3`).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from launcher.machine.gpu_state import GpuName

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator

LIBRARY = "libnvidia-ml.so.1"
OK, NOT_SUPPORTED, NO_PERMISSION, INSUFFICIENT_SIZE, NOT_FOUND_HERE = 0, 3, 4, 7, 13
# The GPU responds, but this function does not apply to it, or not to this user.
_HARMLESS = (OK, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND_HERE)
_LIBRARY_MISMATCH = 18
_TEXT_BYTES = 128  # more than NVML requires for any name, UUID or PCI record
_MIG_LIMIT = 8  # no GPU can be split further


class NvmlError(Exception):
    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code = code

    @property
    def is_mismatch(self) -> bool:
        return self.code == _LIBRARY_MISMATCH


class Nvml:
    """An initialized library. Arguments after the name are those of the function, without the result."""

    def __init__(self, library: str = LIBRARY) -> None:
        """Raise OSError if the library is missing, and NvmlError if it cannot reach the driver."""
        import ctypes  # late, because only jobs on GPUs need it

        self._c = ctypes
        self._library = ctypes.CDLL(library)
        if code := self.code("nvmlInit_v2"):
            raise NvmlError(code, self.words(code))

    def close(self) -> None:
        self.code("nvmlShutdown")

    def code(self, name: str, *of: Any) -> int:
        function = getattr(self._library, name, None)
        return NOT_FOUND_HERE if function is None else int(function(*of))

    def words(self, code: int) -> str:
        function = getattr(self._library, "nvmlErrorString", None)
        if function is None:
            return f"error {code}"
        function.restype = self._c.c_char_p
        text = function(code)
        return text.decode(errors="replace") if text else f"error {code}"

    def number(self, name: str, *of: Any) -> int | None:
        value = self._c.c_uint(0)
        return value.value if self.code(name, *of, self._c.byref(value)) == OK else None

    def long(self, name: str, *of: Any) -> int | None:
        value = self._c.c_ulonglong(0)
        return value.value if self.code(name, *of, self._c.byref(value)) == OK else None

    def text(self, name: str, *of: Any) -> str:
        buffer = self._c.create_string_buffer(_TEXT_BYTES)
        return (
            buffer.value.decode(errors="replace") if self.code(name, *of, buffer, _TEXT_BYTES) == OK else ""
        )

    def handle(self, name: str, *of: Any) -> ctypes.c_void_p | None:
        value = self._c.c_void_p()
        return value if self.code(name, *of, self._c.byref(value)) == OK else None

    def record(self, name: str, *of: Any, size: int = _TEXT_BYTES, more: tuple[Any, ...] = ()) -> bytes:
        """The bytes of a structure; empty if the call fails. `more`: arguments after the structure."""
        buffer = self._c.create_string_buffer(size)
        return buffer.raw if self.code(name, *of, buffer, *more) == OK else b""

    def array(self, name: str, device: Any, limit: int, size: int) -> tuple[int, bytes] | None:
        """Call a function that fills an array: the number of its elements, and their bytes."""
        length = self._c.c_uint(limit)
        buffer = self._c.create_string_buffer(limit * size)
        code = self.code(name, device, self._c.byref(length), buffer)
        return (min(length.value, limit), buffer.raw) if code == OK else None

    def length(self, name: str, *of: Any) -> int | None:
        """The number of elements that an array would have."""
        value = self._c.c_uint(0)
        code = self.code(name, *of, self._c.byref(value), None)
        return value.value if code in (OK, INSUFFICIENT_SIZE) else None

    def problem(self, name: str, *of: Any) -> str:
        """Why a device does not respond; "" if it does."""
        code = self.code(name, *of)
        return "" if code in _HARMLESS else self.words(code)

    def count(self) -> int:
        return self.number("nvmlDeviceGetCount_v2") or 0


@contextlib.contextmanager
def driver(library: str = LIBRARY) -> Iterator[Nvml | None]:
    """Yield the library, or None if it is missing or its initialization fails."""
    nvml: Nvml | None = None
    with contextlib.suppress(OSError, NvmlError):
        nvml = Nvml(library)
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.close()


def gpu_names(library: str = LIBRARY) -> list[GpuName]:
    """The GPUs of this machine in the order of their bus addresses; those that do not respond are left out."""
    with driver(library) as nvml:
        if nvml is None:
            return []
        handles = [nvml.handle("nvmlDeviceGetHandleByIndex_v2", index) for index in range(nvml.count())]
        return [_named(nvml, handle) for handle in handles if handle is not None]


def _named(nvml: Nvml, gpu: ctypes.c_void_p) -> GpuName:
    return GpuName(address_of(nvml, gpu), uuids_of(nvml, gpu), nvml.text("nvmlDeviceGetName", gpu))


def uuids_of(nvml: Nvml, gpu: ctypes.c_void_p) -> tuple[str, ...]:
    parts = [nvml.handle("nvmlDeviceGetMigDeviceHandleByIndex", gpu, index) for index in range(_MIG_LIMIT)]
    return tuple(nvml.text("nvmlDeviceGetUUID", each) for each in (gpu, *parts) if each is not None)


def address_of(nvml: Nvml, gpu: ctypes.c_void_p) -> str:
    return pci_address_of(nvml.record("nvmlDeviceGetPciInfo_v3", gpu))


def pci_address_of(record: bytes) -> str:
    """nvmlPciInfo_t: 16 bytes of the legacy bus id, then domain, bus and slot, then more."""
    import struct

    return pci_address(*struct.unpack_from("16x3I", record)) if record else ""


def pci_address(domain: int, bus: int, slot: int) -> str:
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"
