"""Two launchers doing the same thing in turns, and what that says.

Theory of operation
-------------------
A machine is never quiet: clocks change, neighbours come and go. So both launchers run in every round, one right
after the other, in an order that alternates; a ratio is taken within a round, and the figure that counts is the
median of these ratios. Their smallest and largest are shown beside it. The first round only fills the page cache.
A run that fails or hangs has no figure; it is counted in the table, never left out of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING

from watched import Hung, RunFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_BESIDE_PYTHON = os.path.dirname(sys.executable)


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    command: str
    env: tuple[tuple[str, str], ...] = ()

    def argv(self, *args: str) -> list[str]:
        return [os.path.join(_BESIDE_PYTHON, self.command), "--standalone", *args]


TORCHRUN = Contender("torchrun", "torchrun")
DDP_LAUNCH = Contender("ddp-launch", "ddp-launch")


@dataclass(frozen=True, slots=True)
class Quantity:
    """`ratio` is the target for ours over theirs, `limit` one for ours alone."""

    key: str
    title: str
    unit: str = "s"
    ratio: float | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    figures: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    hung: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    theirs: Run
    ours: Run


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row: medians of both, and the ratios of the rounds in which both have a figure."""

    quantity: Quantity
    theirs: list[float]
    ours: list[float]
    ratios: list[float]

    @property
    def verdict(self) -> str:
        quantity = self.quantity
        if quantity.ratio is None and quantity.limit is None:
            return ""
        values, target = (
            (self.ratios, quantity.ratio) if quantity.limit is None else (self.ours, quantity.limit)
        )
        if not values or target is None:
            return "no figure"
        return "met" if statistics.median(values) <= target else "not met"


def play(
    measure: Callable[[Contender], dict[str, float]],
    theirs: Contender,
    ours: Contender,
    rounds: int,
    warm_up: int,
) -> list[Round]:
    played = []
    for number in range(-warm_up, rounds):
        order = (theirs, ours) if number % 2 == 0 else (ours, theirs)
        runs = {contender.name: _attempt(measure, contender) for contender in order}
        for name, run in runs.items():
            _say(number, name, run)
        if number >= 0:
            played.append(Round(runs[theirs.name], runs[ours.name]))
    return played


def _attempt(measure: Callable[[Contender], dict[str, float]], contender: Contender) -> Run:
    try:
        return Run(measure(contender))
    except RunFailed as failure:
        return Run(problem=str(failure), hung=isinstance(failure, Hung))


def _say(number: int, name: str, run: Run) -> None:
    label = f"round {number + 1}" if number >= 0 else "warm-up"
    figures = "  ".join(f"{key} {value:.3f}" for key, value in run.figures.items())
    print(f"{label:>8}  {name:<10}  {figures or run.problem}", file=sys.stderr, flush=True)


def compare(quantity: Quantity, rounds: Sequence[Round]) -> Comparison:
    key = quantity.key
    pairs = [(r.theirs.figures.get(key), r.ours.figures.get(key)) for r in rounds]
    return Comparison(
        quantity,
        [theirs for theirs, _ in pairs if theirs is not None],
        [ours for _, ours in pairs if ours is not None],
        [ours / theirs for theirs, ours in pairs if theirs and ours is not None],
    )


# --- what is shown -----------------------------------------------------------------------------------


def table(title: str, comparisons: Sequence[Comparison]) -> str:
    lines = [
        f"| {title} | torchrun | ddp-launch | ratio: median (min .. max of rounds) | target | |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in comparisons:
        quantity = row.quantity
        theirs, ours = (_amount(values, quantity.unit) for values in (row.theirs, row.ours))
        cells = (quantity.title, theirs, ours, _spread(row.ratios), _target(quantity), row.verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tally(rounds: Sequence[Round]) -> str:
    """How many runs the table stands on, and how many have no figure."""
    parts = []
    for name, runs in (("torchrun", [r.theirs for r in rounds]), ("ddp-launch", [r.ours for r in rounds])):
        failed = sum(1 for run in runs if run.problem)
        hung = sum(1 for run in runs if run.hung)
        parts.append(f"{name} {len(runs)} runs, {failed} without a figure ({hung} of them hung)")
    return "; ".join(parts) + "."


def _amount(values: list[float], unit: str) -> str:
    if not values:
        return "-"
    value = statistics.median(values)
    return f"{value:.{1 if unit == 'MiB' else 3}f} {unit}"


def _spread(ratios: list[float]) -> str:
    if not ratios:
        return "-"
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})"


def _target(quantity: Quantity) -> str:
    if quantity.limit is not None:
        return f"<= {quantity.limit:g} {quantity.unit}"
    return "" if quantity.ratio is None else f"<= {quantity.ratio:g}"


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_processor()}, {len(os.sched_getaffinity(0))} CPUs, {memory:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, torch {version('torch')}; "
        f"load average when it began {os.getloadavg()[0]:.2f}"
    )


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
        return next(names, platform.machine())


# --- where it goes -----------------------------------------------------------------------------------


def option_parser(doc: str, rounds: int = 7, timeout_s: float = 60.0) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"default {rounds}")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that are thrown away (default 1)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=timeout_s,
        help=f"a run that takes longer hangs (default {timeout_s:g} s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write every figure of every round there")
    parser.add_argument("--plot", metavar="FILE", help="where the chart goes (default: docs/img)")
    parser.add_argument(
        "--write-docs",
        metavar="FILE",
        nargs="?",
        const=os.path.join(ROOT, "docs", "performance.md"),
        help="put the table between its markers in this file (default: docs/performance.md)",
    )
    return parser


@dataclass(frozen=True, slots=True)
class Finding:
    """One table with its rounds."""

    title: str
    quantities: tuple[Quantity, ...]
    rounds: list[Round]

    @property
    def comparisons(self) -> list[Comparison]:
        return [compare(quantity, self.rounds) for quantity in self.quantities]


def report(name: str, findings: Sequence[Finding], machine_line: str, options: argparse.Namespace) -> None:
    blocks = [f"{table(f.title, f.comparisons)}\n\n{tally(f.rounds)}" for f in findings]
    text = "\n\n".join([*blocks, f"Machine: {machine_line}."])
    print(text)
    if options.json:
        _write_json(options.json, findings, machine_line)
    if options.write_docs:
        write_between_markers(options.write_docs, name, text)
    _draw(options.plot or os.path.join(ROOT, "docs", "img", f"{name}.png"), findings, machine_line)


def _draw(path: str, findings: Sequence[Finding], machine_line: str) -> None:
    try:
        from chart import draw
    except ImportError as error:
        print(f"no chart: {error}; `make install-bench` installs what it needs", file=sys.stderr)
        return
    draw(path, findings, machine_line)


def _write_json(path: str, findings: Sequence[Finding], machine_line: str) -> None:
    whole = {"machine": machine_line, "tables": [asdict(finding) for finding in findings]}
    with open(path, "w") as file:
        json.dump(whole, file, indent=1)


def write_between_markers(path: str, name: str, text: str) -> None:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    with open(path) as file:
        before, found_begin, rest = file.read().partition(begin)
    _old, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise SystemExit(f"{path} has no place for this table: {begin} and {end} are missing")
    with open(path, "w") as file:
        file.write(f"{before}{begin}\n{text}\n{end}{after}")
