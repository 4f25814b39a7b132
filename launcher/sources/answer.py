"""Recognizes the format of a source's answer. These formats are known:

- a Node object of the Kubernetes API, or a list of its conditions (JSON)
- an object of a script of your own (JSON): {"unfit": ["disk 3 is broken"], "warnings": []}; an empty object is healthy
- the report of `dcgmi health -c -j` (JSON)
- metrics in Prometheus text format
"""

from __future__ import annotations

import json
from typing import Any

from launcher.sources.conditions import of_conditions, of_node
from launcher.sources.dcgmi import is_of_dcgmi, of_dcgmi
from launcher.sources.findings import Finding, NotUnderstood, Severity, line
from launcher.sources.metrics import of_metrics

_OWN = {"unfit": Severity.UNFIT, "warnings": Severity.WARNING}
_MOST = 100


def findings(text: str, host: str, ignored: tuple[str, ...] = ()) -> tuple[Finding, ...]:
    """`ignored`: names of conditions, taints and metrics that are left out. Raise NotUnderstood."""
    found = _read(text.strip(), host)
    kept = [_printable(each) for each in found if not _is_ignored(each.name, ignored)]
    return tuple(sorted(kept, key=lambda each: -each.severity)[:_MOST])


def _printable(found: Finding) -> Finding:
    return Finding(found.severity, line(found.name), line(found.text), line(found.of))


def _is_ignored(name: str, ignored: tuple[str, ...]) -> bool:
    return name in ignored or name.rpartition(" ")[2] in ignored  # "taint KEY", "label KEY"


def _read(text: str, host: str) -> tuple[Finding, ...]:
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


def _own(read: dict[str, Any]) -> tuple[Finding, ...]:
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
        found += [Finding(severity, text, "") for text in texts]
    return tuple(found)
