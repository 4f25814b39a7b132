"""The pre-flight on a network with one fault: who is named, and who is not."""

from __future__ import annotations

import itertools
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from lab_job import LONG_S, environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lab_host import Host
    from lab_network import Lab

NIGHTLY = pytest.mark.nightly(
    instead=("wings/links/test_link_plan.py", "shell/test_preflight.py::test_nodes_meet_measure_and_then_run")
)

FAST, SLOW = 150e6, 10e6  # bits per second: what the lab carries at any time, and much less
NODES = 4


def examined(lab: Lab, tmp_path: Path) -> list[dict[str, Any]]:
    """What the doctor on each host has found."""
    env = environment() | {"PYTHON_EXEC": sys._base_executable}  # without torch: nobody waits for its import
    words = ("doctor", "--json", "--nnodes", str(len(lab.hosts)), "--rendezvous", "node0:29400")
    running = []
    for host in lab.hosts:
        with (tmp_path / f"{host}.out").open("wb") as out, (tmp_path / f"{host}.err").open("wb") as err:
            command = (sys.executable, "-m", "launcher", *words, "--interface", "eth0")
            running.append(host.start(*command, env=env, stdout=out, stderr=err))
    codes = [process.wait(LONG_S) for process in running]
    errors = [(tmp_path / f"{host}.err").read_text() for host in lab.hosts]
    reports = [json.loads((tmp_path / f"{host}.out").read_text() or "{}") for host in lab.hosts]
    assert [report.get("exit_code") for report in reports] == codes, errors
    return reports


def links(report: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(check for check in report["checks"] if check["name"] == "links")
    return found


def told(reports: list[dict[str, Any]]) -> str:
    return "\n".join(f"{report['node']}: {links(report)}" for report in reports)


def sound(net: Lab) -> Lab:
    """Every link as fast as the others, whatever else this machine has to do."""
    for a, b in itertools.combinations(net.hosts, 2):
        net.shape(a, b, rate=FAST)
    return net


def slow_host(lab: Lab, host: Host) -> None:
    for other in lab.hosts:
        if other is not host:
            lab.shape(host, other, rate=SLOW)


@NIGHTLY
def test_the_one_slow_network_card_is_named_by_all_and_only_its_node_is_unfit(
    lab: Callable[..., Lab], tmp_path: Path
) -> None:
    net = sound(lab(NODES))
    slow_host(net, net.hosts[2])
    reports = examined(net, tmp_path)
    assert [report["fit"] for report in reports] == [True, True, False, True], told(reports)
    assert links(reports[2])["found"].startswith("the links to all 3 measured nodes are slow: "), links(
        reports[2]
    )
    for report in (reports[0], reports[1], reports[3]):
        assert links(report)["grade"] == "ok", links(report)
        elsewhere = next(check for check in report["checks"] if check["name"] == "links elsewhere")
        assert elsewhere["found"].startswith("node2 is slow on all its links: ")


@NIGHTLY
@pytest.mark.parametrize("fault", ["bandwidth", "latency", "cut"])
def test_a_bad_link_between_two_good_nodes_is_named_as_that(
    fault: str, lab: Callable[..., Lab], tmp_path: Path
) -> None:
    net = sound(lab(NODES))
    how = {"bandwidth": {"rate": SLOW}, "latency": {"delay_s": 0.02}, "cut": {"up": False}}[fault]
    net.shape(net.hosts[1], net.hosts[3], **how)
    reports = examined(net, tmp_path)
    assert links(reports[1])["found"].startswith("the link to node3: "), links(reports[1])
    assert links(reports[3])["found"].startswith("the link to node1: "), links(reports[3])
    assert [links(reports[at])["grade"] for at in (0, 2)] == ["ok", "ok"], told(reports)
    # Without the link, the job can do with one of the two; a slow one is no reason to leave anybody out.
    assert [report["fit"] for report in reports] == [True, True, True, fault != "cut"]
