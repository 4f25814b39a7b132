"""Average parameters every few steps, instead of gradients in every step.

    local = LocalSGD(model, every=8, warmup=100)
    for x in data:
        with local.step():
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            optimizer.step()

During the first `warmup` steps, gradients are averaged as usual. After that each rank trains alone, as under
`no_sync()`, and the ranks synchronize once per `every` steps:

LocalSGD  Each parameter becomes its average over all ranks (Stich 2018; with a warm-up: Lin and others 2018).
DiLoCo    An outer optimizer updates the parameters of the last synchronization. Its gradient is (old - new parameters),
          averaged over all ranks (Douillard and others 2023). It is usually SGD with Nesterov momentum.

The model may be wrapped in our DDP or in torch's. Without a wrapper, gradients are never averaged, not even during the
warm-up, and the ranks must start with the same parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddp.telemetry.coded import WrongValue
from ddp.telemetry.comm_error import explaining

if TYPE_CHECKING:
    from torch.optim import Optimizer

    Outer = Callable[[list[torch.Tensor]], Optimizer]


def is_local(step: int, warmup: int) -> bool:
    """Whether the gradients of this step are not averaged; steps are counted from 0."""
    return step >= warmup


def is_due(steps: int, every: int, warmup: int) -> bool:
    """Whether the ranks synchronize after this number of completed steps."""
    return steps > warmup and (steps - warmup) % every == 0


class LocalSGD:
    """Local SGD: average the parameters once per `every` steps.

    `buffers`: whether to average floating-point buffers, such as running means, as well. They are never broadcast
    while the ranks train alone.
    """

    trains_alone = True  # for ddp.elastic: between two synchronizations each rank has parameters of its own

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
            raise WrongValue(f"invalid every={every}: not a positive number of steps. Use 1 or more")
        if warmup < 0:
            raise WrongValue(f"invalid warmup={warmup}: negative. Use 1 or more steps, or 0 for no warm-up")
        self.model = model
        self.every = every
        self.warmup = warmup
        self.steps = 0
        self.process_group = process_group or getattr(model, "process_group", None) or dist.group.WORLD
        self._buffers = buffers

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run forward, backward and the optimizer's step inside this context. A step that raises is not counted."""
        with self._gradients():
            yield
        self.steps += 1
        if is_due(self.steps, self.every, self.warmup):
            self.synchronize()
        elif self.steps == self.warmup:
            self._end_warmup()

    @property
    def is_synchronized(self) -> bool:
        """Whether all ranks have the same parameters now."""
        return self.steps <= self.warmup or is_due(self.steps, self.every, self.warmup)

    def _gradients(self) -> contextlib.AbstractContextManager[Any]:
        no_sync = getattr(self.model, "no_sync", None)
        if not is_local(self.steps, self.warmup) or no_sync is None:
            return contextlib.nullcontext()
        local: contextlib.AbstractContextManager[Any] = no_sync()
        return local

    @torch.no_grad()
    def synchronize(self) -> None:
        """Synchronize the ranks now, for example before the model is saved. All ranks must call it."""
        self._average(self._parameters())
        self._average_buffers()

    def _end_warmup(self) -> None:
        """Called when the warm-up ends, while the parameters are the same on all ranks."""

    def _parameters(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.model.parameters() if p.requires_grad]

    def _average_buffers(self) -> None:
        if self._buffers:
            self._average([b for b in self.model.buffers() if b.is_floating_point() or b.is_complex()])

    @explaining("the averaging of parameters")
    def _average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Average in place, with one collective per dtype and device. These collectives run concurrently."""
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        pending = []
        for members in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in members])
            flat.div_(dist.get_world_size(self.process_group))
            pending.append((members, flat, dist.all_reduce(flat, group=self.process_group, async_op=True)))
        for members, flat, work in pending:
            work.wait()
            averages = torch.split(flat, [tensor.numel() for tensor in members])
            for tensor, average in zip(members, averages, strict=True):
                tensor.copy_(average.view(tensor.shape))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the averaging.

        Save it on one rank, together with the model, directly after a synchronization. At any other time, save it on
        every rank together with the model of that rank.
        """
        return {"steps": self.steps}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.steps = saved["steps"]


class DiLoCo(LocalSGD):
    """DiLoCo: an outer optimizer runs once per `every` steps.

    `outer`: a function that creates the outer optimizer for the parameters it receives, for example
    `lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)`.
    """

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

    def _end_warmup(self) -> None:
        for anchor, parameter in zip(self._anchors, self._parameters(), strict=True):
            anchor.copy_(parameter)

    @torch.no_grad()
    def synchronize(self) -> None:
        if self.steps < self.warmup:
            super().synchronize()  # the ranks have not trained alone yet
            return
        changes = [a - p for a, p in zip(self._anchors, self._parameters(), strict=True)]
        self._average(changes)
        for anchor, gradient in zip(self._anchors, changes, strict=True):
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
            raise WrongValue(
                f"cannot load the state of DiLoCo: the parameter {odd!r} exists only in the "
                f"{'model' if odd in named else 'state'}. Load a state that was saved for this model"
            )
        super().load_state_dict(saved)
        for name, anchor in zip(named, self._anchors, strict=True):
            anchor.copy_(saved["anchors"][name])
        self.outer.load_state_dict(saved["outer"])

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters by their names in the unwrapped model."""
        return [
            (name.removeprefix("module."), p) for name, p in self.model.named_parameters() if p.requires_grad
        ]
