"""Several States in a job: of one process, or of parts of the ranks. Each has a scope of its own."""

from __future__ import annotations

import json
from pathlib import Path

import generations
import pytest

from ddp import elastic
from ddp.elastic import state
from ddp.elastic.images import kept_images

PROGRAM = Path(__file__).parent / "programs" / "scoped.py"
SHARDS = Path(__file__).parent / "programs" / "scoped_shards.py"


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    monkeypatch.setenv("DDP_SCRATCH", str(tmp_path / "own"))


def test_states_over_parts_of_the_ranks_and_over_all_of_them(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    codes = generations.play(PROGRAM, tmp_path, 2, 1, {"THERE": str(there)})
    assert not any(codes), "\n".join(path.read_text() for path in sorted(tmp_path.glob("rank*")))
    told = [json.loads((there / f"told-{rank}").read_text()) for rank in (0, 1)]
    expected = [{"rank": rank, "numbers": [rank + 3, 1], "x": rank + 10, "y": 101} for rank in (0, 1)]
    assert told == expected
    assert {path.parent.name for path in there.glob("stage*/commit-*")} == {"stage0", "stage1"}


def test_a_lost_node_of_a_state_over_a_part_of_the_ranks(tmp_path: Path) -> None:
    """Each State has a model in shards and a whole one."""
    there = tmp_path / "there"
    there.mkdir()
    env = {"THERE": str(there), "STATE": json.dumps({"redundancy": "copies:1"})}
    codes = generations.play(SHARDS, tmp_path, 4, 1, env)
    assert not any(codes), "\n".join(path.read_text() for path in sorted(tmp_path.glob("rank*")))
    told = [json.loads((there / f"told-{rank}").read_text()) for rank in range(4)]
    assert [(each["resumed"], each["same"]) for each in told] == [([3, True], True)] * 4


def test_a_scope_belongs_to_one_open_state() -> None:
    one, other = elastic.State(x=1, scope="one"), elastic.State(x=2, scope="other")
    one.resume()
    other.resume()
    with pytest.raises(RuntimeError, match=r"scope='one'.*of its own"):
        elastic.State(x=3, scope="one").resume()
    one.close()
    again = elastic.State(x=3, scope="one")
    assert again.resume() is None
    again.close()
    other.close()
    for scope in ("a/b", "..", "A"):
        with pytest.raises(ValueError, match=r"scope=.*file names"):
            elastic.State(x=1, scope=scope)


def test_another_state_that_is_resumed_before_run_is_an_obstacle() -> None:
    """After a failure `run` resumes only its own State, so the two would not fit together."""
    one, other = elastic.State(x=1, scope="one"), elastic.State(x=2, scope="other")
    one.resume()
    assert state.obstacle_of_states(one) == ""
    other.resume()
    assert "another State (scope='other') before state.run" in state.obstacle_of_states(one)
    other.close()
    assert state.obstacle_of_states(one) == ""
    one.close()


def test_a_request_is_answered_when_all_states_have_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDP_CHECKPOINT_REQUEST", str(tmp_path / "checkpoint-1"))
    monkeypatch.setenv("RANK", "0")
    folder = tmp_path / "commits"
    states = [elastic.State(x=1, scope=each, folder=folder) for each in ("one", "two")]
    without = elastic.State(x=1)
    for each in (*states, without):
        each.resume()
    (tmp_path / "checkpoint-1").write_text('{"reason": "the node goes", "deadline_s": null}\n')
    states[0].checkpoint()
    assert not (tmp_path / "checkpoint-1.done.0").exists()
    states[1].checkpoint()
    assert (tmp_path / "checkpoint-1.done.0").exists()
    for each in (*states, without):
        each.close()


def test_memory_of_dead_jobs_is_swept_with_its_scopes(tmp_path: Path) -> None:
    alive = kept_images.folders({}, "a_1")[1].name
    user, space, _owner, started, scope = alive.removeprefix("ddp-elastic-").split("-")
    dead = f"ddp-elastic-{user}-{space}-999999999-{started}-{scope}"
    for name in (alive, dead):
        (tmp_path / name).mkdir()
    kept_images.sweep([tmp_path / "ours"])
    assert [path.name for path in tmp_path.glob("ddp-elastic-*")] == [alive]
