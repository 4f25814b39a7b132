"""All nodes of a job measure the links between them, and compare their installed software.

They join a separate job (its ID ends in `.preflight`), and exchange data in its scratchpad:

    card/RANK        how to reach this node's listener, and its versions
    heard/STAGE/RANK what it has measured
    again/STAGE      from node rank 0: slow links, to be measured once more, and longer (stages 1 to 3)
    verdict          from node rank 0: slow nodes and links, and nodes that differ

Node rank 0 evaluates the results with `link_plan.py`. When all nodes have read the verdict, the job has
succeeded and ends. A node that joins later skips the check, because it cannot measure links of nodes that train.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from ddp_launch_wings.links import link_plan
from ddp_launch_wings.links.link_plan import Baseline, Findings, MeasuredLink, Pair, SlowNode
from launcher.joining.connect import CannotConnect, ServiceConnection
from launcher.joining.join import node_facts
from launcher.preflight.checkup import Check, Comparison, Grade, Report, skipped
from launcher.settings.spec import LaunchSpec
from rendezvous.client.remote_session import CallFailed, Scratch
from rendezvous.diagnosing import versions
from rendezvous.diagnosing.versions import Difference
from rendezvous.values.cause_text import code_of_outcome, code_of_refusal
from rendezvous.values.error_codes import Code
from rendezvous.values.events import (
    AgentJoined,
    AgentLeft,
    Assigned,
    Ended,
    RanksFinished,
    RefusalKind,
    Refused,
    Stop,
    StoreOpened,
    Waiting,
)
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.types import Assignment, RestartBudget, StoreAddress

_START_S = 10.0  # for a partner to reach the round: a slow link of the previous round may delay it
_WORD_S = 120.0  # for a value from another node; a lost node ends the comparison much earlier
_PARTING_S = 15.0
_MOST_PAIRS, _MOST_NAMED = 1000, 64
_STAGES = 3  # a busy CPU slows a link down occasionally, a fault always
_STAGE_NUMBERS = 10_000
_SEND_S = 0.2


class _TooLate(Exception):
    """The comparison has already finished."""


class _Aborted(Exception):
    """The measurement ended early for this node. `over`: the other nodes measure without it."""

    def __init__(self, reason: str, *, over: bool = False) -> None:
        super().__init__(reason)
        self.over = over


@dataclass(frozen=True, slots=True)
class Card:
    """The data that a node publishes for the others."""

    node: str
    host: str  # nodes with an equal host share a network stack
    address: str
    port: int
    token: str
    versions: str


async def compare(
    connection: ServiceConnection, spec: LaunchSpec, report: Report, mtu: int, say: Callable[[str], None]
) -> Comparison:
    """`say` receives what the node waits for. Raise `CannotConnect` if the problem would also stop the job."""
    check = _NetworkCheck(connection, spec, report, mtu, say)
    try:
        return Comparison(await check.run())
    except _TooLate as error:
        return Comparison((skipped("links", str(error)),), too_late=True)
    except _Aborted as error:
        if error.over:
            return Comparison((skipped("links", str(error)),))
        advice = (
            "start ddp-launch on all nodes at the same time, and keep it running until this check has ended"
        )
        return Comparison((Check("links", Grade.WARN, str(error), advice=advice),))
    finally:
        await check.close()


class _NetworkCheck:
    def __init__(
        self,
        connection: ServiceConnection,
        spec: LaunchSpec,
        report: Report,
        mtu: int,
        say: Callable[[str], None],
    ) -> None:
        self._connection, self._spec, self._say = connection, spec, say
        self._versions = str(report.versions) + (f" mtu={mtu}" if mtu else "")
        self._scratch = Scratch(connection.endpoints, connection.options, spec.job.job_id)
        self._listener = ProbeListener(connection.address)
        self._last_reason = ""
        self._links: dict[Pair, MeasuredLink] = {}  # only node rank 0 has all of them

    async def close(self) -> None:
        self._listener.close()
        await self._scratch.close()

    async def run(self) -> tuple[Check, ...]:
        agent, facts = (
            self._connection.agent,
            node_facts(self._spec, self._connection.host, self._connection.address, os.environ),
        )
        asked = replace(self._spec.job, budget=RestartBudget(), rules=())
        self._connection.session.send(AgentJoined(agent, asked, facts))
        place = await self._assigned()
        if place.node_rank == 0:
            store = StoreAddress(self._connection.address, self._listener.port)
            self._connection.session.send(StoreOpened(agent, place.generation, store))
        measuring = asyncio.create_task(self._measure(place))
        watching = asyncio.create_task(self._until_over())
        try:
            await asyncio.wait((measuring, watching), return_when=asyncio.FIRST_COMPLETED)
            if not measuring.done():
                raise _Aborted(f"the nodes could not finish the measurement: {watching.result()}")
            checks = measuring.result()
            self._connection.session.send(RanksFinished(agent, place.generation))
            await asyncio.wait(
                (watching,), timeout=_PARTING_S
            )  # another node may not have read the verdict yet
            return checks
        except CallFailed as error:
            raise _Aborted(f"the service does not respond: {error}") from error
        finally:
            measuring.cancel()
            watching.cancel()
            await asyncio.wait((measuring, watching))

    async def _assigned(self) -> Assignment:
        while True:
            match await self._connection.session.receive():
                case Assigned(assignment):
                    return assignment
                case Waiting(reason, stands_by=True):
                    self._connection.session.send(
                        AgentLeft(self._connection.agent, "this node joins the job without the network check")
                    )
                    raise _Aborted(f"the others measure without this node: {reason}", over=True)
                case Waiting(reason) if reason != self._last_reason:
                    self._last_reason = reason
                    self._say(reason)
                case Refused(reason, kind=RefusalKind.JOB_OVER):
                    raise _TooLate(reason)
                case Refused(reason, exit_code, retryable=False) as refused:
                    # As the job itself would raise it.
                    raise CannotConnect(reason, exit_code, code=code_of_refusal(refused))
                case Ended(outcome):
                    code = code_of_outcome(outcome) or Code.JOB_HAS_ENDED
                    raise CannotConnect(outcome.reason, outcome.exit_code, code=code)
                case _:
                    pass

    async def _until_over(self) -> str:
        while True:
            match await self._connection.session.receive():
                case Ended(outcome):
                    return outcome.reason
                case Stop(_, decision):
                    return decision.reason
                case Refused(reason, retryable=False):
                    return reason
                case _:
                    pass

    # --- measuring ---------------------------------------------------------------------------------

    async def _measure(self, place: Assignment) -> tuple[Check, ...]:
        me, n = place.node_rank, place.n_nodes
        self._prefix = f"{place.generation}/"
        own = Card(
            self._connection.host,
            _network_of_host(),
            self._connection.address,
            self._listener.port,
            self._listener.token,
            self._versions,
        )
        self._cards = {me: own}
        await self._put(f"card/{me}", asdict(own))
        rounds = link_plan.schedule(n)
        self._say(f"measuring the links between {n} nodes in {len(rounds)} rounds")
        await self._run_rounds(me, rounds, 0)
        if me == 0:
            await self._collect_cards(n)
            await self._gather(n, rounds, 0)
        for stage in range(1, _STAGES + 1):
            if me == 0:
                await self._put(f"again/{stage}", self._suspects(n, again=stage > 1))
            again = tuple(
                tuple((int(a), int(b)) for a, b in pairs) for pairs in await self._get(f"again/{stage}")
            )
            if not again:
                break
            self._say("measuring slow links again")
            await self._run_rounds(me, again, stage)
            if me == 0:
                await self._gather(n, again, stage)
        if me == 0:
            await self._put("verdict", _verdict(self._links, self._cards))
        return _read_verdict(me, self._connection.host, await self._get("verdict"))

    async def _run_rounds(self, me: int, rounds: tuple[tuple[Pair, ...], ...], stage: int) -> None:
        told = []
        for at, pairs in enumerate(rounds):
            pair = next((pair for pair in pairs if me in pair), None)
            if pair is None:
                continue
            number, send_s = stage * _STAGE_NUMBERS + at, _SEND_S * 2**stage
            if pair[0] == me:
                card = await self._card(pair[1])
                peer = ProbedNode(card.address, card.port, card.token)
                own = self._connection.address if self._spec.interface or self._spec.local_addr else ""
                heard = await asyncio.to_thread(connect, peer, me, number, own, _START_S, send_s)
            else:
                heard = await asyncio.to_thread(self._answer, pair[0], number, send_s)
            told.append({"pair": pair, **asdict(heard)})
        await self._put(f"heard/{stage}/{me}", told)

    def _answer(self, rank: int, number: int, send_s: float) -> Measurement:
        return answer(self._listener.take(rank, number, _START_S), _START_S, send_s)

    async def _card(self, rank: int) -> Card:
        if rank not in self._cards:
            self._cards[rank] = Card(**await self._get(f"card/{rank}"))
        return self._cards[rank]

    # --- node rank 0 -------------------------------------------------------------------------------

    async def _collect_cards(self, n: int) -> None:
        for rank in range(n):
            await self._card(rank)

    def _suspects(self, n: int, *, again: bool) -> list[list[Pair]]:
        hosts = {rank: card.host for rank, card in self._cards.items()}
        slow = link_plan.suspects(list(self._links.values()), hosts, again=again)[:_MOST_PAIRS]
        return [list(pairs) for pairs in link_plan.in_rounds(slow, max(1, n // 4))]

    async def _gather(self, n: int, rounds: tuple[tuple[Pair, ...], ...], stage: int) -> None:
        told: dict[tuple[Pair, int], Measurement] = {}
        for rank in range(n):
            for entry in await self._get(f"heard/{stage}/{rank}"):
                heard = Measurement(entry["in_bps"], entry["rtt_s"], entry["problem"])
                told[(entry["pair"][0], entry["pair"][1]), rank] = heard
        for pair in (pair for pairs in rounds for pair in pairs):
            silent = Measurement(problem="this link was not measured")
            link = _joined(pair, told.get((pair, pair[0]), silent), told.get((pair, pair[1]), silent))
            before = self._links.get(pair)
            self._links[pair] = link if before is None else link_plan.better_of(before, link)

    # --- the scratchpad ----------------------------------------------------------------------------

    async def _put(self, key: str, value: Any) -> None:
        await self._scratch.put(self._prefix + key, json.dumps(value).encode(), _WORD_S)

    async def _get(self, key: str) -> Any:
        return json.loads(await self._scratch.get(self._prefix + key, _WORD_S))


def _network_of_host() -> str:
    """Return an ID of the network namespace: containers on one machine have separate ones, and a link between them."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return os.uname().nodename


