"""Choose the commit from which the restarted ranks (a new generation) resume, and the ranks that send it.

A commit has *parts*. Each part is stored as an *image*: a copy of its bytes in a file, on disk or in memory. Replicated
state has one part, and every node keeps an image of it. Sharded state has one part per shard. A generation can resume
from a commit if its ranks together can read an image of every part.

The name of a commit has a number and a *lineage*. The number counts the commits of a job. The lineage is a random
string that all ranks choose together at every resume. Two generations may both make a commit 11 with different
contents. The lineage shows which parts belong together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ddp.telemetry.coded import WrongValue

# --- the choice of a commit ------------------------------------------------------------------------

_FOLDER = re.compile(r"commit-(\d{10})-([0-9a-z]+)")
_PART = re.compile(r"part-(\d+)-of-(\d+)\.distcp")
_OLD_FILE = re.compile(r"commit-(\d{10})-([0-9a-z]+)-(\d+)of(\d+)\.ddp")  # of release 0.1.0
MANIFEST = ".metadata"  # the name is DCP's
UNFINISHED = ".part"
_MOST_APART = 3  # the last commits of a rank of which each other rank has one


@dataclass(frozen=True, slots=True, order=True)
class CommitName:
    number: int
    lineage: str


@dataclass(frozen=True, slots=True)
class ReadableImage:
    """An image that a rank can read."""

    commit: CommitName
    part: int | None  # None: only private state of its rank
    parts: int
    rank: int  # the rank that wrote it,
    world_size: int  # and the size of its world
    image: str  # images with the same text have the same bytes, on all ranks
    in_memory: bool
    live: bool = False  # a survivor wrote it after a failure


Holdings = tuple[tuple[ReadableImage, ...], ...]  # by rank


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image of a part, and the ranks that can read it."""

    image: str
    ranks: tuple[int, ...]
    in_memory: bool


@dataclass(frozen=True, slots=True)
class CommitChoice:
    commit: CommitName
    parts: tuple[tuple[ImageSource, ...], ...]  # for each part all of its images, ordered by rank

    @property
    def in_memory(self) -> bool:
        return all(part[0].in_memory for part in self.parts)

    @property
    def is_beyond_doubt(self) -> bool:
        """Whether there is nothing to verify or to compare: what is in memory was written as a whole."""
        return all(len(part) == 1 and part[0].in_memory for part in self.parts)

    def images(self) -> tuple[ImageSource, ...]:
        return tuple(source for part in self.parts for source in part)


def is_due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def newest(holdings: Holdings, bad: frozenset[str] = frozenset()) -> CommitChoice | None:
    """Return the newest commit of which every part is readable by some rank, without the damaged images in `bad`.

    If a rank died before it wrote its own image of this commit, the state of its random generators is missing there.
    Then a commit of the same number or one of the two before is chosen, if all ranks have their own image of it: with
    overlapped commits, ranks can be two apart. It may be of the generation before: a rank can die after its resume and
    before its first commit. A live image is chosen anyway: the previous commit may be many steps older.
    """
    by_commit: dict[CommitName, list[tuple[int, ReadableImage]]] = {}
    for reader, held in enumerate(holdings):
        for each in held:
            if each.image not in bad:
                by_commit.setdefault(each.commit, []).append((reader, each))
    found = [
        choice
        for commit in sorted(by_commit, reverse=True)
        if (choice := _choice(commit, by_commit[commit], len(holdings)))
    ]
    if not found:
        return None
    first = found[0]
    if any(each.live for _reader, each in by_commit[first.commit]):
        return first
    last_numbers = sorted({each.commit.number for each in found}, reverse=True)[:_MOST_APART]
    whole = (
        each
        for each in found
        if each.commit.number in last_numbers
        and (each is first or each.in_memory)
        and _has_all_private(by_commit[each.commit], len(holdings))
    )
    return next(whole, first)


def _choice(
    commit: CommitName, seen: list[tuple[int, ReadableImage]], world_size: int
) -> CommitChoice | None:
    parts: dict[int, dict[str, tuple[list[int], bool]]] = {}
    for reader, each in seen:
        if each.part is not None:
            images = parts.setdefault(each.part, {})
            images.setdefault(each.image, ([], each.in_memory))[0].append(reader)
    wanted = max(each.parts for _reader, each in seen)
    if sorted(parts) != list(range(wanted)):
        return None
    return CommitChoice(commit, tuple(_sources(parts[part], world_size) for part in range(wanted)))


def _has_all_private(seen: list[tuple[int, ReadableImage]], world_size: int) -> bool:
    """Whether the world size is unchanged and every rank can read the image that the same rank wrote."""
    own = {each.rank for reader, each in seen if each.rank == reader and each.world_size == world_size}
    return len(own) == world_size


