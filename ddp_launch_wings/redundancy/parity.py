"""Parity of commits in the memory of ranks: computed from chunks of other nodes, and kept for them."""

from __future__ import annotations

import contextlib
import functools
import json
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ddp.elastic.commits import CommitName
from ddp.elastic.images import image, kept_images
from ddp.elastic.images.image import DamagedImage
from ddp.groups import core_loading
from ddp_launch_wings.redundancy import placement
from ddp_launch_wings.redundancy.peer_links import Links, Peer, PeerError
from ddp_launch_wings.redundancy.placement import Protected, Row, Stripe, StripeFacts, chunk_range

# --- linear combinations ---------------------------------------------------------------------------
#
# Linear combinations of byte strings over the field of 256 elements, compiled or with torch.
#
# The compiled one (`_core/erasure.c`) needs a pass over the inputs. Without it, torch adds 64-bit words of eight
# elements each. A product with a constant is then a sum over the bits of the constant, from the highest to the
# lowest, with a multiplication by x of all eight elements between two bits.

_PIECE = 256 << 10  # bytes that torch combines at once, so that they stay in the cache
_LOW_BITS = 0x0101010101010101
_REDUCED = 0x1D
WORD = 8  # the lengths of all buffers are multiples of it


@functools.cache
def compiled() -> ModuleType | None:
    return core_loading.part("ddp_launch_wings.redundancy._erasure")


def combine(rows: Sequence[Row], inputs: Sequence[memoryview], outputs: Sequence[memoryview]) -> None:
    """Write to each output the combination of the inputs with the coefficients of its row."""
    if not len(outputs[0]):
        return
    if (native := compiled()) is not None:
        native.combine(bytes(each for row in rows for each in row), tuple(inputs), tuple(outputs))
    else:
        combine_with_torch(rows, inputs, outputs)


