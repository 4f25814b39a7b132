"""Survivors form their groups anew, and a replacement joins them."""

from __future__ import annotations

import pytest
import world
from world import Failed, World

ALL_BACKENDS = ["shm", "hier", "gloo"]


def hosts(backend: str, size: int = 3) -> list[int]:
    return [rank // 2 for rank in range(size)] if backend == "hier" else []


def expected(size: int) -> list[dict[str, float]]:
    total = size * (size + 1) / 2
    both = {"world": total, "everybody": total, "plain": float(size)}
    return [both | ({"pair": 3.0} if rank < 2 else {}) for rank in range(size)]


@pytest.mark.parametrize("backend", ["shm", "hier", pytest.param("gloo", marks=pytest.mark.nightly)])
def test_replacements_join_the_survivors(backend: str) -> None:
    with World(3, world.only_groups, backend, hosts=hosts(backend)) as ranks:
        assert ranks.run(world.sums) == expected(3)
        for dead in ((2,), (0,), (0, 1)):
            left = [rank for rank in range(3) if rank not in dead]
            ranks.kill(*dead)
            ranks.tell(world.fails, ranks=left)
            assert all(ranks.answers(left))
            ranks.heal()
            assert ranks.run(world.sums) == expected(3)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_the_world_shrinks_and_grows(backend: str) -> None:
    with World(3, world.torch_alone, backend, hosts=hosts(backend, 4)) as ranks:
        ranks.kill(1)
        ranks.heal({0: 0, 2: 1}, size=2)
        assert ranks.run(world.total) == [3.0] * 2
        ranks.heal(size=4)
        assert ranks.run(world.total) == [10.0] * 4
        ranks.kill(0)
        ranks.heal({1: 2, 2: 0, 3: 1}, size=3)  # a survivor may get any rank
        assert ranks.run(world.total) == [6.0] * 3


def test_a_group_between_resume_and_run_is_an_obstacle() -> None:
    """Nobody would create it again after a failure, and the script would use the old one."""
    with World(2, world.one_group, "shm") as ranks:
        for (told,) in ranks.run(world.group_before_run):
            assert told.startswith("the script creates a group between state.resume and state.run")
    with World(2, world.one_group, "shm") as ranks:
        assert ranks.run(world.begins_to_train) == [[], []]


def test_after_its_resume_a_replacement_waits_for_run_to_communicate() -> None:
    """The survivors have resumed with it, and are in their loop."""
    with World(2, world.one_group, "shm") as ranks:
        ranks.run(world.begins_to_train)
        ranks.kill(1)
        ranks.heal()
        ranks.tell(world.after_resume, ranks=[1])
        (said,) = ranks.answers([1])
        for text, words in zip(said, ("dist.all_reduce", "creates a group", "another State"), strict=True):
            assert words in text
        assert ranks.run(world.total) == [3.0, 3.0]


def test_the_backend_that_init_has_chosen_is_chosen_again() -> None:
    """A second host comes, goes, and then a rank is replaced on the host that stays."""

    def are(ranks: World, backend: str) -> bool:
        total = ranks.size * (ranks.size + 1) / 2
        sums = {"world": total, "everybody": total, "plain": float(ranks.size)}
        return ranks.run(world.sums) == [sums] * ranks.size and all(
            each == (backend, {backend}, True) for each in ranks.run(world.named)
        )

    with World(2, world.chosen, hosts=[0, 0, 1]) as ranks:
        assert are(ranks, "shm")
        ranks.heal(size=3)
        assert are(ranks, "hier")
        ranks.kill(2)
        ranks.heal(size=2)
        assert are(ranks, "shm")
        ranks.kill(1)
        ranks.heal()
        assert are(ranks, "shm")


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_another_rank_dies_while_the_world_heals(backend: str) -> None:
    with World(3, world.only_groups, backend) as ranks:
        ranks.kill(2)
        ranks.begin_healing()
        ranks.kill(2)  # the replacement, before it has formed a group: the survivors wait for it
        ranks.pause(0, 1)
        with pytest.raises(Failed, match=world.PAUSED_AGAIN):
            ranks.answers()
        ranks.heal()
        assert ranks.run(world.sums) == expected(3)


def test_a_group_of_a_part_of_the_world_does_not_survive_another_size() -> None:
    with World(3, world.only_groups, "shm") as ranks:
        ranks.kill(2)
        with pytest.raises(Failed, match=r"the group 2 has the ranks \[0, 1\] of 3, and the world now has 2"):
            ranks.heal(size=2)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_groups_that_only_a_survivor_has_are_an_error_and_not_a_hang(backend: str) -> None:
    with World(2, world.one_group, backend) as ranks:
        ranks.run(world.another_group_before_training)
        ranks.kill(1)
        with pytest.raises(Failed, match=r"rank 1 has not formed the group 1 of the ranks \[0, 1\]"):
            ranks.heal()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_groups_made_while_training_are_made_again_by_the_script(backend: str) -> None:
    with World(2, world.one_group, backend) as ranks:
        assert ranks.run(world.group_of_the_loop) == [(3.0, "1")] * 2
        ranks.kill(1)
        ranks.heal()
        assert ranks.run(world.group_of_the_loop) == [(3.0, "1")] * 2


def settled(ranks: World) -> list[tuple[int, int, int]]:
    """What the ranks use. A group is let go a little later, and what it held then with the heal after that."""
    for _ in range(2):
        ranks.heal()
        ranks.run(world.footprint)
    return ranks.run(world.footprint)


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.nightly)])
def test_healing_many_times_leaves_nothing_behind(backend: str) -> None:
    with World(2, world.only_groups, backend) as ranks:
        before = settled(ranks)
        for _ in range(15):
            ranks.heal()
            ranks.run(world.sums)
        for (files, threads, memory), (files_before, threads_before, memory_before) in zip(
            settled(ranks), before, strict=True
        ):
            assert files <= files_before + 10
            assert threads <= threads_before + 5
            assert memory <= memory_before + 16
