"""What a State can keep, what it refuses and how it says so; in a world of one, without a launcher."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from collections import Counter, OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from ddp import elastic
from ddp.elastic import generators
from ddp.elastic.images import kept_images

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the launcher gives it to a node: what a State leaves there, the next one finds."""
    (tmp_path / "scratch").mkdir(mode=0o700)
    monkeypatch.setenv("DDP_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")


@pytest.fixture
def state_of() -> Iterator[Any]:
    """Makes a State after the process of the one before has died, as far as that can be had in one process."""
    made: list[elastic.State] = []

    def make(**named: Any) -> elastic.State:
        if made:
            made[-1]._keeper = None
            made[-1]._forget_leaving()
        made.append(elastic.State(**named))
        return made[-1]

    yield make
    made[-1].close()


def test_what_is_kept_comes_back_as_it_was(state_of: Any) -> None:
    strided = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    values = {
        "step": 3,
        "best": 0.25,
        "name": "run",
        "nothing": None,
        "nested": {"a": [1, (2, torch.arange(3))], 7: OrderedDict(x=torch.ones(2, dtype=torch.bfloat16))},
        "scalar": torch.tensor(5, dtype=torch.uint8),
        "empty": torch.empty(0, 3),
        "complex": torch.randn(3, dtype=torch.complex64),
        "truth": torch.tensor([True, False]),
        "strided": strided,
        "sparse": torch.eye(3).to_sparse(),
    }
    state = state_of(**values)
    state.resume()
    state.commit()
    blank = {
        name: torch.zeros(1) if isinstance(value, torch.Tensor) else None for name, value in values.items()
    }
    again = state_of(**blank)
    assert again.resume() == elastic.Resumed(1, in_memory=True, world_size=1)
    for name in ("step", "best", "name", "nothing"):
        assert getattr(again, name) == values[name]
        assert type(getattr(again, name)) is type(values[name])
    for name in ("scalar", "empty", "complex", "truth", "strided"):
        kept = getattr(again, name)
        assert kept.dtype == values[name].dtype  # type: ignore[attr-defined]
        assert torch.equal(kept, values[name])  # type: ignore[arg-type]
    assert again.strided.stride() == strided.stride()
    assert torch.equal(again.sparse.to_dense(), torch.eye(3))
    assert again.nested["a"][1][1].tolist() == [0, 1, 2]
    assert type(again.nested[7]) is OrderedDict
    assert again.nested[7]["x"].dtype == torch.bfloat16


