"""Which commit is gone on from, who reads and who sends, what is pruned."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp.elastic import commits
from ddp.elastic.commits import CommitName, DiskName, ReadableImage, TeamMember
from ddp.elastic.images import image

if TYPE_CHECKING:
    import random

A = CommitName(10, "a")
B = CommitName(11, "a")


def held(
    commit: CommitName, rank: int, part: int | None = None, parts: int = 1, **more: object
) -> ReadableImage:
    known = {"world_size": 2, "image": f"{commit.number}{commit.lineage}/{rank}", "in_memory": True} | more
    return ReadableImage(commit, part, parts, rank, **known)  # type: ignore[arg-type]


def replicas(commit: CommitName, world_size: int = 2) -> list[ReadableImage]:
    return [held(commit, 0, 0), *(held(commit, rank) for rank in range(1, world_size))]


def test_nothing_is_held() -> None:
    assert commits.newest(((), ())) is None


def test_the_newest_that_one_member_holds_is_enough_for_replicas() -> None:
    choice = commits.newest((tuple(replicas(A) + replicas(B)), ()))
    assert choice is not None
    assert choice.commit == B
    assert choice.parts[0][0].ranks == (0,)


def test_a_rank_that_died_before_its_own_image_costs_one_commit() -> None:
    """Rank 0 got as far as commit 11, rank 1 did not: with rank 1's random numbers it goes on from 10."""
    node = tuple([*replicas(A), held(B, 0, 0)])
    assert commits.newest((node, node)).commit == A  # type: ignore[union-attr]


def test_ranks_whose_commits_were_copied_beside_the_training_are_up_to_two_apart() -> None:
    """Rank 0 has 10, 11 and 12; rank 1 died before it had more than 10."""
    newest = CommitName(12, "a")
    node = tuple([*replicas(A), held(B, 0, 0), held(newest, 0, 0)])
    assert commits.newest((node, node)).commit == A  # type: ignore[union-attr]
    shards = (tuple(held(each, 0, 0, parts=2) for each in (A, B, newest)), (held(A, 1, 1, parts=2),))
    assert commits.newest(shards).commit == A  # type: ignore[union-attr]


def test_a_rank_that_died_between_its_resume_and_its_first_commit_keeps_its_random_numbers() -> None:
    """All have commit 10 of the generation before. In the new one only rank 0 made it again, and the next one."""
    again = [CommitName(10, lineage) for lineage in ("0", "z")]  # lineages are random: either may come first
    for commit in again:
        node = tuple([*replicas(A), held(commit, 0, 0)])
        assert commits.newest((node, node)).commit == A  # type: ignore[union-attr]
        node = tuple([*replicas(A), held(commit, 0, 0), held(CommitName(11, commit.lineage), 0, 0)])
        assert commits.newest((node, node)).commit == A  # type: ignore[union-attr]


def test_but_not_where_its_image_is_lost_anyway() -> None:
    node = (held(A, 0, 0), held(B, 0, 0))
    assert commits.newest((node, ())).commit == B  # type: ignore[union-attr]
    other_size = tuple([*replicas(A), held(B, 0, 0)])
    assert commits.newest((other_size, other_size, other_size)).commit == B  # type: ignore[union-attr]


def test_shards_are_all_there_or_it_does_not_count() -> None:
    def shard(commit: CommitName, part: int) -> ReadableImage:
        return held(commit, part, part, 2)

    both, half = (shard(A, 0), shard(B, 0)), (shard(A, 1),)
    assert commits.newest((both, half)).commit == A  # type: ignore[union-attr]
    assert commits.newest(((shard(B, 0),), half)) is None


def test_eras_do_not_mix() -> None:
    """Two generations got as far as 11, each on one rank only."""
    stale, fresh = CommitName(11, "a"), CommitName(11, "b")
    choice = commits.newest(
        ((held(A, 0, 0, 2), held(stale, 0, 0, 2)), (held(A, 1, 1, 2), held(fresh, 1, 1, 2)))
    )
    assert choice is not None
    assert choice.commit == A


def test_a_damaged_image_is_left_out() -> None:
    node = tuple(replicas(A) + replicas(B))
    bad = frozenset({node[2].image})
    assert commits.newest((node, node), bad).commit == A  # type: ignore[union-attr]


def test_memory_comes_before_disk_and_replicas_must_agree() -> None:
    on_disk = held(A, 0, 0, image="disk", in_memory=False)
    near, far = held(A, 0, 0, image="near"), held(A, 0, 0, image="far")
    choice = commits.newest(((on_disk,), (far, on_disk), (near, on_disk)))
    assert choice is not None
    assert [source.image for source in choice.parts[0]] == ["far", "near"], "the disk need not be read"
    agreed = commits.keep_equal_images(choice, {"far": 1, "near": 2})
    assert [source.image for source in agreed.parts[0]] == ["far"]
    choice = commits.newest(((on_disk,), (far, on_disk), (near, on_disk)), frozenset({"far", "near"}))
    assert choice is not None
    assert [source.image for source in choice.parts[0]] == ["disk"]


