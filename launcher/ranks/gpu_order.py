"""`--gpu-order nvlink`: puts linked GPUs beside each other in CUDA_VISIBLE_DEVICES, before anything reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.machine.gpu_reading import read_layout
from launcher.machine.gpu_state import visible_by_links
from launcher.machine.nvml import LIBRARY

if TYPE_CHECKING:
    from collections.abc import MutableMapping

VISIBLE = "CUDA_VISIBLE_DEVICES"


def order_gpus(environ: MutableMapping[str, str], library: str = LIBRARY) -> str:
    """Change the order of the GPUs that `environ` selects. Return why it was not changed, or ""."""
    value, problem = visible_by_links(environ, read_layout(library=library).gpus)
    if value:
        environ[VISIBLE] = value
    return f"--gpu-order nvlink has no effect: {problem}" if problem else ""
