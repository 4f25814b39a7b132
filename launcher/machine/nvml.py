"""Two ways to use NVML, the library of the NVIDIA driver.

`driver` opens the C library for a short time: each start needs the number and the PCI addresses of the GPUs, and the
Python binding may not be installed. `binding` is nvidia-ml-py: it reports the health of GPUs.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARY = "libnvidia-ml.so.1"


@contextlib.contextmanager
def driver(library: str = LIBRARY) -> Iterator[Any]:
    """Yield the library, or None if it is missing or its initialization fails."""
    import ctypes  # late, because only jobs on GPUs need it

    nvml: Any = None
    with contextlib.suppress(OSError, AttributeError):
        opened = ctypes.CDLL(library)
        nvml = opened if opened.nvmlInit_v2() == 0 else None
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


def count(nvml: Any) -> int:
    import ctypes

    number = ctypes.c_uint(0)
    return number.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(number)) == 0 else 0


def binding() -> Any:
    """Return the module pynvml, or None if it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None
