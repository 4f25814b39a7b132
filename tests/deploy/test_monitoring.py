"""Dashboard and alerts ask for metrics that the service has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
import yaml
from served import serving

from launcher.health.exposition import OverTime, Running
from launcher.health.exposition import text as exposed
from launcher.health.node_health import HealthState, MemoryUse, NodeReading
from launcher.machine.gpu_state import Gpu
from rendezvous.values.rank_time import TRAINING, RankTime, TimeSpent
from rendezvous.values.rank_view import Histogram, RankPhase, RankView, Totals

DEPLOY = Path(__file__).parents[2] / "deploy"
# Of Prometheus itself, and of etcd.
_OTHERS = {
    "up",
    "etcd_server_has_leader",
    "etcd_mvcc_db_total_size_in_bytes",
    "etcd_server_quota_backend_bytes",
}
_METRIC = re.compile(r"\b(ddp_rendezvous_[a-z_]+|etcd_[a-z_]+|up)\{?")


ALERTS = DEPLOY / "kubernetes" / "components" / "monitoring" / "alerts.yaml"

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on this machine")


def promtool(*words: str) -> str:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def of_board(name: str) -> list[str]:
    board = json.loads((DEPLOY / "grafana" / name).read_text())
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def expressions() -> list[str]:
    found = of_board("ddp-rendezvous.json")
    alerts = yaml.safe_load(ALERTS.read_text())
    return found + [rule["expr"] for group in alerts["spec"]["groups"] for rule in group["rules"]]


def test_every_metric_that_is_asked_for_is_there() -> None:
    with serving("--http", "127.0.0.1:0") as service:
        (line,) = [line for line in service.log if "metrics at" in line]
        with urllib.request.urlopen(
            f"http://{line.split('metrics at ')[1].strip()}/metrics", timeout=60
        ) as got:
            there = set(re.findall(r"^# TYPE (\S+)", got.read().decode(), re.MULTILINE))
    asked = {name for text in expressions() for name in _METRIC.findall(text)}
    assert len(asked) >= 6
    assert asked - _OTHERS <= there


def test_the_board_of_a_job_asks_for_what_agents_have() -> None:
    """In an exposition with all of it: ranks, restarts, a GPU."""
    bins = Histogram((1,) * 24, 3.0)
    view = RankView(
        0, known=True, phase_times=((RankPhase.DATA, 1.0),), totals=Totals(steps=bins, calls=bins)
    )
    reading = NodeReading(0.0, MemoryUse("the machine", 1, 2), gpus=(Gpu(0, utilization=3),))
    over_time = OverTime((RankTime(0, TimeSpent(forward=1.0)),), {"all": bins})
    text = exposed(Running(1, 0, 1, True, "train", "node0"), [view], HealthState(last=reading), over_time)
    there = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    expressions = of_board("ddp-launch-job.json")
    asked = {name for each in expressions for name in re.findall(r"ddp_launch_[a-z_]+", each)}
    assert len(asked) >= 15
    assert asked <= there
    assert all('ddp_launch_job_info{job_id="$job"}' in each for each in expressions)
    classes = re.findall(r'class=~"([^"]+)"', expressions[0])
    assert classes == ["|".join(TRAINING)]


def test_alerts_say_what_to_do() -> None:
    alerts = yaml.safe_load(ALERTS.read_text())
    for rule in (rule for group in alerts["spec"]["groups"] for rule in group["rules"]):
        assert rule["annotations"]["summary"], rule
        assert len(rule["annotations"]["description"]) > 30, rule
        assert rule["labels"]["severity"] in ("critical", "warning")


@needs_promtool
def test_alerts_stand_when_they_should(tmp_path: Path) -> None:
    """When nobody is left to be counted, too: a count of nothing is no number."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(yaml.safe_load(ALERTS.read_text())["spec"]))
    played = tmp_path / "alerts.yaml"
    played.write_text(Path(__file__).with_name("alerts.yaml").read_text().replace("RULES", str(rules)))
    promtool("test", "rules", str(played))


@needs_promtool
def test_every_expression_can_be_read(tmp_path: Path) -> None:
    every = expressions() + of_board("ddp-launch-job.json")
    filled = [each.replace("$__rate_interval", "5m") for each in every]
    recorded = [{"record": f"panel:{n}", "expr": each} for n, each in enumerate(filled)]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": recorded}]}))
    assert f"{len(recorded)} rules found" in promtool("check", "rules", str(path))
