"""The base of hooks with a state: a group, a step count, and a memory that can be saved and loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from ddp.comm_hooks.staged import Staged
from ddp.telemetry import capture
from ddp.telemetry.coded import WrongUse, WrongValue

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

    from torch.distributed import GradBucket

    from ddp.comm_hooks.staged import Stages

# --- memory of each parameter ----------------------------------------------------------------------
#
# Tensors that a hook keeps for each parameter from step to step, even if parameters move to other buckets.


class HookMemory:
    """One stored tensor per parameter, such as its compression error."""

    def __init__(self) -> None:
        self._kept: MutableMapping[torch.Tensor, torch.Tensor] = WeakIdKeyDictionary()

    def get(self, parameter: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
        """Return the kept tensor; None if there is none, or if its shape is different because the parameter changed."""
        kept = self._kept.get(parameter)
        return kept if kept is not None and kept.shape == torch.Size(shape) else None

    def clear(self) -> None:
        self._kept = WeakIdKeyDictionary()

    def put(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        self._kept[parameter] = value

    def add_to(self, flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
        """Add the kept tensors to `flat`, which has one piece for each parameter, in order."""
        for parameter, piece in _pieces(flat, parameters):
            kept = self.get(parameter, piece.shape)
            if kept is not None:
                piece.add_(kept.to(piece.device))

    def keep(self, flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
        """Keep the pieces of `flat`. NaN and Inf become 0: otherwise they would return in every later step."""
        flat.nan_to_num_(0.0, 0.0, 0.0)
        for parameter, piece in _pieces(flat, parameters):
            self.put(parameter, piece)

    def state_dict(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {
            _name(name): self._kept[parameter].detach().clone()
            for name, parameter in module.named_parameters()
            if parameter in self._kept
        }

    def load_state_dict(self, module: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
        known = {_name(name): parameter for name, parameter in module.named_parameters()}
        if unknown := sorted(set(saved) - set(known)):
            raise WrongValue(
                f"cannot load the state of the communication hook: it was saved for another model. This model does not "
                f"have the parameter {unknown[0]!r}. Load the state of the same model"
            )
        self._kept = WeakIdKeyDictionary()
        for name, value in saved.items():
            parameter = known[name]
            self._kept[parameter] = value.to(parameter.device, copy=True)

    def __reduce__(self) -> tuple[type[HookMemory], tuple[()]]:
        return HookMemory, ()


def _pieces(
    flat: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    sizes = [parameter.numel() for parameter in parameters]
    return list(zip(parameters, torch.split(flat[: sum(sizes)], sizes), strict=True))


def _name(name: str) -> str:
    """The name of a parameter in the unwrapped module."""
    return name.removeprefix("module.")


# --- hooks with a state ----------------------------------------------------------------------------


class Resumable:
    """`process_group`: None means the default group. A pickle does not contain it: set it again after loading."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.step = 0
        self.errors = HookMemory()
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

    def memories(self) -> dict[str, HookMemory]:
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