def test_what_is_in_memory_once_needs_no_check() -> None:
    """Then the ranks need not tell each other what they have found."""

    def choice(*parts: tuple[commits.ImageSource, ...]) -> commits.CommitChoice:
        return commits.CommitChoice(A, parts)

    one, other = (
        commits.ImageSource("a", (0,), in_memory=True),
        commits.ImageSource("b", (1,), in_memory=True),
    )
    on_disk = commits.ImageSource("c", (0, 1), in_memory=False)
    assert choice((one,), (other,)).is_beyond_doubt
    assert not choice((one, other)).is_beyond_doubt, "replicas must agree"
    assert not choice((one,), (on_disk,)).is_beyond_doubt


def test_an_image_in_memory_that_all_ranks_can_read_is_compared_with_no_other() -> None:
    """As with HSDP on one node: copies of a shard would have to be read in full."""
    copies = [held(A, rank, rank % 2, 2, world_size=4) for rank in range(4)]
    on_disk = [held(A, part, part, 2, image=f"disk{part}", in_memory=False) for part in (0, 1)]
    choice = commits.newest((tuple(copies + on_disk),) * 4)
    assert choice is not None
    assert [[source.image for source in part] for part in choice.parts] == [["10a/0"], ["10a/1"]]
    choice = commits.newest((tuple(copies),) * 4, frozenset({"10a/0"}))
    assert choice is not None
    assert [[source.image for source in part] for part in choice.parts] == [["10a/2"], ["10a/1"]]
    first, second = tuple(copies[:2]), tuple(copies[2:])  # on two nodes
    choice = commits.newest((first, first, second, second))
    assert choice is not None
    assert [len(part) for part in choice.parts] == [2, 2]


def test_who_cannot_read_is_sent_it_and_nobody_else_is() -> None:
    choice = commits.newest(((held(A, 0, 0, 2),), (held(A, 1, 1, 2),)))
    assert choice is not None
    (sent,) = commits.plan_broadcasts(choice, ((0,), (0, 1)))
    assert (sent.part, sent.root) == (0, 0)
    assert not commits.plan_broadcasts(choice, ((0,), (1,)))


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(1, 3), st.sampled_from("ab"), st.integers(0, 2), st.booleans()), max_size=6
        ),
        min_size=1,
        max_size=4,
    ),
    st.randoms(),
)
def test_all_that_is_chosen_is_there_whatever_the_order(
    lists: list[list[tuple[int, str, int, bool]]], shuffle: random.Random
) -> None:
    ranks = [
        [held(CommitName(number, lineage), part, part, 3, in_memory=memory, world_size=9,
              image=f"{number}{lineage}{part}{memory}")
         for number, lineage, part, memory in each]
        for each in lists
    ]  # fmt: skip
    choice = commits.newest(tuple(map(tuple, ranks)))
    shuffled = [shuffle.sample(each, len(each)) for each in ranks]
    assert commits.newest(tuple(map(tuple, shuffled))) == choice
    seen = {each.commit: set() for rank in ranks for each in rank}  # type: ignore[var-annotated]
    for rank in ranks:
        for each in rank:
            seen[each.commit].add(each.part)
    whole = sorted(commit for commit, parts in seen.items() if parts == {0, 1, 2})
    assert (choice.commit if choice else None) == (whole[-1] if whole else None)
    for part, sources in enumerate(choice.parts if choice else ()):
        for source in sources:
            for reader in source.ranks:
                assert any(each.image == source.image and each.part == part for each in ranks[reader])


# --- roles -------------------------------------------------------------------------------------------


def test_replicas_are_kept_once_per_node_and_written_once() -> None:
    found = commits.roles(tuple(TeamMember(node, 0, 1) for node in ("x", "x", "y", "y")))
    assert [role.part for role in found] == [0, None, 0, None]
    assert [role.local_index for role in found] == [0, 1, 0, 1]
    assert [role.writes_disk for role in found] == [True, False, False, False]


def test_each_shard_is_kept_by_who_has_it_and_written_once() -> None:
    """Two copies of two shards."""
    found = commits.roles(tuple(TeamMember("x", part, 2) for part in (0, 1, 0, 1)))
    assert [role.part for role in found] == [0, 1, 0, 1]
    assert [role.keeps_replicas for role in found] == [True, False, True, False]
    assert [role.writes_disk for role in found] == [True, True, False, False]


def test_ranks_with_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="1 shards on rank 1"):
        commits.roles((TeamMember("x", 0, 2), TeamMember("x", 0, 1)))


def test_needs() -> None:
    assert commits.parts_needed(2, same_regions=True, parts=4) == (0, 2)
    assert commits.parts_needed(2, same_regions=False, parts=4) == (0, 1, 2, 3)


# --- files -------------------------------------------------------------------------------------------


@given(st.integers(0, 10**9), st.text("0123456789abcdef", min_size=1), st.integers(1, 9999), st.data())
def test_a_file_name_says_what_it_is_of(number: int, lineage: str, parts: int, data: st.DataObject) -> None:
    name = DiskName(CommitName(number, lineage), data.draw(st.integers(0, parts - 1)), parts)
    assert commits.parse_file_name(commits.file_name(name)) == name
    assert commits.parse_file_name(commits.file_name(name) + commits.UNFINISHED) is None
    assert commits.parse_file_name(commits.file_name(dataclasses.replace(name, part=parts))) is None


