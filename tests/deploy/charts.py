"""The chart of deploy/helm, rendered as `helm install` would, and overlays of deploy/kubernetes beside it."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

Object = dict[str, Any]

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "ddp-rendezvous"
_AS_SETS = ("env", "volumes", "volumeMounts", "ports", "volumeClaimTemplates")
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on this machine")


@cache
def overlay(name: str) -> tuple[Object, ...]:
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes" / "overlays" / name)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return tuple(yaml.safe_load_all(text))


def values_of(file: str) -> Object:
    found = yaml.safe_load((CHART / file).read_text())
    assert isinstance(found, dict)
    return found


def rendered(values: Object, namespace: str = "ddp-rendezvous") -> list[Object]:
    """Raises what helm raises."""
    from helm_python import Chart  # 75 MB, and not for every machine

    with Chart.load(CHART) as chart:
        texts = chart.render(values, name="any", namespace=namespace)
    return [
        found
        for name, text in sorted(texts.items())
        if name.endswith(".yaml")
        for found in yaml.safe_load_all(text)
        if found
    ]


def comparable(found: Any, key: str = "") -> Any:
    """Without what means nothing: an order, and the namespace, which helm adds when it installs."""
    if isinstance(found, dict):
        return {name: comparable(each, name) for name, each in found.items() if (key, name) != _NAMESPACE}
    if isinstance(found, list):
        parts = [comparable(each) for each in found]
        return sorted(parts, key=lambda each: json.dumps(each, sort_keys=True)) if key in _AS_SETS else parts
    return found


_NAMESPACE = ("metadata", "namespace")
