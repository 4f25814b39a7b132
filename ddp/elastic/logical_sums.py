"""The gradients of the logical ranks of this process, summed in the order of `ddp.elastic.logical_ranks`.

The backward of each logical rank begins without gradients. Those of all logical ranks but the last are taken out of
`.grad`, and added as soon as both parts of a node are there: at most one sum for each level of the tree is kept. The
last backward is averaged by the reducer. It calls `fold` when gradients are ready, before they go into a bucket, so the
sums of this process overlap with the backward, and the communication does as in any step.

A gradient that is missing counts as zeros. Adding zeros changes only the sign of a negative zero. That is done too:
where another process carries the logical rank, a bucket contains the zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ddp.elastic import logical_ranks
from ddp.telemetry.coded import WrongType, WrongUse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp.elastic.logical_ranks import Node

Gradients = list["torch.Tensor | None"]


class LogicalSums:
    """The sums of one model in this process. The reducer calls `fold` and reads `divisor`."""

    def __init__(self, parameters: Sequence[torch.Tensor], names: Sequence[str], logical_world: int) -> None:
        self.parameters = list(parameters)
        self.divisor = float(logical_world)
        self._names = list(names)
        self._logical_world = logical_world
        self._sums: list[tuple[Node, Gradients]] = []
        self._earlier: Gradients = []
        self._folds = 0  # how many sums the last gradients complete
        self._sends = False  # whether the backward is that of the last logical rank of this process
        self._folded: set[int] = set()

    # --- the steps of a process ----------------------------------------------------------------------

    def begin(self) -> None:
        """Put aside the gradients that the script has accumulated before this step."""
        self.drop()
        self._earlier = self._take()
        # A bucket may own this memory, and is used again in this step.
        self._earlier = [None if each is None else each.clone() for each in self._earlier]

    def begin_rank(self, rank: int, *, last: bool) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self._sends = last
        self._folded = set()
        if last:
            self._folds = self._count_folds(logical_ranks.raised((0, rank), self._logical_world))

    def end_rank(self, rank: int) -> None:
        """Take the gradients of a logical rank. Those of the last one are averaged already."""
        if self._sends:
            if len(self._folded) < len(self.parameters):
                raise WrongUse(
                    f"logical rank {rank} ended without an averaged backward of the model. Run forward and backward of "
                    "every model once for each logical rank, and do not use no_sync() around the last backward"
                )
            return
        node, grads = logical_ranks.raised((0, rank), self._logical_world), self._take()
        while self._sums and (joined := self._joined(self._sums[-1][0], node)) is not None:
            _left, earlier = self._sums.pop()
            node, grads = joined, _added(earlier, grads)
        self._sums.append((node, grads))

    def finish(self) -> None:
        with torch.no_grad():
            for parameter, earlier in zip(self.parameters, self._earlier, strict=True):
                if earlier is not None:
                    parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)
        self.drop()

    def drop(self) -> None:
        """Forget an unfinished step."""
        self._sums, self._earlier, self._sends = [], [], False

    def _take(self) -> Gradients:
        found: Gradients = []
        for i, parameter in enumerate(self.parameters):
            grad, parameter.grad = parameter.grad, None
            if grad is not None and grad.is_sparse:
                raise WrongType(
                    f"the gradient of {self._names[i]} is sparse: a logical world supports dense gradients only. Use a "
                    "layer with dense gradients, for example Embedding(sparse=False)"
                )
            found.append(grad if grad is None or not grad.requires_grad else grad.detach())
        return found

    def _joined(self, left: Node, right: Node) -> Node | None:
        return logical_ranks.parent(left, right, self._logical_world)

    def _count_folds(self, node: Node) -> int:
        count = 0
        while count < len(self._sums):
            joined = self._joined(self._sums[-1 - count][0], node)
            if joined is None:
                break
            node, count = joined, count + 1
        return count

    # --- for the reducer -----------------------------------------------------------------------------

    def fold(self, members: Sequence[int]) -> None:
        """Add the sums of this process to gradients of its last logical rank, before they go into a bucket."""
        if not self._sends:
            raise WrongUse(
                "a backward was averaged outside of a step of the logical world. Run it inside of steps() or ranks()"
            )
        self._folded.update(members)
        for _node, sums in self._sums[: -1 - self._folds : -1]:
            for i in members:
                parameter, earlier = self.parameters[i], sums[i]
                grad = parameter.grad
                if grad is not None and grad.requires_grad:
                    grad = grad.detach().clone()
                added = _added_one(earlier, grad)
                if added is not parameter.grad:
                    parameter.grad = added
        for sums in self.rest():
            for i in members:
                # Otherwise the parameter would count as unused in this process.
                if self.parameters[i].grad is None and (earlier := sums[i]) is not None:
                    self.parameters[i].grad = torch.zeros_like(earlier)

    def rest(self) -> list[Gradients]:
        """The sums that the last gradients do not complete, in the order of their logical ranks."""
        return [sums for _node, sums in self._sums[: len(self._sums) - self._folds]]


def _added_one(earlier: torch.Tensor | None, grad: torch.Tensor | None) -> torch.Tensor | None:
    if earlier is None:
        return None if grad is None else grad.add_(0.0)
    return earlier.add_(0.0) if grad is None else grad.add_(earlier)


def _added(earlier: Gradients, grads: Gradients) -> Gradients:
    with torch.no_grad():
        return [_added_one(a, b) for a, b in zip(earlier, grads, strict=True)]
