"""Wrapped models train on after a rank was replaced, with the bits of a run in which nobody died."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import world
import wrapped_models as models
from world import Failed, World

from ddp.groups import wrappers
from ddp.telemetry import torch_api, torch_names

if TYPE_CHECKING:
    from collections.abc import Callable


needs_reset = pytest.mark.skipif(
    torch_api.version() < torch_names.RESET_OF_FSDP.since,
    reason="FSDP2 of this torch cannot go on after a step that was interrupted",
)


def undisturbed(size: int, *args: str) -> list[list[float]]:
    with World(size, models.top, *args) as ranks:
        ranks.run(models.train, 8)
        return ranks.run(models.weights)


def die_and_heal(ranks: World, dead: int, step: int, where: str) -> None:
    ranks.tell(models.train, 8, (dead, step, where))
    left = [rank for rank in sorted(ranks.processes) if rank != dead]
    for rank in left:
        good, _text = ranks.answer(rank)
        assert not good
    ranks.bury(dead)
    ranks.heal()
    assert set(ranks.run(models.resume)) == {step}


CASES = [
    ("shm", "ours", "plain"),
    ("hier", "ours", "plain"),
    ("gloo", "torchs", "plain"),
    *[("shm", "ours", options) for options in ("static", "unused")],
    ("gloo", "torchs", "static"),
]
MORE_CASES = [
    *[
        ("shm", "torchs", "plain"),
        ("hier", "torchs", "plain"),
        ("gloo", "ours", "plain"),
        ("shm", "ours", "views"),
    ],
    *[("gloo", "torchs", options) for options in ("unused", "views", "copied")],
]


@pytest.mark.parametrize(
    ("backend", "kind", "options"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in MORE_CASES)],
)
def test_a_model_trains_on_with_the_same_bits(backend: str, kind: str, options: str) -> None:
    wanted = undisturbed(2, backend, kind, options)
    assert wanted[0] == wanted[1]
    with World(2, models.top, backend, kind, options, hosts=[0, 1] if backend == "hier" else []) as ranks:
        die_and_heal(ranks, 1, 3, "forward")
        die_and_heal(ranks, 0, 5, "backward")
        ranks.run(models.train, 8)
        assert ranks.run(models.weights) == wanted


@pytest.mark.parametrize("kind", ["ours", "torchs"])
def test_gradients_accumulated_under_no_sync_are_dropped(kind: str) -> None:
    with World(2, models.top, "shm", kind, "plain") as ranks:
        ranks.run(models.train, 8, (-1, -1, "no_sync"))
        wanted = ranks.run(models.weights)
    with World(2, models.top, "shm", kind, "plain") as ranks:
        die_and_heal(ranks, 1, 4, "no_sync")
        ranks.run(models.train, 8, (-1, -1, "no_sync"))
        assert ranks.run(models.weights) == wanted


@pytest.mark.parametrize(
    ("backend", "kind", "hook"),
    [("shm", "ours", "torchs"), ("gloo", "torchs", "torchs")],
)
def test_power_sgd_starts_anew_on_all_ranks(backend: str, kind: str, hook: str) -> None:
    """The error feedback of the dead rank is lost, and so is its count of steps: all ranks begin at step 0 again."""
    with World(2, models.top, backend, kind, "plain", hook) as ranks:
        die_and_heal(ranks, 1, 5, "forward")
        assert ranks.run(models.hook_steps) == [0, 0]
        ranks.run(models.train, 10)
        assert ranks.run(models.hook_steps) == [5, 5]
        healed = ranks.run(models.weights)
    assert healed[0] == healed[1]
    with World(
        2, models.top, backend, kind, "plain", hook
    ) as ranks:  # the same, with a hook of the script's own
        ranks.run(models.train, 5)
        ranks.run(models.restart_hook)
        ranks.run(models.train, 10)
        assert ranks.run(models.weights) == healed


def test_a_state_of_a_hook_that_cannot_start_anew_is_refused() -> None:
    with World(2, models.top, "gloo", "torchs", "plain", "unknown") as ranks:
        ranks.kill(1)
        with pytest.raises(Failed, match=r"\(Unknown\) belongs to a rank.*Give it a method start_anew\(\)"):
            ranks.heal()


@needs_reset
def test_a_model_in_shards_drops_what_it_has_accumulated() -> None:
    """And the script need not have told it again to average gradients: a replacement was never told otherwise."""
    with World(2, models.sharded, "shm") as ranks:
        assert ranks.run(models.accumulate) == [(False, False, True)] * 2
        ranks.kill(1)
        ranks.heal()
        assert ranks.run(models.accumulated) == [(True, True, False)] * 2


@pytest.mark.parametrize(
    ("top", "places", "size", "said"),
    [
        pytest.param(
            models.sharded, {0: 0, 2: 1}, 2, "shard of rank 2 of 3. It is rank 1 of 2 now", marks=needs_reset
        ),
        pytest.param(
            models.sharded, {0: 2, 2: 0}, 3, "shard of rank 2 of 3. It is rank 0 of 3 now", marks=needs_reset
        ),
        (models.flat, {0: 0, 2: 2}, 3, r"FSDP1 cannot go on .* Use fully_shard \(FSDP2\)"),
    ],
)
def test_shards_in_another_place_are_refused(
    top: Callable[..., Any], places: dict[int, int], size: int, said: str
) -> None:
    with World(3, top, "shm") as ranks:
        ranks.kill(1)
        with pytest.raises(Failed, match=said):
            ranks.heal(places, size)


@needs_reset
def test_no_search_of_all_objects_makes_the_heal_longer() -> None:
    """torch.compile imports FSDP also for other models, and torch has a table of those of FSDP2."""
    with World(2, models.top, "shm", "ours", "plain") as ranks:
        ranks.run(models.count_searches)
        ranks.kill(1)
        ranks.heal()
        assert ranks.run(models.searches) == [0, 0]
        ranks.run(models.shard_later)
        ranks.kill(1)
        ranks.heal()
        assert ranks.run(models.searches) == [0, 0]
        assert ranks.run(models.found_in_both_ways) == [1, 0]


def test_what_fsdp_lacks_is_said_when_the_training_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the first failure would be healed in vain."""
    with World(2, models.flat, "shm") as ranks:
        for (told,) in ranks.run(world.begins_to_train):
            assert told.startswith("the model is sharded (FullyShardedDataParallel): FSDP1 cannot go on")
    monkeypatch.setattr(torch_api, "has", lambda _name: False)
    assert "torch 2.13 and later can" in wrappers._obstacle_of([torch.nn.Linear(1, 1)])


def test_a_model_of_fsdp1_that_is_made_while_training_is_noted() -> None:
    with World(2, models.top, "shm", "ours", "plain") as ranks:
        ranks.run(models.flat_later)
        ranks.kill(1)
        with pytest.raises(Failed, match="FSDP1 cannot go on"):
            ranks.heal()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "broadcast",
            r"the script communicates before state\.run: dist\.broadcast at wrapped_models\.py:\d+",
        ),
        ("objects", r"the script communicates before state\.run: dist\.all_gather at wrapped_models\.py:\d+"),
        (
            "forward",
            r"the script communicates before state\.run: the forward of Distributed\w+ at wrapped_models\.py:\d+",
        ),
    ],
)
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_replacement_that_communicates_too_early_is_an_error(backend: str, what: str, said: str) -> None:
    with World(2, models.early, backend, what) as ranks:
        ranks.kill(1)
        ranks.begin_healing()
        good, text = ranks.answer(1)
        assert not good
        assert re.search(said, text), text
