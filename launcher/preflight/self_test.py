"""The self-test program: the CPU and each accelerator multiply matrices and copy memory; it reports their speed.

It prints one JSON object. torch is imported only in this process, so its memory use, or a device error that kills the
process, does not affect the agent.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

_SIDE, _SIDE_THERE = 512, 4096  # on the CPU, on an accelerator
_COPY_BYTES, _COPY_BYTES_THERE = 64 << 20, 1 << 30
_TRY_S = 0.2


def main() -> int:
    try:
        import torch
    except ImportError as error:
        os.write(1, json.dumps({"problem": f"torch cannot be imported: {error}"}).encode())
        return 0
    found = [_tried(torch, "cpu", "CPU")]
    if there := torch.accelerator.current_accelerator(check_available=True):
        kind = there.type
        name_of = getattr(torch.get_device_module(kind), "get_device_name", lambda at: f"{kind}:{at}")
        found += [
            _tried(torch, f"{kind}:{at}", name_of(at)) for at in range(torch.accelerator.device_count())
        ]
    os.write(1, json.dumps({"results": found}).encode())
    return 0


def _tried(torch: Any, device: str, name: str) -> dict[str, Any]:
    told: dict[str, Any]
    try:
        flops, wrong = _multiplied(torch, device)
        told = {"flops": flops, "wrong": wrong, "copy_bps": _copied(torch, device)}
    except Exception as error:  # the result reports any error of torch or the driver
        told = {"problem": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
    return {"device": device, "name": name} | told


def _multiplied(torch: Any, device: str) -> tuple[float, bool]:
    """Multiply matrices of small integers, which every dtype represents exactly, to compare the result bit by bit."""
    side, dtype = (_SIDE, torch.float32) if device == "cpu" else (_SIDE_THERE, torch.bfloat16)
    left = (torch.arange(side, device=device) % 2).to(dtype).repeat(side, 1)  # each row 0 1 0 1 ...
    right = torch.ones(side, side, device=device, dtype=dtype)
    expected = side // 2
    product = left @ right
    wrong = not bool((product == expected).all())
    per_s = _per_second(torch, device, lambda: torch.mm(left, right, out=product))
    wrong = wrong or not bool((product == expected).all())
    return per_s * 2 * side**3, wrong


def _copied(torch: Any, device: str) -> float:
    size = _COPY_BYTES if device == "cpu" else _COPY_BYTES_THERE
    if device != "cpu" and (free := getattr(torch.get_device_module(device), "mem_get_info", None)):
        size = min(size, free(device)[0] // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _per_second(torch, device, lambda: target.copy_(source)) * size


def _per_second(torch: Any, device: str, once: Callable[[], object]) -> float:
    """Return the best rate of several short measurements, because other processes can only reduce the rate."""
    best, until = 0.0, time.monotonic() + 3 * _TRY_S
    once()
    _synchronize(torch, device)
    while time.monotonic() < until:
        began, times = time.perf_counter(), 0
        while time.perf_counter() - began < _TRY_S / 4:
            once()
            times += 1
            _synchronize(torch, device)
        best = max(best, times / (time.perf_counter() - began))
    return best


def _synchronize(torch: Any, device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
