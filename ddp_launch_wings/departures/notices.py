"""What an announcement of a departure says: in our own JSON, and as clouds, Kubernetes and Slurm write it. Pure.

Our own: {"departs": "the rack is moved", "in_s": 120}. `in_s` may be missing. Without `departs`, the node stays.

An answer that is unclear does not count as an announcement. To drain a node without need costs a restart, and a real
announcement is there again at the next look.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from rendezvous.values.late_dataclass import dataclass

_LONGEST_TEXT = 200
_LEAVING = {"terminate", "stop", "hibernate", "preempt", "reboot", "redeploy"}
# Taints that the programs set which remove nodes. Others, such as pressure of memory, pass.
_TAINTS = re.compile(
    r"ToBeDeleted|karpenter\.sh/disrupt|impending-node-termination|aws-node-termination-handler|"
    r"node\.kubernetes\.io/(unschedulable|out-of-service)|cloudprovider.*/shutdown"
)
_SLURM_STATES = {"DRAIN", "DRAINING", "DRAINED", "FAIL", "FAILING", "REBOOT_REQUESTED", "REBOOT_ISSUED"}


@dataclass(frozen=True, slots=True)
class Departure:
    reason: str
    in_s: float | None = None  # until the node is gone
    is_of_job: bool = False  # the whole job ends, so another node is of no use


class NotRead(ValueError):
    """The answer is not in the format of its source."""


def own(text: str, now: float) -> Departure | None:
    found = _object(text)
    reason, in_s = found.get("departs"), found.get("in_s")
    if not reason:
        return None
    if not isinstance(reason, str) or not (in_s is None or type(in_s) in (int, float)):
        raise NotRead('expected {"departs": TEXT, "in_s": SECONDS}')
    return Departure(_line(reason), None if in_s is None else max(0.0, float(in_s)))


def ec2(text: str, now: float) -> Departure | None:
    """`spot/instance-action`: {"action": "terminate", "time": "2026-01-02T03:04:05Z"}."""
    found = _object(text)
    action = str(found.get("action", ""))
    if action not in _LEAVING:
        return None
    return Departure(f"spot notice: {action}", _until(found.get("time"), now))


def gcp(text: str, now: float) -> Departure | None:
    """`instance/preempted`: TRUE or FALSE. The instance has 30 s then."""
    return Departure("preempted", 30.0) if text.strip() == "TRUE" else None


def azure(text: str, now: float) -> Departure | None:
    """Scheduled events: of the earliest that takes the machine away."""
    found = []
    for event in _object(text).get("Events") or ():
        kind = str(event.get("EventType", "")) if isinstance(event, dict) else ""
        if kind.lower() in _LEAVING:
            found.append(Departure(f"scheduled event: {kind}", _until(event.get("NotBefore"), now)))
    return min(found, key=lambda each: each.in_s or 0.0, default=None)


def kubernetes(text: str, now: float) -> Departure | None:
    """A Node object: a cordon, or a taint of a program that removes nodes."""
    spec = _object(text).get("spec")
    if not isinstance(spec, dict):
        raise NotRead("expected a Node object")
    for taint in spec.get("taints") or ():
        key = str(taint.get("key", "")) if isinstance(taint, dict) else ""
        if _TAINTS.search(key) and key != "node.kubernetes.io/unschedulable":
            return Departure(f"taint {_line(key)}")
    return Departure("the node is cordoned") if spec.get("unschedulable") is True else None


def slurm(text: str, now: float) -> Departure | None:
    """`scontrol show node NAME`, with State=ALLOCATED+DRAIN."""
    state = re.search(r"\bState=(\S+)", text)
    if state is None:
        raise NotRead("expected the output of scontrol show node")
    if _SLURM_STATES.isdisjoint(re.split(r"[^A-Z_]+", state[1])):
        return None
    reason = re.search(r"\bReason=(.+)", text)
    return Departure(_line(f"Slurm: {state[1]}" + (f" ({reason[1]})" if reason else "")))


def slurm_end(end_time: str, lead_s: float, now: float) -> Departure | None:
    """SLURM_JOB_END_TIME, in seconds since the epoch, when at most `lead_s` are left."""
    if not end_time.isdecimal():
        raise NotRead(f"SLURM_JOB_END_TIME is {end_time!r}, not a number of seconds")
    left_s = float(end_time) - now
    return Departure("the time limit of the Slurm job", max(0.0, left_s), True) if left_s <= lead_s else None


READERS: dict[str, Callable[[str, float], Departure | None]] = {
    "ec2": ec2,
    "gcp": gcp,
    "azure": azure,
    "kubernetes": kubernetes,
    "slurm": slurm,
}


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotRead(f"not JSON: {_line(str(error))}") from None
    if not isinstance(found, dict):
        raise NotRead("not a JSON object")
    return found


def _until(moment: object, now: float) -> float | None:
    """Seconds until an ISO or HTTP date; None if it cannot be read."""
    try:
        when = datetime.fromisoformat(str(moment))
    except ValueError:
        try:
            when = parsedate_to_datetime(str(moment))
        except ValueError:
            return None
    return max(0.0, (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - now)


def _line(text: str) -> str:
    return " ".join(text.split())[:_LONGEST_TEXT]


# --- what to do ---------------------------------------------------------------------------------------

LONGEST_CHECKPOINT_S = 60.0


def checkpoint_wait_s(departure: Departure) -> float:
    """How long to wait for a checkpoint: a node that is drained needs time, too."""
    if departure.in_s is None:
        return LONGEST_CHECKPOINT_S
    share = 0.9 if departure.is_of_job else 0.5
    return max(1.0, min(LONGEST_CHECKPOINT_S, departure.in_s * share))
