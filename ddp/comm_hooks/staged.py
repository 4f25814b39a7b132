"""Hooks that need one collective after another, in one order on all ranks.

A collective that is launched when another one is done is launched by whichever thread notices: on one rank before the
first collective of the next bucket, on another after. Backends that match collectives by their order then add up what
does not belong together. So nothing is launched by a callback here. A hook is a generator that yields what it waits
for; with each new bucket, each bucket that is under way is taken one stage further, and with the last bucket all of
them to their end. A stage has thus the time between two buckets to be transferred while the backward goes on.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ddp.comm_hooks.plain import future_for

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

# Yields what can be waited for, in the end the average. Whoever writes such a function names this type at run time.
Stages = Generator[Sequence[Any], None, torch.Tensor]


class Staged:
    def __init__(self) -> None:
        self._under_way: list[_Run] = []

    def add(self, bucket: GradBucket, stages: Stages) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self._under_way.clear()  # of a backward that raised
        run = _Run(stages, future_for(bucket.buffer()))
        earlier = [*self._under_way]
        self._under_way.append(run)
        self._advance([run, *earlier])
        while bucket.is_last() and self._under_way:
            self._advance([*self._under_way])
        return run.future

    def _advance(self, runs: Sequence[_Run]) -> None:
        for run in runs:
            if run.advance():
                self._under_way.remove(run)

    def __reduce__(self) -> tuple[type[Staged], tuple[()]]:
        return Staged, ()  # what is under way belongs to a backward, not to a pickle


class _Run:
    def __init__(self, stages: Stages, future: torch.futures.Future[torch.Tensor]) -> None:
        self.future = future
        self._stages = stages
        self._awaited: Sequence[Any] = ()

    def advance(self) -> bool:
        """Whether that was the last stage."""
        for work in self._awaited:
            work.wait()
        try:
            self._awaited = next(self._stages)
        except StopIteration as end:
            self.future.set_result(end.value)
            return True
        return False
