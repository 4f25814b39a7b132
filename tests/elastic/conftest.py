from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from launched import Launched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAM = Path(__file__).parent / "programs" / "training.py"


@dataclass(frozen=True)
class Told:
    """What the ranks of a job told, in their order."""

    lines: list[dict[str, Any]]
    stderr: str

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


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Told]]:
    """Runs programs/training.py to its end, on so many ranks, disturbed as the plan says."""
    jobs: list[Launched] = []

    def run(nproc: int = 2, restarts: int = 0, code: int = 0, env: Any = None, **plan: Any) -> Told:
        plan = {"model": "torch", "epochs": 2, "state": {}} | plan
        words = ("--nproc-per-node", str(nproc), "--max-restarts", str(restarts), "--crash-loop", "off")
        words += (
            "--preload",
            "torch._dynamo,torch.distributed.fsdp",
        )  # else each rank imports them, each time
        env = {"PLAN": json.dumps(plan)} | (env or {})
        job = Launched(tmp_path / f"job{len(jobs)}", *words, str(PROGRAM), env=env)
        jobs.append(job)
        assert job.wait(200) == code, job.stderr()
        lines = [
            json.loads(line)
            for path in sorted(job.there.glob("told-*"))
            for line in path.read_text().splitlines()
        ]
        return Told(lines, job.stdout() + job.stderr())

    yield run
    for job in jobs:
        job.clean_up()
