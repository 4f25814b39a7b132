"""The buffers of a model, such as the running statistics of BatchNorm: all logical ranks begin a step with the same.

After a step they are those of logical rank 0, in all processes. With DDP it is the same: before a forward, rank 0
broadcasts its buffers, and what the others have is lost.

Most buffers never change, such as masks. Only those that have changed are copied and sent: those that any process has
changed. A tensor counts its changes (`_version`), but torch's BatchNorm writes its statistics without counting. So
numbers with a fraction are compared, bit by bit. On an accelerator the host would have to wait for that, so there they
count as changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ddp.telemetry.coded import WrongUse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp.elastic.team import Team


@dataclass
class _Buffer:
    """The buffer of a module under a name, and what it was when the step began."""

    owner: torch.nn.Module
    name: str
    tensor: torch.Tensor
    version: int = -1
    before: torch.Tensor | None = None

    @property
    def now(self) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.owner, self.name)
        return tensor

    @property
    def has_changed(self) -> bool:
        if self.before is None or self.now is not self.tensor or self.tensor._version != self.version:
            return True
        if not self.tensor.is_floating_point() and not self.tensor.is_complex():
            return False
        return self.tensor.device.type != "cpu" or not torch.equal(
            _as_bytes(self.tensor), _as_bytes(self.before)
        )

    def note(self) -> None:
        if self.has_changed:
            self.tensor = self.now
            self.before = self.tensor.detach().clone()
            self.version = self.tensor._version

    def put(self, value: torch.Tensor) -> None:
        """A script may have replaced the tensor in its forward: take the old one again."""
        if value.shape != self.tensor.shape:
            raise WrongUse(
                f"the buffer {self.name} of shape {tuple(self.tensor.shape)} now has the shape {tuple(value.shape)}. A "
                "logical world needs buffers of constant shape"
            )
        setattr(self.owner, self.name, self.tensor)
        with torch.no_grad():
            self.tensor.copy_(value)

    def restore(self) -> None:
        if self.has_changed:
            assert self.before is not None
            self.put(self.before)
            self.version = self.tensor._version


class LogicalBuffers:
    def __init__(self, model: torch.nn.Module, team: Team) -> None:
        self._team = team
        self._all = [
            _Buffer(owner, name, tensor)
            for owner in model.modules()
            for name, tensor in owner.named_buffers(recurse=False)
        ]
        self._changed: list[bool] = []
        self._kept: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        self._changed, self._kept = [False] * len(self._all), {}
        for each in self._all:
            each.note()

    def begin_rank(self) -> None:
        for each in self._all:
            each.restore()

    def end_rank(self, rank: int) -> None:
        for i, each in enumerate(self._all):
            if each.has_changed:
                self._changed[i] = True
                if rank == 0:
                    self._kept[i] = each.now.detach().clone()

    def finish(self) -> None:
        if not self._all:
            return
        chosen = [
            each for each, changed in zip(self._all, self._team.union(self._changed), strict=True) if changed
        ]
        for i, value in self._kept.items():
            self._all[i].put(value)
        if chosen and self._team.size > 1:
            self._send(chosen)

    def _send(self, chosen: Sequence[_Buffer]) -> None:
        flat = self._team.share(torch.cat([_as_bytes(each.now) for each in chosen]))
        sizes = [each.tensor.nbytes for each in chosen]
        for each, piece in zip(chosen, torch.split(flat, sizes), strict=True):
            each.put(piece.clone().view(each.tensor.dtype).view(each.tensor.shape))


def _as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().contiguous().view(-1).view(torch.uint8)
