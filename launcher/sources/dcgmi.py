"""Findings from the report of `dcgmi health -c -j`, as a timer may write it into a file.

The report is a tree: "body" has the overall health, and for each kind of device (GPU, NvSwitch, ...) its devices by
number, below them the systems with an incident (Memory, PCIe, ...), each with its health and the lines of a message:

    {"body": {"Overall Health": {"value": "Failure"},
              "GPU": {"children": {"0": {"children": {"Errors": {"children": {
                  "Memory system": {"value": "Failure", "overflow": ["the message,", "in several lines"]}}}}}}}}}
"""

from __future__ import annotations

from typing import Any

from launcher.sources.findings import Finding, NotUnderstood, Severity

_OVERALL = "Overall Health"
_SEVERITIES = {"Healthy": Severity.NOTE, "Warning": Severity.WARNING, "Failure": Severity.UNFIT}


def is_of_dcgmi(read: dict[str, Any]) -> bool:
    body = read.get("body")
    return isinstance(body, dict) and _OVERALL in body


def of_dcgmi(read: dict[str, Any]) -> tuple[Finding, ...]:
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
        return (Finding(_severity(overall), "dcgmi", f"its overall health is {overall}"),)
    return tuple(found)


def _incident(device: str, system: str, incident: dict[str, Any]) -> Finding:
    health, lines = incident.get("value"), incident.get("overflow", [])
    if not isinstance(health, str) or not isinstance(lines, list):
        raise _wrong(f"no health of {device}, {system}")
    name = f"dcgmi {system.removesuffix(' system')}"
    return Finding(_severity(health), name, f"{device}: {health}: {' '.join(map(str, lines))}", device)


def _severity(health: str) -> Severity:
    return _SEVERITIES.get(health, Severity.WARNING)  # "Internal error": it does not know, so ranks may start


def _parts(of: dict[str, Any]) -> dict[str, dict[str, Any]]:
    parts = of.get("children", {})
    if not isinstance(parts, dict) or not all(isinstance(each, dict) for each in parts.values()):
        raise _wrong("parts that are not objects")
    return dict(parts)


def _wrong(what: str) -> NotUnderstood:
    return NotUnderstood(f"a report of dcgmi with {what}")
