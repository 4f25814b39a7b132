"""Compute the images of lost ranks at a resume, as `recovery` plans it.

The rank that has the number of a lost rank reads the chunks that it needs from their holders, over connections of its
own, and checks them. The image is then treated like one in its memory. A damaged chunk is as good as lost: the ranks
exclude it and plan again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp.elastic import checksums, combining, image, parity_file, recovery, scratch
from ddp.elastic.peer_links import Reply

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ddp.elastic.commits import CommitName
    from ddp.elastic.peer_links import Links, Peer, Words
    from ddp.elastic.recovery import HeldParity, Rebuilt, Solved, Source
    from ddp.elastic.resume import LocalImages
    from ddp.elastic.team import Team

log = logging.getLogger("ddp.elastic")
_PIECE = 4 << 20
_REBUILT = "ddp.elastic: commit %d: computed what rank %s had on lost nodes, from the memory of other nodes"
_DAMAGED = "ddp.elastic: ignored damaged or unreadable chunks of commits: %s"


class ChunkReader:
    """Serves the images and parity chunks on this node to ranks that compute others."""

    def __init__(self, local: LocalImages, parities: dict[str, parity_file.ParityFile]) -> None:
        self._data = {key: each.whole for key, each in local.images.items()}
        self._data |= {key: each.data for key, each in parities.items()}

    def place(self, words: Words, n_bytes: int) -> memoryview:
        raise OSError(f"cannot write {n_bytes} bytes at a resume: {words}")

    def answer(self, words: Words) -> Reply:
        begin, end = int(words["begin"]), int(words["end"])
        data = self._data.get(words["key"])
        if data is None or not 0 <= begin <= end <= len(data):
            raise OSError(f"{words['key']} does not have the bytes from {begin} to {end}")
        return Reply({}, data[begin:end])


def rebuild(team: Team, local: LocalImages, places: list[Path], links: Links) -> None:
    """Add to the images of this rank those that it computes. Collective."""
    parities = dict(_parities(places))
    held = [recovery.HeldParity(key, each.stripe, each.row) for key, each in parities.items()]
    everything: list[tuple[HeldParity, ...]] = team.gather(tuple(held))
    if not any(everything):
        return
    links.server.start(ChunkReader(local, parities))
    holdings = tuple(team.gather(tuple(local.held)))
    bad: frozenset[str] = frozenset()
    while plan := recovery.plan(holdings, tuple(everything), bad):
        found, problems = _build(plan, team.rank, links)
        damaged = frozenset().union(*team.gather(problems))
        if not damaged:
            _use(plan, local, found)
            if team.rank == 0:
                ranks = ", ".join(str(each.image.rank) for each in plan.images)
                log.warning(_REBUILT, plan.commit.number, ranks)
            return
        if team.rank == 0:
            log.warning(_DAMAGED, ", ".join(sorted(damaged)))
        bad |= damaged


def _parities(places: list[Path]) -> Iterator[tuple[str, parity_file.ParityFile]]:
    for path in scratch.parities_in(places):
        try:
            found = parity_file.ParityFile(memoryview(scratch.map_for_reading(path)))
        except (image.DamagedImage, OSError, ValueError):
            continue  # an incomplete one is normal after a failure
        yield f"{path}#{found.facts_sum:08x}", found


def _build(plan: recovery.Plan, rank: int, links: Links) -> tuple[dict[int, memoryview], frozenset[str]]:
    """Compute the images that are this rank's. Return them, and the names of chunks that cannot be used."""
    found: dict[int, memoryview] = {}
    damaged: set[str] = set()
    reader = _Reader(links, {})
    try:
        for each in plan.images:
            if each.builder == rank:
                found[each.image.rank] = memoryview(bytearray(each.image.n_bytes))
                for chunk in each.chunks:
                    damaged |= _solve(chunk, found[each.image.rank], reader)
                if not damaged:
                    damaged |= _problem_of(plan.commit, each, found[each.image.rank])
    finally:
        reader.close()
    return found, frozenset(damaged)


def _solve(chunk: Solved, into: memoryview, reader: _Reader) -> set[str]:
    """Compute one chunk of an image. Return the names of sources that cannot be used."""
    size = max((source.end - source.begin for source in chunk.sources), default=0)
    piece = min(_PIECE, -(-size // combining.WORD) * combining.WORD)
    buffers = [memoryview(bytearray(piece)) for _ in chunk.sources]
    output = memoryview(bytearray(piece))
    sums = [0] * len(chunk.sources)
    total = 0
    for at in range(0, size, piece or 1):
        for number, (source, buffer) in enumerate(zip(chunk.sources, buffers, strict=True)):
            n_bytes = max(0, min(piece, source.end - source.begin - at))
            try:
                reader.read(source, at, buffer[:n_bytes])
            except OSError as error:
                log.warning("ddp.elastic: cannot read a chunk: %s", error)
                return {source.chunk}
            sums[number] = checksums.crc32(buffer[:n_bytes], sums[number])
            buffer[n_bytes:] = bytes(piece - n_bytes)
        combining.combine([chunk.row], buffers, [output])
        wanted = max(0, min(piece, chunk.end - chunk.begin - at))
        into[chunk.begin + at : chunk.begin + at + wanted] = output[:wanted]
        total = checksums.crc32(output[:wanted], total)
    pairs = zip(chunk.sources, sums, strict=True)
    damaged = {source.chunk for source, checksum in pairs if checksum != source.checksum}
    if not damaged and total != chunk.checksum:
        return {source.chunk for source in chunk.sources}
    return damaged


def _problem_of(commit: CommitName, rebuilt: Rebuilt, data: memoryview) -> set[str]:
    """The names of all chunks of an image that is not what it should be."""
    try:
        found = image.Image(data)
    except (image.DamagedImage, ValueError):
        pass
    else:
        if found.commit == commit and found.head.rank == rebuilt.image.rank:
            return set()
    return {source.chunk for chunk in rebuilt.chunks for source in chunk.sources}


@dataclass(slots=True)
class _Reader:
    links: Links
    peers: dict[int, Peer]

    def read(self, source: Source, at: int, into: memoryview) -> None:
        if not len(into):
            return
        peer = self.peers.setdefault(source.rank, self.links.peer(source.rank))
        begin = source.begin + at
        peer.ask({"do": "read", "key": source.key, "begin": begin, "end": begin + len(into)}, into=into)

    def close(self) -> None:
        for each in self.peers.values():
            each.close()


def _use(plan: recovery.Plan, local: LocalImages, found: dict[int, memoryview]) -> None:
    """Add the computed images of this rank, and forget damaged ones."""
    replaced = {each.replaces for each in plan.images}
    local.held[:] = [each for each in local.held if each.image not in replaced]
    for each in plan.images:
        if (data := found.get(each.image.rank)) is not None:
            key = recovery.image_key(plan.commit, each.image.rank)
            local.images[key], local.paths[key] = image.Image(data), key
            local.held.append(recovery.readable(plan.commit, each.image))
