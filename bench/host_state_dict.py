"""A state dictionary on the CPU for the local checkpoints of NVRx, whose own class accepts only CUDA tensors.

It is in a module of its own, because the checkpoint names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def _mapped(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_mapped(value, change) for value in tree]
    return change(tree) if isinstance(tree, torch.Tensor) else tree


class HostStateDict(TensorAwareStateDict):
    """What a save and a load of one rank need; without replication nothing else is called."""

    def __init__(self, state_dict: Any) -> None:
        self.state_dict = state_dict

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        self.state_dict = _mapped(self.state_dict, lambda tensor: tensor.detach().clone())

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """The tensors are where they were."""

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        found: list[torch.Tensor] = []
        _mapped(self.state_dict, found.append)
        return found

    @property
    def is_hollow(self) -> bool:
        return False

    def pop_tensors(self) -> list[torch.Tensor]:
        raise NotImplementedError("only replication takes the tensors out")

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        raise NotImplementedError("only replication puts tensors in")

    def init_tensors(self) -> None:
        raise NotImplementedError("only replication makes empty tensors")
