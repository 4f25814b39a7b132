"""Plans which nodes measure the link between them in which round, and finds slow nodes and links in the results.

In a round, every node measures with at most one other node, so that two tests never share a network card. The pairs are
those of a round-robin tournament (the circle method). Up to about 20 nodes, all its rounds are run and every link is
measured. With more nodes, 4 log2(n) rounds are run, spread over the tournament, so each node is tested with 4 log2(n)
others. Then each network card is still measured with many partners, but not every link is measured. To find any single
slow link, all n - 1 links of a node would have to be measured.

The baseline, the expected speed of this network, is the upper quartile of all measurements. A node that is slow with
nearly all its partners (and has at least two) is slow itself, and its measurements do not count against other nodes.
For the remaining slow links, both nodes are healthy. Slow measurements are repeated, up to three times and with few
links at once, before a node is reported as slow: the best result counts. Nodes that share a host do not measure a
network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from launcher.preflight.checkup import Check, Grade, skipped
from rendezvous.values.durations import short_duration
from rendezvous.values.late_dataclass import dataclass

Pair = tuple[int, int]  # the first connects to the second

_ROUNDS_PER_DOUBLING = 4


def schedule(n: int) -> tuple[tuple[Pair, ...], ...]:
    """Return rounds of pairs of node ranks. A node is in at most one pair per round, a pair in at most one round."""
    if n < 2:
        return ()
    seats = n + n % 2  # with an odd number of nodes, one pauses in each round
    whole = seats - 1
    rounds = min(whole, _ROUNDS_PER_DOUBLING * (n - 1).bit_length())
    return tuple(_round(n, seats, at * whole // rounds) for at in range(rounds))


def _round(n: int, seats: int, turn: int) -> tuple[Pair, ...]:
    """Keep the last node fixed; rotate the other nodes by one position per round."""
    moving = seats - 1
    circle = [(turn + at) % moving for at in range(moving)]
    pairs = [(seats - 1, circle[0])]
    pairs += [(circle[at], circle[-at]) for at in range(1, seats // 2)]
    return tuple(sorted(_directed(*sorted(pair)) for pair in pairs if max(pair) < n))


def _directed(low: int, high: int) -> Pair:
    """Let about half of the nodes connect and half listen, so that a closed port is detected."""
    return (low, high) if (low + high) % 2 else (high, low)


def in_rounds(pairs: Iterable[Pair], at_once: int) -> tuple[tuple[Pair, ...], ...]:
    """Group these pairs: no node twice in a round, and no more than `at_once` pairs in one."""
    rounds: list[list[Pair]] = []
    for pair in pairs:
        for taken in rounds:
            if len(taken) < at_once and not any(end in other for other in taken for end in pair):
                taken.append(pair)
                break
        else:
            rounds.append([pair])
    return tuple(tuple(each) for each in rounds)


# --- measurements --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """What two nodes have measured, in bits per second each way. None: no measurement."""

    pair: Pair
    there_bps: float | None = None  # from the connector
    back_bps: float | None = None
    rtt_s: float | None = None
    problem: str = ""

    @property
    def bps(self) -> float:
        known = [each for each in (self.there_bps, self.back_bps) if each is not None]
        return min(known) if known and not self.problem else 0.0


def better_of(first: MeasuredLink, second: MeasuredLink) -> MeasuredLink:
    """Return the better of two measurements: a disturbance only makes a link slower."""
    if first.problem or second.problem:
        return second if first.problem else first
    rtts = [each for each in (first.rtt_s, second.rtt_s) if each is not None]
    best = first if first.bps > second.bps else second
    return replace(best, rtt_s=min(rtts, default=None))


@dataclass(frozen=True, slots=True)
class Baseline:
    """What this network can do; zeros if there are too few measurements."""

    bps: float = 0.0
    rtt_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SlowNode:
    node: int
    bps: float
    rtt_s: float
    partners: int
    unreachable: bool = False


@dataclass(frozen=True, slots=True)
class Findings:
    baseline: Baseline = Baseline()
    nodes: tuple[SlowNode, ...] = ()
    links: tuple[MeasuredLink, ...] = ()  # slow links between good ends
    measured: int = 0


SLOW_FACTOR = 2.5  # of the baseline's bandwidth: a warning ...
BAD_FACTOR = 5.0  # ... and a failure
_RTT_FACTOR, _RTT_MARGIN_S = 4.0, 0.001
_BAD_RTT_FACTOR, _BAD_RTT_MARGIN_S = 20.0, 0.010
_FLOOR_BPS = 100e6  # the minimum for any network that carries gradients
_FLOOR_RTT_S = 0.050
_ALL = 0.8  # of a node's partners: one lucky measurement must not hide a slow node


def baseline(links: Iterable[MeasuredLink]) -> Baseline:
    sound = [link for link in links if not link.problem]
    if not sound:
        return Baseline()
    rates = sorted((link.bps for link in sound), reverse=True)
    times = sorted(link.rtt_s for link in sound if link.rtt_s is not None)
    return Baseline(rates[len(rates) // 4], times[len(times) // 4] if times else 0.0)


def is_slow(link: MeasuredLink, best: Baseline) -> bool:
    return _falls_short(link, best.bps / SLOW_FACTOR, _limit_of_rtt(best))


def _limit_of_rtt(best: Baseline) -> float:
    return max(best.rtt_s * _RTT_FACTOR, best.rtt_s + _RTT_MARGIN_S)


def is_bad(link: MeasuredLink, best: Baseline) -> bool:
    """Return whether the link is so slow that the node should be excluded."""
    limit = max(best.rtt_s * _BAD_RTT_FACTOR, best.rtt_s + _BAD_RTT_MARGIN_S)
    return _falls_short(link, best.bps / BAD_FACTOR, limit)


def _falls_short(link: MeasuredLink, bps: float, rtt_s: float) -> bool:
    return bool(link.problem) or link.bps < bps or (link.rtt_s or 0.0) > rtt_s


def suspects(
    links: Sequence[MeasuredLink], hosts: Mapping[int, str], *, again: bool = False
) -> tuple[Pair, ...]:
    """Return the pairs to measure again. `again`: this was a repetition, so bad links are confirmed and left out."""
    counted = _between_hosts(links, hosts)
    best = baseline(counted)
    slow = [link for link in counted if is_slow(link, best)]
    return tuple(link.pair for link in slow if not (again and is_bad(link, best)))


def _between_hosts(links: Iterable[MeasuredLink], hosts: Mapping[int, str]) -> list[MeasuredLink]:
    """Keep failed links even on one host: agents on one host that cannot connect are also a finding."""
    return [link for link in links if link.problem or hosts[link.pair[0]] != hosts[link.pair[1]]]


def judge(links: Sequence[MeasuredLink], hosts: Mapping[int, str]) -> Findings:
    counted = _between_hosts(links, hosts)
    best = baseline(counted)
    slow = [link for link in counted if is_slow(link, best)]
    guilty = _slow_nodes(counted, slow)
    named = [node.node for node in guilty]
    between = tuple(link for link in slow if link.pair[0] not in named and link.pair[1] not in named)
    return Findings(best, guilty, between, len(counted))


def _slow_nodes(counted: Sequence[MeasuredLink], slow: Sequence[MeasuredLink]) -> tuple[SlowNode, ...]:
    counts: dict[int, int] = {}
    for link in counted:
        for end in link.pair:
            counts[end] = counts.get(end, 0) + 1
    found = []
    for node, partners in sorted(counts.items()):
        own = [link for link in slow if node in link.pair]
        if partners < 2 or len(own) < _ALL * partners:
            continue
        rates, times = (
            sorted(link.bps for link in own),
            sorted(link.rtt_s for link in own if link.rtt_s is not None),
        )
        unreachable = all(link.problem for link in own)
        typical = times[len(times) // 2] if times else 0.0
        found.append(SlowNode(node, rates[len(rates) // 2], typical, partners, unreachable))
    return tuple(found)


# --- as text --------------------------------------------------------------------------------------------


def checks_of(me: int, findings: Findings, names: Mapping[int, str]) -> tuple[Check, ...]:
    """Report the links of node `me`, and slow links of other nodes."""
    best, floor = findings.baseline, _floor(findings.baseline)
    own = [node for node in findings.nodes if node.node == me]
    mine = sorted((link for link in findings.links if me in link.pair), key=_worst_first)
    if own:
        first = _of_slow_node(own[0], best, floor)
    elif mine:
        first = _of_slow_links(me, mine, best, floor, names)
    else:
        first = _of_the_network(best, floor, findings.measured)
    return first, *_elsewhere(me, findings, names)


def _floor(best: Baseline) -> str:
    return (
        f"at least {_rate(best.bps / SLOW_FACTOR)}, round trip at most {short_duration(_limit_of_rtt(best))}"
    )


def _of_slow_node(own: SlowNode, best: Baseline, floor: str) -> Check:
    if own.unreachable:
        found = f"none of {own.partners} other nodes can connect to this node"
        return Check("links", Grade.FAIL, found, floor, "check its firewall, --interface and cable")
    bad = is_bad(MeasuredLink((own.node, own.node), own.bps, own.bps, own.rtt_s), best)
    found = (
        f"the links to all {own.partners} measured nodes are slow: {_rate(own.bps)}, {short_duration(own.rtt_s)}; "
        f"other links have {_rate(best.bps)}"
    )
    advice = "check its network card, cable and switch port (ethtool), and other traffic on them"
    return Check("links", Grade.FAIL if bad else Grade.WARN, found, floor, advice)


def _worst_first(link: MeasuredLink) -> tuple[bool, float]:
    return (not link.problem, link.bps)


def _of_slow_links(
    me: int, mine: Sequence[MeasuredLink], best: Baseline, floor: str, names: Mapping[int, str]
) -> Check:
    """If two nodes cannot connect, only one of them can be in the job: the node with the higher node rank fails."""
    others = [names[link.pair[0] if link.pair[1] == me else link.pair[1]] for link in mine]
    is_dropped = any(link.problem and me == max(link.pair) for link in mine)
    found = "; ".join(
        f"the link to {other}: {_link_text(link)}" for other, link in zip(others[:4], mine, strict=False)
    )
    found += f"; other links have {_rate(best.bps)}" if best.bps else ""
    advice = f"both nodes can connect to other nodes: check the path between this node and {others[0]}"
    if not best.bps:
        advice = (
            "check firewalls, --interface and cables of both nodes: two nodes do not show which is faulty"
        )
    return Check("links", Grade.FAIL if is_dropped else Grade.WARN, found, floor, advice)


def _of_the_network(best: Baseline, floor: str, measured: int) -> Check:
    if not measured:
        return skipped("links", "all nodes are on one host")
    found = f"as fast as the links of other nodes: {_rate(best.bps)}, {short_duration(best.rtt_s)}"
    if best.bps >= _FLOOR_BPS and best.rtt_s <= _FLOOR_RTT_S:
        return Check("links", Grade.OK, found, floor)
    advice = "the whole network is slow: check that it is the right one (--interface)"
    return Check(
        "links",
        Grade.WARN,
        found,
        f"at least {_rate(_FLOOR_BPS)}, round trip at most {short_duration(_FLOOR_RTT_S)}",
        advice,
    )


def _link_text(link: MeasuredLink) -> str:
    return link.problem or f"{_rate(link.bps)}, {short_duration(link.rtt_s or 0.0)}"


def _elsewhere(me: int, findings: Findings, names: Mapping[int, str]) -> tuple[Check, ...]:
    """Report slow links between other nodes. They do not change the grade of this node."""
    told = [
        f"{names[node.node]} is {'unreachable' if node.unreachable else f'slow on all its links: {_rate(node.bps)}'}"
        for node in findings.nodes
        if node.node != me
    ]
    told += [
        f"between {names[link.pair[0]]} and {names[link.pair[1]]}: {_link_text(link)}"
        for link in findings.links
        if me not in link.pair
    ]
    more = f"; and {len(told) - 8} more" if len(told) > 8 else ""
    return (Check("links elsewhere", Grade.OK, "; ".join(told[:8]) + more),) if told else ()


def _rate(bps: float) -> str:
    return f"{bps / 1e9:.3g} Gbit/s" if bps >= 1e9 else f"{bps / 1e6:.3g} Mbit/s"
