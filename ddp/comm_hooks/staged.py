"""Hooks that need several collectives in turn, in the same order on all ranks.

Suppose that a callback launches the second collective of a bucket when the first one completes. Then the order depends
on timing and differs between ranks. Backends that match collectives by their order would combine unrelated data. So no
callback launches anything here. A hook is a generator that yields the work it waits for. Each new bucket advances all
pending buckets by one stage, and the last bucket runs all remaining stages. So the data of a stage is transferred until
the next bucket is ready, while the backward continues.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ddp.comm_hooks.plain import future_for

if TYPE_CHECKING:
    from torch.distributed import GradBucket

# Yields objects with wait(), and returns the average. Hooks use this type at run time, in their annotations.
Stages = Generator[Sequence[Any], None, torch.Tensor]


class Staged:
    """The pending buckets of a hook, each at one of its stages."""

    def __init__(self) -> None:
        self._pending: list[_Run] = []

    def add(self, bucket: GradBucket, stages: Stages) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self._pending.clear()  # left over from a backward that raised
        run = _Run(stages, future_for(bucket.buffer()))
        earlier = [*self._pending]
        self._pending.append(run)
        self._advance([run, *earlier])
        while bucket.is_last() and self._pending:
            self._advance([*self._pending])
        return run.future

    def _advance(self, runs: Sequence[_Run]) -> None:
        for run in runs:
            if run.advance():
                self._pending.remove(run)

    def __reduce__(self) -> tuple[type[Staged], tuple[()]]:
        return Staged, ()  # pending buckets belong to a backward and are not pickled


class _Run:
    def __init__(self, stages: Stages, future: torch.futures.Future[torch.Tensor]) -> None:
        self.future = future
        self._stages = stages
        self._awaited: Sequence[Any] = ()

    def advance(self) -> bool:
        """Run the next stage; return whether it was the last one."""
        for work in self._awaited:
            work.wait()
        try:
            self._awaited = next(self._stages)
        except StopIteration as end:
            self.future.set_result(end.value)
            return True
        return False
