"""Kill -9 while commits of a state on a device are on their way to the host, on the emulated accelerator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import emu_build
import generations
import pytest

HERE = Path(__file__).parent
POINTS = ("under-way", "begun", "copied", "complete")


def told(folder: Path, points: tuple[str, ...]) -> list[dict[str, Any]]:
    folder.mkdir()
    env = {"THERE": str(folder), "POINTS": " ".join(points), "EMU": str(Path(emu_build.__file__).parent)}
    program = HERE / "programs" / "overlapped.py"
    codes = generations.play(program, folder, nproc=2, restarts=len(points), env=env)
    assert not any(codes), "\n".join(path.read_text() for path in sorted(folder.glob("rank*")))
    return [
        json.loads(line) for path in sorted(folder.glob("told-*")) for line in path.read_text().splitlines()
    ]


def test_a_kill_during_the_copy_costs_no_whole_commit_and_no_bit(tmp_path: Path) -> None:
    try:
        emu_build.built()
    except emu_build.CannotBuild as why:
        pytest.skip(str(why))
    lines = told(tmp_path / "killed", POINTS)
    bits: dict[int, set[str]] = {}
    for line in [*lines, *told(tmp_path / "whole", ())]:
        if "step" in line:
            bits.setdefault(line["step"], set()).add(line["digest"])
    assert sorted(bits) == list(range(1, 25))
    assert all(len(each) == 1 for each in bits.values()), bits
    resumed = [line["resumed"] for line in lines if "resumed" in line]
    # Rank 0 is killed with the fifth commit of each generation. Rank 1 may lack that one and the one before.
    of_rank_0 = resumed[: len(POINTS) + 1]
    for point, before, number in zip(POINTS, [0, *of_rank_0[1:]], of_rank_0[1:], strict=False):
        assert 3 <= number - before <= (5 if point == "complete" else 4), (point, resumed)