def _sources(images: dict[str, tuple[list[int], bool]], world_size: int) -> tuple[ImageSource, ...]:
    """Sort images by rank, so that all ranks get the same order. Those on disk are used only if none is in memory:

    they would have to be read and verified, and another node sends the image in memory sooner. If all ranks can read
    one in memory, it is the only one: then nothing has to be compared.
    """
    sources = [ImageSource(image, tuple(ranks), in_memory) for image, (ranks, in_memory) in images.items()]
    best = [source for source in sources if source.in_memory] or sources
    ordered = sorted(best, key=lambda source: (source.ranks[0], source.image))
    for source in ordered:
        if source.in_memory and len(source.ranks) == world_size:
            return (source,)
    return tuple(ordered)


def verifying_rank(source: ImageSource, part: int) -> int:
    """The rank that verifies an image before any rank uses it. All ranks share the work if all can read all parts."""
    return source.ranks[part % len(source.ranks)]


def keep_equal_images(choice: CommitChoice, checksums: dict[str, int]) -> CommitChoice:
    """For each part, keep only the images that are equal to its first image: replicas must have the same bits."""
    kept = tuple(
        tuple(each for each in part if checksums[each.image] == checksums[part[0].image])
        for part in choice.parts
    )
    return CommitChoice(choice.commit, kept)


@dataclass(frozen=True, slots=True)
class Broadcast:
    part: int
    image: str
    root: int


def plan_broadcasts(choice: CommitChoice, needs: tuple[tuple[int, ...], ...]) -> tuple[Broadcast, ...]:
    """The parts that some rank needs and cannot read, in the order in which all ranks broadcast them."""
    found = []
    for part, sources in enumerate(choice.parts):
        readers = {rank for source in sources for rank in source.ranks}
        if any(part in need and rank not in readers for rank, need in enumerate(needs)):
            found.append(Broadcast(part, sources[0].image, sources[0].ranks[0]))
    return tuple(found)


# --- survivors ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Position:
    """Where a survivor of the last generation is. A process that has just started has none."""

    node: str
    called: int  # how many times it called commit()
    live: int | None  # the call whose state its objects still hold; None: an optimizer has stepped since
    kept: int | None  # the newest call of which it has written an image


def live_savers(positions: tuple[Position | None, ...]) -> tuple[int, ...]:
    """The ranks that write their live state as a commit: on each node the first one that is furthest.

    No rank writes if there is an image of that state or a newer one.
    """
    there = [
        (rank, each) for rank, each in enumerate(positions) if each is not None and each.live is not None
    ]
    if not there:
        return ()
    furthest = max(each.live or 0 for _rank, each in there)
    if any(each.kept is not None and each.kept >= furthest for each in positions if each is not None):
        return ()
    first_of: dict[str, int] = {}
    for rank, each in there:
        if each.live == furthest:
            first_of.setdefault(each.node, rank)
    return tuple(first_of.values())


def steps_to_repeat(positions: tuple[Position | None, ...], number: int) -> int:
    """How many calls of commit() survivors had made after the commit from which all resume."""
    return max((each.called - number for each in positions if each is not None), default=0)


def steps_of_rank_to_repeat(positions: tuple[Position | None, ...], number: int, rank: int) -> int:
    """How many steps this rank takes again: with the one that was interrupted. A new rank does what the others do."""
    mine = positions[rank]
    return 1 + (steps_to_repeat(positions, number) if mine is None else max(0, mine.called - number))


# --- the folder on disk ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DiskName:
    commit: CommitName
    part: int
    parts: int


def folder_name(commit: CommitName) -> str:
    return f"commit-{commit.number:010d}-{commit.lineage}"


def file_name(name: DiskName) -> str:
    return f"{folder_name(name.commit)}/part-{name.part}-of-{name.parts}.distcp"


def parse_folder_name(folder: str) -> CommitName | None:
    found = _FOLDER.fullmatch(folder)
    return None if found is None else CommitName(int(found[1]), found[2])


def parse_file_name(file: str) -> DiskName | None:
    """What a file contains; `file`: its path from the folder of the commits, also of release 0.1.0."""
    if (old := _OLD_FILE.fullmatch(file)) is not None:
        commit, numbers = CommitName(int(old[1]), old[2]), (int(old[3]), int(old[4]))
    else:
        folder, _, rest = file.partition("/")
        named, found = parse_folder_name(folder), _PART.fullmatch(rest)
        if named is None or found is None:
            return None
        commit, numbers = named, (int(found[1]), int(found[2]))
    part, parts = numbers
    return DiskName(commit, part, parts) if part < parts else None


def commit_of(file: str) -> CommitName | None:
    """The commit that a file belongs to, finished or not."""
    name = parse_file_name(re.sub(r"\.part$", "", file))
    return name.commit if name is not None else parse_folder_name(file.partition("/")[0])


