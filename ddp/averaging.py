"""Averaging parameters now and then, instead of gradients in every step.

    local = LocalSGD(model, every=8, warmup=100)
    for x in data:
        with local.step():
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            optimizer.step()

Within `step()` gradients are averaged as usual for the first `warmup` steps; then each rank trains by itself, as
under `no_sync()`, and after every `every` steps the ranks meet:

LocalSGD  parameters become their average over the ranks (Stich 2018; with a warm-up: Lin and others 2018).
DiLoCo    what the ranks have moved since they met last, on average, is the gradient of an outer optimizer, usually
          SGD with Nesterov momentum, which steps from where they met last (Douillard and others 2023).

The model may be wrapped by our DDP, by torch's, or by nothing, and is then never synchronized in between; without a
wrapper, ranks must begin with the same parameters.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddp.telemetry.comm_error import explained

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.optim import Optimizer

    Outer = Callable[[list[torch.Tensor]], Optimizer]


def is_local(step: int, warmup: int) -> bool:
    """Whether the gradients of this step, the first is 0, stay on their rank."""
    return step >= warmup


def is_due(steps: int, every: int, warmup: int) -> bool:
    """Whether ranks meet, now that so many steps are done."""
    return steps > warmup and (steps - warmup) % every == 0


class LocalSGD:
    """`buffers`: whether buffers of floating point, like running means, are averaged along. They are not sent
    between ranks while these train by themselves."""

    def __init__(
        self,
        model: torch.nn.Module,
        every: int,
        warmup: int = 0,
        *,
        buffers: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every}: ranks meet after one step at least")
        if warmup < 0:
            raise ValueError(f"warmup={warmup}: give a number of steps, 0 for none")
        self.model = model
        self.every = every
        self.warmup = warmup
        self.steps = 0
        self.process_group = process_group or getattr(model, "process_group", None) or dist.group.WORLD
        self._buffers = buffers

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around forward, backward and the optimizer's step. A step that raises is not counted."""
        with self._gradients():
            yield
        self.steps += 1
        if is_due(self.steps, self.every, self.warmup):
            self.meet()
        elif self.steps == self.warmup:
            self._warm()

    def _gradients(self) -> contextlib.AbstractContextManager[Any]:
        no_sync = getattr(self.model, "no_sync", None)
        if not is_local(self.steps, self.warmup) or no_sync is None:
            return contextlib.nullcontext()
        local: contextlib.AbstractContextManager[Any] = no_sync()
        return local

    @torch.no_grad()
    def meet(self) -> None:
        """All ranks call it. By itself where they are to agree now, before the model is saved, for instance."""
        self._average(self._parameters())
        self._average_buffers()

    def _warm(self) -> None:
        """The warm-up is over; the parameters are the same on all ranks."""

    def _parameters(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.model.parameters() if p.requires_grad]

    def _average_buffers(self) -> None:
        if self._buffers:
            self._average([b for b in self.model.buffers() if b.is_floating_point() or b.is_complex()])

    @explained("the averaging of parameters")
    def _average(self, tensors: Sequence[torch.Tensor]) -> None:
        """In place. One collective for each kind of tensors, all under way at once."""
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        under_way = []
        for alike in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            flat.div_(dist.get_world_size(self.process_group))
            under_way.append((alike, flat, dist.all_reduce(flat, group=self.process_group, async_op=True)))
        for alike, flat, work in under_way:
            work.wait()
            averages = torch.split(flat, [tensor.numel() for tensor in alike])
            for tensor, average in zip(alike, averages, strict=True):
                tensor.copy_(average.view(tensor.shape))

    def state_dict(self) -> dict[str, Any]:
        """To be saved with the model, right after the ranks have met, or by each rank with its own model."""
        return {"steps": self.steps}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.steps = saved["steps"]


class DiLoCo(LocalSGD):
    """`outer`: makes the outer optimizer of the parameters that it is given, for instance
    `lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)`."""

    def __init__(
        self,
        model: torch.nn.Module,
        outer: Outer,
        every: int,
        warmup: int = 0,
        *,
        buffers: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(model, every, warmup, buffers=buffers, process_group=process_group)
        self._anchors = [parameter.clone() for parameter in self._parameters()]
        self.outer = outer(self._anchors)

    def _warm(self) -> None:
        self._take_over()

    def _take_over(self) -> None:
        for anchor, parameter in zip(self._anchors, self._parameters(), strict=True):
            anchor.copy_(parameter)

    @torch.no_grad()
    def meet(self) -> None:
        if self.steps < self.warmup:
            super().meet()  # nobody has moved alone yet
            return
        moved = [a - p for a, p in zip(self._anchors, self._parameters(), strict=True)]
        self._average(moved)
        for anchor, gradient in zip(self._anchors, moved, strict=True):
            anchor.grad = gradient
        self.outer.step()
        self.outer.zero_grad()
        for anchor, parameter in zip(self._anchors, self._parameters(), strict=True):
            parameter.copy_(anchor)
        self._average_buffers()

    def state_dict(self) -> dict[str, Any]:
        anchors = {
            name: anchor.clone() for (name, _), anchor in zip(self._named(), self._anchors, strict=True)
        }
        return {**super().state_dict(), "anchors": anchors, "outer": self.outer.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        named = [name for name, _ in self._named()]
        if sorted(named) != sorted(saved["anchors"]):
            odd = sorted(set(named) ^ set(saved["anchors"]))[0]
            raise ValueError(f"the saved state is of another model: {odd!r} is only in one of the two")
        super().load_state_dict(saved)
        for name, anchor in zip(named, self._anchors, strict=True):
            anchor.copy_(saved["anchors"][name])
        self.outer.load_state_dict(saved["outer"])

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        """By the names without a wrapper."""
        return [
            (name.removeprefix("module."), p) for name, p in self.model.named_parameters() if p.requires_grad
        ]
