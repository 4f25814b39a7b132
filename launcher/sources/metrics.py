"""Findings from metrics in Prometheus text format: of the DCGM exporter, and of node-problem-detector.

The exporter writes a number of its own for "no value". It keeps the last Xid until it is restarted, so this Xid may be
of an earlier job, and the GPU may have been reset since: it is only a warning. The count of Xids within a time window
does not have this problem.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from launcher.machine.xids import UNKNOWN, XIDS, Need, Origin
from launcher.sources.conditions import of_condition
from launcher.sources.findings import Finding, NotUnderstood, Severity
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_BLANK = 2147483632.0  # this and larger numbers are blanks of DCGM, in 32 and in 64 bits
_WARNS, _FAILS = 10, 20  # values of a DCGM health check
_SLOWED_BY = {
    0x08: "a hardware slowdown",
    0x20: "its temperature",
    0x40: "its temperature",
    0x80: "an insufficient power supply",
}
_SAMPLE = re.compile(
    r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+([^\s]+)(?:\s+-?\d+)?$"
)  # name, labels, value
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float

    @property
    def gpu(self) -> str:
        instance = self.labels.get("GPU_I_ID")
        return f"GPU {self.labels.get('gpu', '?')}" + (f" instance {instance}" if instance else "")


def samples(text: str) -> tuple[Sample, ...]:
    """Raise NotUnderstood if no line is a sample."""
    found = tuple(_samples(text.splitlines()))
    if not found:
        raise NotUnderstood(
            "neither JSON nor metrics in Prometheus text format" if text.strip() else "it is empty"
        )
    return found


def _samples(lines: Iterable[str]) -> Iterator[Sample]:
    for line in lines:
        match = _SAMPLE.match(line.strip())
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        yield Sample(match[1], dict(_LABEL.findall(match[2] or "")), value)


def of_metrics(text: str, host: str) -> tuple[Finding, ...]:
    """`host`: the name of this node. Metrics that the exporters of other nodes wrote are left out."""
    read = samples(text)
    if not any(sample.name in _RULES for sample in read):
        raise NotUnderstood(
            "metrics, but none about health: it must be a DCGM exporter or node-problem-detector"
        )
    hosts = {sample.labels["Hostname"] for sample in read if "Hostname" in sample.labels}
    if len(hosts) > 1:
        ours = {each for each in hosts if _short(each) == _short(host)}
        if not ours:
            raise NotUnderstood(f"metrics of {len(hosts)} hosts, and none of them is {host}")
        read = tuple(sample for sample in read if sample.labels.get("Hostname") in ours | {None})
    known = (rule(sample) for sample in read if (rule := _RULES.get(sample.name)) is not None)
    return tuple({finding.key: finding for finding in known if finding is not None}.values())


def _short(host: str) -> str:
    return host.partition(".")[0].lower()


# --- rules: one metric, and what its value means ---------------------------------------------------------


def _positive(severity: Severity, words: str) -> Callable[[Sample], Finding | None]:
    def rule(sample: Sample) -> Finding | None:
        if not 0 < sample.value < _BLANK:
            return None
        return Finding(
            severity, sample.name, f"{sample.gpu} {words.format(count=int(sample.value))}", sample.gpu
        )

    return rule


def _last_xid(sample: Sample) -> Finding | None:
    if not 0 < sample.value < _BLANK:
        return None
    code = int(sample.value)
    meaning = XIDS.get(code, UNKNOWN)
    if meaning.origin is Origin.PROGRAM:
        return None
    text = (
        f"{sample.gpu}: the last Xid is {code}: {meaning.text}; the exporter keeps it until it is restarted"
    )
    return Finding(Severity.WARNING, sample.name, text, sample.gpu)


def _recent_xids(sample: Sample) -> Finding | None:
    code = sample.labels.get("xid", "")
    if not 0 < sample.value < _BLANK or not code.isdecimal() or not int(code):
        return None
    meaning = XIDS.get(int(code), UNKNOWN)
    if meaning.origin is Origin.PROGRAM:
        return None
    severity = Severity.UNFIT if meaning.need not in (Need.NOTHING, Need.WATCH) else Severity.WARNING
    return Finding(severity, sample.name, f"{sample.gpu}: Xid {code}: {meaning.text}", f"{sample.gpu} {code}")


def _health_check(sample: Sample) -> Finding | None:
    if not _WARNS <= sample.value < _BLANK:
        return None
    what = sample.labels.get("health_watch") or "all"
    why = sample.labels.get("health_error") or sample.labels.get("health_error_code") or ""
    fails = sample.value >= _FAILS
    words = f"{sample.gpu}: the DCGM health check {what!r} {'fails' if fails else 'warns'}"
    severity = Severity.UNFIT if fails else Severity.WARNING
    return Finding(severity, sample.name, f"{words}: {why}" if why else words, f"{sample.gpu} {what}")


def _clocks(sample: Sample) -> Finding | None:
    if not 0 < sample.value < _BLANK:
        return None
    reasons = dict.fromkeys(word for bit, word in _SLOWED_BY.items() if int(sample.value) & bit)
    text = f"{sample.gpu} runs slower because of {' and '.join(reasons)}"
    return Finding(Severity.WARNING, sample.name, text, sample.gpu) if reasons else None


def _node_problem(sample: Sample) -> Finding | None:
    """problem_gauge: 1 while the condition `type` has a problem."""
    kind = sample.labels.get("type", "")
    return of_condition(kind, "True", sample.labels.get("reason", "")) if sample.value == 1 and kind else None


_RULES: dict[str, Callable[[Sample], Finding | None]] = {
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": _positive(
        Severity.UNFIT, "has {count} uncorrectable memory errors (ECC)"
    ),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": _positive(Severity.UNFIT, "has no spare memory rows left"),
    "DCGM_FI_DEV_ROW_REMAP_PENDING": _positive(Severity.UNFIT, "has memory rows that wait for a reset"),
    "DCGM_FI_DEV_RETIRED_PENDING": _positive(Severity.UNFIT, "has memory pages that wait for a reset"),
    "DCGM_FI_DEV_XID_ERRORS": _last_xid,
    "DCGM_EXP_XID_ERRORS_COUNT": _recent_xids,
    "DCGM_EXP_GPU_HEALTH_STATUS": _health_check,
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": _clocks,
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": _clocks,
    "problem_gauge": _node_problem,
}
