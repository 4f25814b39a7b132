"""Dashboard and alerts ask for metrics that the service has."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import yaml
from served import serving

DEPLOY = Path(__file__).parents[2] / "deploy"
# Of Prometheus itself, and of etcd.
_OTHERS = {"up", "etcd_server_has_leader"}
_METRIC = re.compile(r"\b(ddp_rendezvous_[a-z_]+|etcd_[a-z_]+|up)\{?")


def expressions() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana" / "ddp-rendezvous.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    alerts = yaml.safe_load((DEPLOY / "kubernetes" / "components" / "monitoring" / "alerts.yaml").read_text())
    return found + [rule["expr"] for group in alerts["spec"]["groups"] for rule in group["rules"]]


def test_every_metric_that_is_asked_for_is_there() -> None:
    with serving("--http", "127.0.0.1:0") as service:
        (line,) = [line for line in service.log if "metrics at" in line]
        with urllib.request.urlopen(
            f"http://{line.split('metrics at ')[1].strip()}/metrics", timeout=10
        ) as got:
            there = set(re.findall(r"^# TYPE (\S+)", got.read().decode(), re.MULTILINE))
    asked = {name for text in expressions() for name in _METRIC.findall(text)}
    assert len(asked) >= 6
    assert asked - _OTHERS <= there


def test_alerts_say_what_to_do() -> None:
    alerts = yaml.safe_load((DEPLOY / "kubernetes" / "components" / "monitoring" / "alerts.yaml").read_text())
    for rule in (rule for group in alerts["spec"]["groups"] for rule in group["rules"]):
        assert rule["annotations"]["summary"], rule
        assert len(rule["annotations"]["description"]) > 30, rule
        assert rule["labels"]["severity"] in ("critical", "warning")
