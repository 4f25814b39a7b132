"""A ShardedOptimizer in a State: ranges of elements become regions of tensors, which fit other worlds and shardings."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from ddp.elastic.contents import Range

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Told

READER = Path(__file__).parent / "programs" / "stock_reader.py"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 5, 2), (3, 1, 1)])
def test_every_range_of_every_layout_is_its_regions(shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    """`order`: that of the dimensions in memory."""
    inverse = [order.index(dimension) for dimension in range(3)]
    memory = torch.arange(torch.Size(shape).numel())
    whole = memory.view([shape[each] for each in order]).permute(inverse)
    for start, end in itertools.combinations(range(len(memory) + 1), 2):
        found = torch.full(shape, -1)
        boxes = Range(0, start, end, shape, whole.stride()).boxes()
        assert len(boxes) <= 5
        at = start
        for box in boxes:
            region = tuple(slice(begin, begin + length) for begin, length in box.region)
            assert torch.equal(box.view(memory[at : at + box.numel]), whole[region])
            found[region] = whole[region]
            at += box.numel
        assert at == end
        assert found[found >= 0].sort().values.tolist() == list(range(start, end))


def test_a_number_is_a_range() -> None:
    (box,) = Range(0, 0, 1, (), ()).boxes()
    assert (box.region, box.view(torch.ones(1)).shape) == ((), ())


def test_ranks_are_lost_and_the_result_is_that_of_an_undisturbed_run(train: Callable[..., Told]) -> None:
    undisturbed = train(3, model="sharded", epochs=1)
    kill = {"1": {"step": 3, "when": "before", "ranks": [1]}}
    told = train(3, 1, model="sharded", epochs=1, kill=kill)
    assert [(line["number"], line["in_memory"]) for line in told.of("resumed")] == [(2, True)] * 3
    assert told.digests() == undisturbed.digests()


@pytest.mark.parametrize(
    ("chain", "readers"),
    [
        ((("sharded", 3), ("sharded", 2), ("ours", 1), ("sharded", 2)), ("fsdp2:2",)),
        pytest.param(
            (("sharded", 2), ("fsdp2", 3), ("sharded", 3)), ("ddp:1", "hsdp:4"), marks=pytest.mark.nightly
        ),
    ],
)
def test_other_worlds_and_shardings_read_it_from_disk(
    train: Callable[..., Told], tmp_path: Path, chain: tuple[tuple[str, int], ...], readers: tuple[str, ...]
) -> None:
    """Each job of the chain goes on from the commit of the one before; torch alone reads the first one."""
    folder = tmp_path / "commits"
    state = {"folder": str(folder), "disk_every": 1, "keep": 9}
    before = None
    for number, (model, world) in enumerate(chain):
        stop = 2 * number + 2
        told = train(world, model=model, stop=stop, epochs=1, state=state)
        assert {line["digest"] for line in told.of("resumed")} == (set() if before is None else {before})
        before = told.digests()[stop]
    commit = min(path for path in folder.iterdir() if "0002-" in path.name)
    command = [sys.executable, "-I", str(READER), str(commit), *readers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    begun = train(2, model="sharded", stop=1, epochs=1, state={"start_from": str(commit)})
    first = train(chain[0][1], model=chain[0][0], stop=2, epochs=1)
    digests = [each["digest"] for each in (*found, *begun.of("began"))]
    assert digests == [first.digests()[2]] * (len(readers) + 2)
