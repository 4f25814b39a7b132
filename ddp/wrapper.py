"""The public class: torch's module with our reducer, and optional diagnostics."""

from __future__ import annotations

from ddp.diagnostics import bucket_tuner, numerics
from ddp.reducer import extensions
from ddp.reducer.module import DistributedDataParallel

__all__ = ["DistributedDataParallel"]

extensions.start_tuner = bucket_tuner.Tuning
extensions.when_built.append(numerics.check_from_environment)
