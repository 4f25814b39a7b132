"""Which chunks a lost image is computed from: played with real bytes, for all sets of lost nodes."""

from __future__ import annotations

import itertools
import random
import zlib
from dataclasses import dataclass, replace

import pytest

from ddp.elastic.commits import CommitName, ReadableImage
from ddp_launch_wings.redundancy import placement
from ddp_launch_wings.redundancy.placement import (
    Code,
    HeldParity,
    Place,
    Protected,
    StripeFacts,
    chunk_range,
    layout,
    parity_rows,
    product,
)

NEW = CommitName(7, "abc")


def combined(row: tuple[int, ...], chunks: list[bytes]) -> bytes:
    total = bytearray(max(map(len, chunks)))
    for coefficient, chunk in zip(row, chunks, strict=True):
        for i, each in enumerate(chunk):
            total[i] ^= product(coefficient, each)
    return bytes(total)


@dataclass
class Job:
    """Ranks, one on each node, with the image of a commit and the parity that they keep."""

    images: list[bytes]
    stripes: list[StripeFacts]
    parity: dict[str, bytes]
    held: list[list[HeldParity]]

    def holdings(self, gone: tuple[int, ...], commit: CommitName = NEW) -> placement.Holdings:
        size = len(self.images)
        return tuple(
            () if rank in gone else (ReadableImage(commit, rank, size, rank, size, f"image{rank}", True),)
            for rank in range(size)
        )

    def parities(self, gone: tuple[int, ...]) -> placement.Parities:
        return tuple(() if rank in gone else tuple(held) for rank, held in enumerate(self.held))

    def play(self, plan: placement.Plan, gone: tuple[int, ...]) -> dict[int, bytes]:
        """Compute what the plan says, with what is there."""
        found = {}
        for each in plan.images:
            whole = bytearray(each.image.n_bytes)
            for chunk in each.chunks:
                data = []
                for source in chunk.sources:
                    assert source.rank not in gone
                    all_of_it = (
                        self.parity.get(source.key) or self.images[int(source.key.removeprefix("image"))]
                    )
                    data.append(all_of_it[source.begin : source.end])
                    assert zlib.crc32(data[-1]) == source.checksum
                size = chunk.end - chunk.begin
                whole[chunk.begin : chunk.end] = combined(chunk.row, data)[:size] if size else b""
                assert zlib.crc32(whole[chunk.begin : chunk.end]) == chunk.checksum
            found[each.image.rank] = bytes(whole)
        return found


def job(code: Code, n_nodes: int) -> Job:
    numbers = random.Random(code.k * 100 + n_nodes)
    images = [numbers.randbytes(numbers.randrange(1, 700)) for _ in range(n_nodes)]
    made = Job(images, [], {}, [[] for _ in images])
    for stripe in layout([Place(f"n{rank:02}") for rank in range(n_nodes)], code):
        members = [rank for rank in stripe.data if rank is not None]
        protected = tuple(Protected(rank, rank, n_nodes, n_nodes, len(images[rank])) for rank in members)
        ranges = [chunk_range(len(images[rank]), code.k, chunk) for chunk, rank in enumerate(members)]
        chunks = [images[rank][begin:end] for rank, (begin, end) in zip(members, ranges, strict=True)]
        facts = StripeFacts(NEW, stripe.number, code.m, protected, ())
        size = placement.parity_bytes(facts)
        parity = [combined(row, chunks).ljust(size, b"\0") for row in parity_rows(code.k, code.m)]
        facts = replace(facts, sums=tuple(map(zlib.crc32, (*chunks, *parity))))
        made.stripes.append(facts)
        for row, (rank, data) in enumerate(zip(stripe.parity, parity, strict=True)):
            key = f"parity{stripe.number}-{row}"
            made.parity[key] = data
            made.held[rank].append(HeldParity(key, facts, row))
    return made


@pytest.mark.parametrize(
    ("code", "n_nodes"),
    [(Code(1, 1), 2), (Code(1, 2), 5), (Code(3, 1), 4), (Code(2, 2), 5), (Code(6, 2), 8)],
    ids=str,
)
def test_every_set_of_m_lost_nodes_is_computed_and_no_larger_one_in_a_circle(
    code: Code, n_nodes: int
) -> None:
    made = job(code, n_nodes)
    for n_lost in range(1, code.m + 1):
        for gone in itertools.combinations(range(n_nodes), n_lost):
            plan = placement.plan(made.holdings(gone), made.parities(gone))
            assert plan is not None
            assert made.play(plan, gone) == {rank: made.images[rank] for rank in gone}
    if n_nodes == code.n_nodes:
        for gone in itertools.combinations(range(n_nodes), code.m + 1):
            assert placement.plan(made.holdings(gone), made.parities(gone)) is None


def test_nothing_is_computed_if_nothing_is_lost_or_something_newer_is_there() -> None:
    made = job(Code(3, 1), 4)
    assert placement.plan(made.holdings(()), made.parities(())) is None
    newer = made.holdings((), CommitName(8, "abc"))
    both = tuple((*a, *b) for a, b in zip(made.holdings((1,)), newer, strict=True))
    assert placement.plan(both, made.parities(())) is None


def test_what_is_protected_comes_before_an_older_commit_on_disk_and_after_a_newer_one() -> None:
    made = job(Code(3, 1), 4)
    for number, computed in ((5, True), (7, True), (9, False)):
        commit = NEW if number == 7 else CommitName(number, "abc")
        on_disk = ReadableImage(commit, 0, 1, -1, 0, "disk", False)
        holdings = tuple((*held, on_disk) for held in made.holdings((1,)))
        assert (placement.plan(holdings, made.parities((1,))) is not None) is computed, number


def test_damaged_chunks_count_as_lost() -> None:
    made = job(Code(2, 2), 4)
    gone = (0,)
    plan = placement.plan(made.holdings(gone), made.parities(gone))
    assert plan is not None
    used = {source.chunk for each in plan.images for chunk in each.chunks for source in chunk.sources}
    for bad in used:
        again = placement.plan(made.holdings(gone), made.parities(gone), frozenset({bad}))
        assert again is not None
        chunks = {source.chunk for each in again.images for chunk in each.chunks for source in chunk.sources}
        assert bad not in chunks
        assert made.play(again, gone)[0] == made.images[0]


def test_a_damaged_image_is_computed_too_and_not_used() -> None:
    for code, computed in ((Code(2, 2), True), (Code(3, 1), False)):  # with node 0, two are lost
        made = job(code, 4)
        both = [[each.rank for each in stripe.data if each] for stripe in made.stripes]
        number = next(number for number, ranks in enumerate(both) if {0, 1} <= set(ranks))
        bad = frozenset({f"commit-{7:010d}-abc/stripe{number}/chunk{both[number].index(1)}"})
        plan = placement.plan(made.holdings((0,)), made.parities((0,)), bad)
        assert (plan is not None) is computed
        if plan is not None:
            assert [(each.image.rank, each.replaces) for each in plan.images] == [(0, None), (1, "image1")]
            assert made.play(plan, (0,)) == {0: made.images[0], 1: made.images[1]}
