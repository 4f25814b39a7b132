"""Checkpoints beside each other: how long the training waits, until when they are durable, how long a resume takes.

    python bench/checkpoints.py [--gb 0.1 1 4] [--shardings replicated FSDP2 HSDP] [--rounds N] [--json FILE]
                                [--plot FILE] [--write-docs]

ddp.elastic, `async_save` of torch.distributed.checkpoint (DCP), and, if they are installed in the environment of this
Python, NVRx's local checkpoints and torchsnapshot save and restore the same model with Adam, in turns, in the same
processes: two ranks, with HSDP 2 x 2. A figure is that of the slowest rank. Ratios are taken within a round.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shown import draw_chart, machine, option_parser, publish

RANK = Path(__file__).parent / "ranks" / "saves_in_turns.py"
RANKS = {"replicated": 2, "FSDP2": 2, "HSDP": 4}
OURS, DCP = "ddp.elastic", "DCP async_save"
COLUMNS = {"stall": "stall", "durable": "durable", "memory": "resume from memory", "disk": "resume from disk"}
ROUNDS = {0.1: 7, 1.0: 5, 4.0: 3}
TARGETS = (
    ("stall", "stall", 0.1),
    ("memory", "disk", 0.05),
)  # of ours, of DCP's, and the most that it should be

Rounds = dict[str, list[dict[str, float]]]  # by contestant


def play(gigabytes: float, sharding: str, rounds: int, timeout_s: float) -> Rounds:
    """The figures of all rounds."""
    ranks = RANKS[sharding]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    disk = Path(tempfile.mkdtemp(prefix="ddp-bench-", dir=os.environ.get("FOLDER")))
    memory = Path(tempfile.mkdtemp(prefix="ddp-bench-", dir="/dev/shm"))
    shared = os.environ | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "bench"}
    shared |= {"OMP_NUM_THREADS": "1", "DDP_SCRATCH": str(memory)}
    # What does not fit beside the model, the copy and two commits of each rank is on disk.
    fits = gigabytes * 1e9 * ranks * 5 < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    words = [str(gigabytes), sharding, str(rounds), str(disk), str(memory if fits else disk / "nvrx")]
    command = [sys.executable, str(RANK), *words, str(disk / "figures")]
    processes = []
    try:
        for rank in range(ranks):
            env = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=env))
        for each in processes:
            if each.wait(timeout_s):
                raise SystemExit(f"a rank ended with {each.returncode}")
        return dict(json.loads((disk / "figures").read_text()))
    finally:
        for each in processes:
            each.kill()
            each.wait()
        for folder in (disk, memory):
            shutil.rmtree(folder, ignore_errors=True)


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {what: statistics.median(each[what] for each in rounds) for what in rounds[0]}


def rows(state: str, played: Rounds) -> list[str]:
    found = []
    for name, rounds in played.items():
        figures = medians(rounds)
        cells = [f"{figures[what]:,.0f} ms" if what in figures else "-" for what in COLUMNS]
        if "written" in figures:
            cells[1] = f"{figures['written']:,.0f} ms, not synced"
        found.append(f"| {state} | {name} | {' | '.join(cells)} |")
    return found


def ratios(played: Rounds) -> list[list[float]]:
    """Ours over DCP's, in each round, for each target."""
    pairs = list(zip(played[OURS], played[DCP], strict=True))
    return [[ours[mine] / dcp[theirs] for ours, dcp in pairs] for mine, theirs, _target in TARGETS]


def target_row(state: str, played: Rounds) -> str:
    cells = []
    for found, (_mine, _theirs, target) in zip(ratios(played), TARGETS, strict=True):
        median = statistics.median(found)
        verdict = "met" if median <= target else "missed"
        cells += [f"{median:.3f} ({min(found):.3f} .. {max(found):.3f})", f"<= {target:g}", verdict]
    return f"| {state} | {' | '.join(cells)} |"


def text_of(figures: dict[str, Rounds], machine_line: str) -> str:
    lines = [f"| state | | {' | '.join(COLUMNS.values())} |", f"|---|---|{'---:|' * len(COLUMNS)}"]
    for state, played in figures.items():
        lines += rows(state, played)
    lines += [
        "",
        "| ddp.elastic / DCP | stall: median (min .. max) | target | | resume from memory / `dcp.load` | target | |",
        "|---|---:|---:|---|---:|---:|---|",
        *(target_row(state, played) for state, played in figures.items()),
    ]
    counts = ", ".join(f"{state} {len(played[OURS])}" for state, played in figures.items())
    return "\n".join(lines) + f"\n\nRounds: {counts}. Machine: {machine_line}."


def draw(path: str, figures: dict[str, Rounds], machine_line: str) -> None:
    from chart import draw_bars

    panels: dict[str, dict[str, dict[str, float]]] = {}
    for title, keys in (
        ("stall of the training", ("stall",)),
        ("durable (NVRx, torchsnapshot: written)", ("durable", "written")),
        ("resume (ddp.elastic, NVRx: from memory)", ("memory", "disk")),
    ):
        panel: dict[str, dict[str, float]] = {}
        for state, played in figures.items():
            for name, rounds in played.items():
                of = medians(rounds)
                panel.setdefault(name, {})[state] = next(of[key] for key in keys if key in of)
        panels[title] = panel
    draw_bars(path, panels, "ms", machine_line)


def main() -> None:
    parser = option_parser(__doc__ or "", rounds=0, timeout_s=3600.0)
    parser.add_argument("--gb", type=float, nargs="+", default=list(ROUNDS))
    parser.add_argument("--shardings", nargs="+", choices=tuple(RANKS), default=list(RANKS))
    options = parser.parse_args()
    machine_line = machine()
    figures: dict[str, Any] = {}
    for gigabytes in options.gb:
        for sharding in options.shardings:
            rounds = options.rounds or ROUNDS.get(gigabytes, 3)
            figures[f"{gigabytes:g} GB, {sharding}"] = play(gigabytes, sharding, rounds, options.timeout)
    text = text_of(figures, machine_line)
    publish("checkpoints", text, {"machine": machine_line, "tables": figures}, options)
    draw_chart(options, "checkpoints", lambda path: draw(path, figures, machine_line))


if __name__ == "__main__":
    main()
