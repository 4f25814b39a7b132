"""The `.grad` of each parameter when a backward began. Later comparison shows which gradients have arrived."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

# There may be thousands of gradients: `map` calls these in a loop that runs in C.
_grad_of = attrgetter("grad")
_version_of = attrgetter("_version")


@dataclass
class Baseline:
    """The gradients and their versions before a backward. `grads` is None if no parameter had a gradient.

    Gradients that are views of one bucket share a version counter, which does not show which of them has changed.
    Then `exact` is false, and only a hook can report which gradients have arrived.
    """

    grads: list[Any] | None
    versions: list[int]
    exact: bool = True

    def arrived(self, index: int, grad: torch.Tensor | None) -> bool:
        if grad is None:
            return False
        if self.grads is None:
            return True
        return grad is not self.grads[index] or grad._version != self.versions[index]

    def all_arrived(self, members: Sequence[int], grads: Sequence[torch.Tensor | None]) -> bool:
        if self.grads is None:
            return all(map(is_not, grads, repeat(None)))
        return all(map(self.arrived, members, grads))

    def had_gradient(self, index: int) -> bool:
        """Whether `.grad` existed when the baseline was recorded."""
        return self.grads is not None and self.grads[index] is not None

    def of(self, members: Sequence[int]) -> list[Any] | None:
        return None if self.grads is None else [self.grads[i] for i in members]


def baseline(parameters: Sequence[torch.Tensor], *, exact: bool) -> Baseline:
    grads = list(map(_grad_of, parameters))
    if not any(map(is_not, grads, repeat(None))):
        return Baseline(None, [])
    if all(map(is_not, grads, repeat(None))):
        return Baseline(grads, list(map(_version_of, grads)), exact)
    return Baseline(grads, [-1 if grad is None else grad._version for grad in grads], exact)
