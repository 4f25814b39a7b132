"""What torch's class refuses, or gets wrong without a word, is averaged: as alone, with the data of all ranks."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from test_misuse import Choosing
from test_training import batch, close, expected, gradients, loss_of, mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp import DistributedDataParallel
from ddp.comm_hooks import PowerSGD, bf16, power_sgd
from ddp.reducer.chunks import Mode

if TYPE_CHECKING:
    from ranks import Ranks


def same_as_alone(wrapped: DistributedDataParallel, rank: int, run: Any, tolerance: float = 0.0) -> None:
    """`run(module, rank)` runs a backward. Compare with the mean of what it gives for each rank, computed here."""
    plain = copy.deepcopy(wrapped.module)
    found: list[list[torch.Tensor | None]] = []
    for each in range(2):
        plain.zero_grad()
        run(plain, each)
        found.append([p.grad for p in plain.parameters()])
    wrapped.zero_grad()
    run(wrapped, rank)
    for (name, parameter), *grads in zip(wrapped.module.named_parameters(), *found, strict=True):
        known = [grad for grad in grads if grad is not None]
        if not known or not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        mean = torch.stack(known).sum(0) / 2
        torch.testing.assert_close(parameter.grad, mean, rtol=1e-5 + tolerance, atol=1e-6 + tolerance)


class Gate(nn.Module):
    """Its parameter is used by both ranks, by one, or by none; its gradient may be zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.gain, self.other = nn.Linear(6, 6), nn.Parameter(torch.ones(6)), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, gain: float | None = None, other: bool = True) -> torch.Tensor:
        x = self.layer(x)
        x = x if gain is None else x + gain * self.gain * x.detach()
        out: torch.Tensor = self.other(x) if other else x
        return out


def some_unused(rank: int, backend: str, given: dict[str, Any]) -> None:
    importlib.import_module("ddp.shm")
    wrapped = DistributedDataParallel(Gate(), process_group=dist.new_group(backend=backend), **given)
    # Which gain each rank uses (0.0: its gradient is zero), and whether it uses the last layer.
    steps: list[list[tuple[float | None, bool]]] = [
        [(1.0, True), (1.0, True)],
        [(1.0, True), (None, True)],
        [(0.0, True), (None, False)],
        [(None, True), (None, True)],
        [(None, False), (1.0, True)],
        [(1.0, False), (0.0, False)],
        [(None, False), (None, False)],
        [(1.0, True), (1.0, True)],
    ]
    for step, uses in enumerate([*steps, *steps[1:]]):

        def run(model: Any, r: int, step: int = step, uses: Any = uses) -> None:
            gain, other = uses[r]
            model(batch(r, step), gain, other).square().mean().backward()

        same_as_alone(wrapped, rank, run)
    assert wrapped.reducer.core.mode is Mode.COUNT


@pytest.mark.parametrize(
    ("backend", "given"),
    [
        ("gloo", {}),
        ("shm", {}),
        ("gloo", {"bucket_cap_mb": 0.0001}),
        ("gloo", {"gradient_as_bucket_view": True}),
    ],
)
def test_parameters_that_some_ranks_do_not_use(two_ranks: Ranks, backend: str, given: dict[str, Any]) -> None:
    two_ranks(some_unused, backend, given)


def said_once(rank: int) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ddp")
    logger.addHandler(handler)
    wrapped = DistributedDataParallel(Choosing())
    for _ in range(3):
        loss_of(wrapped, batch(rank)).backward()
    logger.removeHandler(handler)
    return said


def test_one_line_says_which_option_is_cheaper(two_ranks: Ranks) -> None:
    for rank, said in enumerate(two_ranks(said_once)):
        (line,) = said
        assert line.startswith(f"rank {rank} computed no gradient of right.weight, right.bias")
        assert "find_unused_parameters=True" in line
        assert "\n" not in line


def an_output_left_out(rank: int) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> Any:
            return self.a(x), self.b(x)

    wrapped = DistributedDataParallel(Two())
    for step in range(5):
        same_as_alone(
            wrapped,
            rank,
            lambda m, r, step=step: m(batch(r, step))[(step + r * (step > 2)) % 2].square().mean().backward(),
        )