def _joined(pair: Pair, connector: Measurement, listener: Measurement) -> MeasuredLink:
    """Combine both sides. If the link failed, use the reason of the node that opened the connection."""
    if connector.in_bps is None and listener.in_bps is None:
        return MeasuredLink(
            pair, rtt_s=connector.rtt_s, problem=connector.problem or listener.problem or "no answer"
        )
    return MeasuredLink(pair, listener.in_bps, connector.in_bps, connector.rtt_s)


# --- the verdict -----------------------------------------------------------------------------------------


def _verdict(links: Mapping[Pair, MeasuredLink], cards: Mapping[int, Card]) -> dict[str, Any]:
    hosts = {rank: card.host for rank, card in cards.items()}
    found = link_plan.judge(list(links.values()), hosts)
    nodes, between = found.nodes[:_MOST_NAMED], found.links[:_MOST_NAMED]
    named = [node.node for node in nodes] + [end for link in between for end in link.pair]
    differ = versions.differences([(card.node, card.versions) for _, card in sorted(cards.items())])
    return {
        "baseline": asdict(found.baseline),
        "nodes": [asdict(node) for node in nodes],
        "links": [asdict(link) for link in between],
        "measured": found.measured,
        "names": {rank: cards[rank].node for rank in named},
        "differences": [asdict(each) for each in differ[:_MOST_NAMED]],
    }


