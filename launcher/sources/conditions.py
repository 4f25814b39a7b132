"""Findings from conditions, taints and labels of a Kubernetes node.

There is no list of all condition types: node-problem-detector, NVSentinel and cloud providers define their own. These
rules cover them:

- True means a problem, as node-problem-detector requires. Names that end in Ready or Healthy mean the opposite.
- A problem of a GPU, NVLink or InfiniBand, and the problems in `_UNFIT`, make the node unfit.
- All other problems are warnings: the node may run ranks in spite of them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from launcher.sources.findings import Finding, NotUnderstood, Severity, line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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


def of_node(node: Mapping[str, Any]) -> tuple[Finding, ...]:
    """`node`: a Node object of the Kubernetes API. Raise NotUnderstood if it is not one."""
    try:
        status, spec = node.get("status") or {}, node.get("spec") or {}
        labels = (node.get("metadata") or {}).get("labels") or {}
        conditions = _conditions(status.get("conditions") or ())
        return (*conditions, *_taints(spec.get("taints") or ()), *_cordon(spec, labels))
    except (AttributeError, TypeError) as error:
        raise NotUnderstood(f"not a Kubernetes node: {error}") from None


def of_conditions(conditions: Sequence[Any]) -> tuple[Finding, ...]:
    """Conditions alone, as the page /conditions of node-problem-detector lists them."""
    try:
        return tuple(_conditions(conditions))
    except (AttributeError, TypeError) as error:
        raise NotUnderstood(f"not a list of conditions: {error}") from None


def of_condition(kind: str, status: str, text: str) -> Finding | None:
    """`status`: True, False or Unknown. None if the condition is fine."""
    if status == "Unknown":
        return Finding(Severity.WARNING if kind == "Ready" else Severity.NOTE, kind, line(text or "unknown"))
    good = kind.endswith(_GOOD_IF_TRUE)
    if (status == "True") == good:
        return None
    return Finding(_severity(kind, good), kind, line(text))


def _severity(kind: str, good_if_true: bool) -> Severity:
    if _HARMLESS.search(kind):
        return Severity.WARNING
    unfit = good_if_true or kind in _UNFIT or _DEVICES.search(kind)
    return Severity.UNFIT if unfit else Severity.WARNING


def _conditions(conditions: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for condition in conditions:
        kind, status = str(condition.get("type") or ""), str(condition.get("status") or "")
        words = [str(condition.get(each) or "") for each in ("reason", "message")]
        found = of_condition(kind, status, ": ".join(filter(None, words))) if kind and status else None
        if found is not None:
            yield found


def _taints(taints: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """A taint that only reserves nodes, such as nvidia.com/gpu, says nothing about their health."""
    for taint in taints:
        key, effect = str(taint.get("key") or ""), str(taint.get("effect") or "")
        if key.startswith(_OWN_TAINTS) or not _BAD_TAINT.search(key):
            continue
        severity = Severity.WARNING if effect == "PreferNoSchedule" else Severity.UNFIT
        value = str(taint.get("value") or "")
        yield Finding(severity, f"taint {key}", line(f"{value} ({effect})" if value else effect))


def _cordon(spec: Mapping[str, Any], labels: Mapping[str, Any]) -> Iterator[Finding]:
    """NVSentinel cordons a node and writes what it does into a label. Other cordons may be planned maintenance."""
    state = str(labels.get(_STATE_LABEL) or "")
    if state.startswith(_STATES):
        yield Finding(Severity.UNFIT, f"label {_STATE_LABEL}", state)
    elif spec.get("unschedulable"):
        text = "no new pods are placed here; somebody may want to empty the node"
        yield Finding(Severity.WARNING, "cordoned", text)
