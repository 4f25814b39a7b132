"""Measures one link between two nodes over plain TCP: the round-trip time, and the bandwidth each way.

    connector                                   listener
    TOKEN FROM ROUND \\n            ->           keeps the connection until its node has reached that round
                                   <-           r
    32 bytes, 16 times             <->          returns them
    blocks, for a given time        ->          counts
                                   <-           blocks; the connector counts
    (end)

Each side measures the rate of what it received. Blocks have one size and begin with a flag that marks the last one. So
the receiver reads until the last block, and the rate counts only received data. Every wait has a limit.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from dataclasses import replace

from rendezvous.values.late_dataclass import dataclass

_HELLO_BYTES = 160
_PING_BYTES, _PINGS = 32, 16
_BLOCK_BYTES = 64 << 10
_BUFFER_BYTES = (
    1 << 20
)  # enough for any link that Python fills; more would take seconds to drain on a slow one
_MOST_BLOCKS = 64 << 10  # 4 GB
_COUNT_S = 6.0  # limit for counting; on a slower link the rate is that of the data received by then
_CONNECT_S = 3.0
_QUIET_S = 6.0  # maximum silence of a peer that measures
_MORE, _LAST = b"\0", b"\1"
_AHEAD = 64  # connections that wait for their round


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurement of one side, in received bits per second. None: no measurement."""

    in_bps: float | None = None
    rtt_s: float | None = None
    problem: str = ""


class Listener:
    """Accepts connections of nodes that know the token, and keeps each connection open until its round."""

    def __init__(self, address: str) -> None:
        self._server = _server_at(address)
        self.port = int(self._server.getsockname()[1])
        self.token = secrets.token_hex(16)
        self._came = threading.Condition()
        self._waiting: dict[tuple[int, int], socket.socket] = {}  # by the rank it is from, and the round
        self._open = True
        threading.Thread(target=self._accept, name="pre-flight links", daemon=True).start()

    def take(self, rank: int, round_at: int, within_s: float) -> socket.socket | None:
        with self._came:
            self._came.wait_for(lambda: (rank, round_at) in self._waiting or not self._open, within_s)
            return self._waiting.pop((rank, round_at), None)

    def close(self) -> None:
        with self._came:
            self._open = False
            self._came.notify_all()
            for connection in self._waiting.values():
                connection.close()
            self._waiting.clear()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # ends the thread's accept
        self._server.close()

    def _accept(self) -> None:
        while self._open:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        known = None
        with contextlib.suppress(OSError, ValueError):
            connection.settimeout(_CONNECT_S)
            token, rank, round_at = _line(connection).split(" ")
            if hmac.compare_digest(token, self.token):
                known = (int(rank), int(round_at))
        with self._came:
            if known is None or not self._open or known in self._waiting or len(self._waiting) >= _AHEAD:
                connection.close()
                return
            self._waiting[known] = connection
            self._came.notify_all()


def _server_at(address: str) -> socket.socket:
    """Listen on that address, or on all addresses if this fails (a name, a NAT address): the token protects the
    listener.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError):
        return socket.create_server((address, 0), family=family, backlog=_AHEAD)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=_AHEAD, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=_AHEAD)


def _line(connection: socket.socket) -> str:
    said = b""
    while not said.endswith(b"\n"):
        more = connection.recv(1)
        if not more or len(said) > _HELLO_BYTES:
            raise ValueError("the connection did not send the expected first line")
        said += more
    return said[:-1].decode("ascii")


# --- one measurement -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Peer:
    address: str
    port: int
    token: str


def connect(
    peer: Peer, me: int, round_at: int, own_address: str, within_s: float, send_s: float
) -> Measurement:
    """`within_s` limits the wait for a peer that is still busy with the previous round."""
    try:
        source = (own_address, 0) if own_address else None
        connection = socket.create_connection((peer.address, peer.port), _CONNECT_S, source)
    except OSError as error:
        return Measurement(
            problem=f"cannot connect to {peer.address}:{peer.port} ({_in_words(error)}); check the firewall"
        )
    with connection:
        heard = Measurement()
        try:
            _tune(connection)
            connection.settimeout(within_s)
            connection.sendall(f"{peer.token} {me} {round_at}\n".encode())
            _exactly(connection, 1)
            connection.settimeout(_QUIET_S)
            heard = Measurement(rtt_s=_pinged(connection))
            _send_blocks(connection, send_s)
            return replace(heard, in_bps=_counted(connection)[0])
        except OSError as error:
            return heard if heard.rtt_s is not None else Measurement(problem=_in_words(error))


def answer(connection: socket.socket | None, within_s: float, send_s: float) -> Measurement:
    if connection is None:
        return Measurement(
            problem=f"the other node did not connect within {within_s:g} s; check the firewall of this node"
        )
    with connection:
        heard = Measurement()
        try:
            _tune(connection)
            connection.settimeout(_QUIET_S)
            connection.sendall(b"r")
            for _ in range(_PINGS):
                connection.sendall(_exactly(connection, _PING_BYTES))
            bps, complete = _counted(connection)
            heard = Measurement(in_bps=bps)
            if complete:
                _send_blocks(connection, send_s)
                connection.recv(1)  # wait until the other side has counted
        except OSError as error:
            return heard if heard.in_bps is not None else Measurement(problem=_in_words(error))
        return heard


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)


def _pinged(connection: socket.socket) -> float:
    """Return the shortest round trip: longer ones usually include a wait for a CPU."""
    times = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        connection.sendall(bytes(_PING_BYTES))
        _exactly(connection, _PING_BYTES)
        times.append(time.perf_counter() - began)
    return min(times)


def _send_blocks(connection: socket.socket, send_s: float) -> None:
    block = bytearray(_BLOCK_BYTES)
    until = time.monotonic() + send_s
    for _ in range(_MOST_BLOCKS):
        if time.monotonic() >= until:
            break
        connection.sendall(block)
    block[:1] = _LAST
    connection.sendall(block)


def _counted(connection: socket.socket) -> tuple[float, bool]:
    """Return the bits per second from the first byte to the last block, and whether all blocks arrived in time."""
    buffer = bytearray(_BLOCK_BYTES)
    view, arrived, began = memoryview(buffer), 0, 0.0
    give_up_at = time.monotonic() + _COUNT_S
    while True:
        filled = 0
        while filled < _BLOCK_BYTES:
            got = connection.recv_into(view[filled:])
            if not got:
                raise ConnectionResetError("the other node closed the connection")
            filled += got
            if not began:
                began = time.monotonic()
            if time.monotonic() > give_up_at:
                return (arrived + filled) * 8 / max(1e-6, time.monotonic() - began), False
        arrived += filled
        if buffer[:1] == _LAST:
            return arrived * 8 / max(1e-6, time.monotonic() - began), True


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionResetError("the other node closed the connection")
        data += more
    return data


def _in_words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or str(error)).lower()
