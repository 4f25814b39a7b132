"""Send buckets: the current plan, the storage of its buckets, the hook or the collective, and the divisor.

A communication hook receives undivided gradients and divides them itself. Without a hook, gradients are divided before
they are summed. If the process group can divide, it divides instead (see `ddp/reducer/collectives.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ddp.reducer import plan
from ddp.reducer.collectives import GROUP_TIMEOUT, BucketCollectives
from ddp.reducer.grad_bucket import GradBucket, result_of
from ddp.reducer.plan import CostModel, Kind, ParameterInfo
from ddp.telemetry import coded, comm_error, status_page, torch_api, torch_names
from ddp.telemetry.coded import WrongUse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_BARE_FUTURE = torch_api.get(torch_names.FUTURE)  # what C++ returns; torch.futures.Future inherits from it


@dataclass(frozen=True)
class ReducerSettings:
    """The arguments of the module that concern the reducer."""

    groups: tuple[ProcessGroup, ...]
    limit: plan.Limits
    find_unused: bool = False
    as_views: bool = False
    skip_unused: bool = False
    strict: bool = False  # gradients that torch's class leaves local without a message are an error


class BucketSender:
    """The current plan and its buckets, and how they are sent: by a hook or by a collective."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        sparse: Sequence[bool],
        settings: ReducerSettings,
    ) -> None:
        self.parameters = list(parameters)
        self.device = self.parameters[0].device
        self.facts = [describe_parameter(*one) for one in zip(parameters, names, sparse, strict=True)]
        self._settings = settings
        self._collectives = BucketCollectives(settings.groups, self.device)
        self._hook: tuple[Any, Callable[[Any, GradBucket], Any]] | None = None
        self._dtype: torch.dtype | None = None
        self._hook_stream: torch.Stream | None = None
        self._divisor: float | None = None
        self._joining: tuple[Any, bool] | None = None
        # Set for every model in a `join`. Only the first also has `_joining`, which counts the ranks with input left.
        self.within_join = False
        self._futures: list[Any] = []
        self._consumed = self._shared = False
        self.unused: frozenset[int] = frozenset()  # parameters that this step does not use on this rank
        self.buckets: list[AnyBucket] = []
        # A tag says which bucket of which step this is. Ranks with different ones must not be averaged.
        self.identity = 0  # of the wrapper, the same number on all ranks
        self.rounds = 0  # averaged steps so far
        self._plan_tag = 0
        self._page = status_page.page()
        self._launched = 0
        self.plan = plan.BucketPlan(())
        self.start_over()

    def skip_write_back(self) -> None:
        """Do not write averages to `.grad`: the hook runs the optimizer and drops the gradients."""
        self._consumed = True

    def set_shared(self) -> None:
        """Do not average in place: another reducer, or the script, uses the same gradients in the backward."""
        self._shared = True
        for bucket in self.buckets:
            if isinstance(bucket, InPlaceBucket):
                bucket.copies = True

    @property
    def backend_name(self) -> str:
        return str(self.group.name())

    @property
    def gloo_threads(self) -> int | None:
        if self.backend_name != "gloo":
            return None
        return torch_api.gloo_threads(torch_api.backend_of(self.group, self.device))

    @property
    def dtype_names(self) -> list[str]:
        """The C++ names of the dtypes, as in torch's logging data."""
        called = {
            "float32": "float",
            "float64": "double",
            "float16": "c10::Half",
            "bfloat16": "c10::BFloat16",
        }
        plain = [facts.dtype.removeprefix("torch.") for facts in self.facts]
        return [called.get(name, name) for name in plain]

    @property
    def costs(self) -> CostModel:
        return self._collectives.costs

    @property
    def group(self) -> ProcessGroup:
        return self._collectives.groups[0]

    # --- the plan ----------------------------------------------------------------------------------

    @property
    def transport(self) -> plan.Transport:
        plain = self._hook is None and self._dtype is None and not self._settings.as_views
        return plan.Transport(lists=self._collectives.averages_lists, in_place=plain, costs=self.costs)

    def start_over(self) -> None:
        """Return to the first plan, which is made before any backward."""
        self.adopt(plan.first_plan(self.facts, self._settings.limit, self.transport))

    def make_plan(self, arrival: Sequence[int]) -> plan.BucketPlan:
        return plan.rebuilt_plan(self.facts, arrival, self._settings.limit, self.transport)

    def adopt(self, chosen: plan.BucketPlan) -> None:
        self.plan = chosen
        self._plan_tag = plan.plan_fingerprint(chosen)
        self.buckets = [self._storage(bucket) for bucket in chosen.buckets]

    def _storage(self, bucket: plan.Bucket) -> AnyBucket:
        members = [self.parameters[i] for i in bucket.members]
        if bucket.kind is Kind.SPARSE:
            return SparseBucket(members[0])
        if bucket.kind is Kind.IN_PLACE:
            return InPlaceBucket(members, copies=self._shared)
        return FlatBucket(members, self._collectives, as_views=self._settings.as_views, dtype=self._dtype)

    def register_hook(self, state: Any, hook: Callable[[Any, GradBucket], Any]) -> None:
        if self._hook is not None:
            raise coded.WrongUse("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._hook = (state, hook)
        self.start_over()

    @property
    def hooked(self) -> bool:
        """Whether a communication hook is registered. A hook may rely on receiving every bucket."""
        return self._hook is not None

    def use_dtype(self, dtype: torch.dtype | None) -> None:
        """Set the dtype of the gradients if it differs from that of the parameters: in mixed precision."""
        self._dtype = dtype
        self._hook_stream = getattr(self._hook[0], "upcast_stream", None) if self._hook is not None else None
        self.start_over()

    def start_anew(self, settings: ReducerSettings) -> None:
        """Use the groups of these settings, from the first plan on, and drop what is in flight."""
        self._settings, self._collectives = settings, BucketCollectives(settings.groups, self.device)
        self._divisor, self._joining, self._launched, self._futures = None, None, 0, []
        self.within_join = False
        self.identity = self.rounds = 0
        self.start_over()

    # --- sending a bucket --------------------------------------------------------------------------

    def join_with(self, work: Any, static_world_size: bool) -> None:
        """Make this step part of a `join`. `work` counts the ranks that still have input."""
        self._joining = work, static_world_size

    @property
    def joins(self) -> bool:
        """Whether some ranks may be without input in this step."""
        return self._joining is not None or self.within_join

    @property
    def divisor(self) -> float:
        if self._divisor is None:
            self._divisor = float(self.group.size())
            if self._joining is not None and not self._joining[1]:
                self._divisor = float(result_of(self._joining[0].get_future()).item())
        return self._divisor

    def _divides(self, bucket: AnyBucket) -> bool:
        """Whether the group divides the sums.

        In a `join` it does not: a rank without input does not have the divisor.
        """
        return self._collectives.divides and not isinstance(bucket, SparseBucket) and not self.joins

    def _scale(self, bucket: AnyBucket) -> float | None:
        """The factor for gradients before they are summed. None: do not scale."""
        return None if self._hook is not None or self._divides(bucket) else 1 / self.divisor

    def gather(self, number: int, start: int, end: int) -> None:
        bucket = self.buckets[number]
        if isinstance(bucket, InPlaceBucket):
            members = self.plan.buckets[number].members
            bucket.unused = self.unused and [i for i, member in enumerate(members) if member in self.unused]
        bucket.gather(start, end, self._scale(bucket))

    def launch(self, number: int) -> Any:
        bucket = self.buckets[number]
        self._launched += 1
        self._page.buckets(len(self.buckets), self._launched, 0)
        try:
            if self._hook is not None:
                return self.run_hook(self._hook_bucket(number, bucket.payload[0]))
            return self._start(number, bucket.payload, self.divisor if self._divides(bucket) else 1.0)
        except RuntimeError as error:
            self._explain(error, number)
            raise

    def _start(self, number: int, tensors: list[torch.Tensor], divisor: float) -> Any:
        """Start the collective of a bucket, and return its Work. The group divides if it can and must."""
        if self._collectives.averages_lists and not tensors[0].is_sparse:
            return self._collectives.average(number, tensors, divisor, self._tag(number))
        (tensor,) = tensors
        return self._collectives.sum(number, tensor, average=divisor != 1.0 and self._collectives.divides)

    def _tag(self, number: int) -> int:
        """Of 64 bits: 24 for the wrapper and the plan, 28 for the step, 12 for the bucket."""
        origin = (self._plan_tag ^ self.identity) & 0xFFFFFF
        return origin << 40 | (self.rounds & 0xFFFFFFF) << 12 | (number & 0xFFF)

    def _explain(self, error: RuntimeError, number: int) -> None:
        """Raise a more detailed error if communication has failed."""
        names = [self.facts[i].name for i in self.plan.buckets[number].members]
        way = "all_reduce" if self._hook is None else "the communication hook"
        group = str(getattr(self.group, "group_desc", ""))
        doing = comm_error.Operation(way, group, None, number, len(self.buckets), tuple(names))
        comm_error.explain(error, doing)

    def run_hook(self, bucket: GradBucket) -> Any:
        """Return the hook's future, or the Work of the collective. The caller waits for it."""
        if self._hook is None:
            return self._start(bucket.index(), [bucket.buffer()], 1.0)
        state, hook = self._hook
        future = hook(state, bucket)
        if not isinstance(future, torch.futures.Future | _BARE_FUTURE):
            raise coded.WrongUse(
                "DDP communication hook's callback must return a torch.futures.Future object, but got "
                f"{type(future).__name__}."
            )
        return future

    def sum_bucket(self, bucket: GradBucket) -> Any:
        """Return a future of the sum, for hooks that use the plain all-reduce as one of their steps."""
        return self._collectives.sum(bucket.index(), bucket.buffer()).get_future()

    def zero_buckets(self) -> list[GradBucket]:
        """Return the buckets that a rank without input sends."""
        return [self._hook_bucket(number, bucket.zeros()) for number, bucket in enumerate(self.buckets)]

    def _hook_bucket(self, number: int, buffer: torch.Tensor) -> GradBucket:
        names = [self.facts[i].name for i in self.plan.buckets[number].members]
        last = number + 1 == len(self.buckets)
        return GradBucket(number, last, buffer, self.buckets[number].parameters, names)

    def await_futures(self, futures: Sequence[Any]) -> None:
        self._futures += futures

    def finish(self, number: int, work: Any, used: Used) -> None:
        bucket = self.buckets[number]
        result = None
        before = self._page.mark(status_page.COMMUNICATE)
        if before != status_page.BACKWARD:  # autograd's thread, for the backward pass of another thread
            self._page.awaits()
        try:
            if work is not None and self._hook is not None:
                result = result_of(work)
                if self._hook_stream is not None:  # of torch's hook, whose future does not carry it
                    torch.accelerator.current_stream(self.device).wait_stream(self._hook_stream)
            elif work is not None:
                work.wait(GROUP_TIMEOUT)
        except RuntimeError as error:
            self._explain(error, number)
            raise
        finally:
            self._page.back(before)
        self._page.buckets(len(self.buckets), self._launched, number + 1)
        with torch.no_grad():
            bucket.finish(result, _Nothing() if self._consumed else used)

    def step_ended(self) -> None:
        self._divisor, self._joining, self._launched = None, None, 0
        self.rounds += 1
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()


class _Nothing:
    """No member receives its average."""

    def __call__(self, member: int, average: torch.Tensor) -> bool:
        return False

    def includes_all(self) -> bool:
        return False


# --- the storage of gradients while they are averaged ----------------------------------------------
#
# FlatBucket    copies gradients side by side into one tensor, and the averages back into `.grad`. With `as_views`,
#               `.grad` is a view of that tensor from the first step on, so that nothing is copied any more.
# InPlaceBucket averages gradients in place.
# SparseBucket  holds one sparse gradient.
#
# As in torch's class, `.grad` stays the tensor that autograd or the script has stored there. The script may hold it, or
# replace its memory (`p.grad.data = ...`). So a bucket compares addresses, and never hands out its own tensors.
#
# The three classes share an interface. `gather` takes the gradients of the members [start, end). `payload` holds the
# tensors to average. `finish` stores the average in `.grad`.

# There may be thousands of gradients: `map` calls these in a loop that runs in C.
_grad_of = attrgetter("grad")
_address_of = torch.Tensor.data_ptr
_is_negated = torch.Tensor.is_neg


class Used(Protocol):
    """Which members of a bucket any rank used. Only their `.grad` receives the average."""

    def __call__(self, member: int, average: torch.Tensor) -> bool: ...

    def includes_all(self) -> bool:
        """Whether it is known, without waiting, that all members were used."""
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
            # Make existing gradients views at once: what the script holds of the old ones does not change any more.
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
        if not _are_complete(grads):
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
            if result.numel() < self.numel:  # one element would be copied to all
                raise WrongUse(
                    f"the communication hook's future holds {result.numel()} elements, but its bucket has "
                    f"{self.numel}. Return a tensor of the size of `bucket.buffer()`"
                )
            self.flat.copy_(result.view(-1)[: self.numel])
        if not self._as_views:
            _store(self.parameters, self._targets, range(len(self._targets)), used)
            return
        grads = list(map(_grad_of, self.parameters))
        for i, grad in enumerate(grads if not _are_complete(grads) else ()):
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
        """`copies`: something else uses the same gradients in the same backward."""
        self.parameters = list(parameters)
        self.copies = copies
        self.unused: Collection[int] = ()  # members whose gradients are kept if no rank has used them
        self.payload: list[Any] = []
        self._copied: dict[int, torch.Tensor] = {}

    def gather(self, start: int, end: int, scale: float | None) -> None:
        self.payload = self.payload or [None] * len(self.parameters)
        for i in range(start, end):
            parameter = self.parameters[i]
            grad = parameter.grad
            apart = self.copies or i in self.unused
            if grad is not None and not apart and not _needs_copy(grad, parameter):
                tensor = grad
            else:
                tensor = like_gradient(parameter)
                tensor = tensor.zero_() if grad is None else tensor.copy_(grad.detach())
                self._copied[i] = tensor
            if scale is not None:
                tensor.mul_(scale)
            self.payload[i] = tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))

    def zeros(self) -> torch.Tensor:
        first = self.parameters[0]
        numel = sum(parameter.numel() for parameter in self.parameters)
        return torch.zeros(numel, dtype=first.dtype, device=first.device)

    def finish(self, result: torch.Tensor | None, used: Used) -> None:
        if result is not None:
            raise WrongUse("internal error: an InPlaceBucket has no flat buffer for a result")
        copied, self.payload, self._copied = self._copied, [], {}
        if copied:
            _store([self.parameters[i] for i in copied], list(copied.values()), copied, used)


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
    return grads[0].is_complex() or any(map(_is_negated, grads))


def _are_complete(grads: list[Any]) -> bool:
    return all(map(is_not, grads, itertools.repeat(None)))


def _store(
    parameters: Sequence[torch.Tensor], averages: list[torch.Tensor], members: Iterable[int], used: Used
) -> None:
    """Copy averages into the gradients of these members. A member without one gets its average as its gradient."""
    grads = list(map(_grad_of, parameters))
    if used.includes_all() and _are_complete(grads) and not _are_lazy(grads):
        torch_api.copy_all(grads, averages)
        return
    for parameter, grad, average, member in zip(parameters, grads, averages, members, strict=True):
        if not used(member, average):
            continue
        if grad is None:
            parameter.grad = average.to(parameter.dtype, copy=True)
        else:
            grad.copy_(average)
