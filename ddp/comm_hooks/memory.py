"""Tensors that a hook keeps for each parameter from step to step, even if parameters move to other buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ddp.telemetry.coded import WrongValue

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence


class Memory:
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

    def __reduce__(self) -> tuple[type[Memory], tuple[()]]:
        return Memory, ()


def _pieces(
    flat: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    sizes = [parameter.numel() for parameter in parameters]
    return list(zip(parameters, torch.split(flat[: sum(sizes)], sizes), strict=True))


def _name(name: str) -> str:
    """The name of a parameter in the unwrapped module."""
    return name.removeprefix("module.")