def past_the_wrapper(rank: int, given: dict[str, Any]) -> None:
    """Without any forward of the wrapper, then in turns with one; with a checkpoint inside."""
    wrapped = DistributedDataParallel(mlp(), **given)

    def inner(model: Any) -> Any:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def checkpointed(model: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in inner(model):
            x = checkpoint(layer, x if x.requires_grad else x.requires_grad_(), use_reentrant=True)
        return x

    ways: list[Any] = [
        lambda m, x: inner(m)(x),
        lambda m, x: inner(m)[2:](inner(m)[:2](x)),
        lambda m, x: m(x),
        checkpointed,
        lambda m, x: inner(m)[4](torch.tanh(inner(m)[2](torch.ones(4, 50) * x.sum()))),
    ]
    for step in range(15):
        way = ways[step % 5 if step > 4 else 0]
        same_as_alone(
            wrapped, rank, lambda m, r, step=step, way=way: way(m, batch(r, step)).square().mean().backward()
        )


def in_no_sync(rank: int, given: dict[str, Any]) -> None:
    """The backward alone inside no_sync(): its gradients stay here, and are averaged with the next ones."""
    wrapped = DistributedDataParallel(mlp(), **given)
    for step in range(5):
        wrapped.zero_grad()
        losses = [loss_of(wrapped, batch(rank, 10 * step + i)) for i in range(2)]
        alone = copy.deepcopy(wrapped.module)
        loss_of(alone, batch(rank, 10 * step)).backward()
        with wrapped.no_sync():
            losses[0].backward()
        close(gradients(wrapped), gradients(alone))
        losses[1].backward()
        wanted = [expected(wrapped.module, 2, 10 * step + i) for i in range(2)]
        close(gradients(wrapped), [a + b for a, b in zip(*wanted, strict=True)])


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.used = (0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.used:
            x = torch.tanh(checkpoint(self.layers[i], x, use_reentrant=True))
        return x


def reentrant(rank: int, given: dict[str, Any]) -> None:
    wrapped = DistributedDataParallel(Reentrant(), bucket_cap_mb=0.0001, **given)
    for step in range(6):

        def run(model: Any, r: int, step: int = step) -> None:
            module = model.module if isinstance(model, DistributedDataParallel) else model
            module.used = ((0, 1), (1, 3), (2,), (0, 1, 2, 3))[(step + r) % 4]
            model(batch(r, step).requires_grad_()).square().mean().backward()

        same_as_alone(wrapped, rank, run)


VIEW, UNUSED = {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}


def all_of_them(rank: int) -> None:
    an_output_left_out(rank)
    for given in ({}, VIEW, UNUSED):
        past_the_wrapper(rank, given)
        in_no_sync(rank, given)
        reentrant(rank, given)


def test_outputs_left_out_other_ways_to_call_no_sync_and_reentrant_checkpoints(two_ranks: Ranks) -> None:
    two_ranks(all_of_them)


# --- parameters that are unfrozen ----------------------------------------------------------------------------


def steps(wrapped: DistributedDataParallel, rank: int, first: int, tolerance: float = 0.0) -> None:
    for step in range(first, first + 4):
        same_as_alone(wrapped, rank, lambda m, r, step=step: loss_of(m, batch(r, step)).backward(), tolerance)


def frozen() -> nn.Module:
    module = mlp()
    module[0].requires_grad_(False)
    module[4].bias.requires_grad_(False)
    return module


def unfrozen(rank: int) -> None:
    for given in ({}, VIEW, UNUSED, {"static_graph": True}, {"bucket_cap_mb": 0.0001}):
        module = frozen()
        wrapped = DistributedDataParallel(module, **given)
        reducer = wrapped.reducer
        steps(wrapped, rank, 0)
        module[0].requires_grad_(True)
        steps(wrapped, rank, 4)
        module[4].bias.requires_grad_(True)
        module[2].requires_grad_(False)
        steps(wrapped, rank, 8)
        module[2].requires_grad_(True)
        steps(wrapped, rank, 12)
        assert wrapped.reducer is reducer
        assert wrapped._get_ddp_logging_data()["num_parameter_tensors"] == 6
    unfrozen_with_more(rank)


def unfrozen_with_more(rank: int) -> None:
    """With hooks, with accumulated gradients, with a wrapper that shares parameters, and past the wrapper."""
    module = frozen()
    wrapped = DistributedDataParallel(module)
    wrapped.register_comm_hook(None, bf16)
    steps(wrapped, rank, 0, 1e-2)
    module[0].requires_grad_(True)
    steps(wrapped, rank, 4, 1e-2)

    module = frozen()
    wrapped = DistributedDataParallel(module)
    wrapped.register_comm_hook(PowerSGD(start_step=2), power_sgd)
    for step in range(12):
        module[0].requires_grad_(step > 5)
        loss_of(wrapped, batch(rank, step)).backward()
    assert all(p.grad is not None for p in module[:4].parameters())

    module = frozen()
    wrapped = DistributedDataParallel(module)
    steps(wrapped, rank, 0)
    module[0].requires_grad_(True)

    def accumulated(model: Any, r: int) -> None:
        with model.no_sync() if model is wrapped else contextlib.nullcontext():
            loss_of(model, batch(r, 1)).backward()
        loss_of(model, batch(r, 2)).backward()

    same_as_alone(wrapped, rank, accumulated)
    sharing = DistributedDataParallel(module)
    module[4].bias.requires_grad_(True)
    steps(sharing, rank, 0)
    steps(wrapped, rank, 4)

    module = frozen()
    wrapped = DistributedDataParallel(module)
    module[0].requires_grad_(True)
    same_as_alone(wrapped, rank, lambda m, r: loss_of(m.module if m is wrapped else m, batch(r)).backward())


def test_a_parameter_may_be_unfrozen_after_wrapping(two_ranks: Ranks) -> None:
    two_ranks(unfrozen)


def unfrozen_differently(rank: int, where: list[list[int]]) -> str:
    """On a store that all ranks have; a wait of the group lasts 3 s."""
    module = mlp().requires_grad_(False)
    module[4].requires_grad_(True)
    group = dist.new_group(timeout=timedelta(seconds=3))
    wrapped = DistributedDataParallel(module, process_group=group)
    for layer in where[rank]:
        module[layer].requires_grad_(True)
    with pytest.raises(RuntimeError) as error:
        loss_of(wrapped, batch(rank)).backward()
    return str(error.value)


def test_ranks_that_unfreeze_something_else_are_named(two_ranks: Ranks) -> None:
    said = two_ranks(unfrozen_differently, [[0], [2]])
    assert "rank 0 has unfrozen 0.weight, 0.bias, but rank 1 has unfrozen 2.weight, 2.bias" in said[0]
    assert "rank 1 has unfrozen 2.weight, 2.bias, but rank 0 has unfrozen 0.weight, 0.bias" in said[1]


def test_a_rank_that_unfreezes_alone_is_told_who_did_not(two_ranks: Ranks) -> None:
    said = two_ranks(unfrozen_differently, [[], [0]])
    assert (
        "Rank 1 has unfrozen 0.weight, 0.bias after wrapping, but rank 0 did not do so within 3 s" in said[1]
    )


# --- with strict=True ----------------------------------------------------------------------------------------


def strictly(rank: int) -> None:
    wrapped = DistributedDataParallel(mlp(), strict=True)
    loss = loss_of(wrapped, batch(rank))
    with wrapped.no_sync():
        loss.backward()
    close(gradients(wrapped), expected(wrapped.module, 2))
    module = frozen()
    wrapped = DistributedDataParallel(module, strict=True)
    module[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=rf"rank {rank}.*0\.weight, 0\.bias.*with strict=True"):
        wrapped(batch(rank))
    with pytest.raises(TypeError, match="strict='yes'"):
        DistributedDataParallel(mlp(), strict="yes")


def test_strict_does_what_torch_documents(two_ranks: Ranks) -> None:
    two_ranks(strictly)


def pickled(rank: int) -> None:
    assert pickle.loads(
        pickle.dumps(DistributedDataParallel(mlp(), strict=True))
    ).reducer.core.settings.strict
    everyone = dist.new_group([0, 1])
    alone = [dist.new_group([each]) for each in (0, 1)][rank]
    for group in (everyone, alone):
        wrapped = DistributedDataParallel(mlp(), process_group=group)
        for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
            assert other.process_group is other.reducer.core.sender.group is group
    steps(pickle.loads(pickle.dumps(DistributedDataParallel(mlp(), process_group=everyone))), rank, 0)
    parts = [pickle.dumps(DistributedDataParallel(mlp(), process_group=group)) for group in (everyone, alone)]
    dist.destroy_process_group(everyone)
    dist.destroy_process_group(alone)
    steps(pickle.loads(parts[0]), rank, 0)
    with pytest.raises(RuntimeError, match=rf"for the ranks \[{rank}\], and no process group here"):
        pickle.loads(parts[1])


def test_a_pickle_comes_back_on_a_group_of_the_same_ranks(two_ranks: Ranks) -> None:
    two_ranks(pickled)
