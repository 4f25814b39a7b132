"""Which commit a new generation goes on from, and who gives it to whom. Values only: the files are elsewhere.

A commit is written in *parts*, each an *image* in a file of its own. Replicated state has one part, of
which every node keeps an image. Sharded state has as many parts as there are shards. A commit can be
resumed from when the members together see an image of each of its parts.

Its name is a number that counts the commits of a job, and a *lineage*: a word that all ranks agree on at every
resume. Two generations may both have got as far as commit 11, with different contents; the lineage keeps
their parts apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FILE = re.compile(r"commit-(\d{10})-([0-9a-z]+)-(\d+)of(\d+)\.ddp")
UNFINISHED = ".part"


@dataclass(frozen=True, slots=True, order=True)
class CommitName:
    number: int
    lineage: str


@dataclass(frozen=True, slots=True)
class Held:
    """An image that a rank can read itself."""

    commit: CommitName
    part: int | None  # None: only what is private to its rank
    parts: int
    rank: int  # who wrote it,
    world_size: int  # and in what world
    image: str  # the same text means the same bytes, whoever says it
    in_memory: bool


Holdings = tuple[tuple[Held, ...], ...]  # by rank


@dataclass(frozen=True, slots=True)
class Source:
    """An image of a part, and the ranks that see it."""

    image: str
    ranks: tuple[int, ...]
    in_memory: bool


@dataclass(frozen=True, slots=True)
class Choice:
    commit: CommitName
    parts: tuple[tuple[Source, ...], ...]  # of each part, all images of it: those of low ranks first

    @property
    def in_memory(self) -> bool:
        return all(part[0].in_memory for part in self.parts)

    def images(self) -> tuple[Source, ...]:
        return tuple(source for part in self.parts for source in part)


def is_due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def newest(holdings: Holdings, bad: frozenset[str] = frozenset()) -> Choice | None:
    """The newest commit whose every part somebody sees, leaving out images that were found to be damaged.

    A rank may have died a moment before it made its own image of that commit. Then the state could go on from
    there, but with other random numbers on that rank. If every rank still has its own of the commit before, that
    one is taken.
    """
    by_commit: dict[CommitName, list[tuple[int, Held]]] = {}
    for reader, held in enumerate(holdings):
        for each in held:
            if each.image not in bad:
                by_commit.setdefault(each.commit, []).append((reader, each))
    found = [
        choice for commit in sorted(by_commit, reverse=True) if (choice := _choice(commit, by_commit[commit]))
    ]
    if not found:
        return None
    first, others = found[0], found[1:2]
    if not _has_all_private(by_commit[first.commit], len(holdings)):
        for other in others:
            near = other.commit.lineage == first.commit.lineage and other.in_memory
            if near and _has_all_private(by_commit[other.commit], len(holdings)):
                return other
    return first


def _choice(commit: CommitName, seen: list[tuple[int, Held]]) -> Choice | None:
    parts: dict[int, dict[str, tuple[list[int], bool]]] = {}
    for reader, each in seen:
        if each.part is not None:
            images = parts.setdefault(each.part, {})
            images.setdefault(each.image, ([], each.in_memory))[0].append(reader)
    wanted = max(each.parts for _reader, each in seen)
    if sorted(parts) != list(range(wanted)):
        return None
    return Choice(commit, tuple(_sources(parts[part]) for part in range(wanted)))


def _has_all_private(seen: list[tuple[int, Held]], world_size: int) -> bool:
    """Each rank of the new world can read what the rank of its number wrote, in a world of the same size."""
    own = {each.rank for reader, each in seen if each.rank == reader and each.world_size == world_size}
    return len(own) == world_size


def _sources(images: dict[str, tuple[list[int], bool]]) -> tuple[Source, ...]:
    """What lies in memory comes before what lies on disk; then by rank, so that all ranks list them alike."""
    sources = [Source(image, tuple(ranks), in_memory) for image, (ranks, in_memory) in images.items()]
    return tuple(sorted(sources, key=lambda source: (not source.in_memory, source.ranks[0], source.image)))


def examiner(source: Source) -> int:
    """The one rank that reads an image through before anybody trusts it."""
    return source.ranks[0]


def agreeing(choice: Choice, checksums: dict[str, int]) -> Choice:
    """Leaves, of each part, those images whose bytes are those of the first: replicas must come out bit-equal."""
    kept = tuple(
        tuple(each for each in part if checksums[each.image] == checksums[part[0].image])
        for part in choice.parts
    )
    return Choice(choice.commit, kept)


@dataclass(frozen=True, slots=True)
class Sending:
    part: int
    image: str
    root: int


def sendings(choice: Choice, needs: tuple[tuple[int, ...], ...]) -> tuple[Sending, ...]:
    """The parts that some rank needs and cannot read itself, in the order in which all ranks take part in sending."""
    found = []
    for part, sources in enumerate(choice.parts):
        readers = {rank for source in sources for rank in source.ranks}
        if any(part in need and rank not in readers for rank, need in enumerate(needs)):
            found.append(Sending(part, sources[0].image, sources[0].ranks[0]))
    return tuple(found)


# --- the folder on disk ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DiskName:
    commit: CommitName
    part: int
    parts: int


def file_name(name: DiskName) -> str:
    return f"commit-{name.commit.number:010d}-{name.commit.lineage}-{name.part}of{name.parts}.ddp"


def parsed(file: str) -> DiskName | None:
    found = _FILE.fullmatch(file)
    if found is None:
        return None
    part, parts = int(found[3]), int(found[4])
    return DiskName(CommitName(int(found[1]), found[2]), part, parts) if part < parts else None


def outdated(files: list[str], keep: int, lineage: str, since: CommitName) -> list[str]:
    """Files that are older than the last `keep` whole commits; and what was never finished then.

    What is later than the commit that was resumed from, and not of this lineage, was left out or never seen: it may be
    damaged, and is not counted. It goes when it is older than those that are.
    """
    names = {file: name for file in files if (name := parsed(file.removesuffix(UNFINISHED)))}
    finished: dict[tuple[CommitName, int], int] = {}
    for file, name in names.items():
        if not file.endswith(UNFINISHED):
            finished[name.commit, name.parts] = finished.get((name.commit, name.parts), 0) + 1
    whole = [commit for (commit, parts), there in finished.items() if there == parts]
    ours = [commit for commit in whole if commit.lineage == lineage or commit <= since]
    kept = sorted(ours, reverse=True)[:keep]
    if len(kept) < keep:
        return []
    return sorted(file for file, name in names.items() if name.commit < kept[-1])


# --- who keeps what ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Member:
    node: str
    part: int  # of sharded state; 0 of 1 where everything is replicated
    parts: int


@dataclass(frozen=True, slots=True)
class Role:
    local_index: int  # among the ranks of its node
    part: int | None  # whose image this rank keeps; None: nothing but what is private to it
    parts: int
    keeps_replicas: bool
    writes_disk: bool


def roles(members: tuple[Member, ...]) -> tuple[Role, ...]:
    """Replicated state: one image on each node, one file in all. Shards: an image per rank, a file per shard."""
    met: dict[str, int] = {}
    written: dict[int, int] = {}
    found = []
    for rank, member in enumerate(members):
        if member.parts != members[0].parts:
            raise ValueError(
                f"rank {rank} has {member.parts} shards of its state, rank 0 has {members[0].parts}: "
                "all ranks must hold the same model"
            )
        index = met.get(member.node, 0)
        met[member.node] = index + 1
        keeps = member.parts > 1 or index == 0
        first = written.setdefault(member.part, rank) == rank
        part = member.part if keeps else None
        found.append(Role(index, part, member.parts, keeps and member.part == 0, keeps and first))
    return tuple(found)


def parts_needed(part: int, same_regions: bool, parts: int) -> tuple[int, ...]:
    """The first part has what is not sharded. A rank whose shards are those of a part needs no other."""
    return tuple(sorted({0, part})) if same_regions else tuple(range(parts))
