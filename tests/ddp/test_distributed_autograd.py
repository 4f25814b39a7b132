"""Gradients of a distributed backward (RPC) are averaged in their context, and `.grad` stays as it was."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from test_misuse import Choosing
from test_training import Sharing, batch, close, expected, gradients, loss_of, mlp, words
from torch import nn
from torch.distributed import rpc

from ddp import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ranks import Ranks


@contextmanager
def session(rank: int, folder: str) -> Iterator[None]:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    try:
        yield
    finally:
        rpc.shutdown(graceful=False)


def in_context(model: nn.Module, *losses: Any) -> list[torch.Tensor]:
    """-> what the context holds after a distributed backward of each loss, in the order of the parameters."""
    with dist_autograd.context() as context:
        for loss in losses:
            dist_autograd.backward(context, [loss()])
        held = dist_autograd.get_gradients(context)
        dist.barrier()  # a context must not end while a peer's backward runs
        return [held[parameter] for parameter in model.parameters() if parameter in held]


def taking_turns(rank: int, folder: str, given: dict[str, Any], over: str) -> None:
    importlib.import_module("ddp.shm")
    group = dist.new_group(backend=over)
    with session(rank, folder):
        wrapped = DistributedDataParallel(mlp(), process_group=group, **given)
        for step in range(8):
            wrapped.zero_grad(set_to_none=step != 6)
            wanted = expected(wrapped.module, 2, step)
            if step % 4 in (0, 3):
                close(
                    in_context(wrapped.module, lambda step=step: loss_of(wrapped, batch(rank, step))), wanted
                )
                assert all(p.grad is None for p in wrapped.parameters())
            else:
                loss_of(wrapped, batch(rank, step)).backward()
                close(gradients(wrapped), wanted)
        kept = gradients(wrapped)
        losses = [lambda step=step: loss_of(wrapped, batch(rank, step)) for step in (8, 9)]
        wanted = [a + b for a, b in zip(*(expected(wrapped.module, 2, n) for n in (8, 9)), strict=True)]
        close(in_context(wrapped.module, *losses), wanted)
        close(gradients(wrapped), kept)


@pytest.mark.parametrize(
    ("given", "over"),
    [
        ({}, "gloo"),
        ({}, "shm"),
        ({"bucket_cap_mb": 0.005}, "gloo"),
        ({"gradient_as_bucket_view": True}, "gloo"),
        ({"find_unused_parameters": True}, "gloo"),
        ({"static_graph": True}, "gloo"),
    ],
)
def test_distributed_and_ordinary_backwards_take_turns(
    two_ranks: Ranks, tmp_path: Path, given: dict[str, Any], over: str
) -> None:
    two_ranks(taking_turns, str(tmp_path), given, over)


def learned_alone_first(rank: int, folder: str) -> None:
    with session(rank, folder):
        wrapped = DistributedDataParallel(mlp())
        for step in range(5):
            wrapped.zero_grad()
            wanted = expected(wrapped.module, 2, step)
            if step == 3:
                close(in_context(wrapped.module, lambda: loss_of(wrapped, batch(rank, 3))), wanted)
            else:
                loss_of(wrapped, batch(rank, step)).backward()
                close(gradients(wrapped), wanted)


def test_a_distributed_backward_after_ordinary_ones_is_averaged(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(learned_alone_first, str(tmp_path))


def sparse(rank: int, folder: str) -> None:
    with session(rank, folder):
        wrapped, plain = DistributedDataParallel(Sharing()), Sharing()
        torch.stack([plain(words(r)).square().mean() for r in range(2)]).mean().backward()
        for _ in range(3):
            held = in_context(wrapped.module, lambda: wrapped(words(rank)).square().mean())
            close([each.to_dense() for each in held], [each.to_dense() for each in gradients(plain)])


def test_sparse_gradients_are_averaged_in_their_context(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(sparse, str(tmp_path))


def unused(rank: int, folder: str) -> None:
    with session(rank, folder):
        wrapped = DistributedDataParallel(Choosing(), find_unused_parameters=True)
        for _ in range(2):
            assert len(in_context(wrapped.module, lambda: loss_of(wrapped, batch(rank)))) == 2
        wrapped.module.use = ("left", "right")[rank]
        lacking = ("right", "left")[rank]
        with dist_autograd.context() as context:
            loss = loss_of(wrapped, batch(rank))
            with pytest.raises(RuntimeError, match=rf"{lacking}\.weight"):
                dist_autograd.backward(context, [loss])
            dist.barrier()


def test_a_parameter_without_an_entry_in_the_context_is_named_if_others_used_it(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks(unused, str(tmp_path))


def outside(rank: int, folder: str) -> None:
    with session(rank, folder):
        wrapped = DistributedDataParallel(mlp())
        for _ in range(2):
            loss = loss_of(wrapped, batch(rank))
            with (
                dist_autograd.context() as context,
                pytest.raises(RuntimeError, match=r"dist_autograd\.context"),
            ):
                dist_autograd.backward(context, [loss])
            dist.barrier()
        loss_of(wrapped, batch(rank)).backward()
        close(gradients(wrapped), expected(wrapped.module, 2))


def test_a_forward_outside_of_the_context_is_an_error(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(outside, str(tmp_path))
