"""Ranks are killed at random instants, many times in one job: no step is lost or done twice, and nothing leaks."""

from __future__ import annotations

import json
import os
import statistics
from typing import TYPE_CHECKING, Any

import generations
import pytest
from soak import HERE, PROGRAM, WITNESS_DIES_EVERY, Sight, Soak
from soak_board import RANKS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

KILLS = int(os.environ.get("SOAK_KILLS", "1000"))
TIMEOUT_S = 3600.0
SETTLED_AFTER = 50  # kills: by then caches of the allocator and of torch have their size
# Per heal. What the garbage collector has not yet freed goes up and down; a leak only goes up.
DESCRIPTORS_PER_HEAL, BYTES_PER_HEAL = 0.05, 16 << 10


def calm(folder: Path, steps: int, backend: str, wrap: str) -> dict[str, Any]:
    """The same steps without kills, and without the launcher."""
    there = folder / "there"
    there.mkdir(parents=True)
    plan = {"backend": backend, "wrap": wrap, "steps": steps, "beside": str(HERE)}
    env = {"PLAN": json.dumps(plan), "THERE": str(there)}
    codes = generations.play(PROGRAM, folder, RANKS, 0, env, within_s=TIMEOUT_S)
    assert not any(codes), "\n".join(path.read_text() for path in sorted(folder.glob("rank*")))
    found: dict[str, Any] = json.loads((there / "end-0").read_text())
    return found


@pytest.mark.nightly(
    instead=(
        "elastic/test_in_place.py::test_two_die_at_once_and_then_another_one_while_the_job_heals",
        "elastic/test_in_place.py::test_between_two_commits_no_step_is_lost_or_done_twice",
        "ddp_reform/test_groups.py::test_healing_many_times_leaves_nothing_behind",
        "shell/test_heals.py",
    )
)
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(("backend", "wrap"), [("shm", "ours"), ("gloo", "torch")])
def test_no_step_is_lost_or_done_twice_and_nothing_leaks(tmp_path: Path, backend: str, wrap: str) -> None:
    soak = Soak(tmp_path, backend, wrap, look_every=4 if KILLS < SETTLED_AFTER else 25)
    soak.play(KILLS)
    print(report(soak))
    assert soak.violations() == ""
    ends = soak.ends()
    assert ends == [ends[0]] * RANKS
    assert ends[0]["counter"] == ends[0]["step"]
    if (
        wrap == "ours"
    ):  # torch's DDP forms other buckets in its first step, so Gloo adds three ranks in another order
        assert ends[0] == calm(tmp_path / "calm", ends[0]["step"], backend, wrap)
    assert soak.kills >= KILLS
    assert_nothing_leaks(soak.sights)


def assert_nothing_leaks(sights: Sequence[Sight]) -> None:
    first = sights[1]  # the first one saw no heal yet
    for sight in sights[1:]:
        assert sight.is_no_more_than(first), sights
    settled = [sight for sight in sights if SETTLED_AFTER <= sight.kills <= WITNESS_DIES_EVERY]
    if len(settled) > 2:
        heals = [sight.witness_heals for sight in settled]
        open_files = [sight.witness.descriptors for sight in settled]
        memory = [sight.witness.memory for sight in settled]
        assert statistics.linear_regression(heals, open_files).slope < DESCRIPTORS_PER_HEAL, sights
        assert statistics.linear_regression(heals, memory).slope < BYTES_PER_HEAL, sights


def report(soak: Soak) -> str:
    first, last = soak.sights[1], soak.sights[-1]
    healed = sorted(soak.healed_s)
    lines = [
        f"{last.kills} times killed, {soak.kills} ranks, {soak.pairs} pairs; "
        f"until all trained again: median {statistics.median(healed):.2f} s, longest {healed[-1]:.2f} s",
        *map(str, soak.sights),
    ]
    return "\n".join([*lines, f"first {first}", f"last {last}"])
