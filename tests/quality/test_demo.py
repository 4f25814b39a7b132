"""Each claim of the demo can be false, and the demo then says so. `make test` runs the demo itself."""

from __future__ import annotations

import importlib.util
import json
import os
import sys

import pytest
from tidy import ROOT


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["demo"]


@pytest.fixture
def recovered(demo):
    falling = [2.0 / (epoch + 1) for epoch in range(demo.EPOCHS)]
    pids = [{0: 10, 1: 11}, {0: 12, 1: 13}]
    epoch = demo.KILL_AFTER
    return demo.Watched(falling, pids, resumed_at=epoch, reported_before=epoch, victim=11, recovery_s=0.1)


def failed(demo, seen, code=0, left=0):
    return [text for held, text in demo.verdict(code, seen, left) if not held]


def test_a_recovered_job_passes(demo, recovered):
    assert not failed(demo, recovered)


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        ({"victim": 0}, "rank 1 was killed"),
        ({"pids": [{0: 10, 1: 11}]}, "rank 1 was killed"),
        ({"pids": [{0: 10, 1: 11}, {0: 12}]}, "rank 1 was killed"),
        ({"resumed_at": 0}, "they continued"),
        ({"resumed_at": 5, "reported_before": 5}, "they continued"),
        ({"losses": [2.0] * 12}, "the loss fell"),
        ({"losses": [2.0, 0.1]}, "the loss fell"),
        ({"resumed_at": 8, "reported_before": 7}, "the loss fell"),  # one epoch was reported twice
    ],
)
def test_a_claim_that_does_not_hold_is_seen(demo, recovered, change, claim):
    for name, value in change.items():
        setattr(recovered, name, value)
    assert [text.startswith(claim) for text in failed(demo, recovered)] == [True]


@pytest.mark.parametrize("unreported", [0, 1])
def test_the_job_recovers_from_a_late_kill(demo, unreported):
    """The demo may be delayed for some epochs, and the kill may come before the last of them was reported."""
    seen, late = demo.Watched(pids=[{0: 10, 1: 11}, {0: 12, 1: 13}], victim=11), demo.KILL_AFTER + 2
    for epoch in range(demo.EPOCHS):
        if epoch == late:
            for _rank in (0, 1):
                seen.read_line(json.dumps({"what": "resumed", "epoch": late + unreported}))
        if epoch < late or epoch >= late + unreported:
            seen.read_line(json.dumps({"what": "epoch", "loss": 2.0 / (epoch + 1)}))
    assert not failed(demo, seen)


def test_a_bad_end_is_seen(demo, recovered):
    assert failed(demo, recovered, code=1)
    assert failed(demo, recovered, left=1)


def test_what_is_left_behind_is_counted(demo):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert demo.orphans() >= 1
