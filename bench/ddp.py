"""How long a training step takes: torch's DistributedDataParallel over Gloo, ours over Gloo and over shared memory.

    python bench/ddp.py [--quick] [--ranks 2 4] [--models 'MLP, 1M' ...] [--parts steps buckets no-sync memory]
                        [--rounds 7] [--json FILE] [--join FILE ...] [--write-docs]

One torch thread per rank, plain SGD, all ranks on this machine. In every round each contender trains for a moment,
one after the other, in an order that rotates. A ratio is a contender's time over torch's in the same round; the
figure is the median of these. `alone` communicates nothing: what is left when averaging costs nothing. All of it takes
half an hour: parts that were measured singly, each with --json, are shown together by --join.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "ddp_models"))

from shown import draw_chart, machine, option_parser, publish
from trial import Figures, play

if TYPE_CHECKING:
    import argparse

MODELS = ["MLP, 1M", "ResNet-50-like", "GPT-like, 30M", "2,000 x 1,000", "one of 100M", "idle backward"]
TORCH, OVER_GLOO, OVER_SHM, ALONE = "torch, Gloo", "ours, Gloo", "ours, shm", "alone"
STEP_CONTENDERS: list[dict[str, Any]] = [
    {"name": TORCH, "kind": "torch", "backend": "gloo"},
    {"name": OVER_GLOO, "kind": "ours", "backend": "gloo"},
    {"name": OVER_SHM, "kind": "ours", "backend": "shm"},
    {"name": ALONE, "kind": "alone"},
]
# Ratios to torch over Gloo, by number of ranks, in the order of the models.
TARGETS = {
    (2, OVER_GLOO): [0.95] * 6,
    (2, OVER_SHM): [0.38, 0.72, 0.80, 0.70, 0.58, 0.64],
    (4, OVER_SHM): [0.45, 0.77, 0.79, 0.72, 0.60, 0.44],
}
CAPS = [1, 5, 25, 100]
CADENCES = [1, 2, 4, 8]
PARTS = ["steps", "buckets", "no-sync", "memory"]


@dataclass(frozen=True)
class Found:
    part: str
    model: str
    ranks: int
    figures: Figures


# --- what is measured --------------------------------------------------------------------------------


def contenders_of(part: str) -> list[dict[str, Any]]:
    varied: list[dict[str, Any]] = STEP_CONTENDERS[:3]
    if part == "steps":
        return STEP_CONTENDERS
    if part == "buckets":
        return [
            {**one, "name": f"{one['name']}, {cap}", "bucket_cap_mb": cap} for one in varied for cap in CAPS
        ]
    if part == "no-sync":
        return [
            {**one, "name": f"{one['name']}, {n}", "micro_batches": n} for n in CADENCES for one in varied
        ]
    views = {"name": "torch, views", "kind": "torch", "backend": "gloo", "gradient_as_bucket_view": True}
    return [*STEP_CONTENDERS, views]


def measured(part: str, model: str, ranks: int, options: argparse.Namespace) -> list[Found]:
    trial: dict[str, Any] = {"model": model, "rounds": options.rounds, "contenders": contenders_of(part)}
    if part != "memory":
        found = [Found(part, model, ranks, play(ranks, trial, options.timeout))]
    else:
        trial |= {"rounds": 2, "steps": 2, "weighed": True}
        alone = [{**trial, "contenders": [one]} for one in contenders_of(part)]
        found = [Found(part, model, ranks, play(ranks, one, options.timeout)) for one in alone]
    print(f"measured: {part}, {model}, {ranks} ranks", file=sys.stderr, flush=True)
    return found


def everything(options: argparse.Namespace) -> list[Found]:
    found = []
    for part in options.parts:
        among = {
            "steps": options.models,
            "buckets": ["ResNet-50-like", "GPT-like, 30M"],
            "no-sync": ["MLP, 1M", "2,000 x 1,000"],
            "memory": ["one of 100M", "ResNet-50-like"],
        }[part]
        for ranks in options.ranks if part == "steps" else options.ranks[:1]:
            for model in among:
                if model in options.models:
                    found += measured(part, model, ranks, options)
    return found


def joined(paths: list[str]) -> tuple[list[Found], str]:
    """What earlier runs have written, and the machine of the last of them."""
    found: list[Found] = []
    machine_line = ""
    for path in paths:
        with open(path) as file:
            written = json.load(file)
        machine_line = written["machine"]
        found += [Found(*where, Figures(taken, peak)) for *where, taken, peak in written["found"]]
    found.sort(key=lambda one: (one.ranks, PARTS.index(one.part), MODELS.index(one.model)))
    return found, machine_line


# --- what is shown -----------------------------------------------------------------------------------


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})"


def target_of(ranks: int, name: str, model: str) -> float | None:
    targets = TARGETS.get((ranks, name))
    return None if targets is None else targets[MODELS.index(model)]


def verdict(target: float | None, ratios: list[float]) -> str:
    if target is None:
        return ""
    return f"<= {target:.2f} {'met' if statistics.median(ratios) <= target else 'not met'}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def steps_text(ranks: int, found: list[Found]) -> str:
    rows = []
    for one in found:
        cells = [one.model, milliseconds(one.figures.median(TORCH))]
        for name in (OVER_GLOO, OVER_SHM):
            ratios = one.figures.ratios(name, TORCH)
            cells += [spread(ratios), verdict(target_of(ranks, name, one.model), ratios)]
        rows.append([*cells, spread(one.figures.ratios(ALONE, TORCH))])
    return table([f"step, {ranks} ranks", TORCH, OVER_GLOO, "target", OVER_SHM, "target", ALONE], rows)


def breakdown_text(found: list[Found]) -> str:
    """Communication that shows: the backward, without what it takes where nothing is communicated."""
    rows = []
    for one in found:
        for name in (TORCH, OVER_GLOO, OVER_SHM):
            phases = [one.figures.median(name, phase) for phase in ("forward", "backward", "optimizer")]
            exposed = max(0.0, phases[1] - one.figures.median(ALONE, "backward"))
            cells = [phases[0], phases[1] - exposed, exposed, phases[2]]
            rows.append([f"{one.model}: {name}", *map(milliseconds, cells)])
    head = ["latency breakdown, 2 ranks", "forward", "backward, alone", "exposed communication", "optimizer"]
    return table([head[0].replace("2", str(found[0].ranks)), *head[1:]], rows)


def buckets_text(found: list[Found]) -> str:
    rows = []
    for one in found:
        for name in (TORCH, OVER_GLOO, OVER_SHM):
            row = [f"{one.model}: {name}", milliseconds(one.figures.median(f"{name}, 25"))]
            for cap in CAPS:
                this = f"{name}, {cap}"
                ratios = one.figures.ratios(this, f"{name}, 25") if this in one.figures.taken else []
                row.append(spread(ratios) if ratios else "-")
            rows.append(row)
    return table(["bucket size, MiB", "25", *map(str, CAPS)], rows)


def no_sync_text(found: list[Found]) -> str:
    rows = []
    for one in found:
        for name in (TORCH, OVER_GLOO, OVER_SHM):
            first = milliseconds(one.figures.median(f"{TORCH}, 1"))
            ratios = [one.figures.ratios(f"{name}, {n}", f"{TORCH}, 1") for n in CADENCES]
            rows.append([f"{one.model}: {name}", first, *map(spread, ratios)])
    head = ["a micro-batch, synchronised after", "torch, each", *(f"{n}" for n in CADENCES)]
    return table(head, rows)


def memory_text(found: list[Found]) -> str:
    rows = []
    for model in dict.fromkeys(one.model for one in found):
        weights = {next(iter(one.figures.taken)): one.figures.peak_mib for one in found if one.model == model}
        names = [ALONE, TORCH, "torch, views", OVER_GLOO, OVER_SHM]
        met = max(weights[OVER_GLOO], weights[OVER_SHM]) <= weights["torch, views"]
        cells = [f"{weights[name]:.0f} MiB" for name in names]
        rows.append([model, *cells, f"<= torch, views: {'met' if met else 'not met'}"])
    return table(
        ["peak memory of a rank (PSS)", ALONE, TORCH, "torch, views", OVER_GLOO, OVER_SHM, "target"], rows
    )


def rounds_of(found: list[Found]) -> str:
    counts = {len(turns) for one in found if one.part != "memory" for turns in one.figures.taken.values()}
    return " to ".join(map(str, sorted({min(counts), max(counts)}))) if counts else "1"


def text_of(found: list[Found]) -> str:
    def of(part: str, ranks: int | None = None) -> list[Found]:
        return [one for one in found if one.part == part and ranks in (None, one.ranks)]

    blocks = []
    for ranks in dict.fromkeys(one.ranks for one in found):
        blocks += [steps_text(ranks, of("steps", ranks))] if of("steps", ranks) else []
    shown = (breakdown_text, "steps"), (buckets_text, "buckets"), (no_sync_text, "no-sync")
    for show, part in (*shown, (memory_text, "memory")):
        if rows := of(part, found[0].ranks):
            blocks.append(show(rows))
    return "\n\n".join(blocks)


def main() -> None:
    parser = option_parser(__doc__ or "", timeout_s=900.0)
    parser.add_argument("--quick", action="store_true", help="3 rounds, 2 ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default: 2 4")
    parser.add_argument(
        "--models", nargs="+", default=MODELS, choices=MODELS, metavar="NAME", help="default: all"
    )
    parser.add_argument("--join", nargs="+", metavar="FILE", help="measure nothing: show what --json wrote")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="default: all")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.ranks = 3, options.ranks[:1]
    # Whoever stops us stops the ranks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.join:
        found, machine_line = joined(options.join)
    else:
        machine_line = machine()
        found = everything(options)
    if not found:
        raise SystemExit("nothing to measure: these parts do not look at these models")
    text = f"{text_of(found)}\n\nRounds: {rounds_of(found)}. Machine: {machine_line}."
    rounds = [[one.part, one.model, one.ranks, one.figures.taken, one.figures.peak_mib] for one in found]
    publish("ddp", text, {"machine": machine_line, "found": rounds}, options)
    draw_chart(options, "ddp", lambda path: _draw(path, found, machine_line))


def _draw(path: str, found: list[Found], machine_line: str) -> None:
    from figures import draw

    draw(path, found, machine_line)


if __name__ == "__main__":
    main()
