"""Random programs do the same under torch's class and under ours."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import differ
import pytest
from differences import differences
from drawn_model import Net
from drawn_program import Layer, draw
from known_differences import KNOWN
from rank_crew import Patience, Stuck, counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from drawn_program import Op

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ddp.md"
OF_A_NIGHT = 20_000


@pytest.fixture(scope="module")
def pairs() -> Iterator[differ.Pairs]:
    made = differ.Pairs()
    yield made
    made.close()


def test_some_programs(pairs: differ.Pairs) -> None:
    reports = differ.run(pairs, range(1_000_000, 1_000_015), shrinks=False)
    assert not reports, "\n".join(reports)


@pytest.mark.nightly(instead="::test_some_programs")
@pytest.mark.timeout(6 * 3600)
def test_many_programs(pairs: differ.Pairs) -> None:
    reports = differ.run(pairs, range(OF_A_NIGHT), shrinks=True)
    assert not reports, "\n".join(reports)


def test_torchs_class_agrees_with_itself() -> None:
    again = differ.Pairs("again")
    try:
        reports = differ.run(again, range(1_000_000, 1_000_004), shrinks=False)
    finally:
        again.close()
    assert not reports, "\n".join(reports)


def test_a_program_follows_from_its_seed() -> None:
    assert draw(17) == draw(17)
    assert draw(17) != draw(18)


def test_drawn_models_can_be_made() -> None:
    """Otherwise both classes raise before anything is compared."""
    for seed in range(300):
        Net(draw(seed))


def test_what_is_known_is_on_the_page() -> None:
    words = " ".join(PAGE.read_text().split())
    for each in KNOWN:
        assert each.page in words, each.page


def test_a_difference_is_seen_and_shrunk() -> None:
    """Each step is recorded wrongly on one rank, as if a gradient had stayed local."""
    program = replace(draw(18), world=2, wild=False)

    class Wrong(differ.Pairs):
        def compare(self, program: object, patience: float = 0) -> differ.Outcome:
            right = [[{"a": 1}, *({"a": 1} for _ in program.ops)] for _ in range(2)]  # type: ignore[attr-defined]
            steps = [op["kind"] == "step" and "form" not in op for op in program.ops]  # type: ignore[attr-defined]
            wrong = [right[0], [{"a": 1}, *({"a": 2 if step else 1} for step in steps)]]
            return differ.Outcome(tuple(differences(program, right, wrong)), compared=True)  # type: ignore[arg-type]

    kept, _ = differ.shrunk(Wrong(), program)
    assert len(kept) == 1
    assert program.ops[kept[0]]["kind"] == "step"


@pytest.mark.parametrize(
    ("torchs", "ours", "says"),
    [
        ([{"a": 1}, {"a": 2}], [{"a": 1}, {"a": 3}], "a is 3, torch has 2"),
        ([{"a": 1}, {"a": 2}], [{"a": 1}, {"raised": (["E"], "why", "")}], "ours raises E: why"),
        ([{"a": 1}, {"raised": (["E"], "why", "")}], [{"a": 1}, {"a": 2}], "ours goes on, torch raises E"),
        ([{"a": 1}, {"raised": (["E"], "", "")}], [{"a": 1}, {"raised": (["F"], "", "")}], "ours raises F"),
        ([{"a": 1}, {"a": 2}], Stuck(0), "ours is stuck"),
        ([{"a": 1}, {"raised": (["E"], "", "")}], Stuck(0), "ours is stuck, torch raises E"),
        ([{"a": 1}, {"a": 2}], [{"a": 1}, {"a": 2}], ""),
        ([{"a": 1}, {"raised": (["E"], "", "")}], [{"a": 1}, {"raised": (["G", "E"], "", "")}], ""),
        (Stuck(0), [{"a": 1}, {"a": 2}], ""),
        ([{"raised": (["E"], "", "")}], [{"raised": (["E"], "", "")}], "cannot be constructed"),
    ],
)
def test_what_counts_as_a_difference(torchs: object, ours: object, says: str) -> None:
    program = replace(draw(17), world=2, ops=({"kind": "step"},))
    found = differences(program, [torchs] * 2, [ours] * 2)
    assert (says in str(found[0]), bool(says)) == (True, True) if found else not says


def test_a_rank_without_a_cpu_is_not_stuck() -> None:
    assert counted(elapsed=90, used=1, delayed=89) == 1
    assert counted(elapsed=90, used=1, delayed=0) == 90
    assert counted(elapsed=90, used=80, delayed=60) == 80


def test_a_rank_that_computes_has_no_more_patience_than_its_cpu_time() -> None:
    waited = Patience([multiprocessing.process.current_process()])
    began = time.process_time()
    while time.process_time() - began < 0.1:
        pass
    assert waited.seconds() >= 0.05


PLAIN = replace(
    draw(17),
    world=2,
    dtype="float32",
    layers=tuple(map(Layer, ["linear", "embedding", "linear"])),
    wrappers=1,
    in_backward=False,
    hook="",
    wild=False,
)
OFF = dict.fromkeys(["find_unused_parameters", "gradient_as_bucket_view", "static_graph"], False)
STEP, HAND, HOLD = (
    {"kind": "step"},
    {"kind": "hand", "layers": [0, 1]},
    {"kind": "hold", "layers": [0, 1, 2]},
)
FROZEN = {"kind": "step", "frozen_between": [1, 2]}
JOIN = {"kind": "join", "inputs": [2, 1], "initial": True}
PART = {"kind": "step", "uses": [[True, False, True]] * 2}
PENALTY = {"kind": "step", "penalty": True}
# The forward raises on rank 1 only. Rank 0 waits for the next step of rank 1.
HALF = {"kind": "step", "uses": [[True, True, False], [True] * 3], "breaks": ["forward", 2, [0, 1]]}


@pytest.mark.parametrize("backend", ["gloo", "shm", "hier"])
@pytest.mark.parametrize(
    ("options", "ops"),
    [
        pytest.param({"find_unused_parameters": True}, (HAND, PART, HAND, STEP), id="by-hand-and-unused"),
        pytest.param({"static_graph": True}, (HAND, PART, HAND, PART), id="by-hand-and-unused-static"),
        pytest.param({"static_graph": True}, (FROZEN, STEP, STEP), id="frozen-in-the-first-static-step"),
        pytest.param(
            {"find_unused_parameters": True},
            ({**FROZEN, "local": "all"}, HAND, PART, STEP),
            id="by-hand-after-no-gradient",
        ),
        pytest.param({"static_graph": True}, (HALF, PENALTY), id="autograd.grad-on-one-rank-static"),
        pytest.param({"static_graph": True}, (HAND, PENALTY, STEP, STEP), id="autograd.grad-static"),
        pytest.param({"find_unused_parameters": True}, (JOIN, STEP, JOIN, STEP), id="join-after-steps"),
        pytest.param({"gradient_as_bucket_view": True}, (STEP, HOLD, STEP, STEP), id="held-over-the-rebuild"),
        pytest.param(
            {"gradient_as_bucket_view": True, "static_graph": True},
            (STEP, HOLD, STEP, HOLD, STEP, STEP),
            id="held-over-the-rebuild-static",
        ),
    ],
)
def test_what_once_differed(
    pairs: differ.Pairs, backend: str, options: dict[str, bool], ops: tuple[Op, ...]
) -> None:
    """With buckets of one gradient each, and with one bucket for all."""
    for cap in (0.00001, 25):
        program = replace(PLAIN, backend=backend, options={**OFF, **options, "bucket_cap_mb": cap}, ops=ops)
        outcome = pairs.confirm(program)
        assert outcome.compared
        assert not outcome.found, "\n".join(map(str, outcome.found))
