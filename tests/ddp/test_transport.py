"""Communication hooks, several groups, and groups that spare us copies."""

from __future__ import annotations

import itertools
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from test_training import batch, close, expected, gradients, loss_of, mlp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import ddp.shm
from ddp import DistributedDataParallel
from ddp.groups.core_loading import native
from ddp.reducer.plan import BucketPlan, Kind

if TYPE_CHECKING:
    from datetime import timedelta

    from ranks import Ranks

    from ddp.reducer.grad_bucket import GradBucket


def hooked(rank: int, given: dict[str, Any]) -> list[tuple[int, bool, list[tuple[int, ...]]]]:
    wrapped = DistributedDataParallel(mlp(), bucket_cap_mb=0.005, **given)
    seen: list[tuple[int, bool, list[tuple[int, ...]]]] = []

    def hook(state: str, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert state == "mine"
        pieces, parameters = bucket.gradients(), bucket.parameters()
        assert [g.shape for g in pieces] == [p.shape for p in parameters]
        assert sum(g.numel() for g in pieces) == bucket.buffer().numel()
        seen.append((bucket.index(), bucket.is_last(), [tuple(p.shape) for p in parameters]))
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]

    wrapped.register_comm_hook("mine", hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    for step in range(3):
        wrapped.zero_grad()
        loss_of(wrapped, batch(rank, step)).backward()
        close(gradients(wrapped), expected(wrapped.module, 2, step))
    return seen


@pytest.mark.parametrize("given", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
def test_a_hook_sees_every_bucket_in_order(two_ranks: Ranks, given: dict[str, Any]) -> None:
    one, other = two_ranks(hooked, given)
    assert one == other
    assert (50, 6) in one[-1][2]  # the first layer comes last
    assert [last for _, last, _ in one][-1]
    for (index, last, _), (following, _, _) in itertools.pairwise(one):
        assert following == (0 if last else index + 1)


def unpromising(rank: int, answer: Any) -> str:
    wrapped = DistributedDataParallel(mlp())

    def hook(_state, bucket):  # type: ignore[no-untyped-def]  # as most are written
        if answer is None:
            return bucket.buffer()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(answer)
        return future

    wrapped.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError) as error:
        loss_of(wrapped, batch(rank)).backward()
    return str(error.value)


def test_a_hook_that_promises_no_tensor_is_told_so(two_ranks: Ranks) -> None:
    assert all(
        "must return a torch.futures.Future object, but got Tensor" in text
        for text in two_ranks(unpromising, None)
    )
    assert all("future holds str" in text for text in two_ranks(unpromising, "words"))


def in_turns(rank: int) -> None:
    groups = [dist.new_group() for _ in range(2)]
    wrapped = DistributedDataParallel(mlp(), process_group=groups, bucket_cap_mb=0.0005)
    assert len(wrapped.reducer.core.sender.plan.buckets) == 1
    for step in range(4):
        wrapped.zero_grad()
        loss_of(wrapped, batch(rank, step)).backward()
        close(gradients(wrapped), expected(wrapped.module, 2, step))
    assert len(wrapped.reducer.core.sender.plan.buckets) > len(groups)
    with pytest.raises(ValueError, match="empty list"):
        DistributedDataParallel(mlp(), process_group=[])
    alone = [dist.new_group([0]), dist.new_group([1])]
    with pytest.raises(ValueError, match="same ranks"):
        DistributedDataParallel(mlp(), process_group=[groups[0], alone[rank]])


def test_buckets_take_turns_on_several_groups(two_ranks: Ranks) -> None:
    two_ranks(in_turns)


def two_sizes(rank: int) -> list[set[Kind]]:
    import ddp.shm

    ddp.shm.register()
    group = dist.new_group(backend="shm")
    kinds = []
    for width, given in ((50, {}), (50, {"gradient_as_bucket_view": True}), (1400, {})):
        torch.manual_seed(2)
        model = nn.Sequential(
            nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
        )
        wrapped = DistributedDataParallel(model, process_group=group, **given)
        for step in range(4):
            wrapped.zero_grad()
            loss_of(wrapped, batch(rank, step)).backward()
            close(gradients(wrapped), expected(wrapped.module, 2, step))
        kinds.append({bucket.kind for bucket in wrapped.reducer.core.sender.plan.buckets})
        plain = default_hooks.allreduce_hook
        wrapped.register_comm_hook(group, plain)
        wrapped.zero_grad()
        loss_of(wrapped, batch(rank)).backward()
        close(gradients(wrapped), expected(wrapped.module, 2))
    return kinds


@pytest.mark.skipif(native() is None, reason="the compiled core is not there")
def test_shared_memory_needs_no_bucket_for_a_small_model_and_has_it_in_its_segment_otherwise(
    two_ranks: Ranks,
) -> None:
    assert two_ranks(two_sizes)[0] == [{Kind.IN_PLACE}, {Kind.FLAT}, {Kind.FLAT}]


def uneven(rank: int, by_initial: bool, backend: str) -> None:
    if backend == "shm":
        import ddp.shm

        ddp.shm.register()
    wrapped = DistributedDataParallel(mlp(), process_group=dist.new_group(backend=backend))
    with wrapped.join(divide_by_initial_world_size=by_initial):
        for step in range(3 + 2 * rank):
            wrapped.zero_grad()
            wanted = expected(wrapped.module, 2, step)
            if step >= 3:  # rank 0 has no input left, and contributes zeros
                mine = copy_of_gradients(wrapped, batch(rank, step))
                wanted = [g / (2 if by_initial else 1) for g in mine]
            loss_of(wrapped, batch(rank, step)).backward()
            close(gradients(wrapped), wanted)


def copy_of_gradients(wrapped: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model = mlp()
    model.load_state_dict(wrapped.module.state_dict())  # type: ignore[union-attr,operator]
    loss_of(model, x).backward()
    return gradients(model)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("by_initial", [True, False])
def test_a_rank_without_input_contributes_zeros(two_ranks: Ranks, by_initial: bool, backend: str) -> None:
    if backend == "shm" and native() is None:
        pytest.skip("the compiled core is not there")
    two_ranks(uneven, by_initial, backend)


def let_go(rank: int, backend: str) -> list[bool]:
    """The gradient of a parameter as large as a bucket is averaged where it lies: nobody else needs it afterwards."""
    ddp.shm.register()
    layer = nn.Linear(1024, 512, bias=False)
    wrapped = DistributedDataParallel(layer, bucket_cap_mb=1, process_group=dist.new_group(backend=backend))
    assert [bucket.kind for bucket in wrapped.reducer.core.sender.plan.buckets] == [Kind.IN_PLACE]
    gone = []
    for keep in (True, False, True, False):
        wrapped(torch.ones(2, 1024)).sum().backward()
        grad = weakref.ref(layer.weight.grad)
        wrapped.zero_grad(set_to_none=not keep)
        deadline = time.monotonic() + 40
        while not keep and grad() is not None and time.monotonic() < deadline:
            time.sleep(0.001)  # Gloo's thread has it in its hand a little longer than we
        gone.append(grad() is None)
    return gone


@pytest.mark.parametrize(
    "backend",
    ["gloo", pytest.param("shm", marks=pytest.mark.skipif(native() is None, reason="no compiled core"))],
)
def test_a_gradient_that_is_let_go_of_is_gone(two_ranks: Ranks, backend: str) -> None:
    assert two_ranks(let_go, backend) == [[False, True, False, True]] * 2


class InPython(dist.ProcessGroup):
    """As strict as a group may be that torch's own reducer gets along with: known to nobody, and called in full."""

    class Waiting(dist.Work):
        def __init__(self, work: dist.Work) -> None:
            super().__init__()
            self.work = work

        def wait(self, timeout: timedelta) -> bool:
            return self.work.wait(timeout)

        def get_future(self) -> Any:
            return self.work.get_future()

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group

    def getBackendName(self) -> str:
        return "in-python"

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self.Waiting(self.group.broadcast(tensors, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self.Waiting(self.group.allgather(outputs, inputs, opts))

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return self.Waiting(self.group.allreduce(tensors, opts))


def over_a_group_in_python(rank: int, given: dict[str, Any]) -> None:
    assert dist.group.WORLD is not None
    group = InPython(dist.group.WORLD)
    wrapped = DistributedDataParallel(mlp(), process_group=group, bucket_cap_mb=0.005, **given)
    for step in range(3):
        wrapped.zero_grad()
        loss_of(wrapped, batch(rank, step)).backward()
        close(gradients(wrapped), expected(wrapped.module, 2, step))


@pytest.mark.parametrize("given", [{}, {"find_unused_parameters": True}])
def test_a_group_written_in_python_carries_a_model(two_ranks: Ranks, given: dict[str, Any]) -> None:
    two_ranks(over_a_group_in_python, given)


def disagrees(rank: int, backend: str, how: str) -> str:
    """Two wrappers of the same model. On rank 1 the last step is another one, with as many elements."""
    with pytest.MonkeyPatch.context() as changed:  # the rank runs other tests after this one
        changed.setenv("DDP_HOST_KEY", f"host{rank}" if backend == "hier" else "host")
        group = dist.new_group(backend=backend)
    one, other = (DistributedDataParallel(mlp(), process_group=group) for _ in range(2))
    for number in range(3):
        for wrapped in (one, other):
            step_of(wrapped, rank, number)
    sender = one.reducer.core.sender
    if rank and how == "plan":
        (bucket,) = sender.plan.buckets
        sender.adopt(BucketPlan((replace(bucket, members=bucket.members[::-1]),)))
    try:
        if rank and how == "call":
            dist.all_reduce(torch.zeros(sum(p.numel() for p in one.parameters())), group=group)
        else:
            step_of(other if rank and how == "wrapper" else one, rank, 3)
    except RuntimeError as error:
        return str(error)
    return ""


def step_of(wrapped: DistributedDataParallel, rank: int, number: int) -> None:
    wrapped.zero_grad()
    loss_of(wrapped, batch(rank, number)).backward()


@pytest.mark.skipif(native() is None, reason="the compiled core is not built here")
@pytest.mark.parametrize("backend", ["shm", "hier"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("wrapper", "averaged bucket 0 of step 3"),
        ("plan", "averaged bucket 0 of step 3"),
        ("call", "averaged bucket 0 of step 3"),
    ],
)
def test_ranks_that_average_different_steps_fail_in_this_step(
    two_ranks: Ranks, backend: str, how: str, words: str
) -> None:
    for said in two_ranks(disagrees, backend, how):
        assert "the ranks disagree: " in said
        assert words in said
