"""The storage of gradients while they are averaged, and the tensor that `.grad` refers to before and after.

FlatBucket    copies gradients side by side into one tensor. If this backward created a gradient, it is freed after the
              copy,
              and `.grad` then points into the bucket. This avoids the copy back to `.grad`, and frees memory early.
              A gradient that existed before (accumulation, zeroed in place) keeps its identity: the average is
              copied back into it, unless it is already in the bucket.
InPlaceBucket averages gradients in place.
SparseBucket  holds one sparse gradient.

With `as_views`, `.grad` is a view of the bucket. The bucket lives as long as the plan, and the next step writes into
it again. Without `as_views`, `.grad` is a separate tensor that uses the memory of the bucket. The bucket reuses this
memory only if no other code refers to it. A gradient that the script keeps therefore does not change.

The three classes share an interface. `gather` takes the gradients of the members [start, end). `payload` holds the
tensors to average. `finish` stores the average in `.grad`. `late` is true if a gradient changed after `gather`.
"""

from __future__ import annotations

import itertools
import sys
from operator import attrgetter, is_, is_not
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ddp.reducer.plan import ParameterInfo
from ddp.reducer.unused import ABSENT
from ddp.telemetry import torch_api
from ddp.telemetry.coded import WrongUse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp.reducer.baseline import Baseline
    from ddp.reducer.collectives import BucketCollectives

    Averages = Sequence[tuple[int, torch.Tensor]]

# There may be thousands of gradients: `map` calls these in a loop that runs in C.
_version_of = attrgetter("_version")
_grad_of = attrgetter("grad")
_wants_gradient = attrgetter("requires_grad")


class Used(Protocol):
    """Which members of a bucket any rank used. Only their `.grad` receives the average."""

    def __call__(self, member: int, average: torch.Tensor) -> bool: ...

    def includes_all(self, members: Sequence[int]) -> bool:
        """Whether it is known, without looking at the averages, that all of these members were used.

        Their `.grad` is not None.
        """
        ...


