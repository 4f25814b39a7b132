"""Compute the parity chunks of one stripe of a commit, from chunks in the memory of other nodes.

The first holder of parity does it for all: it reads the k chunks piece by piece, and sends the other parity chunks to
their holders. So k + m - 1 chunks travel for k chunks of data, and this rank needs k + m pieces of memory. It works a
third of the time and sleeps in between: the training comes first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddp.elastic import checksums, combining, erasure_code, parity_file, recovery
from ddp.elastic.commits import CommitName
from ddp.elastic.peer_links import PeerError
from ddp.elastic.recovery import Protected, StripeFacts
from ddp.elastic.stripes import chunk_range

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddp.elastic.parity_store import ParityStore
    from ddp.elastic.peer_links import Links, Peer
    from ddp.elastic.stripes import Stripe

_PIECE = 1 << 20
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
        n_bytes = recovery.parity_bytes(facts)
        opened = {"do": "open", "number": number, "stripe": self.stripe.number}
        opened |= {"n_chunks": self.k + self.m, "n_bytes": n_bytes}
        mine = self.store.open((self.stripe.number, 0), number, self.k + self.m, n_bytes)
        for row, holder in self._others():
            holder.ask(opened | {"row": row})
        self._make_buffers(min(_PIECE, n_bytes))
        sums = [0] * (self.k + self.m)
        for at in range(0, n_bytes, _PIECE):
            began = time.monotonic()
            self._encode_piece(number, members, mine, at, min(at + _PIECE, n_bytes), sums)
            self.wait(_PAUSE * (time.monotonic() - began))
        whole = StripeFacts(facts.commit, facts.number, facts.m, facts.data, tuple(sums))
        for row, holder in self._others():
            finished = {"do": "finish", "number": number, "facts": parity_file.facts_of(whole, row)}
            holder.ask(finished | {"n_bytes": n_bytes})
        self.store.finish((self.stripe.number, 0), number, parity_file.facts_of(whole, 0), n_bytes)

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
            sums[chunk] = checksums.crc32(into, sums[chunk])
            lengths[chunk] = n_bytes
        for chunk, n_bytes in lengths.items():
            self._inputs[chunk][n_bytes:size] = bytes(size - n_bytes)
        outputs = [mine[begin:end], *(each[:size] for each in self._outputs)]
        rows = erasure_code.parity_rows(self.k, self.m)
        combining.combine(rows, [each[:size] for each in self._inputs], outputs)
        self._hand_out(number, begin, outputs, sums)

    def _hand_out(self, number: int, begin: int, outputs: list[memoryview], sums: list[int]) -> None:
        others = list(self._others())
        for row, holder in others:
            words = {"do": "write", "number": number, "stripe": self.stripe.number, "row": row}
            holder.send(words | {"begin": begin, "n_chunks": self.k + self.m}, outputs[row])
        for row, output in enumerate(outputs):
            sums[self.k + row] = checksums.crc32(output, sums[self.k + row])
        for _row, holder in others:
            holder.receive()

    def _make_buffers(self, size: int) -> None:
        if not self._inputs or len(self._inputs[0]) < size:
            self._inputs = [memoryview(bytearray(size)) for _ in range(self.k)]
            self._outputs = [memoryview(bytearray(size)) for _ in range(self.m - 1)]

    def _others(self) -> list[tuple[int, Peer]]:
        """The other holders of parity: row and connection."""
        return [(row, self._peer(rank)) for row, rank in enumerate(self.stripe.parity) if row]

    def _peer(self, rank: int) -> Peer:
        if rank == self.links.rank:
            raise PeerError(f"stripe {self.stripe.number} has rank {rank} twice")
        if rank not in self._peers:
            self._peers[rank] = self.links.peer(rank)
        return self._peers[rank]
