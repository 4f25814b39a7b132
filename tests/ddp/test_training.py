"""Steps that give the same numbers as one process with the whole batch."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp import DistributedDataParallel
from ddp.reducer.plan import Kind

if TYPE_CHECKING:
    from ranks import Ranks

Gradients = list[torch.Tensor]


def mlp() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 3))


def batch(rank: int, step: int = 0, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (4, 6)), generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def gradients(model: nn.Module) -> Gradients:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def expected(model: nn.Module, world: int, step: int = 0) -> Gradients:
    """Of the mean over all ranks' batches, in one process."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    losses = [loss_of(plain, batch(rank, step)) for rank in range(world)]
    torch.stack(losses).mean().backward()
    return gradients(plain)


def close(ours: Gradients, wanted: Gradients) -> None:
    assert len(ours) == len(wanted)
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b)


def train(rank: int, world: int, given: dict[str, Any], set_to_none: bool) -> Gradients:
    wrapped = DistributedDataParallel(mlp(), **given)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad(set_to_none=set_to_none)
        wanted = expected(wrapped.module, world, step)
        loss_of(wrapped, batch(rank, step)).backward()
        close(gradients(wrapped), wanted)
        optimizer.step()
    return [p.detach().clone() for p in wrapped.parameters()]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"bucket_cap_mb": 0.005},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
    ],
)
def test_gradients_are_those_of_the_whole_batch(
    three_ranks: Ranks, given: dict[str, Any], set_to_none: bool
) -> None:
    results = three_ranks(train, 3, given, set_to_none)
    for parameters in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0], strict=True))


def large(rank: int) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 3))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
    for step in range(3):
        wrapped.zero_grad()
        wanted = copy.deepcopy(model)
        torch.stack([loss_of(wanted, batch(r, step, 2, 600)) for r in range(2)]).mean().backward()
        loss_of(wrapped, batch(rank, step, 2, 600)).backward()
        close(gradients(wrapped), gradients(wanted))
    kinds = [bucket.kind for bucket in wrapped.reducer.core.sender.plan.buckets]
    assert sorted(kind.name for kind in kinds) == ["FLAT", "IN_PLACE"]
    assert kinds.index(Kind.IN_PLACE) == 1  # the first layer's weight, the last to arrive but for its bias


def test_a_large_parameter_has_no_bucket(two_ranks: Ranks) -> None:
    two_ranks(large)


def backwards(rank: int) -> None:
    wrapped = DistributedDataParallel(mlp())
    for step in range(3):
        wrapped.zero_grad()
        first, second = loss_of(wrapped, batch(rank, step)), loss_of(wrapped, batch(rank, step + 50))
        first.backward()
        averaged = expected(wrapped.module, 2, step)
        close(gradients(wrapped), averaged)
        second.backward()
        alone = copy.deepcopy(wrapped.module)
        alone.zero_grad()
        loss_of(alone, batch(rank, step + 50)).backward()
        close(gradients(wrapped), [a + b for a, b in zip(averaged, gradients(alone), strict=True)])


def test_one_backward_after_forwards_is_averaged(two_ranks: Ranks) -> None:
    two_ranks(backwards)


def accumulation(rank: int, as_views: bool) -> None:
    wrapped = DistributedDataParallel(mlp(), gradient_as_bucket_view=as_views)
    for step in range(4):
        wrapped.zero_grad()
        with wrapped.no_sync():
            loss_of(wrapped, batch(rank, step)).backward()
        before = [p.grad for p in wrapped.parameters()]
        loss_of(wrapped, batch(rank, step + 50)).backward()
        wanted = [expected(wrapped.module, 2, step), expected(wrapped.module, 2, step + 50)]
        close(gradients(wrapped), [a + b for a, b in zip(*wanted, strict=True)])
        if not as_views:  # whoever looks at an accumulated gradient goes on looking at it
            assert all(p.grad is grad for p, grad in zip(wrapped.parameters(), before, strict=True))


@pytest.mark.parametrize("as_views", [False, True])
def test_accumulated_gradients_are_averaged_with_the_last(two_ranks: Ranks, as_views: bool) -> None:
    two_ranks(accumulation, as_views)


