"""Find the newest commit that the ranks of a generation can read, and give it to all of them.

1. Every rank lists the images that it can read, in the memory of its node and in the folder on disk.
2. The ranks exchange their lists. All of them have the same lists, so `commits.newest` chooses the same commit.
3. One rank verifies each image of that commit. Damaged images are reported and excluded, and step 2 is repeated.
4. If all ranks that need a part can read it, each of them reads it. All other parts are broadcast.

No decision depends on one rank alone or on a clock: all ranks run the same collectives.
"""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp.elastic import commits
from ddp.elastic.files import part_file
from ddp.elastic.files.writer import CommitError
from ddp.elastic.images import image, kept_images
from ddp.elastic.rejected import Rejected, tell, without
from ddp.groups.reform import CannotReform
from ddp.telemetry import status_page

if TYPE_CHECKING:
    from pathlib import Path

    from ddp.elastic.files.folders import Folder
    from ddp.elastic.team import Team

log = logging.getLogger("ddp.elastic")
_PATIENCE_WITH_MEMORY_S = 10.0
_IGNORED = "ddp.elastic: ignored the damaged commit file %s: %s. The job resumes from another copy or an older commit"
_REPEATED = (
    "ddp.elastic: repeating %d steps, from commit %d: the failure came after an optimizer step on all survivors, or "
    "while newer commits were copied from the device. With every=1 and state on the host, or if the script "
    "communicates only before the optimizer step, no step is repeated"
)
_REPEATED_IN_SHARDS = (
    "ddp.elastic: repeating %d steps, from commit %d: a shard of the state is only in commits. With every=1 no step is "
    "repeated"
)
_NOTHING_WHOLE = (
    "no rank has a whole state of the training: the failure came between an optimizer step and the next commit(), and "
    "there is no earlier commit. Use State(every=1), or communicate before the optimizer step"
)
_SHARDS_LOST = (
    "a shard of the state is lost, and there is no commit that has it. Use State(every=1); and so that shards survive "
    "the loss of a node, --redundancy, HSDP, or commits on disk (folder=, disk_every=)"
)


@dataclass(frozen=True, slots=True)
class Resumed:
    """The commit from which a job resumes."""

    number: int  # number of commits before
    in_memory: bool  # whether it was read from memory, not from disk
    world_size: int  # size of the world that made the commit


@dataclass
class LocalImages:
    """The images that this rank can read. Those on disk are opened when they are chosen."""

    images: dict[str, image.Image]  # opened
    paths: dict[str, str]
    held: list[commits.ReadableImage]
    folder: Folder | None

    def open(self, name: str) -> image.Image:
        """Open an image. Raise DamagedImage or OSError if this is not possible."""
        if name not in self.images:
            assert self.folder is not None
            file = self.paths[name].removeprefix(f"{self.folder.name}/")
            self.images[name] = part_file.opened(self.folder.read(file))
        return self.images[name]

    def open_sound(self, name: str) -> image.Image:
        """Open an image and check all of its bytes."""
        if name in self.images or self.folder is None:
            found = self.open(name)
            found.check_data()
            return found
        return part_file.read_again(self.folder, lambda: self._read_sound(name))

    def _read_sound(self, name: str) -> image.Image:
        found = self.open(name)
        try:
            found.check_data()
        except image.DamagedImage:
            del self.images[name]
            raise
        return found


def node_name(places: list[Path]) -> str:
    """Return the name of this rank's node. Ranks on one node have the same host and the same folder in memory."""
    return f"{socket.gethostname()}:{places[0]}"


def find_images(team: Team, places: list[Path], folder: Folder | None) -> LocalImages:
    local = LocalImages({}, {}, [], folder)
    node = node_name(places)
    for path in kept_images.slots_in(places):
        _add_slot(local, path, f"{node}/{path.name}")
    if folder is not None:
        _add_files(local, _files(team, local, folder), team, folder)
    return local