def files_to_remove(files: list[str], keep: int, lineage: str, since: CommitName) -> list[str]:
    """Return the files to remove: complete and unfinished ones that are older than the last `keep` complete commits.

    Manifests come first: a reader that finds one must find the rest.
    """
    kept = commits_to_keep(files, keep, lineage, since)
    if len(kept) < keep:
        return []
    gone = [file for file in files if (commit := commit_of(file)) is not None and commit < kept[-1]]
    return sorted(gone, key=lambda file: (not file.endswith(MANIFEST), file))


def commits_to_keep(files: list[str], keep: int, lineage: str, since: CommitName) -> list[CommitName]:
    """Return the last `keep` complete commits.

    A commit of another lineage that is newer than `since` was damaged or unreadable at the resume, so it does not count
    as complete. It is removed when enough newer complete commits exist.
    """
    ours = [commit for commit in whole_commits(files) if commit.lineage == lineage or commit <= since]
    return sorted(ours, reverse=True)[:keep]


def whole_commits(files: Iterable[str]) -> set[CommitName]:
    """The commits of which all parts are there."""
    finished: dict[tuple[CommitName, int], int] = {}
    for file in files:
        if (name := parse_file_name(file)) is not None:
            finished[name.commit, name.parts] = finished.get((name.commit, name.parts), 0) + 1
    return {commit for (commit, parts), there in finished.items() if there == parts}


def has_torn(files: Iterable[str]) -> bool:
    """Whether a commit has a manifest, but not all parts. No order of writes leaves that: the listing is stale."""
    files = list(files)
    there = whole_commits(files)
    return any(file.endswith(f"/{MANIFEST}") and commit_of(file) not in there for file in files)


def without_manifest(files: Iterable[str], among: Iterable[CommitName]) -> dict[CommitName, int]:
    """The commits of `among` that lack only the manifest, with the number of their parts."""
    parts: dict[CommitName, int] = {}
    done = set()
    for file in files:
        if file.endswith(f"/{MANIFEST}"):
            done.add(commit_of(file))
        elif (name := parse_file_name(file)) is not None and "/" in file:  # release 0.1.0 had no manifests
            parts[name.commit] = max(name.parts, parts.get(name.commit, 0))
    return {commit: parts[commit] for commit in among if commit in parts and commit not in done}


# --- roles of ranks ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TeamMember:
    node: str
    part: int  # of sharded state; 0 of 1 if all state is replicated
    parts: int


@dataclass(frozen=True, slots=True)
class CommitRole:
    local_index: int  # among the ranks of its node
    part: int | None  # the part that this rank keeps; None: only its private state
    parts: int
    keeps_replicas: bool
    writes_disk: bool


def roles(members: tuple[TeamMember, ...], all_keep: bool = False) -> tuple[CommitRole, ...]:
    """Assign who writes what.

    Replicated state: one rank per node keeps an image in memory, and one rank of the job writes the file. Shards: each
    rank keeps an image and writes a file. `all_keep`: each rank has a state of its own, and keeps an image of it.
    """
    met: dict[str, int] = {}
    written: dict[int, int] = {}
    found = []
    for rank, member in enumerate(members):
        if member.parts != members[0].parts:
            raise WrongValue(
                f"the state has {member.parts} shards on rank {rank}, but {members[0].parts} on rank 0. "
                "Use the same model with the same sharding on all ranks"
            )
        index = met.get(member.node, 0)
        met[member.node] = index + 1
        keeps = member.parts > 1 or index == 0 or all_keep
        first = written.setdefault(member.part, rank) == rank
        part = member.part if keeps else None
        found.append(CommitRole(index, part, member.parts, keeps and member.part == 0, keeps and first))
    return tuple(found)


def parts_needed(part: int, same_regions: bool, parts: int) -> tuple[int, ...]:
    """The first part has all replicated state. A rank whose shards equal those of one part needs only that part."""
    return tuple(sorted({0, part})) if same_regions else tuple(range(parts))


# --- which commits a slow store gets ---------------------------------------------------------------
#
# Which commits are written to a store that cannot take them all.
#
# A commit has all its parts only if all ranks write it, and they decide without communication. So a rank that is
# still busy when a commit is due doubles its stride: it then writes only each 2nd, 4th, 8th commit. All commits of
# the slowest rank, which has the longest stride, are also written by all others. After some commits in time, the
# stride is halved.

_GOOD_ENOUGH = 4  # commits in time, before the stride is halved
_LONGEST = 1 << 16


@dataclass(frozen=True, slots=True)
class Thinning:
    stride: int = 1
    in_time: int = 0  # commits since the stride has changed

    def ask(self, index: int, is_busy: bool) -> tuple[bool, Thinning]:
        """Whether to write the commit of this index, and what to ask next."""
        if index % self.stride:
            return False, self
        if is_busy:
            return False, Thinning(min(2 * self.stride, _LONGEST))
        if self.stride > 1 and self.in_time + 1 >= _GOOD_ENOUGH:
            return True, Thinning(self.stride // 2)
        return True, Thinning(self.stride, self.in_time + 1)
