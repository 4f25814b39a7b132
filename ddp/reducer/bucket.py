"""The storage of gradients while they are averaged.

FlatBucket    copies gradients side by side into one tensor, and the averages back into `.grad`. With `as_views`,
              `.grad` is a view of that tensor from the first step on, so that nothing is copied any more.
InPlaceBucket averages gradients in place.
SparseBucket  holds one sparse gradient.

As in torch's class, `.grad` stays the tensor that autograd or the script has stored there. The script may hold it, or
replace its memory (`p.grad.data = ...`). So a bucket compares addresses, and never hands out its own tensors.

The three classes share an interface. `gather` takes the gradients of the members [start, end). `payload` holds the
tensors to average. `finish` stores the average in `.grad`.
"""

from __future__ import annotations

import itertools
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ddp.reducer.plan import ParameterInfo
from ddp.telemetry import torch_api
from ddp.telemetry.coded import WrongUse

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ddp.reducer.collectives import BucketCollectives

    Averages = Sequence[tuple[int, torch.Tensor]]

# There may be thousands of gradients: `map` calls these in a loop that runs in C.
_grad_of = attrgetter("grad")
_address_of = torch.Tensor.data_ptr
_is_negated = torch.Tensor.is_neg


class Used(Protocol):
    """Which members of a bucket any rank used. Only their `.grad` receives the average."""

    def __call__(self, member: int, average: torch.Tensor) -> bool: ...

    def includes_all(self, members: Sequence[int]) -> bool:
        """Whether it is known, without waiting, that all of these members were used."""
        ...


