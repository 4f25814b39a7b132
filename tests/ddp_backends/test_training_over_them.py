"""torch's DDP, ZeRO, FSDP2 and functional collectives over shm; and what the core hands on to Gloo."""

from __future__ import annotations

import training


def same(answers):
    assert all(answer == answers[0] for answer in answers)


def test_torchs_ddp(crew):
    same(crew.run(training.torchs_ddp))


def test_zero_redundancy_optimizer(crew):
    same(crew.run(training.zero_redundancy))


def test_fsdp2(pair):
    same(pair.run(training.fully_sharded))


def test_functional_collectives(crew):
    crew.run(training.functional_collectives)


def test_past_the_core(crew):
    crew.run(training.past_the_core)


def test_many_at_once(crew):
    for seed in range(3):
        crew.run(training.many_at_once, seed)


def test_groups_side_by_side(crew):
    assert crew.run(training.groups_side_by_side) == ["shm"] * crew.size
