"""Steps that are captured in a graph, such as a CUDA graph, and replayed without Python.

A replay repeats the kernels and collectives of the captured step, in the same memory. So whatever the host decides or
reads in a step must already be settled: the buckets, and which parameters are used. And the memory of a captured
bucket must not be freed as long as the graph may be replayed, also if later steps use other buckets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp.reducer import errors
from ddp.reducer.bucket import FlatBucket
from ddp.telemetry import capture

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ddp.reducer.reducer import Reducer


def check_capture(core: Reducer) -> None:
    """Before a forward that is captured: raise if a replay could not repeat the step."""
    if capture.is_capturing() and (obstacle := _obstacle_to_capture(core)):
        raise core.record_error(errors.not_capturable(obstacle))


def _obstacle_to_capture(core: Reducer) -> str:
    if core.looks_for_unused:
        return (
            "find_unused_parameters=True reads in each step which parameters are used. Remove it, or set "
            "static_graph=True"
        )
    if core.sender.joins:
        return "inside join(), the host reads in each step which ranks have input. Capture outside join()"
    if core.tuner is not None:
        return 'bucket_cap_mb="auto" still tries sizes. Run more steps before the capture, or set a size'
    if core.should_rebuild:
        return (
            "the buckets are not final yet. Run some steps before the capture, forward and backward with gradient "
            "averaging: 11 are enough, as for torch's class"
        )
    why: Callable[[], str] = getattr(core.operations, "why_not_capturable", str)
    return why()


def keep_captured_memory(core: Reducer) -> None:
    """From now on, keep the memory of all captured buckets as long as this reducer exists."""
    kept: dict[int, torch.Tensor] = {}
    sender = core.sender

    def keep() -> None:
        if capture.is_capturing():
            flats = [bucket.flat for bucket in sender.buckets if isinstance(bucket, FlatBucket)]
            kept.update({flat.data_ptr(): flat for flat in flats})

    core.at_round_over.append(keep)