class FlatBucket:
    """Copies its gradients into one tensor."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        collectives: BucketCollectives,
        *,
        as_views: bool,
        dtype: torch.dtype | None,
    ) -> None:
        self.parameters = list(parameters)
        self._collectives = collectives
        self._as_views = as_views
        self._dtype = dtype or parameters[0].dtype
        sizes = [parameter.numel() for parameter in self.parameters]
        self.numel = sum(sizes)
        self._offsets = [0, *itertools.accumulate(sizes)]
        self._scaled_alone = self.numel * self._dtype.itemsize >= collectives.costs.scaled_alone * len(sizes)
        self.flat = torch.empty(0, dtype=self._dtype)
        self._targets: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._views: list[torch.Tensor] = []  # what `.grad` gets; the script may replace their memory
        if as_views and dtype is None:
            self._move_gradients_in()

    def _move_gradients_in(self) -> None:
        """Make existing gradients views at once: what the script holds of the old ones does not change any more."""
        for i, grad in enumerate(map(_grad_of, self.parameters)):
            if grad is not None:
                if not self._targets:
                    self._allocate()
                self._targets[i].copy_(grad.detach())
                self.parameters[i].grad = self._view(i)

    def _allocate(self) -> None:
        self.flat = self._collectives.allocate(self.numel, self._dtype, self.parameters[0].device)
        self._targets = [
            self.flat.as_strided(p.shape, gradient_strides(p), self.flat.storage_offset() + offset)
            for p, offset in zip(self.parameters, self._offsets[:-1], strict=True)
        ]
        self._addresses = list(map(_address_of, self._targets))
        self._views = list(self._targets)

    def gather(self, start: int, end: int, scale: float | None) -> None:
        """Take gradients. A parameter without one counts as zero."""
        if not self._targets:
            self._allocate()
        grads, targets = list(map(_grad_of, self.parameters[start:end])), self._targets[start:end]
        if not all(map(is_not, grads, itertools.repeat(None))):
            self._gather_one_by_one(start, grads, scale)
        elif self._as_views and list(map(_address_of, grads)) == self._addresses[start:end]:
            if scale is not None:  # autograd has added to the bucket itself
                self.flat[self._offsets[start] : self._offsets[end]].div_(1 / scale)
        elif self._as_views:
            self._gather_one_by_one(start, grads, scale)
        else:
            self._copy(start, end, targets, grads, scale)

    def _gather_one_by_one(self, start: int, grads: list[Any], scale: float | None) -> None:
        for i, grad in enumerate(grads, start):
            target = self._targets[i]
            if grad is None:
                target.zero_()
            elif grad.data_ptr() == self._addresses[i] and self._as_views:
                if scale is not None:
                    target.div_(1 / scale)
            else:
                _copy_scaled(target, grad, scale)
                if self._as_views:
                    self.parameters[i].grad = self._view(i)

    def _copy(
        self, start: int, end: int, targets: list[torch.Tensor], grads: list[Any], scale: float | None
    ) -> None:
        """Copy the gradients of all members [start, end)."""
        if scale is not None and self._scaled_alone:
            for target, source in zip(targets, grads, strict=True):
                _copy_scaled(target, source, scale)
            return
        torch_api.copy_all(targets, grads)
        if scale is not None:
            # Not _foreach_mul_: it rounds the factor to the dtype of the gradients first.
            self.flat[self._offsets[start] : self._offsets[end]].mul_(scale)

    @property
    def payload(self) -> list[torch.Tensor]:
        return [self.flat]

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.numel, dtype=self._dtype, device=self.parameters[0].device)

    def finish(self, result: torch.Tensor | None, used: Used) -> None:
        """Store the averages in `.grad`. `result` is the average if it is not in the payload."""
        if result is not None and result.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(result.view(-1)[: self.numel])
        grads = list(map(_grad_of, self.parameters))
        if not self._as_views:
            _store(self.parameters, grads, list(enumerate(self._targets)), used)
            return
        for i, grad in enumerate(grads):
            if grad is None and used(i, self._targets[i]):
                self.parameters[i].grad = self._view(i)

    def _view(self, i: int) -> torch.Tensor:
        """Return the view of a member for `.grad`: the one of the step before, if it still has its memory."""
        view = self._views[i]
        if view is self._targets[i] or view.data_ptr() != self._addresses[i]:
            view = self._views[i] = self._targets[i].view_as(self._targets[i])
        return view


class InPlaceBucket:
    """Averages each gradient where it is."""

    def __init__(self, parameters: Sequence[torch.Tensor], *, copies: bool) -> None:
        """`copies`: another reducer averages the same gradients in the same backward."""
        self.parameters = list(parameters)
        self.copies = copies
        self.unused: Collection[int] = ()  # members whose gradients are kept if no rank has used them
        self.payload: list[torch.Tensor] = []
        self._copied: list[tuple[int, torch.Tensor]] = []

    def gather(self, start: int, end: int, scale: float | None) -> None:
        for i in range(start, end):
            parameter = self.parameters[i]
            grad = parameter.grad
            apart = self.copies or i in self.unused
            if grad is not None and not apart and not _needs_copy(grad, parameter):
                tensor = grad
            else:
                tensor = like_gradient(parameter)
                tensor = tensor.zero_() if grad is None else tensor.copy_(grad.detach())
                self._copied.append((i, tensor))
            if scale is not None:
                tensor.mul_(scale)
            self.payload.append(_as_flat(tensor))

    def zeros(self) -> torch.Tensor:
        first = self.parameters[0]
        numel = sum(parameter.numel() for parameter in self.parameters)
        return torch.zeros(numel, dtype=first.dtype, device=first.device)

    def finish(self, result: torch.Tensor | None, used: Used) -> None:
        if result is not None:
            raise WrongUse("internal error: an InPlaceBucket has no flat buffer for a result")
        copied, self.payload, self._copied = self._copied, [], []
        _store(self.parameters, [self.parameters[i].grad for i, _ in copied], copied, used)


class SparseBucket:
    """Averages one sparse gradient."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameters = [parameter]
        self.payload: list[torch.Tensor] = []

    def gather(self, start: int, end: int, scale: float | None) -> None:
        grad = self.parameters[0].grad
        if grad is None:
            grad = self.zeros()
        elif not grad.is_sparse:
            raise WrongUse("Expected variable to have sparse gradient.")
        # The gradients of two parameters may share their values, so nothing is changed in place.
        self.payload = [grad.clone() if scale is None else grad * scale]

    def zeros(self) -> torch.Tensor:
        """Return an empty sparse gradient, like that of an embedding for a batch that does not use it."""
        parameter = self.parameters[0]
        indices = torch.zeros((1, 0), dtype=torch.long, device=parameter.device)
        values = torch.zeros((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)

    def finish(self, result: torch.Tensor | None, used: Used) -> None:
        average = self.payload[0] if result is None else result
        if self.parameters[0].grad is None:
            if used(0, average):
                self.parameters[0].grad = average
        else:
            self.parameters[0].grad.copy_(average)
        self.payload = []


def _copy_scaled(target: torch.Tensor, source: torch.Tensor, scale: float | None) -> None:
    if scale is None:
        target.copy_(source)
    else:
        torch.mul(source, scale, out=target)


AnyBucket = FlatBucket | InPlaceBucket | SparseBucket


def gradient_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient: the parameter's if it is non-overlapping and dense, else contiguous strides."""
    if _is_dense(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def describe_parameter(parameter: torch.Tensor, name: str, sparse: bool) -> ParameterInfo:
    return ParameterInfo(
        name,
        tuple(parameter.shape),
        gradient_strides(parameter),
        str(parameter.dtype),
        str(parameter.device),
        parameter.element_size(),
        sparse,
    )


def like_gradient(parameter: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return an empty tensor with the layout of a parameter's gradient. `like` has its dtype and device."""
    like = parameter if like is None else like
    return torch.empty_strided(
        parameter.shape, gradient_strides(parameter), dtype=like.dtype, device=like.device
    )


def _needs_copy(grad: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether the gradient cannot be averaged in place."""
    is_lazy = grad.is_conj() or grad.is_neg()  # its memory holds the conjugate or the negative of its values
    is_laid_out = grad.stride() == gradient_strides(parameter) and _is_dense(grad)
    return grad.requires_grad or is_lazy or not is_laid_out


def _are_lazy(grads: list[torch.Tensor]) -> bool:
    """Whether these gradients cannot be overwritten all at once. Few are complex, so only the rest is looked at."""
    return bool(grads) and (grads[0].is_complex() or any(map(_is_negated, grads)))


def _as_flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def _store(parameters: Sequence[torch.Tensor], grads: list[Any], averages: Averages, used: Used) -> None:
    """Copy averages into the gradients of these members. A member without one gets its average as its gradient."""
    members = [i for i, _ in averages]
    if (
        all(map(is_not, grads, itertools.repeat(None)))
        and used.includes_all(members)
        and not _are_lazy(grads)
    ):
        if grads:
            torch_api.copy_all(grads, [average for _, average in averages])
        return
    for (i, average), grad in zip(averages, grads, strict=True):
        if not used(i, average):
            continue
        if grad is None:
            parameters[i].grad = average.to(parameters[i].dtype, copy=True)
        else:
            grad.copy_(average)
