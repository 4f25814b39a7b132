"""The public class: torch's module with our reducer in it, and the diagnostics that it may be asked for."""

from __future__ import annotations

from ddp.diagnostics import bucket_tuner, numerics
from ddp.reducer import seams
from ddp.reducer.module import DistributedDataParallel

__all__ = ["DistributedDataParallel"]

seams.tuners.append(bucket_tuner.Tuning)
seams.when_built.append(numerics.check_from_environment)