def test_what_was_given_back_is_the_script_s_own(state_of: Any) -> None:
    """Training on must not write into the commit it came from."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = state_of(model=model, optimizer=optimizer, x=torch.ones(3))
    state.resume()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state.commit()
    expected = [each["momentum_buffer"].clone() for each in optimizer.state.values()]
    for _process in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state = state_of(model=model, optimizer=optimizer, x=torch.zeros(3))
        state.resume()
        buffers = [each["momentum_buffer"] for each in optimizer.state.values()]
        assert all(map(torch.equal, buffers, expected))
        assert state.x.tolist() == [1, 1, 1]
        for tensor in (*buffers, state.x):
            tensor.fill_(7)


class Counting:
    """An object whose state dictionary hands out what it goes on changing."""

    def __init__(self) -> None:
        self.counts = Counter(a=1)
        self.sparse = torch.eye(2).to_sparse()

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def test_what_changes_in_place_is_committed_as_it_is_then(state_of: Any) -> None:
    counting = Counting()
    state = state_of(counting=counting)
    state.resume()
    for _step in range(3):
        state.commit()
        counting.counts["a"] += 1
        counting.sparse.mul_(2)
    state.commit()
    again = Counting()
    state_of(counting=again).resume()
    assert again.counts == {"a": 4}
    assert torch.equal(again.sparse.to_dense(), 8 * torch.eye(2))


def test_names_in_the_commit_are_those_of_the_bare_model(state_of: Any) -> None:
    """Wrapped or not, it is the same model."""

    class Wrapper(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module = module

    state = state_of(model=Wrapper(nn.Linear(2, 2)))
    state.resume()
    state.commit()
    bare = nn.Linear(2, 2)
    state_of(model=bare).resume()
    assert torch.equal(bare.weight, state._contents.objects["model"].weight)


def test_a_growing_state_gets_larger_slots(state_of: Any) -> None:
    state = state_of(x=torch.zeros(1), text="")
    state.resume()
    for size in (10, 100_000, 10, 5000):
        state.x, state.text = torch.full((size,), float(size)), "t" * size
        state.commit()
    again = state_of(x=torch.zeros(1), text="")
    assert again.resume().number == 4
    assert (again.x.tolist(), len(again.text)) == ([5000.0] * 5000, 5000)


def test_two_commits_are_kept_and_a_torn_one_is_passed_over(state_of: Any, tmp_path: Path) -> None:
    state = state_of(step=0)
    state.resume()
    for state.step in (1, 2, 3):
        state.commit()
    slots = sorted((tmp_path / "scratch" / "elastic").iterdir())
    assert len(slots) == 2
    newest = max(slots, key=lambda path: json.loads(_head(path))["number"])
    with newest.open("r+b") as file:
        file.write(bytes(64))  # as if its writer had stopped in the middle
    again = state_of(step=0)
    assert again.resume().number == 2
    assert again.step == 2


def _head(path: Path) -> str:
    text = path.read_bytes()
    begin = text.index(b'{"number"')
    return text[begin : text.index(b"}", begin) + 1].decode()


def test_the_last_commits_are_not_overwritten_in_whatever_order_others_are(tmp_path: Path) -> None:
    for n_whole, count in ((1, 2), (2, 3), (2, 4)):
        slots = kept_images.Slots([tmp_path / f"slots{n_whole}{count}"], 0, count, n_whole=n_whole)
        last: list[kept_images.Slot] = []
        for number in range(12):
            slot = slots.next(100)
            assert not any(slot is each for each in last[-n_whole:])
            if number % 5 == 3:
                continue  # it was not completed
            slots.keep(slot)
            last.append(slot)
            slot.being_written = count > n_whole + 1
            for each in last[:-1]:
                each.being_written = False
        slots.remove()


def test_memory_goes_when_the_training_is_over(state_of: Any, tmp_path: Path) -> None:
    state = state_of(step=0)
    state.resume()
    state.commit()
    state.close()
    assert not list((tmp_path / "scratch").iterdir())


def test_where_the_first_place_has_no_room_the_second_is_taken(
    state_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDP_SCRATCH", "/proc/nowhere")
    monkeypatch.setattr(kept_images.tempfile, "tempdir", str(tmp_path))  # type: ignore[attr-defined]
    state = state_of(step=1)
    state.resume()
    state.commit()
    assert state_of(step=0).resume().number == 1
    monkeypatch.setattr(kept_images.tempfile, "tempdir", "/proc")  # type: ignore[attr-defined]
    state = state_of(step=0)
    assert state.resume() is None
    with pytest.raises(elastic.ScratchError, match=r"/dev/shm.*TMPDIR"):
        state.commit()


def test_a_folder_that_others_could_write_to_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x").chmod(0o777)
    with pytest.raises(elastic.ScratchError, match=f"{tmp_path}/x"):
        kept_images.make_folder(tmp_path / "x")
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(elastic.ScratchError):
        kept_images.make_folder(tmp_path / "link")


def test_what_dead_jobs_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    alive = kept_images.folders({})[0].name
    user, space, _owner, started = alive.removeprefix("ddp-elastic-").split("-")
    dead, elsewhere = (f"ddp-elastic-{user}-{where}-999999999-{started}" for where in (space, "1"))
    for name in (alive, dead, elsewhere, "other"):
        (tmp_path / name).mkdir()
    kept_images.sweep([tmp_path / "ours"])
    assert {path.name for path in tmp_path.iterdir()} >= {alive, elsewhere, "other"}
    assert not (tmp_path / dead).exists()


# --- mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "parameter"),
    [
        ({"every": -1}, "every=-1"),
        ({"keep": 0}, "keep=0"),
        ({"disk_every": 3}, "folder"),
        ({"commit": 3}, "'commit'"),
        ({"folder": ""}, "folder=''"),
        ({"folder": __file__}, r"folder='.*test_state.py': it is a file"),
    ],
)
def test_what_cannot_be_asked_for(named: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ValueError, match=parameter):
        elastic.State(**named)


@pytest.mark.parametrize(
    "named",
    [{"every": 1.5}, {"keep": True}, {"disk_every": "5", "folder": "x"}, {"folder": 5}, {"redundancy": 2}],
)
def test_values_of_other_types_are_refused_by_name(named: dict[str, Any]) -> None:
    (name, value), *_rest = named.items()
    with pytest.raises(TypeError, match=f"invalid {name}={value!r}.* [uU]se "):
        elastic.State(**named)


def test_mistakes_are_told(state_of: Any) -> None:
    state = state_of(step=0, sampler=elastic.ElasticSampler(10))
    with pytest.raises(RuntimeError, match=r"resume\(\)"):
        state.commit(samples=1)
    state.resume()
    with pytest.raises(RuntimeError, match=r"close\(\)"):
        elastic.State(step=0).resume()
    with pytest.raises(TypeError, match="samples="):
        state.commit()
    with pytest.raises(AttributeError, match=r"'stepp'.*State\(stepp=...\)"):
        state.stepp = 1
    with pytest.raises(AttributeError, match="'stepp'"):
        assert state.stepp
    state.close()
    for call in (lambda: state.commit(samples=1), state.checkpoint, state.should_checkpoint):
        with pytest.raises(RuntimeError, match="closed"):
            call()


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # what it imports
def test_optimizers_that_hold_shares_are_refused() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer.__new__(ZeroRedundancyOptimizer)
    with pytest.raises(TypeError, match=r"\bo: a ZeroRedundancyOptimizer\b.*Use FSDP2"):
        elastic.State(o=optimizer)


def test_values_that_could_not_be_read_back_are_refused_when_they_are_committed(state_of: Any) -> None:
    state = state_of(path=Path("x"))
    state.resume()
    with pytest.raises(TypeError, match="weights_only"):
        state.commit()
    state.path = str(state.path)
    state.commit()


@pytest.mark.parametrize("value", [np.float64(0.5), b"", [1, (2, {"a": Path("x")})], {np.int64(1): 2}])
def test_they_are_refused_whenever_they_come(state_of: Any, value: Any) -> None:
    """The tensors look as before: nothing but the values themselves tells."""
    counting = Counting()
    state = state_of(best=float("inf"), name=b"x", counting=counting, x=torch.ones(2))
    state.resume()
    state.commit()
    state.best = value
    for _again in range(2):
        with pytest.raises(TypeError, match="weights_only"):
            state.commit()
    state.best = 0.5
    state.commit()
    counting.counts["b"] = value
    with pytest.raises(TypeError, match="weights_only"):
        state.commit()
    del counting.counts["b"]
    state.commit()


def test_a_commit_of_something_else_is_not_taken(state_of: Any) -> None:
    state = state_of(model=nn.Linear(2, 2), sampler=elastic.ElasticSampler(10))
    state.resume()
    state.commit(samples=1)
    with pytest.raises(ValueError, match=r"model, sampler.*net, sampler"):
        state_of(net=nn.Linear(2, 2), sampler=elastic.ElasticSampler(10)).resume()
    with pytest.raises(ValueError, match=r"\b10 samples.*\b11\b"):
        state_of(model=nn.Linear(2, 2), sampler=elastic.ElasticSampler(11)).resume()


# --- a checkpoint now --------------------------------------------------------------------------------


def test_without_a_launcher_nobody_asks(
    state_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DDP_CHECKPOINT_REQUEST", raising=False)
    state = state_of(step=0, folder=tmp_path / "commits")
    state.resume()
    assert not elastic.checkpoint_requested()
    assert elastic.checkpoint_request() is None
    assert not state.should_checkpoint()
    state.checkpoint()
    assert len(list((tmp_path / "commits").iterdir())) == 1


def test_a_request_is_read_and_answered_once(
    state_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request = tmp_path / "checkpoint-1"
    monkeypatch.setenv("DDP_CHECKPOINT_REQUEST", str(request))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    state = state_of(step=0, folder=tmp_path / "commits")
    state.resume()
    assert elastic.checkpoint_request() is None
    request.write_text('{"reason": "the node goes", "deadline_s": 30.0}\n')
    os.utime(request, (request.stat().st_mtime - 10,) * 2)
    asked = elastic.checkpoint_request()
    assert asked is not None
    assert asked.reason == "the node goes"
    assert 0 < asked.remaining_s <= 20.5
    assert state.should_checkpoint()
    state.checkpoint()
    assert (tmp_path / "checkpoint-1.done.0").exists()
    assert not state.should_checkpoint(), "it has its answer"
    request.write_text('{"reason": "", "deadline_s": null}\n')
    assert elastic.checkpoint_request() == elastic.CheckpointRequest("", float("inf"))
    request.write_text("not JSON")
    assert elastic.checkpoint_request().reason.startswith("cannot read the request file")  # type: ignore[union-attr]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A checkpoint is asked for; here its answer will be."""
    monkeypatch.setenv("DDP_CHECKPOINT_REQUEST", str(tmp_path / "checkpoint-1"))
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "checkpoint-1").write_text('{"reason": "the node goes", "deadline_s": null}\n')
    return tmp_path / "checkpoint-1.done.0"