def kept(rank: int) -> None:
    wrapped = DistributedDataParallel(mlp())
    held: list[tuple[Gradients, Gradients]] = []
    for step in range(6):
        wrapped.zero_grad()
        loss_of(wrapped, batch(rank, step)).backward()
        if step % 2:
            held.append(([p.grad for p in wrapped.parameters()], gradients(wrapped)))
        else:
            held.append(([p.grad.detach() for p in wrapped.parameters()], gradients(wrapped)))
    for seen, then in held:
        assert all(torch.equal(a, b) for a, b in zip(seen, then, strict=True))
    assert not any(p.grad._is_view() for p in wrapped.parameters())


def test_a_gradient_that_somebody_keeps_is_not_written_over(two_ranks: Ranks) -> None:
    two_ranks(kept)


class Turning(nn.Module):
    """The order of its layers changes with every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(4):
            x = torch.tanh(self.layers[(i + self.turn) % 4](x))
        return x


def turning(rank: int) -> None:
    wrapped = DistributedDataParallel(Turning())
    for step in range(6):
        wrapped.module.turn = step // 2 + rank * step
        wrapped.zero_grad()
        plain = copy.deepcopy(wrapped.module)
        losses = []
        for other in range(2):
            plain.turn = step // 2 + other * step
            losses.append(loss_of(plain, batch(other, step)))
        torch.stack(losses).mean().backward()
        loss_of(wrapped, batch(rank, step)).backward()
        close(gradients(wrapped), gradients(plain))


def test_an_order_that_changes_differently_on_each_rank_gives_the_same_gradients(two_ranks: Ranks) -> None:
    two_ranks(turning)


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(6, 6)
        self.times = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=True))
        return x


def repeated(rank: int) -> None:
    wrapped = DistributedDataParallel(Repeated(), static_graph=True)
    x = [batch(r).requires_grad_() for r in range(2)]
    for _ in range(4):
        wrapped.zero_grad()
        plain = copy.deepcopy(wrapped.module)
        torch.stack([loss_of(plain, x[r]) for r in range(2)]).mean().backward()
        loss_of(wrapped, x[rank]).backward()
        close(gradients(wrapped), gradients(plain))


def test_a_layer_may_be_checkpointed_several_times_in_a_static_graph(two_ranks: Ranks) -> None:
    two_ranks(repeated)


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.one = nn.EmbeddingBag(5, 3, sparse=True, mode="sum")
        self.two = nn.EmbeddingBag(5, 3, sparse=True, mode="sum")
        self.rest = nn.Linear(3, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.rest(self.one(words) + self.two(words))
        return out


def words(rank: int) -> torch.Tensor:
    return torch.tensor([[rank, 1, 2], [3, rank, 4]])


def sparse(rank: int) -> None:
    wrapped = DistributedDataParallel(Sharing())
    for _ in range(3):
        wrapped.zero_grad()
        plain = copy.deepcopy(wrapped.module)
        torch.stack([plain(words(r)).square().mean() for r in range(2)]).mean().backward()
        wrapped(words(rank)).square().mean().backward()
        dense = [[g.to_dense() for g in gradients(model)] for model in (wrapped, plain)]
        close(*dense)


def test_sparse_gradients_that_have_their_values_in_common_are_divided_once(two_ranks: Ranks) -> None:
    two_ranks(sparse)


def wrapped_anew(rank: int) -> None:
    """Two more wrappers of one module, while others live and after they are gone."""
    wrappers = [DistributedDataParallel(mlp())]

    def steps() -> None:
        for step in range(3):
            wrappers[-1].zero_grad()
            wanted = expected(wrappers[-1].module, 2, step)
            loss_of(wrappers[-1], batch(rank, step)).backward()
            close(gradients(wrappers[-1]), wanted)

    steps()
    wrappers.append(DistributedDataParallel(wrappers[0].module))
    steps()
    wrappers.append(DistributedDataParallel(wrappers[0].module))
    steps()
    del wrappers[1]
    steps()
    del wrappers[0]
    steps()
    tried = DistributedDataParallel(wrappers[0].module)
    steps()
    del tried
    steps()


def test_several_wrappers_of_one_module(two_ranks: Ranks) -> None:
    two_ranks(wrapped_anew)


def another_wrapper(rank: int) -> int:
    from torch._dynamo import trace_rules

    DistributedDataParallel(mlp())
    skipped = len(trace_rules.SKIP_DIRS)
    DistributedDataParallel(mlp())
    return len(trace_rules.SKIP_DIRS) - skipped


def test_torch_compile_learns_to_skip_us_once(two_ranks: Ranks) -> None:
    """Each time costs 10 ms: torch compiles the pattern of all that it skips anew, and the pattern grows."""
    assert two_ranks(another_wrapper) == [0, 0]
