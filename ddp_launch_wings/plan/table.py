"""What `ddp-launch plan` prints: a table of the predictions, and what follows from it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ddp_launch_wings.plan.prediction import CADENCES, EFFICIENT, Prediction, Question
from ddp_launch_wings.plan.step_model import DEFAULT_CAP_MB
from launcher.settings.arguments import UsageError
from launcher.settings.values import printable
from rendezvous.values.durations import UNITS, short_duration
from rendezvous.values.error_codes import Code

_HEAD = ("nodes", "ranks", "step", "compute", "waiting", "exposed", "efficiency", "HSDP", "DiLoCo", "goodput")


def text(question: Question, predictions: Sequence[Prediction]) -> str:
    rows = [_HEAD, *(_row(each) for each in predictions)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(
        (*_given(question), "", *lines, "", *_advice(question, predictions[-1]), "", *_limits(question))
    )


def _given(question: Question) -> tuple[str, ...]:
    profile, link = question.profile, question.link
    return (
        f"Profile: {len(profile.gradients)} gradients of {profile.nbytes / 1e6:,.1f} MB, "
        f"{short_duration(profile.compute_s)} of computing per step "
        f"({short_duration(profile.backward_s)} of it backward), {_ranks(profile.ranks)} on {profile.device}.",
        f"Cluster: {_ranks(question.ranks_per_node)} per node, {question.transport.name}, "
        f"{link.bandwidth * 8 / 1e9:,.3g} Gbit/s and {short_duration(link.latency_s)} between nodes, "
        f"{question.inside.bandwidth / 1e9:,.3g} GB/s inside a node.",
    )


def _row(each: Prediction) -> tuple[str, ...]:
    step = each.step
    return (
        f"{each.nodes:,}",
        f"{each.ranks:,}",
        short_duration(step.seconds),
        short_duration(step.compute_s),
        short_duration(step.waiting_s),
        short_duration(step.exposed_s),
        f"{step.efficiency:.0%}",
        short_duration(each.hsdp.seconds),
        short_duration(each.diloco.seconds),
        f"{step.efficiency * each.goodput.share:.0%}",
    )


def _advice(question: Question, last: Prediction) -> tuple[str, ...]:
    nodes = f"With {last.nodes:,} node{'s' * (last.nodes > 1)}"
    lines = []
    if last.best_cap_mb == DEFAULT_CAP_MB:
        lines.append(f"{nodes}: the default bucket size (25 MiB) is the best or nearly so.")
    else:
        lines.append(
            f"{nodes}: bucket_cap_mb={last.best_cap_mb:g} makes a step {short_duration(last.best.seconds)} instead of "
            f"{short_duration(last.step.seconds)}."
        )
    if last.cadence is None:
        lines.append(
            f"Even with an average every {CADENCES[-1]} micro-batches, efficiency stays below {EFFICIENT:.0%}."
        )
    elif last.cadence > 1:
        lines.append(
            f"Average every {last.cadence} micro-batches (no_sync) for an efficiency of {EFFICIENT:.0%} or more."
        )
    lines.append(_method(question, last))
    lines.append(
        f"A checkpoint every {short_duration(last.goodput.checkpoint_every_s)} loses the least time with a failure of "
        f"some node every {short_duration(question.failures.node_mtbf_s / last.nodes)}."
        if question.failures.checkpoint_every_s is None
        else f"Failures and checkpoints leave {last.goodput.share:.1%} of the time for training."
    )
    return tuple(lines)


def _method(question: Question, last: Prediction) -> str:
    match last.best_method:
        case "HSDP":
            return "HSDP is faster than DDP here, and needs less memory."
        case "DiLoCo":
            return (
                f"DiLoCo, which averages parameters every {question.diloco_every} steps, is faster per step than DDP "
                "here. It is another algorithm: compare the loss as well."
            )
    return (
        "DDP is the fastest method or nearly so. HSDP needs less memory: the ranks of a node share parameters, "
        "gradients and optimizer state."
    )


def _limits(question: Question) -> tuple[str, ...]:
    transport = question.transport
    error = (
        f"Error of a predicted step: at most {transport.error:.0%} in the runs that checked it ({transport.checked})."
        if transport.error is not None
        else f"No run has checked the constants of {transport.name}: compare with a short run of 2 nodes."
    )
    return (
        error,
        "Not modelled: other traffic on the network, switches with less bandwidth than their links, input data that "
        "nodes share.",
    )


def as_values(question: Question, predictions: Sequence[Prediction]) -> dict[str, Any]:
    """The same for programs (`--json`)."""
    return {
        "profile": {
            "bytes": question.profile.nbytes,
            "compute_s": question.profile.compute_s,
            "backward_s": question.profile.backward_s,
            "device": question.profile.device,
            "ranks": question.profile.ranks,
        },
        "transport": question.transport.name,
        "error": question.transport.error,
        "worlds": [
            {
                "nodes": each.nodes,
                "ranks": each.ranks,
                "step_s": each.step.seconds,
                "compute_s": each.step.compute_s,
                "waiting_s": each.step.waiting_s,
                "exposed_s": each.step.exposed_s,
                "communication_s": each.step.communication_s,
                "efficiency": each.step.efficiency,
                "best_bucket_cap_mb": each.best_cap_mb,
                "best_step_s": each.best.seconds,
                "no_sync_cadence": each.cadence,
                "hsdp_step_s": each.hsdp.seconds,
                "diloco_step_s": each.diloco.seconds,
                "goodput": each.step.efficiency * each.goodput.share,
                "checkpoint_every_s": each.goodput.checkpoint_every_s,
            }
            for each in predictions
        ],
    }


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


# --- values of the plan's options as people write them: 100gbit, 20us, 30min ------------------------

_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z/]*)")
# Bits per second, as tc and the makers of networks write them; bytes per second, as the makers of GPUs do.
_RATES = {
    "kbit": 1e3 / 8,
    "mbit": 1e6 / 8,
    "gbit": 1e9 / 8,
    "tbit": 1e12 / 8,
    "mb/s": 1e6,
    "gb/s": 1e9,
    "tb/s": 1e12,
}
_MOST_NODES, _MOST_RANKS = 100_000, 1_000_000


def rate(option: str, text: str) -> float:
    """Bytes per second."""
    return _measure(option, text, _RATES, "a rate such as 100gbit, 400mbit or 300GB/s")


def seconds(option: str, text: str) -> float:
    return _measure(option, text, UNITS, "a time such as 20us, 5s, 30m or 6000h")


def node_counts(option: str, text: str) -> tuple[int, ...]:
    """One number gives its powers of two as well: 32 is 1,2,4,8,16,32."""
    try:
        counts = tuple(int(word) for word in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1 or max(counts) > _MOST_NODES:
        raise _wrong(option, text, f"numbers of nodes from 1 to {_MOST_NODES:,}, such as 32 or 1,4,16")
    if len(counts) > 1:
        return tuple(sorted(set(counts)))
    powers = (1 << exponent for exponent in range(counts[0].bit_length()))
    return (*(power for power in powers if power < counts[0]), counts[0])


def ranks_per_node(option: str, text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= _MOST_RANKS // _MOST_NODES * 100:
        raise _wrong(option, text, "a number of ranks, such as 8")
    return int(text)


def _measure(option: str, text: str, units: dict[str, float], expected: str) -> float:
    matched = _NUMBER.fullmatch(text.strip())
    factor = units.get(matched[2].lower()) if matched else None
    if matched is None or factor is None or float(matched[1]) <= 0:
        raise _wrong(option, text, expected)
    return float(matched[1]) * factor


def _wrong(option: str, text: str, expected: str) -> UsageError:
    return UsageError(f"{option} {printable(text)} is not valid. Give {expected}.", code=Code.INVALID_VALUE)
