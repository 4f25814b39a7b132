"""What a health source says about this node."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from launcher.machine.xids import UNKNOWN, XIDS, Need, XidOrigin
from launcher.sources import HealthFinding, Severity
from rendezvous.values.late_dataclass import dataclass

_LINE_CHARS = 200


def line(text: str) -> str:
    """One printable line of limited length: sources are outside of our control, and people read this on terminals."""
    words = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return words if len(words) <= _LINE_CHARS else words[: _LINE_CHARS - 1] + "…"


class NotUnderstood(ValueError):
    """The answer of a source has no format that this package knows."""


# --- recognizes the format of a source's answer. These formats are known: ---------------------------
#
# - a Node object of the Kubernetes API, or a list of its conditions (JSON)
# - an object of a script of your own (JSON): {"unfit": ["disk 3 is broken"], "warnings": []}; {} is healthy
# - the report of `dcgmi health -c -j` (JSON)
# - metrics in Prometheus text format

_OWN = {"unfit": Severity.UNFIT, "warnings": Severity.WARNING}
_MOST = 100


def findings(text: str, host: str, ignored: tuple[str, ...] = ()) -> tuple[HealthFinding, ...]:
    """`ignored`: names of conditions, taints and metrics that are left out. Raise NotUnderstood."""
    found = _read(text.strip(), host)
    kept = [_printable(each) for each in found if not _is_ignored(each.name, ignored)]
    return tuple(sorted(kept, key=lambda each: -each.severity)[:_MOST])


def _printable(found: HealthFinding) -> HealthFinding:
    return HealthFinding(found.severity, line(found.name), line(found.text), line(found.of))


def _is_ignored(name: str, ignored: tuple[str, ...]) -> bool:
    return name in ignored or name.rpartition(" ")[2] in ignored  # "taint KEY", "label KEY"


def _read(text: str, host: str) -> tuple[HealthFinding, ...]:
    if text.startswith("Error:"):  # what dcgmi writes also where JSON is asked for
        raise NotUnderstood(f"it reports an {line(text)}")
    if text[:1] not in ("{", "["):
        return of_metrics(text, host)
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotUnderstood(f"damaged JSON: {error}") from None
    if isinstance(read, list):
        return of_conditions(read)
    if is_of_dcgmi(read):
        return of_dcgmi(read)
    return of_node(read) if read.get("kind") == "Node" else _own(read)


def _own(read: dict[str, Any]) -> tuple[HealthFinding, ...]:
    if read.get("kind") == "Status":  # an error of the Kubernetes API
        raise NotUnderstood(f"the Kubernetes API answers: {read.get('message') or read.get('reason')}")
    if unknown := [key for key in read if key not in _OWN]:
        raise NotUnderstood(f"unknown key {unknown[0][:40]!r}; the known keys are unfit and warnings")
    found = []
    for key, severity in _OWN.items():
        texts = read.get(key, [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise NotUnderstood(f"{key!r} is not a list of strings")
        if not all(any(sign.isprintable() and not sign.isspace() for sign in text) for text in texts):
            raise NotUnderstood(f"a text in {key!r} is empty")  # the report would give no reason
        found += [HealthFinding(severity, text, "") for text in texts]
    return tuple(found)


# --- findings from conditions, taints and labels of a Kubernetes node -------------------------------
#
# There is no list of all condition types: node-problem-detector, NVSentinel and cloud providers define their own. These
# rules cover them:
#
# - True means a problem, as node-problem-detector requires. Names that end in Ready or Healthy mean the opposite.
# - A problem of a GPU, NVLink or InfiniBand, and the problems in `_UNFIT`, make the node unfit.
# - All other problems are warnings: the node may run ranks in spite of them.

# Of the kubelet, and of node-problem-detector.
_UNFIT = {"Ready", "NetworkUnavailable", "KernelDeadlock", "ReadonlyFilesystem", "CorruptDockerOverlay2"}
_DEVICES = re.compile(
    r"gpu|nvlink|nvswitch|s?xid|infiniband|dcgm_fr|^ib[A-Z]|acceleratedhardware", re.IGNORECASE
)
# Reports about monitoring, plans, or errors that the reporter itself calls harmless.
_HARMLESS = re.compile(r"nonfatal|maintenance|^DCGMError$", re.IGNORECASE)
_GOOD_IF_TRUE = ("Ready", "Healthy")

_STATE_LABEL = "dgxc.nvidia.com/nvsentinel-state"
_STATES = ("quarantined", "draining", "drain", "remediating", "remediation-failed")
_BAD_TAINT = re.compile(r"error|fault|unhealthy|quarantine|fatal|failed|degraded", re.IGNORECASE)
_OWN_TAINTS = "node.kubernetes.io/"  # of Kubernetes itself; the conditions say the same


def of_node(node: Mapping[str, Any]) -> tuple[HealthFinding, ...]:
    """`node`: a Node object of the Kubernetes API. Raise NotUnderstood if it is not one."""
    try:
        status, spec = node.get("status") or {}, node.get("spec") or {}
        labels = (node.get("metadata") or {}).get("labels") or {}
        conditions = _conditions(status.get("conditions") or ())
        return (*conditions, *_taints(spec.get("taints") or ()), *_cordon(spec, labels))
    except (AttributeError, TypeError) as error:
        raise NotUnderstood(f"not a Kubernetes node: {error}") from None


def of_conditions(conditions: Sequence[Any]) -> tuple[HealthFinding, ...]:
    """Conditions alone, as the page /conditions of node-problem-detector lists them."""
    try:
        return tuple(_conditions(conditions))
    except (AttributeError, TypeError) as error:
        raise NotUnderstood(f"not a list of conditions: {error}") from None


def of_condition(kind: str, status: str, text: str) -> HealthFinding | None:
    """`status`: True, False or Unknown. None if the condition is fine."""
    if status == "Unknown":
        return HealthFinding(
            Severity.WARNING if kind == "Ready" else Severity.NOTE, kind, line(text or "unknown")
        )
    good = kind.endswith(_GOOD_IF_TRUE)
    if (status == "True") == good:
        return None
    return HealthFinding(_severity(kind, good), kind, line(text))


def _severity(kind: str, good_if_true: bool) -> Severity:
    if _HARMLESS.search(kind):
        return Severity.WARNING
    unfit = good_if_true or kind in _UNFIT or _DEVICES.search(kind)
    return Severity.UNFIT if unfit else Severity.WARNING


def _conditions(conditions: Sequence[Mapping[str, Any]]) -> Iterator[HealthFinding]:
    for condition in conditions:
        kind, status = str(condition.get("type") or ""), str(condition.get("status") or "")
        words = [str(condition.get(each) or "") for each in ("reason", "message")]
        found = of_condition(kind, status, ": ".join(filter(None, words))) if kind and status else None
        if found is not None:
            yield found


def _taints(taints: Sequence[Mapping[str, Any]]) -> Iterator[HealthFinding]:
    """A taint that only reserves nodes, such as nvidia.com/gpu, says nothing about their health."""
    for taint in taints:
        key, effect = str(taint.get("key") or ""), str(taint.get("effect") or "")
        if key.startswith(_OWN_TAINTS) or not _BAD_TAINT.search(key):
            continue
        severity = Severity.WARNING if effect == "PreferNoSchedule" else Severity.UNFIT
        value = str(taint.get("value") or "")
        yield HealthFinding(severity, f"taint {key}", line(f"{value} ({effect})" if value else effect))


def _cordon(spec: Mapping[str, Any], labels: Mapping[str, Any]) -> Iterator[HealthFinding]:
    """NVSentinel cordons a node and writes what it does into a label. Other cordons may be planned maintenance."""
    state = str(labels.get(_STATE_LABEL) or "")
    if state.startswith(_STATES):
        yield HealthFinding(Severity.UNFIT, f"label {_STATE_LABEL}", state)
    elif spec.get("unschedulable"):
        text = "no new pods are placed here; an operator may want to empty the node"
        yield HealthFinding(Severity.WARNING, "cordoned", text)


# --- findings from the report of `dcgmi health -c -j`, as a timer may write it into a file ----------
#
# The report is a tree: "body" has the overall health, and for each kind of device (GPU, NvSwitch, ...) its devices by
# number, below them the systems with an incident (Memory, PCIe, ...), each with its health and the lines of a message:
#
#     {"body": {"Overall Health": {"value": "Failure"},
#               "GPU": {"children": {"0": {"children": {"Errors": {"children": {
#                   "Memory system": {"value": "Failure", "overflow": ["the message,", "in several lines"]}}}}}}}}}

_OVERALL = "Overall Health"
_SEVERITIES = {"Healthy": Severity.NOTE, "Warning": Severity.WARNING, "Failure": Severity.UNFIT}


def is_of_dcgmi(read: dict[str, Any]) -> bool:
    body = read.get("body")
    return isinstance(body, dict) and _OVERALL in body


def of_dcgmi(read: dict[str, Any]) -> tuple[HealthFinding, ...]:
    """Raise NotUnderstood."""
    body = _parts({"children": read["body"]})
    overall = body.pop(_OVERALL).get("value")
    if not isinstance(overall, str) or not overall:
        raise _wrong("no overall health")
    found = [
        _incident(f"{kind} {number}", system, incident)
        for kind, devices in body.items()
        for number, device in _parts(devices).items()
        for system, incident in _parts(_parts(device).get("Errors", {})).items()
    ]
    if not found and overall != "Healthy":  # a report that says why in a form that is not known
        return (HealthFinding(_severity_of_health(overall), "dcgmi", f"its overall health is {overall}"),)
    return tuple(found)


def _incident(device: str, system: str, incident: dict[str, Any]) -> HealthFinding:
    health, lines = incident.get("value"), incident.get("overflow", [])
    if not isinstance(health, str) or not isinstance(lines, list):
        raise _wrong(f"no health of {device}, {system}")
    name = f"dcgmi {system.removesuffix(' system')}"
    return HealthFinding(
        _severity_of_health(health), name, f"{device}: {health}: {' '.join(map(str, lines))}", device
    )


def _severity_of_health(health: str) -> Severity:
    return _SEVERITIES.get(health, Severity.WARNING)  # "Internal error": it does not know, so ranks may start


def _parts(of: dict[str, Any]) -> dict[str, dict[str, Any]]:
    parts = of.get("children", {})
    if not isinstance(parts, dict) or not all(isinstance(each, dict) for each in parts.values()):
        raise _wrong("parts that are not objects")
    return dict(parts)


def _wrong(what: str) -> NotUnderstood:
    return NotUnderstood(f"a report of dcgmi with {what}")


# --- metrics ----------------------------------------------------------------------------------------
#
# Findings from metrics in Prometheus text format: of the DCGM exporter, and of node-problem-detector.
#
# The exporter writes a number of its own for "no value". It keeps the last Xid until it is restarted, so this Xid may
# be of an earlier job, and the GPU may have been reset since: it is only a warning. The count of Xids within a time
# window does not have this problem.

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


def of_metrics(text: str, host: str) -> tuple[HealthFinding, ...]:
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


def _positive(severity: Severity, words: str) -> Callable[[Sample], HealthFinding | None]:
    def rule(sample: Sample) -> HealthFinding | None:
        if not 0 < sample.value < _BLANK:
            return None
        return HealthFinding(
            severity, sample.name, f"{sample.gpu} {words.format(count=int(sample.value))}", sample.gpu
        )

    return rule


def _last_xid(sample: Sample) -> HealthFinding | None:
    if not 0 < sample.value < _BLANK:
        return None
    code = int(sample.value)
    meaning = XIDS.get(code, UNKNOWN)
    if meaning.origin is XidOrigin.PROGRAM:
        return None
    text = (
        f"{sample.gpu}: the last Xid is {code}: {meaning.text}; the exporter keeps it until it is restarted"
    )
    return HealthFinding(Severity.WARNING, sample.name, text, sample.gpu)


def _recent_xids(sample: Sample) -> HealthFinding | None:
    code = sample.labels.get("xid", "")
    if not 0 < sample.value < _BLANK or not code.isdecimal() or not int(code):
        return None
    meaning = XIDS.get(int(code), UNKNOWN)
    if meaning.origin is XidOrigin.PROGRAM:
        return None
    severity = Severity.UNFIT if meaning.need not in (Need.NOTHING, Need.WATCH) else Severity.WARNING
    return HealthFinding(
        severity, sample.name, f"{sample.gpu}: Xid {code}: {meaning.text}", f"{sample.gpu} {code}"
    )


def _health_check(sample: Sample) -> HealthFinding | None:
    if not _WARNS <= sample.value < _BLANK:
        return None
    what = sample.labels.get("health_watch") or "all"
    why = sample.labels.get("health_error") or sample.labels.get("health_error_code") or ""
    fails = sample.value >= _FAILS
    words = f"{sample.gpu}: the DCGM health check {what!r} {'fails' if fails else 'warns'}"
    severity = Severity.UNFIT if fails else Severity.WARNING
    return HealthFinding(severity, sample.name, f"{words}: {why}" if why else words, f"{sample.gpu} {what}")


def _clocks(sample: Sample) -> HealthFinding | None:
    if not 0 < sample.value < _BLANK:
        return None
    reasons = dict.fromkeys(word for bit, word in _SLOWED_BY.items() if int(sample.value) & bit)
    text = f"{sample.gpu} runs slower because of {' and '.join(reasons)}"
    return HealthFinding(Severity.WARNING, sample.name, text, sample.gpu) if reasons else None


def _node_problem(sample: Sample) -> HealthFinding | None:
    """problem_gauge: 1 while the condition `type` has a problem."""
    kind = sample.labels.get("type", "")
    return of_condition(kind, "True", sample.labels.get("reason", "")) if sample.value == 1 and kind else None


_RULES: dict[str, Callable[[Sample], HealthFinding | None]] = {
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
