"""How what was measured is shown: as a table, as JSON, as a picture, between markers of a document."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sidebyside import Comparison, Finding, Quantity, Round

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def table(title: str, comparisons: Sequence[Comparison]) -> str:
    lines = [
        f"| {title} | torchrun | ddp-launch | ratio (min .. max) | target | |",
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
    runs = [run for each in rounds for run in (each.theirs, each.ours)]
    failed = sum(1 for run in runs if run.problem)
    hung = sum(1 for run in runs if run.hung)
    return f"{len(rounds)} rounds, {failed} without a figure" + (f" ({hung} hung)." if hung else ".")


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
        f"{_processor()}, {len(os.sched_getaffinity(0))} CPUs, {memory:.0f} GiB, "
        f"Linux {'.'.join(platform.release().split('.')[:2])}, Python {platform.python_version()}, "
        f"torch {version('torch')}; load average at the start {os.getloadavg()[0]:.2f}"
    )


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
        return next(names, platform.machine())


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
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the chart, there (with --write-docs: into docs/img)"
    )
    parser.add_argument(
        "--write-docs",
        metavar="FILE",
        nargs="?",
        const=os.path.join(ROOT, "docs", "performance.md"),
        help="put the table between its markers in this file (default: docs/performance.md)",
    )
    return parser


def report(name: str, findings: Sequence[Finding], machine_line: str, options: argparse.Namespace) -> None:
    blocks = [f"{table(f.title, f.comparisons)}\n\n{tally(f.rounds)}" for f in findings]
    text = "\n\n".join([*blocks, f"Machine: {machine_line}."])
    whole = {"machine": machine_line, "tables": [asdict(finding) for finding in findings]}
    publish(name, text, whole, options)
    draw_chart(options, name, lambda path: _draw(path, findings, machine_line))


def _draw(path: str, findings: Sequence[Finding], machine_line: str) -> None:
    from chart import draw

    draw(path, findings, machine_line)


def draw_chart(options: argparse.Namespace, name: str, draw: Callable[[str], None]) -> None:
    """Where one was asked for: a bench that is merely tried leaves docs/ as it is."""
    path = options.plot or (options.write_docs and os.path.join(ROOT, "docs", "img", f"{name}.png"))
    if not path:
        return
    try:
        draw(path)
    except ImportError as error:
        print(f"no chart: {error}; `make install-bench` installs what it needs", file=sys.stderr)


def publish(name: str, text: str, figures: object, options: argparse.Namespace) -> None:
    """Print the text; save the figures, and put the text between its markers, where the options ask for it."""
    print(text)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)
    if options.write_docs:
        write_between_markers(options.write_docs, name, text)


def write_between_markers(path: str, name: str, text: str) -> None:
    """After `<!-- NAME:begin -->` all of it; after `<!-- NAME:begin rows: REGEX -->` the rows that begin so."""
    end = f"<!-- {name}:end -->"
    with open(path) as file:
        page = file.read()
    begin = re.search(f"<!-- {re.escape(name)}:begin(?: rows: (.*))? -->\n", page)
    if begin is None or end not in page:
        raise SystemExit(f"{path} has no place for this table: <!-- {name}:begin --> and {end} are missing")
    text = without_machine(text, page[: begin.start()])
    chosen = some_rows(text, begin[1]) if begin[1] else text
    with open(path, "w") as file:
        file.write(f"{page[: begin.end()]}{chosen}\n{end}{page[page.index(end) + len(end) :]}")


def without_machine(text: str, before: str) -> str:
    """If the page has already described this machine: only the load, and no word about rounds without a problem."""
    found = re.search("Machine: (.*?); load average at the start", text)
    if found is None or f"machine is: {found[1]}." not in before:
        return text
    return re.sub(r", 0 (runs )?without a figure\.", ".", text.replace(found[0], "Load"))


def some_rows(text: str, begins: str) -> str:
    """Without rows whose first cells do not match, and without tables that have no rows left, with their counts."""
    blocks: list[str] = []
    without = False
    for block in text.split("\n\n"):
        lines = block.split("\n")
        if lines[0].startswith("|"):
            rows = [line for line in lines[2:] if re.match(begins, line[2:])]
            blocks += ["\n".join([*lines[:2], *rows])] if rows else []
            without = not rows
        elif not without or not re.match(r"\d+ rounds", block):
            blocks.append(block)
    return "\n\n".join(blocks)
