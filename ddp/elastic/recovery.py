"""How the images of lost ranks are computed from what other nodes keep.

Every rank lists the images and the parity chunks on its node, and the ranks exchange the lists. So all of them make the
same plan: from which commit the job can resume, which images are missing there, who computes each of them, and from
which chunks. Damaged chunks are excluded, and the plan is made again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ddp.elastic.commits import ReadableImage, folder_name, newest
from ddp.elastic.erasure_code import solve
from ddp.elastic.stripes import chunk_bytes, chunk_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp.elastic.commits import Choice, CommitName, Holdings


@dataclass(frozen=True, slots=True)
class Protected:
    """An image that has a chunk in a stripe."""

    rank: int  # that wrote it
    part: int | None
    parts: int
    world_size: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class StripeFacts:
    """What each parity chunk of a stripe says about the whole stripe."""

    commit: CommitName
    number: int
    m: int
    data: tuple[Protected | None, ...]
    sums: tuple[int, ...]  # checksums of the k data chunks and the m parity chunks

    @property
    def k(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class HeldParity:
    """A complete parity chunk that a rank can read."""

    key: str
    stripe: StripeFacts
    row: int


@dataclass(frozen=True, slots=True)
class Source:
    key: str  # of an image or a parity chunk
    rank: int  # that can read it
    begin: int
    end: int
    checksum: int
    chunk: str  # a name of the chunk, for the exclusion of damaged ones


@dataclass(frozen=True, slots=True)
class Solved:
    """One chunk of a lost image: the combination of the sources with these coefficients."""

    begin: int
    end: int
    checksum: int
    sources: tuple[Source, ...]
    row: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """An image that a rank computes."""

    image: Protected
    builder: int
    chunks: tuple[Solved, ...]
    replaces: str | None  # the key of a damaged image


@dataclass(frozen=True, slots=True)
class Plan:
    commit: CommitName
    images: tuple[Rebuilt, ...]


K = TypeVar("K")
Parities = tuple[tuple[HeldParity, ...], ...]  # by rank


def image_key(commit: CommitName, rank: int) -> str:
    return f"rebuilt/{folder_name(commit)}/rank{rank}"


def plan(holdings: Holdings, parities: Parities, bad: frozenset[str] = frozenset()) -> Plan | None:
    """Return how to compute missing images of the newest commit; None if what is there already gives the best one.

    `bad`: names of damaged chunks.
    """
    best = newest(holdings)
    names = {each.stripe.commit for held in parities for each in held}
    for commit in sorted(names, reverse=True):
        if best is not None and not _is_better(commit, best, holdings):
            return None
        found = _rebuild(commit, holdings, parities, bad)
        if found and (choice := newest(with_rebuilt(holdings, commit, found))) is not None:
            if choice.commit == commit and choice.in_memory:
                return Plan(commit, found)
    return None


def _is_better(commit: CommitName, best: Choice, holdings: Holdings) -> bool:
    if commit != best.commit:
        return commit.number > best.commit.number
    if not best.in_memory:
        return True
    held = [(reader, each) for reader, images in enumerate(holdings) for each in images]
    of_ranks = {each.rank for _reader, each in held if each.commit == commit and each.in_memory}
    return len(of_ranks) < len(holdings)  # the state of random generators is missing


def with_rebuilt(holdings: Holdings, commit: CommitName, images: Sequence[Rebuilt]) -> Holdings:
    """What the ranks can read when the images are there, and damaged ones are not used."""
    added: dict[int, list[ReadableImage]] = {}
    for each in images:
        added.setdefault(each.builder, []).append(readable(commit, each.image))
    replaced = {each.replaces for each in images}
    return tuple(
        (*(each for each in held if each.image not in replaced), *added.get(rank, ()))
        for rank, held in enumerate(holdings)
    )


def readable(commit: CommitName, image: Protected) -> ReadableImage:
    return ReadableImage(
        *(commit, image.part, image.parts, image.rank, image.world_size, image_key(commit, image.rank)),
        in_memory=True,
    )


def _rebuild(
    commit: CommitName, holdings: Holdings, parities: Parities, bad: frozenset[str]
) -> tuple[Rebuilt, ...]:
    """How the missing images of a commit are computed; nothing if one of them cannot be."""
    there = _There.of(commit, holdings, parities, bad)
    members = {each.rank: each for stripe in there.stripes.values() for each in stripe.data if each}
    found = []
    for rank, image in sorted(members.items()):
        if there.is_whole(image):
            continue
        chunks = [there.solve(image, chunk) for chunk in range(there.k)]
        solved = [each for each in chunks if each is not None]
        if len(solved) < len(chunks):
            return ()
        damaged = there.images[rank][0] if rank in there.images else None
        found.append(Rebuilt(image, rank % len(holdings), tuple(solved), damaged))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _There:
    """The chunks of one commit that some rank can read."""

    commit: CommitName
    stripes: dict[int, StripeFacts]
    images: dict[int, tuple[str, list[int]]]  # key and readers, by the rank that wrote it
    rows: dict[tuple[int, int], tuple[str, list[int]]]  # the same of parity chunks, by stripe and row
    bad: frozenset[str]

    @classmethod
    def of(cls, commit: CommitName, holdings: Holdings, parities: Parities, bad: frozenset[str]) -> _There:
        stripes: dict[int, StripeFacts] = {}
        images: dict[int, tuple[str, list[int]]] = {}
        rows: dict[tuple[int, int], tuple[str, list[int]]] = {}
        for reader, held in enumerate(parities):
            for each in held:
                if each.stripe.commit == commit:
                    stripes.setdefault(each.stripe.number, each.stripe)
                    _add(rows, (each.stripe.number, each.row), each.key, reader)
        for reader, readable_images in enumerate(holdings):
            for image in readable_images:
                if image.commit == commit and image.in_memory:
                    _add(images, image.rank, image.image, reader)
        return cls(commit, stripes, images, rows, bad)

    @property
    def k(self) -> int:
        return next(iter(self.stripes.values())).k

    def is_whole(self, image: Protected) -> bool:
        names = (_name(stripe, stripe.data.index(image)) for stripe in self._of(image))
        return image.rank in self.images and not any(name in self.bad for name in names)

    def _of(self, image: Protected) -> list[StripeFacts]:
        return [stripe for stripe in self.stripes.values() if image in stripe.data]

    def solve(self, image: Protected, chunk: int) -> Solved | None:
        stripe = next((each for each in self._of(image) if each.data[chunk] == image), None)
        begin, end = chunk_range(image.n_bytes, self.k, chunk)
        if stripe is None:
            return None
        sources = {
            number: source
            for number in range(stripe.k + stripe.m)
            if (source := self._source(stripe, number))
        }
        empty = [number for number, member in enumerate(stripe.data) if member is None]
        there = [*sources, *empty]
        if chunk in sources:  # this part of the image is there: another part is damaged
            return Solved(begin, end, stripe.sums[chunk], (sources[chunk],), (1,))
        solution = solve(stripe.k, stripe.m, there, [chunk])
        if solution is None:
            return None
        pairs = zip(solution.sources, solution.rows[0], strict=True)
        used = [(sources[number], c) for number, c in pairs if c and number in sources]
        return Solved(
            begin, end, stripe.sums[chunk], tuple(each for each, _c in used), tuple(c for _each, c in used)
        )

    def _source(self, stripe: StripeFacts, number: int) -> Source | None:
        name = _name(stripe, number)
        if name in self.bad:
            return None
        if number >= stripe.k:
            found = self.rows.get((stripe.number, number - stripe.k))
            begin, end = 0, parity_bytes(stripe)
        else:
            image = stripe.data[number]
            found = self.images.get(image.rank) if image is not None else None
            begin, end = chunk_range(image.n_bytes, stripe.k, number) if image is not None else (0, 0)
        if found is None:
            return None
        key, readers = found
        return Source(key, readers[stripe.number % len(readers)], begin, end, stripe.sums[number], name)


def _add(table: dict[K, tuple[str, list[int]]], at: K, key: str, reader: int) -> None:
    known = table.setdefault(at, (key, []))
    if known[0] == key:
        known[1].append(reader)


def _name(stripe: StripeFacts, number: int) -> str:
    return f"{folder_name(stripe.commit)}/stripe{stripe.number}/chunk{number}"


def parity_bytes(stripe: StripeFacts) -> int:
    """The size of the parity chunks: that of the largest data chunk."""
    return max(chunk_bytes(each.n_bytes, stripe.k) for each in stripe.data if each)
