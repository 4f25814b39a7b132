"""What a commit to memory costs beside a training step, in one process with one thread.

    .venv/bin/python bench/commit.py [--rounds N]

Steps and commits alternate; medians are shown. The floor is a copy of the same tensors into ordinary memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import nn

# Beside this file lies a ddp.py, which is not the package.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import ddp
from ddp import elastic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Subject:
    name: str
    model: nn.Module
    loss: Callable[[], torch.Tensor]


def subjects() -> Iterator[Subject]:
    layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    yield Subject("MLP, 1M parameters", layers, lambda: layers(torch.randn(64, 512)).square().mean())
    block = (nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True, dropout=0.0) for _ in range(12))
    writer = nn.Sequential(nn.Embedding(8000, 384), *block)
    yield Subject("GPT-like, 24M", writer, lambda: writer(torch.randint(0, 8000, (4, 64))).square().mean())
    many = nn.ParameterList(nn.Parameter(torch.randn(1000)) for _ in range(2000))
    yield Subject(
        "2,000 tensors of 1,000", many, lambda: torch.stack([(each * each).sum() for each in many]).sum()
    )
    wide = nn.Linear(10_000, 10_000)
    yield Subject("one tensor, 100M", wide, lambda: wide(torch.randn(8, 10_000)).square().mean())


def timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return (time.perf_counter() - begin) * 1e3


def measured(subject: Subject, rounds: int) -> str:
    optimizer = torch.optim.Adam(subject.model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        subject.loss().backward()
        optimizer.step()

    step()
    tensors = [parameter.detach() for parameter in subject.model.parameters()]
    tensors += [each[name] for each in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    copies = [torch.empty_like(tensor) for tensor in tensors]
    state = elastic.State(model=subject.model, optimizer=optimizer, step=0)
    state.resume()
    for _slot in range(2):  # the first commit into each slot asks the kernel for its memory
        state.commit()
    actions = (step, state.commit, lambda: torch._foreach_copy_(copies, tensors))
    torch._foreach_copy_(copies, tensors)
    times = zip(*([timed(action) for action in actions] for _round in range(rounds)), strict=True)
    of_step, of_commit, of_copy = map(median, times)
    state.close()
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors) >> 20
    shares = f"{of_commit / of_step:.3f} of a step, {of_commit / of_copy:.1f}x the copy"
    return f"{subject.name} | {size} MiB | {of_step:.1f} ms | {of_commit:.1f} ms | {shares}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    ddp.init("gloo")
    print("| model, Adam | state | step | commit | |\n|---|---:|---:|---:|---|")
    for subject in subjects():
        print(f"| {measured(subject, rounds)} |", flush=True)
    ddp.shutdown()


if __name__ == "__main__":
    main()
