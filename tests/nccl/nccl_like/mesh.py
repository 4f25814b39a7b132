"""Bytes between the ranks of a group: each rank has a Unix socket to each other rank.

There is one operation, `exchange`: each rank gives a block, and gets the blocks of all. A rank that has gone is noticed
by its closed connections, as NCCL notices it over sockets and InfiniBand.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
from typing import Any

_HEAD = struct.Struct("<QQ")  # a number that must be equal on all ranks, and the length of the block
_PIECE = 1 << 16


class Gone(Exception):
    """A peer has closed its connection."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class Mismatch(Exception):
    """The ranks are in different operations: on a GPU, kernels that wait for each other forever."""


class Released(Exception):
    """The communicator was aborted."""


class Mesh:
    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.peers = _connected(store, rank, size)
        self._early = {peer: bytearray() for peer in self.peers}
        self._ended: set[int] = set()  # peers that send nothing more; what they have sent before counts

    def exchange(self, tag: int, blocks: list[bytes]) -> list[bytes]:
        """Give `blocks[rank]` to each rank, and return what each gave to this one. Raise Gone, Mismatch or Released."""
        left = {peer: memoryview(_HEAD.pack(tag, len(blocks[peer])) + blocks[peer]) for peer in self.peers}
        got: dict[int, bytes] = {self.rank: blocks[self.rank]}
        with selectors.DefaultSelector() as selector:
            selector.register(self.wake_r, selectors.EVENT_READ, -1)
            for peer in self.peers:
                self._take(peer, tag, got)
            for peer in self.peers.keys() - self._ended:
                selector.register(self.peers[peer], selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
            while len(got) < self.size or any(left.values()):
                for peer in self._ended:  # one that has finished this exchange may leave before the others
                    if peer not in got or left[peer]:
                        raise Gone(peer)
                for key, events in selector.select():
                    self._serve(selector, key.data, events, left)
                for peer in self.peers:
                    self._take(peer, tag, got)
        return [got[rank] for rank in range(self.size)]

    def _serve(
        self, selector: selectors.BaseSelector, peer: int, events: int, left: dict[int, memoryview]
    ) -> None:
        if peer < 0:
            raise Released
        connection = self.peers[peer]
        try:
            if events & selectors.EVENT_WRITE and left[peer]:
                left[peer] = left[peer][connection.send(left[peer][:_PIECE]) :]
            if events & selectors.EVENT_READ:
                data = connection.recv(_PIECE)
                if not data:
                    raise ConnectionResetError
                self._early[peer] += data
        except BlockingIOError:
            return
        except OSError:
            self._ended.add(peer)
            selector.unregister(connection)
            return
        if not left[peer]:
            selector.modify(connection, selectors.EVENT_READ, peer)

    def _take(self, peer: int, tag: int, got: dict[int, bytes]) -> None:
        held = self._early[peer]
        if peer in got or len(held) < _HEAD.size:
            return
        theirs, length = _HEAD.unpack_from(held)
        if theirs != tag:
            raise Mismatch
        if len(held) >= _HEAD.size + length:
            got[peer] = bytes(held[_HEAD.size : _HEAD.size + length])
            del held[: _HEAD.size + length]

    def await_gone(self) -> None:
        """Wait until a peer has gone or the communicator is aborted, whatever else arrives."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.wake_r, selectors.EVENT_READ, -1)
            for peer in self.peers.keys() - self._ended:
                selector.register(self.peers[peer], selectors.EVENT_READ, peer)
            while True:
                for peer in self._ended:
                    raise Gone(peer)
                for key, events in selector.select():
                    self._serve(
                        selector,
                        key.data,
                        events & selectors.EVENT_READ,
                        dict.fromkeys(self.peers, memoryview(b"x")),
                    )

    def release(self) -> None:
        os.write(self._wake_w, b"!")

    def close(self) -> None:
        for connection in self.peers.values():
            connection.close()
        self.peers = {}


def _connected(store: Any, rank: int, size: int) -> dict[int, socket.socket]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.bind("")  # the kernel chooses an abstract name
    listener.listen(size)
    store.set(f"mesh/{rank}", bytes(listener.getsockname()).hex())
    peers: dict[int, socket.socket] = {}
    for peer in range(rank):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.connect(bytes.fromhex(store.get(f"mesh/{peer}").decode()))
        connection.sendall(struct.pack("<I", rank))
        peers[peer] = connection
    for _ in range(size - rank - 1):
        connection, _address = listener.accept()
        peers[struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL))[0]] = connection
    listener.close()
    for connection in peers.values():
        connection.setblocking(False)
    return peers