class FlatBucket:
    """Copies its gradients into one tensor."""

    alone = True  # no other reducer averages these gradients in the same backward

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        indices: Sequence[int],
        collectives: BucketCollectives,
        *,
        as_views: bool,
        dtype: torch.dtype | None,
    ) -> None:
        self.parameters = list(parameters)
        self.indices = indices  # of the parameters in the model
        self._collectives = collectives
        self._as_views = as_views
        self._dtype = dtype or parameters[0].dtype
        # In mixed precision a communication hook moves `.grad` to other memory.
        self._may_replace = dtype is None
        sizes = [parameter.numel() for parameter in self.parameters]
        self.numel = sum(sizes)
        self._offsets = [0, *itertools.accumulate(sizes)]
        self._scaled_alone = self.numel * self._dtype.itemsize >= collectives.costs.scaled_alone * len(sizes)
        self.flat = torch.empty(0, dtype=self._dtype)
        self.targets: list[torch.Tensor] = []
        self._idle_references = 0
        self._kept: list[tuple[int, torch.Tensor]] = []
        self._absent: list[tuple[int, torch.Tensor]] = []
        self._idle_uses = 0
        # The versions of the targets. With `as_views`, the targets share the version of the bucket: only that one.
        self._versions: list[int] = []
        self._kept_versions: list[tuple[torch.Tensor, int]] = []
        self._begun = False
        self._late = False
        self._countable = True  # whether versions show changes: views of one bucket share a counter

    def _allocate(self) -> None:
        self.flat = self._collectives.allocate(self.numel, self._dtype, self.parameters[0].device)
        self.targets = [
            self._piece(parameter, offset)
            for parameter, offset in zip(self.parameters, self._offsets[:-1], strict=True)
        ]
        self._idle_references = sum(map(sys.getrefcount, self.targets))
        self._idle_uses = self._uses()
        self._versions = [target._version for target in self.targets]

    def _uses(self) -> int:
        """Return how many tensors use the memory of this bucket."""
        return torch_api.storage_uses(self.flat.untyped_storage())

    def _piece(self, parameter: torch.Tensor, offset: int) -> torch.Tensor:
        size, stride = parameter.shape, gradient_strides(parameter)
        if self._as_views:
            return self.flat.as_strided(size, stride, offset)
        start = self.flat.storage_offset() + offset
        return torch.empty(0, dtype=self._dtype, device=self.flat.device).set_(
            self.flat.untyped_storage(), start, size, stride
        )

    def _has_other_users(self, ours: int) -> bool:
        """Whether other code holds a gradient in this bucket, or another tensor uses the same memory.

        `ours`: the number of references from `.grad` and from the record of earlier gradients.
        """
        references = sum(map(sys.getrefcount, self.targets))
        return references != self._idle_references + ours or self._uses() != self._idle_uses

    def _begin(self, before: Baseline | None) -> None:
        self._begun = True
        self._kept, self._absent, self._kept_versions = [], [], []
        self._late, self._countable = False, True
        if not self.targets:
            self._allocate()
        elif not self._as_views:
            # Not `zip`: it keeps its last pair, which would count as another user of a target.
            ours = 0 if before is None else sum(map(is_, map(_grad_of, self.parameters), self.targets))
            ours += 0 if before is None else sum(map(is_, before.of(self.indices) or (), self.targets))
            if self._has_other_users(ours):
                self._allocate()
        self._versions = [self.flat._version] if self._as_views else [-1] * len(self.targets)

    def gather(self, start: int, end: int, scale: float | None, before: Baseline | None) -> None:
        """Take gradients. `before` holds each `.grad` from the start of the backward. None: all were None."""
        if not self._begun:
            self._begin(before)
        self._countable &= not self._as_views or before is None
        self._late |= self._as_views and self._countable and self.flat._version != self._versions[0]
        members, targets = self.parameters[start:end], self.targets[start:end]
        grads = list(map(_grad_of, members))
        if before is None and self._may_replace and self.alone and _are_plain(grads):
            self._copy(start, end, targets, grads, scale)
            for parameter, target in zip(members, targets, strict=True):
                parameter.grad = target
        elif all(map(is_, grads, targets)):  # autograd has added to the bucket itself
            if scale is not None:
                self.flat[self._offsets[start] : self._offsets[end]].div_(1 / scale)
        else:
            earlier = None if before is None else before.of(self.indices[start:end])
            self._gather_some(start, end, grads, scale, earlier or [None] * len(grads))
        if self._as_views:
            self._versions = [self.flat._version]
        else:
            self._versions[start:end] = map(_version_of, targets)

    def _gather_some(
        self, start: int, end: int, grads: list[Any], scale: float | None, before: Sequence[Any]
    ) -> None:
        """Gather members of which some have no gradient, or one that keeps its memory."""
        into, sources, released = [], [], []
        for i, (grad, earlier) in enumerate(zip(grads, before, strict=True), start):
            target = self.targets[i]
            if grad is None:
                self._absent.append((i, target))
                target.fill_(ABSENT)
            elif grad is target:
                if scale is not None:
                    target.div_(1 / scale)
            else:
                into.append(target)
                sources.append(grad)
                fresh = earlier is None or self._as_views
                if self._may_replace and self.alone and fresh and not grad.requires_grad:
                    released.append(i)
                else:
                    self._kept.append((i, target))
                    self._kept_versions.append((grad, grad._version))
        if len(into) == end - start:
            self._copy(start, end, into, sources, scale)
        else:
            for target, source in zip(into, sources, strict=True):
                _copy_scaled(target, source, scale)
        for i in released:
            self.parameters[i].grad = self.targets[i]

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

    def owns(self, grad: torch.Tensor) -> bool:
        return self._begun and any(grad is target for target in self.targets)

    @property
    def late(self) -> bool:
        """Whether a gradient changed after it was gathered."""
        tensors = [self.flat] if self._as_views else self.targets
        return (
            self._late
            or (self._countable and list(map(_version_of, tensors)) != self._versions)
            or any(grad._version != version for grad, version in self._kept_versions)
        )

    @property
    def payload(self) -> list[torch.Tensor]:
        return [self.flat]

    def zeros(self) -> torch.Tensor:
        return torch.full((self.numel,), ABSENT, dtype=self._dtype, device=self.parameters[0].device)

    def finish(self, result: torch.Tensor | None, used: Used) -> None:
        """Store the averages in `.grad`. `result` is the average if it is not in the payload."""
        self._begun = False
        if result is not None and result.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(result.view(-1)[: self.numel])
        _store(self.parameters, self._kept, self._absent, used)
        self._kept, self._absent, self._kept_versions = [], [], []


