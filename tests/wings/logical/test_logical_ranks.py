"""The order in which logical ranks are summed: the same for every number of processes."""

from __future__ import annotations

import pytest

from ddp.groups.rank_info import layout
from ddp_launch_wings.logical import logical_ranks


def add(left: str, right: str) -> str:
    return f"({left}+{right})"


def pairwise(parts: list[str]) -> str:
    """The tree as docs/decisions/0017 has it: row by row."""
    while len(parts) > 1:
        rest = parts[len(parts) // 2 * 2 :]
        parts = [add(*pair) for pair in zip(parts[::2], parts[1::2], strict=False)] + rest
    return parts[0]


def names(ranks: range) -> list[str]:
    return [str(rank) for rank in ranks]


@pytest.mark.parametrize("logical_world", [*range(1, 34), 48, 63, 64])
def test_any_number_of_processes_forms_the_same_sum(logical_world: int) -> None:
    expected = pairwise(names(range(logical_world)))
    assert logical_ranks.tree_sum(names(range(logical_world)), add) == expected
    for processes in range(1, logical_world + 1):
        parts = {}
        for nodes in logical_ranks.covers(logical_world, processes):
            for level, index in nodes:
                first = index << level
                end = min(first + (1 << level), logical_world)
                parts[level, index] = pairwise(names(range(first, end)))
        assert logical_ranks.total(parts, logical_world, add) == expected, processes


def test_processes_of_equal_powers_of_two_send_one_sum_and_form_a_tree_themselves() -> None:
    for processes in range(1, 20):
        for each in (1, 2, 4, 8):
            assert logical_ranks.is_tree_of_processes(processes * each, processes)
            covers = logical_ranks.covers(processes * each, processes)
            assert all(len(nodes) == 1 for nodes in covers)
            sums = {nodes[0]: str(process) for process, nodes in enumerate(covers)}
            assert logical_ranks.total(sums, processes * each, add) == pairwise(names(range(processes)))
    assert not logical_ranks.is_tree_of_processes(6, 2)
    assert not logical_ranks.is_tree_of_processes(4, 3)


def test_blocks_are_adjacent_and_differ_by_one() -> None:
    for logical_world in range(1, 20):
        for processes in range(1, logical_world + 1):
            blocks = [logical_ranks.block(logical_world, rank, processes) for rank in range(processes)]
            assert [rank for block in blocks for rank in block] == list(range(logical_world))
            assert {len(block) for block in blocks} <= {
                logical_world // processes,
                -(-logical_world // processes),
            }


@pytest.mark.parametrize(
    ("logical_world", "processes", "words"), [(0, 1, "logical world 0"), (4, 5, "at most 4")]
)
def test_too_few(logical_world: int, processes: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        logical_ranks.check_size(logical_world, processes)


def test_when_the_core_sums_as_a_tree() -> None:
    hosts = {
        "aaa": True,
        "aabb": True,
        "aaaabbbb": True,
        "abab": False,
        "aab": False,
        "aaabbb": False,
        "abc": False,
    }
    for keys, is_tree in hosts.items():
        assert layout(list(keys), 0).sums_as_tree is is_tree, keys


def test_no_two_logical_ranks_and_steps_share_the_bits_that_torch_uses() -> None:
    found = [
        logical_ranks.seed_of_step(5, step, rank, 8, stream)
        for step in range(5_000)
        for rank in range(8)
        for stream in range(2)
    ]
    assert len({each & 0xFFFFFFFF for each in found}) == len(found) == 80_000
    assert max(found) < 2**64
    one, other = (logical_ranks.seed_of_step(seed, 3, 2, 8, 0) for seed in (5, 6))
    assert one == logical_ranks.seed_of_step(5, 3, 2, 8, 0) != other
