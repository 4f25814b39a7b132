"""All nodes of a job measure the links between them, and compare their installed software.

They join a separate job (its ID ends in `.preflight`), and exchange data in its scratchpad:

    card/RANK        how to reach this node's listener, and its versions
    heard/STAGE/RANK what it has measured
    again/STAGE      from node rank 0: slow links, to be measured once more, and longer (stages 1 to 3)
    verdict          from node rank 0: slow nodes and links, and nodes that differ

Node rank 0 evaluates the results with `launcher.preflight.link_plan`. When all nodes have read the verdict, the job has
succeeded and ends. A node that joins later skips the check, because it cannot measure links of nodes that train.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from launcher.joining.connect import CannotConnect
from launcher.joining.join import job_spec, node_facts
from launcher.preflight import link_plan, wire
from launcher.preflight.checkup import Check, Grade, skipped
from launcher.preflight.link_plan import Baseline, Findings, Link, SlowNode
from launcher.version import VERSION
from rendezvous.client.scratch_client import CallFailed, Scratch
from rendezvous.diagnosing import versions
from rendezvous.diagnosing.versions import Difference
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
from rendezvous.values.outcome_codes import code_of_outcome, code_of_refusal
from rendezvous.values.types import RestartBudget, StoreAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from launcher.joining.connect import Connection
    from launcher.preflight.checkup import Report
    from launcher.preflight.link_plan import Pair
    from launcher.settings.spec import LaunchSpec
    from rendezvous.values.types import Assignment

SUFFIX = ".preflight"
_START_S = 10.0  # for a partner to reach the round: a slow link of the previous round may delay it
_WORD_S = 120.0  # for a value from another node; a lost node ends the comparison much earlier
_PARTING_S = 15.0
_MOST_PAIRS, _MOST_NAMED = 1000, 64
_STAGES = 3  # a busy CPU slows a link down occasionally, a fault always
_STAGE_NUMBERS = 10_000
_SEND_S = 0.2


@dataclass(frozen=True, slots=True)
class Comparison:
    """`too_late`: the comparison has already finished; this node cannot take part."""

    checks: tuple[Check, ...]
    too_late: bool = False


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
    connection: Connection, spec: LaunchSpec, report: Report, mtu: int, say: Callable[[str], None]
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
        self, connection: Connection, spec: LaunchSpec, report: Report, mtu: int, say: Callable[[str], None]
    ) -> None:
        self._connection, self._spec, self._say = connection, spec, say
        self._versions = str(report.versions) + (f" mtu={mtu}" if mtu else "")
        self._scratch = Scratch(connection.endpoints, connection.options, spec.run_id)
        self._listener = wire.Listener(connection.address)
        self._last_reason = ""
        self._links: dict[Pair, Link] = {}  # only node rank 0 has all of them

    async def close(self) -> None:
        self._listener.close()
        await self._scratch.close()

    async def run(self) -> tuple[Check, ...]:
        agent, facts = (
            self._connection.agent,
            node_facts(self._spec, self._connection.host, self._connection.address, os.environ),
        )
        asked = replace(job_spec(self._spec, VERSION), budget=RestartBudget(), rules=())
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
                peer = wire.Peer(card.address, card.port, card.token)
                own = self._connection.address if self._spec.interface or self._spec.local_addr else ""
                heard = await asyncio.to_thread(wire.connect, peer, me, number, own, _START_S, send_s)
            else:
                heard = await asyncio.to_thread(self._answer, pair[0], number, send_s)
            told.append({"pair": pair, **asdict(heard)})
        await self._put(f"heard/{stage}/{me}", told)

    def _answer(self, rank: int, number: int, send_s: float) -> wire.Measurement:
        return wire.answer(self._listener.take(rank, number, _START_S), _START_S, send_s)

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
        told: dict[tuple[Pair, int], wire.Measurement] = {}
        for rank in range(n):
            for entry in await self._get(f"heard/{stage}/{rank}"):
                heard = wire.Measurement(entry["in_bps"], entry["rtt_s"], entry["problem"])
                told[(entry["pair"][0], entry["pair"][1]), rank] = heard
        for pair in (pair for pairs in rounds for pair in pairs):
            silent = wire.Measurement(problem="this link was not measured")
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


def _joined(pair: Pair, connector: wire.Measurement, listener: wire.Measurement) -> Link:
    """Combine both sides. If the link failed, use the reason of the node that opened the connection."""
    if connector.in_bps is None and listener.in_bps is None:
        return Link(pair, rtt_s=connector.rtt_s, problem=connector.problem or listener.problem or "no answer")
    return Link(pair, listener.in_bps, connector.in_bps, connector.rtt_s)


# --- the verdict -----------------------------------------------------------------------------------------


def _verdict(links: Mapping[Pair, Link], cards: Mapping[int, Card]) -> dict[str, Any]:
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
        tuple(Link(**(each | {"pair": (each["pair"][0], each["pair"][1])})) for each in told["links"]),
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
