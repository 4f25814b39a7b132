from __future__ import annotations

import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import generations
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAM = Path(__file__).parent / "programs" / "training.py"


@dataclass(frozen=True)
class Told:
    """What the ranks of a job told, in their order."""

    lines: list[dict[str, Any]]

    def of(self, what: str, generation: int | None = None) -> list[dict[str, Any]]:
        return [
            line for line in self.lines if line["what"] == what and generation in (None, line["generation"])
        ]

    def losses(self) -> list[float]:
        """At the end, and the same on all ranks."""
        ends = [line["losses"] for line in self.of("end")]
        assert ends
        assert all(each == ends[0] for each in ends)
        return list(ends[0])

    def digests(self) -> dict[int, str]:
        """Of each step, as the last generation that made it left it; ranks agree."""
        found: dict[int, tuple[int, str]] = {}
        for line in self.of("step"):
            generation, digest = found.get(line["step"], (0, ""))
            if line["generation"] == generation:
                assert line["digest"] == digest, line
            elif line["generation"] > generation:
                found[line["step"]] = (line["generation"], line["digest"])
        return {step: digest for step, (_generation, digest) in found.items()}

    def digests_in(self, generation: int) -> dict[int, str]:
        return {line["step"]: line["digest"] for line in self.of("step", generation)}

    def samples(self) -> list[int]:
        """Those that the steps that counted were made of."""
        last: dict[int, int] = {}
        for line in self.of("step"):
            last[line["step"]] = max(last.get(line["step"], 0), line["generation"])
        return [
            sample
            for line in self.of("step")
            if line["generation"] == last[line["step"]]
            for sample in line["ids"]
        ]


@pytest.fixture(autouse=True)
def no_open_states() -> Iterator[None]:
    """A test that fails leaves its State open, held by its traceback: the tests after it do not fail with it."""
    yield
    if found := sys.modules.get("ddp.elastic.state"):
        found._open.clear()


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Told]:
    """Runs programs/training.py to its end, on so many ranks, disturbed as the plan says."""
    numbers = itertools.count()

    def run(nproc: int = 2, restarts: int = 0, **plan: Any) -> Told:
        plan = {"model": "torch", "epochs": 2, "state": {}} | plan
        folder = tmp_path / f"job{next(numbers)}"
        there = folder / "there"
        there.mkdir(parents=True)
        env = {"PLAN": json.dumps(plan), "THERE": str(there)}
        codes = generations.play(PROGRAM, folder, nproc, restarts, env)
        said = "\n".join(path.read_text() for path in sorted(folder.glob("rank*")))
        assert not any(codes), said
        paths = sorted(there.glob("told-*"))
        return Told([json.loads(line) for path in paths for line in path.read_text().splitlines()])

    return run
