"""Embeddings on a parameter server, and dense layers that DistributedDataParallel averages behind them.

ddp-launch --nproc-per-node 4 examples/train_rpc.py

The last rank is the parameter server and holds the table of embeddings. The rank before it is the master: it creates
the table there with RemoteModule, and calls `train` on all other ranks, the trainers. A trainer looks its words up over
RPC, and computes the rest of the model itself. A backward pass in a context of torch.distributed.autograd travels
through both. The wrapper averages the gradients of the dense layers in that context, and DistributedOptimizer updates
the table where it is, and the dense layers here.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

import ddp

WORDS, WIDTH, CLASSES, BATCH = 40, 16, 4, 32
# The group of the trainers; `train` runs in a thread of RPC, and finds it here.
trainers: dist.ProcessGroup | None = None


class Classifier(nn.Module):
    """The table of embeddings is on the parameter server, the dense layers are here."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table
        torch.manual_seed(0)
        dense = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, CLASSES))
        self.dense = ddp.DistributedDataParallel(dense, process_group=trainers)

    def forward(self, words: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dense(self.table.forward(words, offsets))
        return out

    def remote_parameters(self) -> list[RRef[Any]]:
        return [*self.table.remote_parameters(), *(RRef(each) for each in self.dense.parameters())]


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bags of three words each, and their class: the sum of the words decides it."""
    words = torch.randint(0, WORDS, (BATCH, 3), generator=generator)
    return words.flatten(), torch.arange(0, 3 * BATCH, 3), words.sum(1) * CLASSES // (3 * WORDS)


def train(table: Any, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """Run on each trainer: -> the loss of each step, and the dense layers after the last one."""
    model = Classifier(table)
    optimizer = DistributedOptimizer(torch.optim.SGD, model.remote_parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(1 + dist.get_rank(trainers))
    losses = []
    for _ in range(steps):
        words, offsets, classes = batch(generator)
        with dist_autograd.context() as context:
            loss = nn.functional.cross_entropy(model(words, offsets), classes)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    return losses, [each.detach() for each in model.dense.parameters()]


def lead(n_trainers: int, steps: int) -> None:
    """Run on the master: create the table on the parameter server, and let all trainers train."""
    table = RemoteModule("server/cpu", nn.EmbeddingBag, args=(WORDS, WIDTH), kwargs={"mode": "sum"})
    running = [rpc.rpc_async(f"trainer{i}", train, args=(table, steps), timeout=0) for i in range(n_trainers)]
    results = [each.wait() for each in running]
    first = results[0][1]
    alike = all(torch.equal(a, b) for _, dense in results for a, b in zip(dense, first, strict=True))
    last = sum(losses[-1] for losses, _ in results) / n_trainers
    print(
        f"{n_trainers} trainers, {steps} steps, loss {results[0][0][0]:.3f} at first and {last:.3f} at last"
    )
    print(f"the dense layers of all trainers are {'the same' if alike else 'DIFFERENT'}")


def main() -> None:
    global trainers
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    place = ddp.init(backend="gloo", device="cpu")
    if place.world_size < 3:
        raise SystemExit("this example needs a trainer, a master and a parameter server: at least 3 ranks")
    n_trainers = place.world_size - 2
    trainers = dist.new_group(list(range(n_trainers)))
    name = {n_trainers: "master", n_trainers + 1: "server"}.get(place.rank, f"trainer{place.rank}")
    rpc.init_rpc(name, rank=place.rank, world_size=place.world_size)
    if name == "master":
        lead(n_trainers, arguments.steps)
    rpc.shutdown()  # all others serve calls until the master is here
    ddp.shutdown()


if __name__ == "__main__":
    main()