class InPlaceBucket:
    """Averages each gradient where it is."""

    alone = True

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        self.payload: list[torch.Tensor] = []
        self._kept: list[tuple[int, torch.Tensor]] = []
        self._absent: list[tuple[int, torch.Tensor]] = []
        self._versions: list[tuple[torch.Tensor, int]] = []

    def gather(self, start: int, end: int, scale: float | None, before: Baseline | None) -> None:
        for i in range(start, end):
            parameter = self.parameters[i]
            grad = parameter.grad
            if grad is None:
                tensor = like_gradient(parameter).fill_(ABSENT)
                self._absent.append((i, tensor))
            elif not self.alone or _needs_copy(grad, parameter):
                tensor = like_gradient(parameter).copy_(grad.detach())
                self._kept.append((i, tensor))
            else:
                tensor = grad
            if scale is not None:
                tensor.mul_(scale)
            self._versions.append((tensor, tensor._version))
            self.payload.append(_as_flat(tensor))

    def owns(self, grad: torch.Tensor) -> bool:
        return any(grad is tensor for tensor, _version in self._versions)

    @property
    def late(self) -> bool:
        return any(tensor._version != version for tensor, version in self._versions)

    def zeros(self) -> torch.Tensor:
        numel = sum(parameter.numel() for parameter in self.parameters)
        first = self.parameters[0]
        return torch.full((numel,), ABSENT, dtype=first.dtype, device=first.device)

    def finish(self, result: torch.Tensor | None, used: Used) -> None:
        if result is not None:
            raise WrongUse("internal error: an InPlaceBucket has no flat buffer for a result")
        _store(self.parameters, self._kept, self._absent, used)
        self.payload, self._kept, self._absent, self._versions = [], [], [], []


class SparseBucket:
    """Averages one sparse gradient."""

    alone = True

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameters = [parameter]
        self.payload: list[torch.Tensor] = []
        self.late = False

    def gather(self, start: int, end: int, scale: float | None, before: Baseline | None) -> None:
        grad = self.parameters[0].grad
        if grad is None:
            grad = self.zeros()
        elif not grad.is_sparse:
            raise WrongUse("Expected variable to have sparse gradient.")
        # The gradients of two parameters may share their values, so nothing is changed in place.
        self.payload = [grad.clone() if scale is None else grad * scale]

    def owns(self, grad: torch.Tensor) -> bool:
        return False

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


def _are_plain(grads: Sequence[torch.Tensor | None]) -> bool:
    """Whether all gradients exist and none of them requires a gradient."""
    return all(map(is_not, grads, itertools.repeat(None))) and not any(map(_wants_gradient, grads))


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
    return grad.requires_grad or grad.stride() != gradient_strides(parameter) or not _is_dense(grad)


def _as_flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def _store(parameters: Sequence[torch.Tensor], kept: Averages, absent: Averages, used: Used) -> None:
    """Copy averages into the gradients that keep their memory, and assign those of parameters without a gradient."""
    grads: list[Any] = [parameters[i].grad for i, _ in kept]
    if kept and _are_plain(grads) and used.includes_all([i for i, _ in kept]):
        torch_api.copy_all(grads, [average for _, average in kept])
        kept = ()
    for i, average in kept:
        if used(i, average):
            parameter = parameters[i]
            if parameter.grad is None:
                parameter.grad = average.to(parameter.dtype)
            else:
                parameter.grad.detach().copy_(average)
    for i, average in absent:
        if used(i, average):
            parameters[i].grad = average