def _read_verdict(me: int, node: str, told: dict[str, Any]) -> tuple[Check, ...]:
    findings = Findings(
        Baseline(**told["baseline"]),
        tuple(SlowNode(**each) for each in told["nodes"]),
        tuple(
            MeasuredLink(**(each | {"pair": (each["pair"][0], each["pair"][1])})) for each in told["links"]
        ),
        told["measured"],
    )
    names = {int(rank): name for rank, name in told["names"].items()}
    differ = [Difference(**each) for each in told["differences"]]
    return *link_plan.checks_of(me, findings, names), _same_software(node, differ)


def _same_software(node: str, differ: list[Difference]) -> Check:
    name = "same on all nodes"
    if not differ:
        return Check(name, Grade.OK, "versions and MTU")
    own = [each for each in differ if each.node == node]
    if not own:
        others = "; ".join(f"{each.node} has {each.what} {each.version}" for each in differ[:4])
        return Check(name, Grade.OK, f"the same versions as most nodes; {others}")
    found = "; ".join(f"{each.what} {each.version}; most nodes have {each.usual}" for each in own)
    grade = Grade.FAIL if any(versions.prevents_training(each) for each in own) else Grade.WARN
    return Check(name, grade, found, advice=f"install the same versions as on node {own[0].example}")


# --- wire -------------------------------------------------------------------------------------------
#
# Measures one link between two nodes over plain TCP: the round-trip time, and the bandwidth each way.
#
#     connector                                   listener
#     TOKEN FROM ROUND \n            ->           keeps the connection until its node has reached that round
#                                    <-           r
#     32 bytes, 16 times             <->          returns them
#     blocks, for a given time        ->          counts
#                                    <-           blocks; the connector counts
#     (end)
#
# Each side measures the rate of what it received. Blocks have one size and begin with a flag that marks the last one.
# So the receiver reads until the last block, and the rate counts only received data. Every wait has a limit.

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


class ProbeListener:
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
class ProbedNode:
    address: str
    port: int
    token: str


def connect(
    peer: ProbedNode, me: int, round_at: int, own_address: str, within_s: float, send_s: float
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
