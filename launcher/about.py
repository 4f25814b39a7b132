"""The text of `ddp-launch --version`: our version, and the versions of what it works with. Imports nothing large."""

from __future__ import annotations

import platform

from launcher.preflight import installed
from launcher.preflight.installed import torch_version
from launcher.template.torch_release import too_old
from rendezvous.values.contracts import PROTOCOL, VERSION


def text() -> str:
    core = installed.state()
    if core == "compiled":
        core += f", {installed.kernels()} kernels"
    else:
        core += "; collectives of CPU tensors use Gloo"
    return "\n".join(
        (
            f"ddp-launch {VERSION}",
            _torch(torch_version()),
            f"core {core}",
            f"protocol {PROTOCOL}",
            f"python {platform.python_version()}",
        )
    )


def _torch(version: str) -> str:
    words = too_old(version)
    return f"torch {version or 'not installed'}" + (f": {words}" if words else "")