def _files(team: Team, local: LocalImages, folder: Folder) -> dict[str, str]:
    """What is in the folder. One rank asks an object store for all; without an answer, memory has to do."""
    if not folder.is_remote:
        return folder.files()
    has_memory = team.any(bool(local.held))
    files: dict[str, str] = {}
    error = None
    if team.rank == 0:
        try:
            files = folder.files(_PATIENCE_WITH_MEMORY_S if has_memory else None)
        except Exception as problem:
            error = str(problem) or repr(problem)
    files, error = team.gather((files, error))[0]
    if error is None:
        return files
    if not has_memory:
        raise CommitError(
            f"cannot list the commits in {folder.name}: {error}. The job may have to resume from there, so it does not "
            "start without them. Check the address, the permissions and the network"
        )
    log.warning(
        "ddp.elastic: cannot list %s, so only commits in memory are considered: %s", folder.name, error
    )
    return {}


def _add_files(local: LocalImages, files: dict[str, str], team: Team, folder: Folder) -> None:
    for file, identity in files.items():
        named = commits.parse_file_name(file)
        if named is None or (folder.is_remote and named.part % team.size != team.rank):
            continue  # one rank reads each object of a store
        # Folders that are not shared may have different files of the same name.
        key = f"disk/{file}#{identity}"
        local.paths[key] = f"{folder.name}/{file}"
        local.held.append(
            commits.ReadableImage(
                named.commit, named.part, named.parts, rank=-1, world_size=0, image=key, in_memory=False
            )
        )


def _add_slot(local: LocalImages, path: Path, name: str) -> None:
    try:
        found = image.Image(memoryview(kept_images.map_for_reading(path)))
    except (image.DamagedImage, OSError, ValueError):
        return  # an incomplete slot in memory is normal after a rank has died
    head, key = found.head, f"{name}#{found.index_sum:08x}"
    local.images[key], local.paths[key] = found, str(path)
    local.held.append(
        commits.ReadableImage(
            found.commit,
            head.part,
            head.parts,
            head.rank,
            head.world_size,
            key,
            in_memory=True,
            live=head.live,
        )
    )


def choose(team: Team, local: LocalImages, mark: Rejected | None = None) -> commits.CommitChoice | None:
    """`mark`: what this rank knows of a commit that the script has rejected."""
    told = team.gather((tuple(local.held), mark))
    holdings = tuple(held for held, _mark in told)
    skipped = next((each for _held, each in told if each is not None), None)
    if skipped is not None and (left := without(holdings, skipped)) != holdings:
        choice = _choose(team, local, left)
        if team.rank == 0:
            tell(skipped, choice.commit.number if choice is not None else None)
        if choice is not None:
            return choice
    return _choose(team, local, holdings)


def _choose(team: Team, local: LocalImages, holdings: commits.Holdings) -> commits.CommitChoice | None:
    bad: frozenset[str] = frozenset()
    while choice := commits.newest(holdings, bad):
        if choice.is_beyond_doubt:
            return choice
        checksums: dict[str, int] = {}
        damaged: set[str] = set()
        for sums, found in team.gather(_verify(team.rank, local, choice)):
            checksums |= sums
            damaged |= found
        if not damaged:
            return commits.keep_equal_images(choice, checksums)
        bad |= damaged
    return None


def check_survivors(
    positions: tuple[commits.Position | None, ...],
    choice: commits.CommitChoice | None,
    rank: int,
    in_shards: bool = False,
) -> None:
    """Refuse to go on if survivors have trained, and no rank has their state; say which steps are done again."""
    if not any(positions):
        return
    if choice is None:
        raise CannotReform(_SHARDS_LOST if in_shards else _NOTHING_WHOLE)
    n_steps = commits.steps_to_repeat(positions, choice.commit.number)
    status_page.page().repeats(commits.steps_of_rank_to_repeat(positions, choice.commit.number, rank))
    if n_steps > 1 and rank == 0:
        log.warning(_REPEATED_IN_SHARDS if in_shards else _REPEATED, n_steps, choice.commit.number)