def test_a_request_is_not_answered_without_a_folder(state_of: Any, asked: Path) -> None:
    state = state_of(step=0)
    state.resume()
    assert state.should_checkpoint()
    with pytest.raises(ValueError, match=r"checkpoint\(\) needs State\(folder=...\)"):
        state.checkpoint()
    assert not asked.exists()


def test_a_request_is_answered_by_a_checkpoint_that_is_whole_only(
    state_of: Any, asked: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "commits"
    state = state_of(step=0, folder=folder, disk_every=1)
    state.resume()
    folder.write_text("a file where the folder should be")
    with pytest.raises(elastic.CommitError, match=r"rank 0: commit 1\b"):
        state.checkpoint()
    assert not asked.exists()
    state.step = print  # what one rank cannot even keep must not leave the others waiting
    with pytest.raises(TypeError, match="weights_only"):
        state.checkpoint()
    assert not asked.exists()
    state.step = 3
    state.commit()
    for thread in [each for each in threading.enumerate() if each.name == "ddp-commit"]:
        thread.join()
    folder.unlink()
    with pytest.raises(elastic.CommitError, match=r"^commit 3\b"):
        state.checkpoint()
    assert asked.exists(), "an earlier commit's error does not make this one less whole"
    assert [path.name.split("-")[1] for path in folder.iterdir()] == ["0000000004"]


def test_all_generators_come_back(state_of: Any) -> None:
    """Those of torch, Python and NumPy, whatever kind of generator NumPy uses; and commits of earlier versions."""
    was = np.random.get_bit_generator()
    try:
        for kind in (np.random.MT19937(3), np.random.PCG64(3), np.random.Philox(3)):
            np.random.set_bit_generator(kind)
            random.gauss(0, 1)  # keeps the second of a pair
            np.random.randn()
            state = state_of(x=1)
            state.resume()
            state.commit()
            expected = [torch.rand(3).tolist(), random.gauss(0, 1), np.random.randn(), random.random()]
            generators.seed(2**63 + 1)
            state_of(x=1).resume()
            assert [
                torch.rand(3).tolist(),
                random.gauss(0, 1),
                np.random.randn(),
                random.random(),
            ] == expected
            state._keeper = None
    finally:
        np.random.set_bit_generator(was)
    here = random.getstate()
    generators.set({"cpu": torch.get_rng_state()})
    assert random.getstate() == here


def test_generators_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    with_numpy = generators.get()
    for name in ("numpy", "numpy.random"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "numpy" not in generators.get()
    generators.set(with_numpy)  # of a rank that had it
    generators.seed(5)
    assert torch.initial_seed() == 5
