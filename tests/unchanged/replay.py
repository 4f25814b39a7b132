"""Runs random programs under both launchers, and prints what differs.

replay.py SEED [COUNT] [--torch | --light] [--show]     --show prints the programs and both outcomes
replay.py --record                                      writes what `make test` compares with
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "shell"), str(_HERE.parents[1])]

from comparing import differences  # noqa: E402
from outcomes import DdpLaunch, Torchrun  # noqa: E402
from random_programs import program  # noqa: E402
from recorded_outcomes import record  # noqa: E402


def replay(first: int, count: int, torch: bool | None, show: bool, folder: Path) -> int:
    torchrun, ddp_launch, differ = Torchrun(), DdpLaunch(), 0
    for seed in range(first, first + count):
        one = program(seed, torch)
        theirs, ours = torchrun.run(one, folder / "torchrun"), ddp_launch.run(one, folder / "ours")
        found = differences(one, theirs, ours)
        differ += bool(found)
        if show:
            print(one.source)
        if show or found:
            print(f"--- {seed}: {one.nproc} {one.flags} {one.entry} {one.env} warm: {one.is_warm}")
        if show:
            print(f"torchrun: {theirs}\nours: {ours}")
        for each in found:
            print(f"{seed}: {each[:700]}", flush=True)
    torchrun.close()
    ddp_launch.close()
    return differ


def main(words: list[str]) -> int:
    numbers = [int(word) for word in words if word.isdigit()]
    first, count = numbers[0] if numbers else 0, numbers[1] if len(numbers) > 1 else 1
    torch = {"--torch": True, "--light": False}.get(
        next((w for w in words if w in ("--torch", "--light")), "")
    )
    with tempfile.TemporaryDirectory(prefix="unchanged-") as folder:
        if "--record" in words:
            record(Path(folder))
            return 0
        return int(replay(first, count, torch, "--show" in words, Path(folder)) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
