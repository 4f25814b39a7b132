"""State and launcher together: a node is replaced, a checkpoint is asked for, the examples as they stand."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from healed import needs_reset_of_fsdp
from launched import Launched, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NIGHTLY = pytest.mark.nightly(
    instead=(
        "::test_the_examples_go_on_where_they_were",
        "elastic/test_going_on.py::test_a_replaced_node_is_given_the_state",
    )
)

EXAMPLES = Path(__file__).parents[2] / "examples"

# Steps until FINISH is there; says how far it is, and where it came from.
STEPS = """
import os, time, torch, torch.distributed as dist
import ddp
from ddp import elastic
place = ddp.init()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
state = elastic.State(model=model, optimizer=optimizer, step=0, node="", folder=os.environ.get("FOLDER"))
resumed = state.resume()

def say(name, text=""):
    path = os.path.join(os.environ["SAID"], name)
    with open(path + ".part", "w") as file:
        file.write(str(text))
    os.rename(path + ".part", path)

if resumed:
    weights = model.module.weight.sum().item()
    say(f"resumed-{os.environ['DDP_GENERATION']}-{place.rank}", f"{resumed.in_memory} {state.step} {weights!r}")
over = torch.zeros(1)
while not over.item():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    state.step += 1
    state.commit()
    if state.step == 5:
        say(f"five-{place.rank}", os.getpid())
    if state.should_checkpoint():
        say(f"checkpoint-{place.rank}", state.step)  # before: when all have taken it they are stopped at once
        state.checkpoint()
    over.fill_(os.path.exists(os.path.join(os.environ["SAID"], "finish")))
    dist.all_reduce(over)
state.close()
ddp.shutdown()
"""

# The same with shards, which only their node has; it trains when commit 5 is safe.
SHARDED = STEPS
for before, after in (
    (
        "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))",
        "fully_shard(torch.nn.Linear(4, 6))",
    ),
    ("import ddp\n", "import ddp\nfrom torch.distributed.fsdp import fully_shard\n"),
    ("model.module.weight.sum()", "model.weight.full_tensor().sum()"),
    ("state.step == 5:", "(state.protected_commit or 0) >= 5:"),
):
    assert before in SHARDED
    SHARDED = SHARDED.replace(before, after)


@pytest.fixture
def said(tmp_path: Path) -> Path:
    (tmp_path / "said").mkdir()
    return tmp_path / "said"


@pytest.fixture
def launch(tmp_path: Path, said: Path) -> Iterator[Callable[..., Launched]]:
    jobs: list[Launched] = []

    def start(*words: str, **env: str) -> Launched:
        folder = tmp_path / f"job{len(jobs)}"
        jobs.append(Launched(folder, "--preload", "torch._dynamo", *words, env={"SAID": str(said)} | env))
        return jobs[-1]

    yield start
    for job in jobs:
        job.clean_up()


@pytest.mark.parametrize(
    "name", ["train_elastic.py", pytest.param("train_fsdp2.py", marks=pytest.mark.nightly)]
)
def test_the_examples_go_on_where_they_were(
    launch: Callable[..., Launched], tmp_path: Path, name: str
) -> None:
    folder = str(tmp_path / "commits")
    fewer = ("--samples", "256") if name == "train_elastic.py" else ()
    for epochs in (1, 2):
        command = (str(EXAMPLES / name), "--folder", folder, "--epochs", str(epochs), *fewer)
        job = launch("--nproc-per-node", "2", *command)
        assert job.wait(100) == 0, job.stderr()
        assert re.search(rf"epoch {epochs}: .*loss", job.stdout())
        assert ("continuing after step" in job.stdout()) == (epochs == 2)
        assert (f"epoch {epochs - 1}:" in job.stdout()) is False


@needs_reset_of_fsdp
@NIGHTLY
def test_the_example_in_shards_keeps_a_process(
    launch: Callable[..., Launched], said: Path, tmp_path: Path
) -> None:
    script, begin = tmp_path / "train.py", "    place = ddp.init()\n"
    source = (EXAMPLES / "train_fsdp2.py").read_text()
    assert begin in source
    says_its_id = (
        "    import os; open(os.path.join(os.environ['SAID'], f'pid-{place.rank}-{os.getpid()}'), 'w')\n"
    )
    script.write_text(source.replace(begin, begin + says_its_id))
    words = (str(script), "--folder", str(tmp_path / "commits"), "--epochs", "6")
    job = launch("--nproc-per-node", "2", "--recover", "in-place", *words)
    eventually(lambda: "epoch 1:" in job.stdout(), 100, "it trains")
    (first,) = said.glob("pid-0-*")
    os.kill(int(first.name.rpartition("-")[2]), signal.SIGKILL)
    assert job.wait(100) == 0, job.stderr()
    assert re.search(r"ddp-launch: healed in \d+\.\d s: rank 0 is back", job.stderr())
    assert "continuing after step" in job.stdout()
    assert "epoch 6:" in job.stdout()
    assert (len(list(said.glob("pid-0-*"))), len(list(said.glob("pid-1-*")))) == (2, 1)