def test_whole_commits_are_kept_and_what_is_older_goes() -> None:
    def files(number: int, *parts: int) -> list[str]:
        return [commits.file_name(DiskName(CommitName(number, "e"), part, 2)) for part in parts]

    there = [*files(1, 0, 1), *files(2, 0), *files(3, 0, 1), *files(4, 0, 1), *files(5, 1), "notes.txt"]
    left_behind = files(2, 1)[0] + commits.UNFINISHED
    since = CommitName(0, "")
    gone = commits.files_to_remove([*there, left_behind], 2, "e", since)
    assert gone == sorted([*files(1, 0, 1), *files(2, 0), left_behind])
    assert commits.files_to_remove(there, 4, "e", since) == []
    assert not commits.files_to_remove([file + commits.UNFINISHED for file in there], 1, "e", since)


def test_what_was_left_out_is_not_counted_and_goes_when_it_is_older() -> None:
    """Damaged files, or another line that got further: neither may push out what can be resumed from."""

    def file(number: int, lineage: str) -> str:
        return commits.file_name(DiskName(CommitName(number, lineage), 0, 1))

    before = [file(1, "old"), file(2, "old"), file(2, "zzz"), file(5, "old"), file(6, "old")]
    since = CommitName(2, "old")
    assert commits.files_to_remove([*before, file(3, "new")], 2, "new", since) == [file(1, "old")]
    assert commits.files_to_remove([*before, file(3, "new"), file(4, "new")], 2, "new", since) == before[:3]
    later = [file(number, "new") for number in (6, 7)]
    assert commits.files_to_remove([*before, *later], 2, "new", since) == before[:4]
    assert commits.files_to_remove([*before, *later, file(8, "new")], 2, "new", since) == sorted(
        [*before, later[0]]
    )


@given(
    st.sets(st.tuples(st.integers(1, 9), st.sampled_from("abc"))),
    st.integers(1, 3),
    st.integers(0, 8),
    st.sampled_from("ac"),
)
def test_what_was_just_written_is_never_outdated(
    there: set[tuple[int, str]], keep: int, resumed_from: int, its_lineage: str
) -> None:
    written = CommitName(resumed_from + 1, "b")
    names = {CommitName(*each) for each in there if each[1] != "b"} | {written}
    files = [commits.file_name(DiskName(name, 0, 1)) for name in names]
    gone = commits.files_to_remove(files, keep, "b", CommitName(resumed_from, its_lineage))
    assert commits.file_name(DiskName(written, 0, 1)) not in gone


def test_what_is_due() -> None:
    assert [number for number in range(1, 9) if commits.is_due(number, 3)] == [3, 6]
    assert not any(commits.is_due(number, 0) for number in range(5))


def test_files_of_earlier_versions_are_read() -> None:
    """They have the lineage under another name."""
    head = image.ImageHead(11, "b", 0, 2, 1, 4, 77)
    data = json.dumps({name: getattr(head, name) for name in image.ImageHead.__slots__})
    assert image.head_of(data.encode()) == head
    assert image.head_of(data.replace('"lineage"', '"era"').encode()) == head


# --- survivors -----------------------------------------------------------------------------------------


def at(called: int, live: int | None = None, kept: int | None = None, node: str = "a") -> commits.Position:
    return commits.Position(node, called, live, kept)


def test_the_survivor_that_is_furthest_writes_its_state_once_per_node() -> None:
    behind, ahead = at(7, 7), at(8, 8)
    assert commits.live_savers((None, behind, ahead, at(8, 8), at(8, 8, node="b"))) == (2, 4)


def test_a_survivor_whose_optimizer_has_stepped_since_does_not_write() -> None:
    assert commits.live_savers((at(8, None), at(7, 7), None)) == (1,)
    assert commits.live_savers((at(8, None), None)) == ()


def test_nobody_writes_what_is_committed() -> None:
    assert commits.live_savers((at(8, 8, kept=8), at(8, 8, kept=8), None)) == ()
    assert commits.live_savers((at(9, 9, kept=8), at(8, 8, kept=8), None)) == (0,)
    assert commits.live_savers((None, None)) == ()


def test_a_state_of_survivors_is_chosen_although_the_lost_rank_has_no_image_of_it() -> None:
    live = dataclasses.replace(held(B, 0, 0), live=True)
    assert commits.newest(((*replicas(A), live), tuple(replicas(A)))).commit == B  # type: ignore[union-attr]


def test_how_many_steps_survivors_repeat() -> None:
    assert commits.steps_to_repeat((at(8), at(7), None), 7) == 1
    assert commits.steps_to_repeat((None, None), 7) == 0
    positions = (at(8), at(7), None)
    assert [commits.steps_of_rank_to_repeat(positions, 7, rank) for rank in range(3)] == [2, 1, 2]
    assert (
        commits.steps_of_rank_to_repeat((at(7), None), 9, 0) == 1
    )  # resumes from another rank's newer state