def _verify(rank: int, local: LocalImages, choice: commits.CommitChoice) -> tuple[dict[str, int], set[str]]:
    checksums: dict[str, int] = {}
    damaged: set[str] = set()
    for number, part in enumerate(choice.parts):
        for source in part:
            if commits.verifying_rank(source, number) != rank:
                continue
            try:
                found = local.open_sound(source.image)
            except (image.DamagedImage, OSError, ValueError) as error:
                if _is_unavailable(local, error):
                    raise CommitError(f"cannot read {local.paths[source.image]}: {error}") from error
                log.warning(_IGNORED, local.paths[source.image], error)
                damaged.add(source.image)
            else:
                # A single image of a part is not compared.
                checksums[source.image] = found.content_sum() if len(part) > 1 else 0
    return checksums, damaged


def _is_unavailable(local: LocalImages, error: Exception) -> bool:
    """Whether a store does not answer. Then an older commit is not the way out."""
    is_remote = local.folder is not None and local.folder.is_remote
    return is_remote and isinstance(error, OSError) and not isinstance(error, FileNotFoundError)


def parts(
    team: Team,
    local: LocalImages,
    choice: commits.CommitChoice,
    my_part: int,
    regions: int,
    prefers_own: bool = False,
) -> Iterator[image.Image]:
    """Yield the parts that this rank needs, in order. Collective: every rank must consume the whole iterator.

    `prefers_own`: each rank keeps all of the state, and takes the image that the rank of this number has written.
    """
    need: tuple[int, ...] = (0,)
    needs = (need,) * team.size
    if prefers_own or len(choice.parts) > 1:  # ranks need different parts
        stored = _regions(team, local, choice)
        same = my_part < len(stored) and stored[my_part] == regions
        need = commits.parts_needed(my_part, same, len(choice.parts))
        if prefers_own and (own := _own_image(team, local, choice)) is not None:
            need = ()
            yield own
        needs = tuple(team.gather(need))
    sent = {each.part: each for each in commits.plan_broadcasts(choice, needs)}
    for part, sources in enumerate(choice.parts):
        mine = next((each.image for each in sources if team.rank in each.ranks), None)
        here = local.open(mine) if mine is not None and (part in need or part in sent) else None
        if part in sent:
            root = sent[part].root
            received = team.broadcast(local.open(sent[part].image).whole if team.rank == root else None, root)
            if here is None:
                here = part_file.opened(received)
        if part in need:
            assert here is not None
            yield here


def _own_image(team: Team, local: LocalImages, choice: commits.CommitChoice) -> image.Image | None:
    for each in local.images.values():
        if each.commit == choice.commit and each.head.rank == team.rank and each.head.part is not None:
            return each
    return None


def _regions(team: Team, local: LocalImages, choice: commits.CommitChoice) -> list[int]:
    """The fingerprint of each part's regions, made by the rank that wrote the part."""
    mine = {
        part: local.images[sources[0].image].head.regions
        for part, sources in enumerate(choice.parts)
        if commits.verifying_rank(sources[0], part) == team.rank
    }
    known: dict[int, int] = {}
    for each in team.gather(mine):
        known |= each
    return [known[part] for part in range(len(choice.parts))]


def new_lineage(team: Team) -> str:
    return team.first(lambda: uuid.uuid4().hex[:12])


def slots_of(local: LocalImages, choice: commits.CommitChoice | None) -> set[str]:
    """Names of the slots with the chosen commit. The new generation overwrites them only after all others."""
    if choice is None:
        return set()
    return {
        local.paths[name].rpartition("/")[2]
        for name, each in local.images.items()
        if each.commit == choice.commit and not each.on_disk
    }
