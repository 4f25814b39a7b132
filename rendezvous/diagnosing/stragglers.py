"""Find ranks that are slower than their peers, and the phase in which they are slower. Pure.

The measure is the *own time* of a rank: the time of its steps in which it does not wait for others. In a synchronous
job all ranks take the same time per step, because they wait for the slowest one.

Agents report periodically how long each rank has spent in each phase since its start. When all nodes have reported
again, a window closes, and the times per step of the ranks in it are compared. A rank is slow in a phase on two
conditions: it takes longer than `factor` times the median of its peers, and the difference is at least 5 % of a step.
A rank that is slow for several windows in a row is reported. After several windows at normal speed it is no longer
reported. `ddpctl top` and the page compare own times from look to look (`standings`), and so show a slow rank earlier.

Waiting for other ranks is not counted as slowness. But some waits may be part of another phase: torch's own reducer
waits within the backward pass, where every rank waits except the slow one, and this is not seen if autograd is
compiled. In the data loader ranks do not wait for peers, so a longer time there is enough to call a rank slow. In any
other phase the rank must also be slower in the sum of its own phases. With an even number of peers, the higher of the
two middle values is used. So with three ranks, a rank is not reported if another rank is as slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.values.durations import short_duration
from rendezvous.values.frozen_map import EMPTY, FrozenMap
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_time import PhaseTimes, Slowness, SlowRank, StragglerState

if TYPE_CHECKING:
    from rendezvous.values.types import StragglerRule

WINDOWS_TO_NAME = 3  # in a row
WINDOWS_TO_CLEAR = 4
_FEWEST_STEPS = 3  # of each rank, or the window stays open
_MATTERS = 0.05  # of a peer's step
_LEAST_S = 0.001
_SHOWS_IN_ALL = 0.5  # at least this part of a rank's delay must be in the sum of its own phases

PHASES = {
    "data_s": "its data loader",
    "forward_s": "the forward pass",
    "backward_s": "the backward pass",
    "optimizer_s": "the optimizer step",
    "idle_s": "other code of the script",
}


News = tuple[str, str]  # of a rank that became a straggler, or is none any more: its node, and a text


def add_report(
    straggler_state: StragglerState,
    node: str,
    phase_times: tuple[PhaseTimes, ...],
    nodes: int,
    rule: StragglerRule,
) -> tuple[StragglerState, tuple[News, ...]]:
    """Add the report of one node. The world has `nodes` nodes. A second report in a window replaces the first one."""
    straggler_state = replace(straggler_state, reports=straggler_state.reports.plus(node, phase_times))
    if len(straggler_state.reports) < nodes:
        return straggler_state, ()
    compared, home = _compared(straggler_state)
    if any(times.steps < _FEWEST_STEPS for times in compared.values()):
        return replace(straggler_state, reports=EMPTY), ()
    found, news = _after_window(straggler_state.slow_ranks, slow_ranks(compared, rule.factor), compared, home)
    return StragglerState(base=straggler_state.reports, slow_ranks=found), news


def _compared(straggler_state: StragglerState) -> tuple[dict[int, PhaseTimes], dict[int, str]]:
    """The times per step in this window and the nodes, for ranks that had finished a step before the window began."""
    steps: dict[int, PhaseTimes] = {}
    home: dict[int, str] = {}
    for node, phase_times in straggler_state.reports.items():
        before = {times.rank: times for times in straggler_state.base.get(node, ())}
        for times in phase_times:
            if times.steps and times.rank in before and before[times.rank].steps:
                steps[times.rank] = _per_step(before[times.rank], times)
                home[times.rank] = node
    return steps, home


def _per_step(a: PhaseTimes, b: PhaseTimes) -> PhaseTimes:
    """The times per step in the window. `steps` is 0 if the count did not grow, for example after a restart."""
    n = b.steps - a.steps
    if n <= 0:
        return PhaseTimes(b.rank, 0)
    return PhaseTimes(
        b.rank,
        n,
        (b.data_s - a.data_s) / n,
        (b.forward_s - a.forward_s) / n,
        (b.backward_s - a.backward_s) / n,
        (b.optimizer_s - a.optimizer_s) / n,
        (b.idle_s - a.idle_s) / n,
        (b.waiting_s - a.waiting_s) / n,
    )


# --- one window ----------------------------------------------------------------------------------------


def slow_ranks(phase_times: Mapping[int, PhaseTimes], factor: float) -> dict[int, Slowness]:
    """The slow ranks in order, each with the phase in which it loses most time. `phase_times` are per step."""
    if len(phase_times) < 2:
        return {}
    ranks = sorted(phase_times)
    own = _with_peers([phase_times[rank].own_s for rank in ranks])
    whole = _with_peers([phase_times[rank].own_s + phase_times[rank].waiting_s for rank in ranks])
    found: dict[int, Slowness] = {}
    for phase in PHASES:
        spans = _with_peers([getattr(phase_times[rank], phase) for rank in ranks])
        for i, rank in enumerate(ranks):
            mine, peers = spans[i]
            lost = mine - peers
            if mine <= factor * peers or lost < max(_LEAST_S, _MATTERS * whole[i][1]):
                continue
            if phase != "data_s" and own[i][0] - own[i][1] < _SHOWS_IN_ALL * lost:
                continue
            before = found.get(rank)
            if before is None or lost > before.own_s - before.peers_s:
                found[rank] = Slowness(phase, mine, peers)
    return {rank: found[rank] for rank in ranks if rank in found}


def _with_peers(values: Sequence[float]) -> list[tuple[float, float]]:
    """Each value with the (higher) median of the others."""
    order = sorted(range(len(values)), key=values.__getitem__)
    middle = (len(values) - 1) // 2
    pairs = [(0.0, 0.0)] * len(values)
    for place, i in enumerate(order):
        pairs[i] = (values[i], values[order[middle + 1 if place <= middle else middle]])
    return pairs


# --- from look to look ---------------------------------------------------------------------------------

SLOW, VERY_SLOW = 1.2, 1.6  # times the own time of its peers


@dataclass(frozen=True, slots=True)
class Standing:
    """The own time of a rank per step, and that of its peers as the divisor of a ratio."""

    own_s: float
    ratio: float = 1.0
    level: int = 0  # 0: as fast as its peers, 1: slow, 2: very slow


def standings(own: Mapping[int, float], step_s: float) -> dict[int, Standing]:
    """How ranks compare, from the own time of each per step. `step_s`: what a step of the job takes."""
    if len(own) < 2:
        return {rank: Standing(own_s) for rank, own_s in own.items()}
    pairs = zip(own, _with_peers(list(own.values())), strict=True)
    return {rank: _standing(own_s, peers_s, step_s) for rank, (own_s, peers_s) in pairs}


def _standing(own_s: float, peers_s: float, step_s: float) -> Standing:
    ratio = own_s / peers_s if peers_s > 0 else 1.0
    matters = own_s - peers_s >= max(_LEAST_S, _MATTERS * step_s)
    return Standing(own_s, ratio, (ratio >= SLOW) + (ratio >= VERY_SLOW) if matters else 0)


# --- over windows --------------------------------------------------------------------------------------


def _after_window(
    known: FrozenMap[int, SlowRank],
    slow: Mapping[int, Slowness],
    compared: Mapping[int, PhaseTimes],
    home: Mapping[int, str],
) -> tuple[FrozenMap[int, SlowRank], tuple[News, ...]]:
    news: list[News] = []
    for rank in sorted({**slow, **dict(known.items())}):
        before = known.get(rank)
        if rank not in compared:
            continue
        if rank in slow:
            times = 1 + (before.slow if before is not None and not before.fast else 0)
            named = times >= WINDOWS_TO_NAME or (before is not None and before.named)
            known = known.plus(rank, SlowRank(home[rank], times, 0, named, slow[rank]))
            if named and not (before is not None and before.named):
                news.append((home[rank], in_words(rank, home[rank], slow[rank])))
        elif before is not None and before.named and before.fast + 1 < WINDOWS_TO_CLEAR:
            known = known.plus(rank, replace(before, slow=0, fast=before.fast + 1))
        elif before is not None:
            known = known.minus(rank)
            if before.named:
                news.append((before.node, no_longer(rank, before.node)))
    return known, tuple(news)


def in_words(rank: int, node: str, slowness: Slowness) -> str:
    where = PHASES[slowness.phase]
    own, peers = short_duration(slowness.own_s), short_duration(slowness.peers_s)
    return f"rank {rank} on {node} is slower than its peers: {own} per step in {where}, its peers {peers}"


def no_longer(rank: int, node: str) -> str:
    return f"rank {rank} on {node} is no longer a straggler"


# --- at the next restart -------------------------------------------------------------------------------


def nodes_to_exclude(
    straggler_state: StragglerState, present: Sequence[str], min_nodes: int
) -> dict[str, str]:
    """The nodes to exclude, with the reason: the slowest first. At least `min_nodes` of the present nodes remain."""
    slowest = sorted(
        straggler_state.named,
        key=lambda pair: pair[1].slowness.own_s - pair[1].slowness.peers_s,
        reverse=True,
    )
    chosen: dict[str, str] = {}
    for rank, slow_rank in slowest:
        node = slow_rank.node
        if node in present and node not in chosen and len(present) - len(chosen) > min_nodes:
            chosen[node] = in_words(rank, node, slow_rank.slowness)
    return chosen
