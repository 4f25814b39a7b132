"""Runs the Python of a how-to page, as a rank in an empty folder: `ddp-launch --nproc-per-node 1 snippets.py PAGE`.

The page leaves out what each reader has: a model, data, a loss. `before` says what comes first, by the words with which
a snippet begins. All snippets run in one process, a world of one rank, one after the other.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from how_tos import python

from ddp import elastic

READER = """
import ddp, torch
from ddp import DistributedDataParallel as DDP, elastic
from torch.utils.data import DataLoader, TensorDataset

def Net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

def loss_of(output, labels=None):
    return output.square().mean()

place = ddp.init()
rank, path = place.rank, "optimizer.pt"
module, x = Net(), torch.randn(8, 4)
small_x, data = x[:1], [x] * 20
dataset = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = DDP(Net())
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu")
"""
ELASTIC = """
sampler = elastic.ElasticSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler, generator=torch.Generator())
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
state = elastic.State(model=model, optimizer=optimizer, sampler=sampler, step=0, folder="commits")
def train(inputs, labels):
    loss_of(model(inputs)).backward()
"""
WRITTEN = """
state.resume()
loss_of(model(x)).backward()
optimizer.step()
state.checkpoint()
state.close()
"""
LOGS = """
loss, step = model(x).sum(), 1
scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters()))
"""
BEFORE = {
    "import ddp\n\nddp.log(": LOGS,
    "import ddp\nfrom ddp import elastic": ELASTIC,
    "def train():": ELASTIC,
    "import ddp.shm": "ddp.shutdown()\n",
    "def outer(": "from ddp.averaging import DiLoCo\n",
    "import torch.distributed.checkpoint": ELASTIC + WRITTEN,
}


def main(page: Path) -> None:
    for block in python(page):
        found: dict[str, Any] = {"__name__": "__main__"}
        before = "".join(words for begin, words in BEFORE.items() if block.text.startswith(begin))
        exec(compile(READER + before, f"before {block}", "exec"), found)
        text = block.text
        for commit in Path("commits").glob("commit-*/.metadata"):  # the page names one of its reader
            text = text.replace("commits/commit-0000000500-1f0a9c3b7d2e", str(commit.parent))
        exec(compile(text, str(block), "exec"), found)
        if isinstance(state := found.get("state"), elastic.State):
            state.close()
        print(f"ran {block}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
