"""Ranks of one trial: started, watched, their memory looked at, their figures read."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

_RANK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank.py")
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class Figures:
    """Of each contender, what one round after the other took; of the processes, what they weighed at most."""

    taken: dict[str, list[dict[str, float]]]
    peak_mib: float = 0.0

    def median(self, name: str, phase: str = "step") -> float:
        return statistics.median(turn[phase] for turn in self.taken[name])

    def ratios(self, name: str, to: str, phase: str = "step") -> list[float]:
        pairs = zip(self.taken[name], self.taken[to], strict=True)
        return [ours[phase] / theirs[phase] for ours, theirs in pairs]


def play(ranks: int, trial: dict[str, Any], timeout_s: float) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "trial.json"), "w") as file:
            json.dump(trial, file)
        peak = _run(folder, ranks, time.monotonic() + timeout_s, trial.get("weighed", False))
        with open(os.path.join(folder, "taken.json")) as file:
            return Figures(json.load(file), peak)


def _run(folder: str, ranks: int, deadline: float, weighed: bool) -> float:
    env = {**os.environ, "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, _RANK, folder]
    started = [subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in range(ranks)]
    peak = 0.0
    try:
        while any(process.poll() is None for process in started):
            if weighed:
                peak = max(peak, sum(_weight_mib(process.pid) for process in started) / ranks)
            if time.monotonic() > deadline:
                raise SystemExit(f"not done in time: {command}")
            if any(process.returncode for process in started):
                raise SystemExit(f"a rank failed: {command}")
            time.sleep(_LOOK_EVERY_S)
        if any(process.returncode for process in started):
            raise SystemExit(f"a rank failed: {command}")
    finally:
        for process in started:
            process.kill()
            process.wait()
    return peak


def _weight_mib(process: int) -> float:
    """The proportional set size: memory that several ranks share counts for each in part."""
    try:
        with open(f"/proc/{process}/smaps_rollup") as file:
            line = next((line for line in file if line.startswith("Pss:")), "Pss: 0 kB")
    except (OSError, ValueError):
        return 0.0
    return int(line.split()[1]) / 1024
