"""The faults of `make gpu`: those of bench/faults that GPUs or NCCL may answer differently, and those of GPUs alone.

The ranks share the cards that are there. The cases with one rank run also where ranks cannot share a card.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "faults"))

from fault_case import HANG_TIMEOUT_S, Case, Kind

_BOUND_S = 60.0  # what is too late on a GPU is not known yet: the times are shown, and not judged
_BAD = "ValueError: the batch is bad"
_STOPPED = "stopped by a signal"
_STILL = "made no progress"
_ILLEGAL = "illegal memory access|CUDA error"
_ASSERT = "device-side assert|CUDA error"
_OOM = "out of memory"


def death(name: str, injected: str, fault: str, says: str, **more: Any) -> Case:
    return _case(name, injected, says, Kind.DEATH, fault, **({"ranks": 2} | more))


def hang(name: str, injected: str, fault: str, says: str, **more: Any) -> Case:
    return _case(name, injected, says, Kind.HANG, fault, **more)


def _case(name: str, injected: str, says: str, kind: Kind, fault: str, **more: Any) -> Case:
    given = {"backend": "nccl", "device": "cuda", "bound_s": _BOUND_S, "wrap": "ours"}
    return Case(name, injected, says, kind, fault, **(given | more))


_ALONE: dict[str, Any] = {"ranks": 1, "commits": (0,), "blamed": (0,)}

CASES: tuple[Case, ...] = (
    death("killed-alone", "SIGKILL from outside", "", "SIGKILL", outside="kill_rank_0", **_ALONE),
    death(
        "memory-alone", "more memory than the GPU has", "runs_out_of_device_memory@forward", _OOM, **_ALONE
    ),
    death(
        "illegal-alone",
        "a kernel writes to unmapped memory",
        "writes_beyond_its_memory@forward",
        _ILLEGAL,
        **_ALONE,
    ),
    death("exception", "an exception in the forward pass", "raises@forward", _BAD),
    death("exception-torch", "the same", "raises@backward", _BAD, wrap="torch"),
    death("killed", "SIGKILL from outside", "", "SIGKILL, not from ddp-launch", outside="kill_rank"),
    death("killed-torch", "the same", "", "SIGKILL", outside="kill_rank", wrap="torch"),
    death("memory", "more memory than the GPU has", "runs_out_of_device_memory@forward", _OOM),
    death("illegal", "a kernel writes to unmapped memory", "writes_beyond_its_memory@forward", _ILLEGAL),
    death(
        "assert", "an index out of range on the GPU", "asserts_on_the_device@forward", _ASSERT, wrap="torch"
    ),
    hang("stopped", "SIGSTOP from outside", "", _STOPPED, outside="stop_rank"),
    hang("stopped-torch", "the same", "", _STOPPED, outside="stop_rank", wrap="torch"),
    hang("sleep-backward", "a sleep in a hook of the backward pass", "sleeps@backward", "backward"),
    hang("kernel", "a kernel that does not end", "keeps_the_device_busy@forward", _STILL, certain=None),
    hang(
        "other-op",
        "broadcast where the others call all_reduce",
        "other_operation@tally",
        "broadcast.*all_reduce",
        wrap="plain",
    ),
    hang(
        "other-shape",
        "all_reduce of 4,096 elements where the others have 4",
        "other_shape@tally",
        "4,096 x float32|4096",
        wrap="plain",
    ),
    hang("skips", "one rank skips an all_reduce", "skips@tally", "barrier.*all_reduce", wrap="plain"),
    _case(
        "pause",
        f"a pause of 1 s, less than the hang timeout of {HANG_TIMEOUT_S:g} s",
        "",
        Kind.INNOCENT,
        "pauses@forward",
        blamed=(),
    ),
    hang(
        "link-cut",
        "the link between two nodes is cut; both reach the service",
        "",
        "all_reduce",
        outside="cut_link",
        nodes=2,
        ranks=1,
        wrap="plain",
        blamed=None,
        certain=False,
        in_lab=True,
        needs="lab",
    ),
)
BY_NAME = {case.name: case for case in CASES}
