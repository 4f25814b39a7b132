"""Commits in memory that survive the loss of nodes: what a State does with them, from one resume to the next."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ddp.elastic.images import image, kept_images
from ddp.telemetry.coded import WrongType
from ddp.telemetry.contracts import TOPOLOGY
from ddp_launch_wings.redundancy import parity, placement
from ddp_launch_wings.redundancy.parity import ParityStore, StripeEncoder
from ddp_launch_wings.redundancy.peer_links import Links, Peer, PeerError, Reply, Words
from ddp_launch_wings.redundancy.placement import HeldParity, Protected, Rebuilt, Solved, Source, Stripe

if TYPE_CHECKING:
    from pathlib import Path

    from ddp.elastic.commits import CommitName
    from ddp.elastic.images.kept_images import Slot, Slots
    from ddp.elastic.keeper import OpenShield
    from ddp.elastic.resume import LocalImages
    from ddp.elastic.team import Team

# --- protection, from one resume to the next -------------------------------------------------------

log = logging.getLogger("ddp.elastic")
MORE_SLOTS = 2  # one for the protected commit, one for the next
_WEAK = (
    "ddp.elastic: with redundancy %s, a loss of all nodes in %s at once cannot be repaired from memory, because too "
    "many nodes of the job are there. Use a code with a larger M, or spread the job over more units"
)


def asked(option: str, environ: Mapping[str, str]) -> OpenShield | None:
    """What opens the protection of a generation; None if the text means none."""
    if not isinstance(option, str):
        raise WrongType(f"invalid redundancy={option!r}: use a text such as 'copies:1', 'code:6+2' or 'auto'")
    wanted = placement.parse(option)
    return None if wanted is None else partial(Protection.open, wanted, environ)


@dataclass(slots=True)
class Protection:
    """The redundancy of one generation."""

    team: Team
    places: list[Path]
    stripes: tuple[placement.Stripe, ...]
    links: Links
    protector: Protector | None = None
    store: ParityStore | None = None

    @classmethod
    def open(
        cls,
        wanted: placement.Redundancy,
        environ: Mapping[str, str],
        team: Team,
        node: str,
        places: list[Path],
        parts: int,
    ) -> Protection:
        """Collective. `parts`: of the state. If there is one, each node has a copy anyway."""
        path = environ.get(TOPOLOGY, "")
        mine = placement.Place(node, (*filter(None, path.split("/")), socket.gethostname()))
        where = team.gather(mine)
        n_nodes = len({each.node for each in where})
        code, message = placement.fitting(wanted, n_nodes) if parts > 1 else (None, "")
        found = () if code is None else placement.layout(where, code)
        if team.rank == 0:
            if message:
                log.warning("ddp.elastic: %s", message)
            if code is not None:
                for unit in placement.weak_domains(where, found, code.m):
                    log.warning(_WEAK, code, "/".join(unit))
        return cls(team, places, found, Links.open(team))

    def rebuild(self, local: LocalImages) -> None:
        rebuild(self.team, local, self.places, self.links)

    @property
    def more_slots(self) -> int:
        return MORE_SLOTS if self.stripes else 0

    def begin(self, slots: Slots, lineage: str, spared: set[str]) -> None:
        """Begin to protect new commits. Collective. `spared`: slots with the commit that is protected so far."""
        self.links.stop()
        if not self.stripes:
            return
        slots.held = set(spared)
        links = Links.open(self.team)
        self.store = ParityStore(self.places, lineage)
        self.protector = Protector(links, self.stripes, slots, self.store, lineage)
        self.protector.start()
        if self.team.rank == 0:
            Leader(self.protector).start()

    @property
    def is_active(self) -> bool:
        return self.protector is not None

    @property
    def protected(self) -> int | None:
        return None if self.protector is None else self.protector.protected

    def committed(self, number: int, slot: Slot) -> None:
        if self.protector is not None:
            self.protector.committed(number, slot)

    def stop(self) -> None:
        if self.protector is not None:
            self.protector.stop()

    def remove(self) -> None:
        """Forget everything that this rank keeps for others."""
        self.stop()
        if self.store is not None:
            self.store.remove()


# --- rounds, which rank 0 leads --------------------------------------------------------------------
#
# Rank 0 leads the rounds in which commits are protected (`protector`).
#
# A round needs no decision of the training: ranks that train at different speeds are at most two commits apart. If
# a rank has already overwritten the commit that was named, the next round names one that is further ahead. If that
# one does not come, because the training pauses or has ended, the round is given up, and the next one names the
# newest commit.

_FURTHEST_AHEAD = 256
_PATIENCE = 3  # rounds that fail for the same reason before the log says so
_LONGEST_PAUSE_S = 30.0
_NOT_PROTECTED = (
    "ddp.elastic: commit %d is not protected against the loss of a node: %s. Training continues, and later commits "
    "will be tried. If a rank cannot be reached, check the firewall, or set GLOO_SOCKET_IFNAME to an interface that "
    "all nodes can reach. If there is no space, enlarge /dev/shm or use another redundancy"
)


class Leader:
    """Leads the rounds, in a thread of rank 0."""

    def __init__(self, protector: Protector) -> None:
        links = protector.links
        self._protector = protector
        self._peers = [links.peer(rank) for rank in range(len(links.ports))]
        self._ahead = 0
        self._decided: int | None = None  # a commit that is protected, and not all ranks know it
        self._done: int | None = None  # the last one of which all ranks know it
        self._failures: list[str] = []
        self._warned: set[str] = set()

    def start(self) -> None:
        threading.Thread(target=self._lead, name="ddp-protect", daemon=True).start()

    def _lead(self) -> None:
        try:
            while True:
                newest = self._protector.wait_for_commit(self._done)
                began = time.monotonic()
                try:
                    if self._decided is None:
                        self._decided = self._round(newest + self._ahead)
                    # Say that the commit is protected, until all know it: some may have released the one before.
                    if self._decided is not None:
                        self._ask_all({"do": "protected", "number": self._decided})
                        self._done, self._decided = self._decided, None
                except OSError as error:
                    reason = error.strerror or str(error)
                    self._failures.append(reason)
                    log.info("ddp.elastic: commit %d was not protected: %s", newest, reason)
                    if len(self._failures) >= _PATIENCE and reason not in self._warned:
                        self._warned.add(reason)
                        log.warning(_NOT_PROTECTED, newest, reason)
                    self._protector.wait(min(2.0 ** len(self._failures), _LONGEST_PAUSE_S))
                else:
                    self._failures.clear()
                    # A job that commits at each step must not spend all of its time on this.
                    self._protector.wait(min(time.monotonic() - began, _LONGEST_PAUSE_S))
        except Stopped:
            for each in self._peers:
                each.close()

    def _round(self, number: int) -> int | None:
        """Compute the parity of the first commit from this number on. Return its number.

        None: a rank had overwritten it, or no rank makes it now.
        """
        try:
            answers = self._ask_all({"do": "hold", "number": number})
            if any(each["missed"] is not None for each in answers):
                self._ask_all({"do": "give up", "number": number})
                self._ahead = min(max(1, 2 * self._ahead), _FURTHEST_AHEAD)
                return None
            self._ahead = max(0, self._ahead - 1)
            if (encoded := self._wait_until_encoded(number)) is None:
                self._ask_all({"do": "give up", "number": number})
                self._ahead = 0
            return encoded
        except OSError:
            self._give_up(number)
            raise

    def _wait_until_encoded(self, number: int) -> int | None:
        numbers: set[int] = set()
        for peer in self._peers:
            answer: Words = {"busy": True}
            while answer.get("busy"):
                answer = peer.ask({"do": "encoded", "number": 0})
                self._protector.wait(0)
                if answer.get("busy") and (self._protector.newest() or 0) < number:
                    return None
            if answer["problem"]:
                raise PeerError(f"rank {peer.rank}: {answer['problem']}")
            numbers.add(answer["number"])
        if len(numbers) > 1:
            raise PeerError(f"the ranks hold different commits: {sorted(numbers)}")
        return numbers.pop()

    def _ask_all(self, words: Words) -> list[Words]:
        try:
            for each in self._peers:
                each.send(words)
            return [each.receive() for each in self._peers]
        except OSError:
            for each in self._peers:
                each.close()  # replies may be under way
            raise

    def _give_up(self, number: int) -> None:
        for each in self._peers:
            try:
                each.ask({"do": "give up", "number": number})
            except OSError as error:
                log.debug("ddp.elastic: %s", error)


# --- a rank in these rounds ------------------------------------------------------------------------
#
# This rank's part in the protection of commits against the loss of nodes.
#
# A *round* protects one commit. Rank 0 leads it:
#
# 1. Rank 0 names a number. Each rank holds the first commit in memory from this number on: its slot is not overwritten.
#    A rank that has already overwritten it says so, and rank 0 names a later one.
# 2. For each stripe, the first holder of parity computes the parity chunks of that commit.
# 3. When all have finished, the commit is *protected*, and rank 0 says so until all ranks know it. A rank that knows it
#    releases the commit that was protected before, with its parity.
#
# A round that fails before step 3 is given up, and the last protected commit stays. The thread of the training only
# compares a number at each commit. No rank waits for a round.

_ANSWER_WITHIN_S = 5.0


class Stopped(Exception):
    """This rank stops to protect commits."""


class Protector:
    """Holds commits, serves their chunks, and computes the parity of this rank's stripes."""

    def __init__(
        self, links: Links, stripes: tuple[Stripe, ...], slots: Slots, store: ParityStore, lineage: str
    ) -> None:
        self.links, self._slots, self._store, self._lineage = links, slots, store, lineage
        mine = [each for each in stripes if each.parity[0] == links.rank]
        self._encoders = [
            StripeEncoder(each, lineage, store, links, self.wait, self.check_held) for each in mine
        ]
        self._changed = threading.Condition()
        self._stopped = False
        self._newest: tuple[int, Slot] | None = None
        self._wish: int | None = None
        self._held: tuple[int, Slot] | None = None  # the commit of this round
        self._protected: tuple[int, Slot] | None = None
        self._results: dict[int, str] = {}  # by the number of a commit: "" or what went wrong

    def start(self) -> None:
        self.links.server.start(self)
        threading.Thread(target=self._encode_commits, name="ddp-parity", daemon=True).start()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self.links.stop()

    @property
    def protected(self) -> int | None:
        """The number of the last protected commit, as far as this rank knows."""
        return None if self._protected is None else self._protected[0]

    def newest(self) -> int | None:
        return None if self._newest is None else self._newest[0]

    # --- the thread of the training -----------------------------------------------------------------

    def committed(self, number: int, slot: Slot) -> None:
        with self._changed:
            self._newest = (number, slot)
            if self._wish is not None and number >= self._wish:
                self._hold(number, slot)
            self._changed.notify_all()

    def _hold(self, number: int, slot: Slot) -> None:
        self._release()
        slot.shared = True
        self._results.pop(number, None)
        self._wish, self._held = None, (number, slot)
        self._changed.notify_all()

    def _release(self) -> None:
        """Give up the commit of this round, unless it is the protected one."""
        if self._held is not None and (self._protected is None or self._held[1] is not self._protected[1]):
            self._held[1].shared = False
        self._held = None

    # --- waiting ------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Sleep. Raise Stopped when this rank stops."""
        give_up_at = time.monotonic() + seconds
        with self._changed:
            while not self._stopped and (left := give_up_at - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._stopped:
                raise Stopped

    def wait_for_commit(self, after: int | None) -> int:
        """Wait until there is a newer commit than this one. Raise Stopped when this rank stops."""
        with self._changed:
            while not self._stopped:
                if self._newest is not None and (after is None or self._newest[0] > after):
                    return self._newest[0]
                self._changed.wait()
            raise Stopped

    # --- requests of other ranks --------------------------------------------------------------------

    def place(self, words: Words, n_bytes: int) -> memoryview:
        key = (int(words["stripe"]), int(words["row"]))
        return self._store.data(
            key, int(words["number"]), int(words["begin"]), n_bytes, int(words["n_chunks"])
        )

    def answer(self, words: Words) -> Reply:
        number = int(words["number"])
        match words["do"]:
            case "hold":
                return Reply({"missed": self._try_to_hold(number)})
            case "describe":
                return self._describe(number)
            case "read":
                return self._read(number, int(words["begin"]), int(words["n_bytes"]))
            case "open":
                key = (int(words["stripe"]), int(words["row"]))
                self._store.open(key, number, int(words["n_chunks"]), int(words["n_bytes"]))
            case "finish":
                facts = words["facts"]
                self._store.finish((facts["stripe"], facts["row"]), number, facts, int(words["n_bytes"]))
            case "encoded":
                return self._encoded()
            case "protected":
                self._become_protected(number)
            case "give up":
                with self._changed:
                    self._wish = None
                    self._release()
            case "write":
                pass  # the bytes are in their place
            case other:
                raise OSError(f"unknown request {other}")
        return Reply({})

    def _try_to_hold(self, number: int) -> int | None:
        """Hold the first commit from this number on. Return the newest number if that commit may be overwritten."""
        with self._changed:
            newest = self._newest
            if newest is not None and newest[0] > number:
                return newest[0]
            if newest is not None and newest[0] == number:
                self._hold(*newest)
            else:
                self._release()
                self._wish = number
        return None

    def _wait_for_held(self, number: int) -> Slot | None:
        """Return the slot of a commit when it is held; None: not yet. Rank 0 may have told others of it first."""
        give_up_at = time.monotonic() + _ANSWER_WITHIN_S
        with self._changed:
            while not self._stopped and (left := give_up_at - time.monotonic()) > 0:
                if self._held is not None and self._held[0] >= number:
                    break
                self._changed.wait(left)
            if self._held is None or self._held[0] < number:
                return None
            return self._slot_of(number)

    def _slot_of(self, number: int) -> Slot:
        with self._changed:
            if self._held is None or self._held[0] != number:
                raise OSError(f"commit {number} is not held any more")
            return self._held[1]

    def check_held(self, number: int) -> None:
        """Raise OSError if this round has ended, or Stopped."""
        self.wait(0)
        self._slot_of(number)

    def _describe(self, number: int) -> Reply:
        slot = self._wait_for_held(number)
        if slot is None:
            return Reply({"busy": True})
        found = image.Image(slot.buffer)
        head = found.head
        fields = Protected(head.rank, head.part, head.parts, head.world_size, len(found.whole))
        return Reply({"image": {name: getattr(fields, name) for name in Protected.__slots__}})

    def _read(self, number: int, begin: int, n_bytes: int) -> Reply:
        slot = self._slot_of(number)
        if begin < 0 or begin + n_bytes > len(slot.buffer):
            raise OSError(f"commit {number} has no bytes from {begin} to {begin + n_bytes}")
        return Reply({}, slot.buffer[begin : begin + n_bytes], lambda: self._is_held(number))

    def _is_held(self, number: int) -> bool:
        with self._changed:
            return any(each is not None and each[0] == number for each in (self._held, self._protected))

    def _encoded(self) -> Reply:
        """Whether the stripes of this rank are complete, in this round."""
        give_up_at = time.monotonic() + _ANSWER_WITHIN_S
        with self._changed:
            while not self._stopped and (left := give_up_at - time.monotonic()) > 0:
                if self._held is not None and self._held[0] in self._results:
                    return Reply({"number": self._held[0], "problem": self._results[self._held[0]]})
                self._changed.wait(left)
        return Reply({"busy": True})

    def _become_protected(self, number: int) -> None:
        with self._changed:
            if self._protected is not None and self._protected[0] == number:
                return  # rank 0 says it again
            if self._held is None or self._held[0] != number:
                raise OSError(f"commit {number} is not held any more")
            if self._protected is not None and self._protected[1] is not self._held[1]:
                self._protected[1].shared = False
            self._protected, self._held = self._held, None
            self._slots.held.clear()
            self._results.clear()
            self._changed.notify_all()
        self._store.keep_only(number)

    # --- parity -------------------------------------------------------------------------------------

    def _encode_commits(self) -> None:
        try:
            while True:
                number = self._next_to_encode()
                problem = ""
                try:
                    for encoder in self._encoders:
                        encoder.encode(number)
                except OSError as error:
                    problem = error.strerror or str(error)
                with self._changed:
                    self._results[number] = problem
                    self._changed.notify_all()
        except Stopped:
            for encoder in self._encoders:
                encoder.close()

    def _next_to_encode(self) -> int:
        with self._changed:
            while not self._stopped:
                if self._held is not None and self._held[0] not in self._results:
                    return self._held[0]
                self._changed.wait()
            raise Stopped


# --- lost images at a resume -----------------------------------------------------------------------
#
# Compute the images of lost ranks at a resume, as `recovery` plans it.
#
# The rank that has the number of a lost rank reads the chunks that it needs from their holders, over connections of
# its own, and checks them. The image is then treated like one in its memory. A damaged chunk is as good as lost:
# the ranks exclude it and plan again.

_PIECE = 4 << 20
_REBUILT = "ddp.elastic: commit %d: computed what rank %s had on lost nodes, from the memory of other nodes"
_DAMAGED = "ddp.elastic: ignored damaged or unreadable chunks of commits: %s"


class ChunkReader:
    """Serves the images and parity chunks on this node to ranks that compute others."""

    def __init__(self, local: LocalImages, parities: dict[str, parity.ParityFile]) -> None:
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
    held = [placement.HeldParity(key, each.stripe, each.row) for key, each in parities.items()]
    everything: list[tuple[HeldParity, ...]] = team.gather(tuple(held))
    if not any(everything):
        return
    links.server.start(ChunkReader(local, parities))
    holdings = tuple(team.gather(tuple(local.held)))
    bad: frozenset[str] = frozenset()
    while plan := placement.plan(holdings, tuple(everything), bad):
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


def _parities(places: list[Path]) -> Iterator[tuple[str, parity.ParityFile]]:
    for path in kept_images.parities_in(places):
        try:
            found = parity.ParityFile(memoryview(kept_images.map_for_reading(path)))
        except (image.DamagedImage, OSError, ValueError):
            continue  # an incomplete one is normal after a failure
        yield f"{path}#{found.facts_sum:08x}", found


def _build(plan: placement.Plan, rank: int, links: Links) -> tuple[dict[int, memoryview], frozenset[str]]:
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
    piece = min(_PIECE, -(-size // parity.WORD) * parity.WORD)
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
            sums[number] = image.crc32(buffer[:n_bytes], sums[number])
            buffer[n_bytes:] = bytes(piece - n_bytes)
        parity.combine([chunk.row], buffers, [output])
        wanted = max(0, min(piece, chunk.end - chunk.begin - at))
        into[chunk.begin + at : chunk.begin + at + wanted] = output[:wanted]
        total = image.crc32(output[:wanted], total)
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


def _use(plan: placement.Plan, local: LocalImages, found: dict[int, memoryview]) -> None:
    """Add the computed images of this rank, and forget damaged ones."""
    replaced = {each.replaces for each in plan.images}
    local.held[:] = [each for each in local.held if each.image not in replaced]
    for each in plan.images:
        if (data := found.get(each.image.rank)) is not None:
            key = placement.image_key(plan.commit, each.image.rank)
            local.images[key], local.paths[key] = image.Image(data), key
            local.held.append(placement.readable(plan.commit, each.image))
