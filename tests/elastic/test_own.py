"""What differs between ranks by design comes back on each rank: loaders, models trained alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import generations
import pytest
from torch import nn

from ddp import averaging, elastic

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = Path(__file__).parent / "programs" / "combined.py"


@pytest.fixture
def combine(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Runs programs/combined.py to its end, and returns what its ranks told."""

    def run(nproc: int, **plan: Any) -> list[dict[str, Any]]:
        there = tmp_path / "there"
        there.mkdir()
        env = {"PLAN": json.dumps(plan), "THERE": str(there)}
        codes = generations.play(PROGRAM, tmp_path, nproc, 1, env)
        said = "\n".join(path.read_text() for path in sorted(tmp_path.glob("rank*")))
        assert not any(codes), said
        return [json.loads(line) for path in there.glob("told-*") for line in path.read_text().splitlines()]

    return run


def resumed(told: list[dict[str, Any]]) -> list[int]:
    return [each["number"] for each in told if each["what"] == "resumed"]


def same(told: list[dict[str, Any]]) -> list[bool]:
    return [each["same"] for each in told if each["what"] == "end"]


@pytest.mark.parametrize("kind", ["diloco", pytest.param("local", marks=pytest.mark.nightly)])
def test_models_that_ranks_train_alone_are_committed_when_they_were_averaged(
    combine: Callable[..., Any], kind: str
) -> None:
    """Steps 1 (the warm-up), 4 and 7 end with an average. Each rank has an optimizer state of its own."""
    told = combine(3, kind=kind, kill=6)
    assert resumed(told) == [4, 4, 4]
    assert same(told) == [True] * 3


@pytest.mark.nightly(instead=("::test_models_that_ranks_train_alone_are_committed_when_they_were_averaged",))
def test_what_a_rank_trained_alone_comes_back_although_its_node_is_lost(combine: Callable[..., Any]) -> None:
    told = combine(3, kind="diloco", kill=6, own_nodes=True, protected=4, state={"redundancy": "copies:1"})
    assert resumed(told) == [4, 4, 4]
    assert same(told) == [True] * 3


def test_a_stateful_data_loader_goes_on_where_each_rank_was(combine: Callable[..., Any]) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    told = combine(2, kind="plain", kill=6, torchdata=True)
    assert resumed(told) == [5, 5]
    assert same(told) == [True] * 2


# --- refused -------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_at_construction() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    with pytest.raises(TypeError, match=r"hook: torch's PowerSGDState.*Leave it out"):
        elastic.State(model=nn.Linear(2, 2), hook=PowerSGDState(None))
    with pytest.raises(TypeError, match=r"PerRank\(int\)"):
        elastic.PerRank(3)


def test_between_two_averages_there_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir(mode=0o700)
    monkeypatch.setenv("DDP_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("DDP_CHECKPOINT_REQUEST", str(tmp_path / "request"))
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "request").write_text('{"reason": "the node goes", "deadline_s": null}\n')
    model = nn.Linear(2, 2)
    averager = averaging.LocalSGD(model, every=2)
    averager.synchronize = lambda: None  # type: ignore[method-assign]
    state = elastic.State(model=model, averager=averager, folder=tmp_path / "commits", disk_every=1)
    state.resume()
    numbers = []
    for _step in range(5):
        with averager.step():
            pass
        state.commit()
        state.flush()
        numbers.append(
            sorted(int(path.name.split("-")[1]) for path in (tmp_path / "commits").glob("commit-*"))
        )
        if not averager.is_synchronized:
            assert not state.should_checkpoint()
            with pytest.raises(RuntimeError, match="between two synchronizations"):
                state.checkpoint()
        else:
            assert state.should_checkpoint()
    assert numbers == [[], [2], [2], [2, 4], [2, 4]]
    state.close()
