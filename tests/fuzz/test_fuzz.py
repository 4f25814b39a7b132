"""The decoders hold: against all that was found or reached before, and in runs of the fuzzer for more: a short one for
each, some two minutes in all for what reads the wire.

The runs are bounded by a count and begin with a fixed seed, so that they are the same each time; `make fuzz` takes
another seed each time.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest
from fuzz import CORPUS, corpus_of
from lives import AGENTS, changed, cut_up
from targets import TARGETS

from rendezvous.codec import read_from_agent

# A count bounds the runs, not the clock: half a minute's work may take many on a machine that has other things to do.
MOST_S = 600
pytestmark = pytest.mark.timeout(MOST_S + 60)

HERE = Path(__file__).parent
RUNS = 150
# Half a minute each: what an agent may say, what a service may say, and what a job makes of what all of them say.
LONG_RUNS = {"agent_message": 2_000_000, "to_agent": 2_000_000, "job": 15_000}
CORPUS_BYTES = 300_000

GUIDED = pytest.mark.skipif(find_spec("atheris") is None, reason="there is no atheris for this machine")


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_kept_of_earlier_runs_breaks_nothing(name: str) -> None:
    target = TARGETS[name]
    kept = corpus_of(target)
    assert len(kept) > 1
    for data in kept:
        target(data)


def run(names: list[str], runs: int) -> list[str]:
    """The names of those in which nothing was found."""
    done = subprocess.run(
        [sys.executable, str(HERE / "fuzz.py"), *names, "--runs", str(runs), "--seed", "1"],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=MOST_S,
    )
    assert done.returncode == 0, done.stdout
    return re.findall(r"^(\w+): nothing found", done.stdout, re.MULTILINE)


def test_a_short_run_finds_nothing() -> None:
    assert run([], RUNS) == list(TARGETS)


@pytest.mark.nightly(
    instead=("::test_a_short_run_finds_nothing", "::test_what_is_kept_of_earlier_runs_breaks_nothing")
)
@GUIDED
@pytest.mark.parametrize("name", LONG_RUNS)
def test_a_long_run_over_the_wire_finds_nothing(name: str) -> None:
    assert run([name], LONG_RUNS[name]) == [name]


def test_a_life_that_is_changed_is_another_and_is_understood() -> None:
    lives = TARGETS["job"].seeds
    made = [changed(life, Random(seed)) for life in lives for seed in range(20)]
    assert made == [changed(life, Random(seed)) for life in lives for seed in range(20)]
    assert len({*made, *lives}) > 0.8 * len(made)
    for life in made:
        for choice, message in cut_up(life):
            if message:
                read_from_agent(message, AGENTS[choice & 3])


def test_a_corpus_is_small_and_belongs_to_a_target() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} <= set(TARGETS)
    assert sum(path.stat().st_size for path in files) < CORPUS_BYTES