def combine_with_torch(
    rows: Sequence[Row], inputs: Sequence[memoryview], outputs: Sequence[memoryview]
) -> None:
    sources = [torch.frombuffer(each, dtype=torch.int64) for each in inputs]
    for row, output in zip(rows, outputs, strict=True):
        pieces = [torch.split(each, _PIECE // WORD) for each in sources]
        results = torch.split(torch.frombuffer(output, dtype=torch.int64), _PIECE // WORD)
        for number, result in enumerate(results):
            _combine_piece(row, [each[number] for each in pieces], result)


def _combine_piece(row: Row, inputs: list[torch.Tensor], result: torch.Tensor) -> None:
    result.zero_()
    for bit in reversed(range(max(row).bit_length())):
        # Multiply all elements by x, in place.
        words = result
        over = (words >> 7) & _LOW_BITS
        words &= _LOW_BITS * 0x7F
        words <<= 1
        words ^= over * _REDUCED
        for coefficient, each in zip(row, inputs, strict=True):
            if coefficient >> bit & 1:
                result ^= each


# --- the file of a parity chunk --------------------------------------------------------------------
#
# The bytes of a parity chunk in memory.
#
#     prologue | facts | space | data
#
# The *facts* describe the whole stripe in JSON: the commit, whose images have chunks in it, and the checksum of each
# chunk. So any parity chunk tells what a lost image was, and a damaged chunk is recognized. As in an image (`image`),
# the writer clears the state word in the prologue first, and sets it last.

_MAGIC = b"ddppar01"
_PROLOGUE = struct.Struct(
    "<8s4sIIQQ"
)  # magic, state, checksum of the facts, their length, place and length of the data
_BLANK, _COMPLETE = b"none", b"memo"
_PAGE = 4096
_OF_A_CHUNK = 256  # bytes of facts, at most


def data_at(n_chunks: int) -> int:
    return -(-(_PROLOGUE.size + _OF_A_CHUNK * (n_chunks + 2)) // _PAGE) * _PAGE


def begin(buffer: memoryview) -> None:
    buffer[: _PROLOGUE.size] = _PROLOGUE.pack(_MAGIC, _BLANK, 0, 0, 0, 0)


def finish(buffer: memoryview, facts: dict[str, Any], n_bytes: int) -> None:
    """Complete a chunk whose data has been written. `facts`: of `facts_of`, with the row."""
    text = json.dumps(facts).encode()
    at = data_at(len(facts["sums"]))
    if _PROLOGUE.size + len(text) > at:
        raise OSError(f"{len(text)} bytes of facts do not fit")
    buffer[_PROLOGUE.size : _PROLOGUE.size + len(text)] = text
    buffer[: _PROLOGUE.size] = _PROLOGUE.pack(_MAGIC, _COMPLETE, zlib.crc32(text), len(text), at, n_bytes)


def facts_of(stripe: StripeFacts, row: int) -> dict[str, Any]:
    return {
        "number": stripe.commit.number,
        "lineage": stripe.commit.lineage,
        "stripe": stripe.number,
        "m": stripe.m,
        "row": row,
        "data": [None if each is None else asdict(each) for each in stripe.data],
        "sums": stripe.sums,
    }


class ParityFile:
    """A parity chunk in a buffer of the caller. The constructor checks the facts, not the data."""

    def __init__(self, buffer: memoryview) -> None:
        if len(buffer) < _PROLOGUE.size:
            raise DamagedImage(f"too short: {len(buffer)} bytes")
        magic, state, checksum, length, at, n_bytes = _PROLOGUE.unpack(buffer[: _PROLOGUE.size])
        if magic != _MAGIC or state != _COMPLETE:
            raise DamagedImage("incomplete: its writer stopped before the end")
        text = bytes(buffer[_PROLOGUE.size : _PROLOGUE.size + length])
        if zlib.crc32(text) != checksum or at + n_bytes > len(buffer):
            raise DamagedImage("wrong checksum of the facts")
        found = json.loads(text)
        self.stripe = StripeFacts(
            CommitName(found["number"], found["lineage"]),
            found["stripe"],
            found["m"],
            tuple(None if each is None else Protected(**each) for each in found["data"]),
            tuple(found["sums"]),
        )
        self.row: int = found["row"]
        self.facts_sum: int = checksum
        self.data = buffer[at : at + n_bytes]


# --- what a rank keeps -----------------------------------------------------------------------------
#
# The parity chunks that this rank keeps in memory for other nodes.
#
# Each chunk has two files: one with the chunk of the last protected commit, the other one for the next commit. The
# files have the lineage in their names. So those of an earlier generation stay until a commit of this one is
# protected.

Key = tuple[int, int]  # stripe and row


@dataclass(slots=True)
class _File:
    path: Path
    buffer: memoryview
    number: int | None = None  # of the commit


class ParityStore:
    def __init__(self, places: list[Path], lineage: str) -> None:
        self._places, self._lineage = places, lineage
        self._files: dict[Key, list[_File]] = {}
        self._lock = threading.Lock()

    def open(self, key: Key, number: int, n_chunks: int, n_bytes: int) -> memoryview:
        """Begin the chunk of a commit. Return its data, to be written."""
        at = data_at(n_chunks)
        with self._lock:
            found = self._file(key, number, at + n_bytes)
        begin(found.buffer)
        return found.buffer[at : at + n_bytes]

    def _file(self, key: Key, number: int, n_bytes: int) -> _File:
        files = self._files.setdefault(key, [])
        free = next((each for each in files if each.number in (None, number)), None)
        if free is not None and len(free.buffer) < n_bytes:
            files.remove(free)
            self._unlink(free.path)
            free = None
        if free is None:
            taken = {each.path.name for each in files}
            stem = f"parity-{self._lineage}-{key[0]}-{key[1]}"
            name = next(name for turn in range(3) if (name := f"{stem}-{turn}") not in taken)
            free = _File(*kept_images.new_file(self._places, name, n_bytes))
            files.append(free)
        free.number = number
        return free

    def data(self, key: Key, number: int, begin: int, n_bytes: int, n_chunks: int) -> memoryview:
        """A part of a chunk that was begun."""
        found = self._of(key, number)
        at = data_at(n_chunks) + begin
        if begin < 0 or at + n_bytes > len(found.buffer):
            raise OSError(f"parity chunk {key} ends before {begin + n_bytes}")
        return found.buffer[at : at + n_bytes]

    def finish(self, key: Key, number: int, facts: dict[str, Any], n_bytes: int) -> None:
        finish(self._of(key, number).buffer, facts, n_bytes)

    def _of(self, key: Key, number: int) -> _File:
        with self._lock:
            for each in self._files.get(key, ()):
                if each.number == number:
                    return each
        raise OSError(f"parity chunk {key} of commit {number} was not begun")

    def keep_only(self, number: int) -> None:
        """Forget all chunks but those of this commit, also those of earlier generations."""
        with self._lock:
            for files in self._files.values():
                for each in files:
                    if each.number not in (None, number):
                        begin(each.buffer)
                        each.number = None
        for path in kept_images.parities_in(self._places):
            if not path.name.startswith(f"parity-{self._lineage}-"):
                self._unlink(path)

    def remove(self) -> None:
        with self._lock:
            files = [each for kept in self._files.values() for each in kept]
            self._files.clear()
        for each in files:
            self._unlink(each.path)

    @staticmethod
    def _unlink(path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()


# --- the encoder -----------------------------------------------------------------------------------
#
# Compute the parity chunks of one stripe of a commit, from chunks in the memory of other nodes.
#
# The first holder of parity does it for all: it reads the k chunks piece by piece, and sends the other parity
# chunks to their holders. So k + m - 1 chunks travel for k chunks of data, and this rank needs k + m pieces of
# memory. It works a third of the time and sleeps in between: the training comes first.

_PIECE_BYTES = 1 << 20
_PAUSE = 2.0  # the time between two pieces, in times of one piece


@dataclass(slots=True)
class StripeEncoder:
    """Computes the parity of one stripe, commit after commit.

    `wait` sleeps, and raises when this rank stops; `check_held` raises when this rank gives up the commit.
    """

    stripe: Stripe
    lineage: str
    store: ParityStore
    links: Links
    wait: Callable[[float], None]
    check_held: Callable[[int], None]
    _peers: dict[int, Peer] = field(default_factory=dict)
    _inputs: list[memoryview] = field(default_factory=list)
    _outputs: list[memoryview] = field(default_factory=list)

    @property
    def k(self) -> int:
        return len(self.stripe.data)

    @property
    def m(self) -> int:
        return len(self.stripe.parity)

    def encode(self, number: int) -> None:
        """Complete the parity of this commit on all of its holders. Raise OSError if that fails."""
        try:
            self._encode(number)
        except OSError:
            self.close()  # replies may be under way
            raise

    def close(self) -> None:
        for each in self._peers.values():
            each.close()

    def _encode(self, number: int) -> None:
        members = self._members(number)
        facts = StripeFacts(CommitName(number, self.lineage), self.stripe.number, self.m, members, ())
        n_bytes = placement.parity_bytes(facts)
        opened = {"do": "open", "number": number, "stripe": self.stripe.number}
        opened |= {"n_chunks": self.k + self.m, "n_bytes": n_bytes}
        mine = self.store.open((self.stripe.number, 0), number, self.k + self.m, n_bytes)
        for row, holder in self._others():
            holder.ask(opened | {"row": row})
        size = min(_PIECE_BYTES, n_bytes)
        if not self._inputs or len(self._inputs[0]) < size:
            self._inputs = [memoryview(bytearray(size)) for _ in range(self.k)]
            self._outputs = [memoryview(bytearray(size)) for _ in range(self.m - 1)]
        sums = [0] * (self.k + self.m)
        for at in range(0, n_bytes, _PIECE_BYTES):
            began = time.monotonic()
            self._encode_piece(number, members, mine, at, min(at + _PIECE_BYTES, n_bytes), sums)
            self.wait(_PAUSE * (time.monotonic() - began))
        whole = StripeFacts(facts.commit, facts.number, facts.m, facts.data, tuple(sums))
        for row, holder in self._others():
            finished = {"do": "finish", "number": number, "facts": facts_of(whole, row)}
            holder.ask(finished | {"n_bytes": n_bytes})
        self.store.finish((self.stripe.number, 0), number, facts_of(whole, 0), n_bytes)

    def _members(self, number: int) -> tuple[Protected | None, ...]:
        """Ask each member what it has; it may not have made this commit yet."""
        found: list[Protected | None] = []
        for rank in self.stripe.data:
            if rank is None:
                found.append(None)
                continue
            answer = {"busy": True}
            while answer.get("busy"):
                answer = self._peer(rank).ask({"do": "describe", "number": number})
                self.check_held(number)
            found.append(Protected(**answer["image"]))  # type: ignore[arg-type]
        return tuple(found)

    def _encode_piece(
        self,
        number: int,
        members: tuple[Protected | None, ...],
        mine: memoryview,
        begin: int,
        end: int,
        sums: list[int],
    ) -> None:
        wanted: list[tuple[int, Peer, int]] = []
        for chunk, member in enumerate(members):
            if member is not None:
                start, stop = chunk_range(member.n_bytes, self.k, chunk)
                start, stop = min(start + begin, stop), min(start + end, stop)
                if start < stop:
                    peer = self._peer(member.rank)
                    peer.send({"do": "read", "number": number, "begin": start, "n_bytes": stop - start})
                    wanted.append((chunk, peer, stop - start))
        size = end - begin
        lengths = dict.fromkeys(range(self.k), 0)
        for chunk, peer, n_bytes in wanted:
            into = self._inputs[chunk][:n_bytes]
            peer.receive(into)
            sums[chunk] = image.crc32(into, sums[chunk])
            lengths[chunk] = n_bytes
        for chunk, n_bytes in lengths.items():
            self._inputs[chunk][n_bytes:size] = bytes(size - n_bytes)
        outputs = [mine[begin:end], *(each[:size] for each in self._outputs)]
        rows = placement.parity_rows(self.k, self.m)
        combine(rows, [each[:size] for each in self._inputs], outputs)
        self._hand_out(number, begin, outputs, sums)

    def _hand_out(self, number: int, begin: int, outputs: list[memoryview], sums: list[int]) -> None:
        others = list(self._others())
        for row, holder in others:
            words = {"do": "write", "number": number, "stripe": self.stripe.number, "row": row}
            holder.send(words | {"begin": begin, "n_chunks": self.k + self.m}, outputs[row])
        for row, output in enumerate(outputs):
            sums[self.k + row] = image.crc32(output, sums[self.k + row])
        for _row, holder in others:
            holder.receive()

    def _others(self) -> list[tuple[int, Peer]]:
        """The other holders of parity: row and connection."""
        return [(row, self._peer(rank)) for row, rank in enumerate(self.stripe.parity) if row]

    def _peer(self, rank: int) -> Peer:
        if rank == self.links.rank:
            raise PeerError(f"stripe {self.stripe.number} has rank {rank} twice")
        if rank not in self._peers:
            self._peers[rank] = self.links.peer(rank)
        return self._peers[rank]
