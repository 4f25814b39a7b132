"""The base of hooks with a state: a group, a step count, and a memory that can be saved and loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddp.comm_hooks.memory import Memory
from ddp.comm_hooks.staged import Staged
from ddp.telemetry import capture
from ddp.telemetry.coded import WrongUse

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch.distributed import GradBucket

    from ddp.comm_hooks.staged import Stages


class Resumable:
    """`process_group`: None means the default group. A pickle does not contain it: set it again after loading."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.step = 0
        self.errors = Memory()
        self._staged = Staged()

    @property
    def remembers(self) -> bool:
        """Whether a step depends on the steps before it."""
        return bool(getattr(self, "error_feedback", True))

    @property
    def group(self) -> dist.ProcessGroup:
        group = self.process_group or dist.group.WORLD
        assert group is not None, "no process group exists: call ddp.init() first"
        return group

    def run(self, bucket: GradBucket, stages: Stages) -> torch.futures.Future[torch.Tensor]:
        """Start the stages of a bucket. The last bucket of a backward ends the step."""
        if self.remembers and capture.is_capturing():
            raise WrongUse(
                f"the communication hook with state {type(self).__name__} cannot be captured in a graph: it changes "
                "from step to step, and a replay would repeat one step. Use fp16, bf16, all_reduce, or quantized or "
                "top_k with error_feedback=False"
            )
        future = self._staged.add(bucket, stages)
        if bucket.is_last():
            self.step += 1
        return future

    def start_anew(self) -> None:
        """Return to the first step. All ranks do so when one of them was replaced: its memory is lost."""
        self.step = 0
        for memory in self.memories().values():
            memory.clear()
        self._staged = Staged()

    def memories(self) -> dict[str, Memory]:
        return {"errors": self.errors}

    def state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """Save the memory of this rank, which differs between ranks. `module`: the model, or its wrapper."""
        saved = {what: memory.state_dict(module) for what, memory in self.memories().items()}
        return {"step": self.step, **saved}

    def load_state_dict(self, module: torch.nn.Module, saved: Mapping[str, Any]) -> None:
        for what, memory in self.memories().items():
            memory.load_state_dict(module, saved[what])
        self.step = saved["step"]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}
