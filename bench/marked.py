"""What `commit()` costs a step inside `State.run` when nothing fails, beside the same step without a State.

    python bench/marked.py [--models 'MLP, 1M' 'GPT-like, 30M'] [--rounds 15] [--json FILE] [--write-docs]

Two processes on this machine, one torch thread each, our DDP over shared memory, plain SGD. With `every=0` a commit()
only marks the step, with `every=1` it copies the whole state into memory. In every round both train for a moment, one
after the other, in an order that rotates. The ratio is that of the same round; the figure is the median of these. The
CPU time of process 0 is shown as well: it depends less on what else the machine does.
"""

from __future__ import annotations

import os
import statistics
import sys
from typing import TYPE_CHECKING

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "ddp_models"))

from shown import machine, option_parser, publish
from trial import Figures, play

if TYPE_CHECKING:
    import argparse

PLAIN, KEPT = "plain", "kept"
MODELS = ["MLP, 1M", "GPT-like, 30M"]
EVERY = {0: "marked (`every=0`)", 1: "committed (`every=1`)"}
TARGET = 1.01  # of a marked step
PROCESSES = 2
HEAD = (
    "| model | each step is | a step without | ratio: median (middle half of rounds) | target | | CPU time, ratio |\n"
    "|---|---|---:|---:|---:|---|---:|"
)


def measured(model: str, every: int, options: argparse.Namespace) -> Figures:
    same = {"kind": "ours", "backend": "shm"}
    contenders = [{"name": PLAIN, **same}, {"name": KEPT, "every": every, **same}]
    trial = {"model": model, "rounds": options.rounds, "contenders": contenders}
    figures = play(PROCESSES, trial, options.timeout)
    print(f"measured: {model}, every={every}", file=sys.stderr, flush=True)
    return figures


def row(model: str, every: int, figures: Figures) -> str:
    ratios = figures.ratios(KEPT, PLAIN)
    target = ("", "")
    if every == 0:
        target = (f"<= {TARGET:g}", "met" if statistics.median(ratios) <= TARGET else "not met")
    cells = (model, EVERY[every], f"{figures.median(PLAIN) * 1e3:.2f} ms", spread(ratios), *target)
    return f"| {' | '.join(cells)} | {spread(figures.ratios(KEPT, PLAIN, 'cpu'))} |"


def spread(ratios: list[float]) -> str:
    if len(ratios) < 2:
        return f"{ratios[0]:.3f}"
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{statistics.median(ratios):.3f} ({low:.3f} .. {high:.3f})"


def main() -> None:
    parser = option_parser(__doc__ or "", rounds=15, timeout_s=600.0)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS, help="default: both")
    options = parser.parse_args()
    machine_line = machine()
    found = [(model, every, measured(model, every, options)) for model in options.models for every in EVERY]
    text = "\n".join([HEAD, *(row(*each) for each in found)])
    text += f"\n\nRounds: {options.rounds}. Machine: {machine_line}."
    rows = [(model, every, figures.taken) for model, every, figures in found]
    publish("marked", text, {"machine": machine_line, "found": rows}, options)


if __name__ == "__main__":
    main()
