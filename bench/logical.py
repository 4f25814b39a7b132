"""What a step of logical ranks costs, beside the same step of our DistributedDataParallel without them.

    python bench/logical.py [--models 'MLP, 1M' 'GPT-like, 30M'] [--rounds 7] [--json FILE] [--write-docs]

One torch thread per process, plain SGD, all processes on this machine. A process that carries several logical ranks is
compared with a process that accumulates as many micro-batches under no_sync(). In every round both train for a moment,
one after the other, in an order that rotates. The ratio is that of the same round; the figure is the median of these.
The CPU time of process 0 is shown as well: it depends less on what else the machine does.
"""

from __future__ import annotations

import os
import statistics
import sys
from typing import TYPE_CHECKING, Any

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "ddp_models"))

from shown import machine, option_parser, publish
from trial import Figures, play

if TYPE_CHECKING:
    import argparse

PLAIN, LOGICAL = "plain", "logical"
MODELS = ["MLP, 1M", "GPT-like, 30M"]
TARGETS = {"GPT-like, 30M": 1.1}
# The processes, the logical ranks of each, the backend.
WORLDS = [
    (2, 1, "shm"),
    (2, 2, "shm"),
    (2, 4, "shm"),
    (2, 1, "gloo"),
    (2, 2, "gloo"),
    (4, 1, "shm"),
    (4, 1, "gloo"),
]
HEAD = (
    "| model | processes | logical ranks | backend | a step without | ratio (min .. max) | target | "
    "| CPU time, ratio |"
)


def measured(model: str, world: tuple[int, int, str], options: argparse.Namespace) -> Figures:
    processes, each, backend = world
    contender = {"kind": "ours", "backend": backend, "micro_batches": each}
    contenders = [{"name": PLAIN, **contender}, {"name": LOGICAL, "logical": True, **contender}]
    trial = {"model": model, "rounds": options.rounds, "contenders": contenders}
    figures = play(processes, trial, options.timeout)
    print(f"measured: {model}, {processes} x {each}, {backend}", file=sys.stderr, flush=True)
    return figures


def row(model: str, world: tuple[int, int, str], figures: Figures) -> str:
    processes, each, backend = world
    ratios, used = figures.ratios(LOGICAL, PLAIN), figures.ratios(LOGICAL, PLAIN, "cpu")
    ratio, target = statistics.median(ratios), TARGETS.get(model)
    cells = [model, processes, processes * each, backend, f"{figures.median(PLAIN) * each * 1e3:.1f} ms"]
    cells += [f"{ratio:.3f} ({min(ratios):.3f} .. {max(ratios):.3f})"]
    cells += ["", ""] if target is None else [f"<= {target:g}", "met" if ratio <= target else "not met"]
    cells += [f"{statistics.median(used):.3f} ({min(used):.3f} .. {max(used):.3f})"]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = option_parser(__doc__ or "", timeout_s=600.0)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS, help="default: both")
    parser.add_argument("--worlds", type=int, default=len(WORLDS), help="only the first of the worlds")
    options = parser.parse_args()
    machine_line = machine()
    found: list[tuple[str, Any, Figures]] = [
        (model, world, measured(model, world, options))
        for model in options.models
        for world in WORLDS[: options.worlds]
    ]
    lines = [HEAD, "|---|---:|---:|---|---:|---:|---:|---|---:|", *(row(*each) for each in found)]
    text = "\n".join(lines) + f"\n\nRounds: {options.rounds}. Machine: {machine_line}."
    rows = [(model, world, figures.taken) for model, world, figures in found]
    publish("logical", text, {"machine": machine_line, "found": rows}, options)


if __name__ == "__main__":
    main()
