"""The results of `make gpu` as text for docs/performance.md and docs/faults.md. Pure: results in, Markdown out."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import gpu_parts
from gpu_results import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpu_results import Finding, Results

NOT_MEASURED = "Not measured yet."
# Of each table: its heading, and the names of the two that it compares.
TABLES: dict[str, tuple[str, str, str]] = {
    "launch": ("Launch with contexts on the GPU", "torchrun", "ddp-launch"),
    "first-step": ("Launch to the first training step", "torchrun", "ddp-launch"),
    "restart": ("Restart: seconds after the death of a rank", "torchrun", "ddp-launch"),
    "heal": ("Heal in place: seconds after the death of a rank, compiled GPT", "torchrun", "ddp-launch"),
    "reducer": ("A training step", "torch", "ours"),
    "cpu": ("CPU time of a backward", "torch", "ours"),
    "commit": ("How long a commit holds up the training thread", "dcp.async_save", "commit"),
    "commit-steps": ("Steps with a commit each", "without", "with"),
    "watched": ("Overhead of being watched", "everything off", "everything on"),
}
_HEAD = "| {} | {} | {} | ratio: median (min .. max of rounds) | target | |\n|---|---:|---:|---:|---:|---|"
_FAULT_HEAD = (
    "| case | setting, fault | verdict | correct | first collective, first step |\n|---|---|---|---|---:|"
)
_CORRECT = "yes"


def performance(results: Results) -> str:
    blocks = [_origin(results), _tests(results)]
    comparisons, figures = results.findings("comparison"), results.findings("figure")
    for table, (title, theirs, ours) in TABLES.items():
        rows = [_comparison(each) for each in comparisons if each["table"] == table]
        rows += [_figure(each) for each in figures if each["table"] == table]
        if rows:
            blocks.append("\n".join([_HEAD.format(title, theirs, ours), *rows]))
    return "\n\n".join([*blocks, *_unfinished(results, lambda name: not name.startswith("fault-"))])


def faults(results: Results) -> str:
    played = results.findings("fault")
    correct = sum(each["correct"] == _CORRECT for each in played)
    counted = (
        f"{len(played)} cases: {correct} correct verdicts, {len(played) - correct} wrong. Target: 0 wrong."
        if played
        else NOT_MEASURED
    )
    table = [_FAULT_HEAD, *map(_fault, played)] if played else []
    blocks = [_origin(results), counted, "\n".join(table)]
    unfinished = _unfinished(results, lambda name: name.startswith("fault-"))
    return "\n\n".join(block for block in [*blocks, *unfinished] if block)


def _origin(results: Results) -> str:
    machine = results.machine
    where = "; ".join(dict.fromkeys(machine["devices"])) or "a rehearsal on CPUs, whose figures mean nothing"
    words = [where]
    words += [f"{len(machine['devices'])} GPUs"] if len(machine["devices"]) > 1 else []
    for key, title in (("torch", "torch"), ("cuda", "CUDA"), ("nccl", "NCCL"), ("driver", "driver")):
        if machine.get(key):
            words.append(f"{title} {machine[key]}")
    words.append(f"Python {machine['python']}")
    words += [
        f"{machine[key]}{unit}" for key, unit in (("processor", ""), ("cpus", " CPUs")) if key in machine
    ]
    sharing = {
        "": "",
        "multi-rank": " Several ranks share a card by NCCL_MULTI_RANK_GPU_ENABLE=1.",
        "host-ids": " Several ranks share a card: each gives another NCCL_HOSTID, and NCCL connects them by sockets.",
    }.get(results.sharing(), "")
    return f"Machine: {', '.join(words)}.{sharing}"


def _tests(results: Results) -> str:
    checks = results.findings("check")
    wrong = [each["name"] for each in checks if not each["ok"]]
    named = f": {', '.join(wrong)}" if wrong else ""
    return f"Tests: {len(checks) - len(wrong)} passed, {len(wrong)} failed{named}."


def _unfinished(results: Results, fits: Any) -> Iterable[str]:
    """Which parts have no figures, or not all of them, and why."""
    rows = []
    for part in gpu_parts.PARTS:
        result = results.parts.get(part.name)
        if not fits(part.name) or (result is not None and result.outcome is Outcome.DONE):
            continue
        why = "not reached" if result is None else f"{result.outcome}: {_one_line(result.why)}".rstrip(": ")
        rows.append(f"- `{part.name}`: {why}")
    return ["\n".join(["Parts without complete figures:", "", *rows])] if rows else []


def _comparison(row: Finding) -> str:
    pairs = zip(row["theirs"], row["ours"], strict=False)
    ratios = [ours / theirs for theirs, ours in pairs if theirs > 0]
    target = row["target"]
    cells = [row["name"], _median(row["theirs"], row["unit"]), _median(row["ours"], row["unit"])]
    cells.append(
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})" if ratios else "-"
    )
    cells += [_target(target, ""), _verdict(ratios, target)]
    return f"| {' | '.join(cells)} |"


def _figure(row: Finding) -> str:
    limit = row["limit"]
    cells = [row["name"], "", _median(row["values"], row["unit"]), ""]
    cells += [_target(limit, f" {row['unit']}"), _verdict(row["values"], limit)]
    return f"| {' | '.join(cells)} |"


def _target(target: float | None, unit: str) -> str:
    return "" if target is None else f"<= {target:g}{unit}"


def _verdict(values: Sequence[float], target: float | None) -> str:
    if target is None:
        return ""
    if not values:
        return "no figure"
    return "met" if statistics.median(values) <= target else "not met"


def _median(values: Sequence[float], unit: str) -> str:
    return f"{statistics.median(values):.3f} {unit}" if values else "-"


def _fault(row: Finding) -> str:
    times = ", ".join("-" if row[key] is None else f"{row[key]:.2f} s" for key in ("collective_s", "step_s"))
    cells = (
        f"`{row['name']}`",
        f"{row['setting']}: {row['injected']}",
        _one_line(row["verdict"]),
        row["correct"],
        times,
    )
    return f"| {' | '.join(cells)} |"


def _one_line(text: str) -> str:
    words = " ".join(text.replace("|", "/").split())
    return words if len(words) <= 300 else f"{words[:300]} ..."
