"""Decides whether the ranks of this node still make progress while the service is unreachable. Pure.

Theory of operation
-------------------
A healthy job must survive an outage of the service. But ranks that wait for peers of an ended generation must not keep
their GPUs forever. The agent can distinguish the two cases only by the progress of the ranks. It stops them if the
service has been unreachable for `--isolation-timeout` *and* the last sign of progress is at least that old.

Signs of progress, from the strongest to the weakest: a new training step (if ranks publish it), a line of output,
more CPU time than an idle process uses. If a sign is uncertain, the ranks continue, because to stop a healthy job is
the worse error. For example, a rank that spins in a collective uses CPU time, and only its own timeout ends it. See
docs/decisions/0009.

If no rank runs, the agent retries for `--join-timeout` and then ends.
"""

from __future__ import annotations

from dataclasses import replace

from rendezvous.values.late_dataclass import dataclass

# A rank that waits, with all its threads, uses well under 1 % of a CPU; a rank that trains uses all of it.
_IDLE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class ProgressSigns:
    """Signs of progress: sums over all ranks of the node, which only increase."""

    at: float
    cpu_s: float = 0.0
    output_bytes: int = 0
    ranks: int = 1
    step: int | None = None  # of the rank that is furthest behind; None: no rank publishes it


@dataclass(frozen=True, slots=True)
class Isolation:
    since: float
    progress_at: float
    seen: ProgressSigns
    idle_since: float | None = None  # since when no rank runs


def contact_lost(signs: ProgressSigns) -> Isolation:
    """Start: there is no earlier sample, so the time without progress starts at 0."""
    return Isolation(signs.at, signs.at, signs, None if signs.ranks else signs.at)


def updated(isolation: Isolation, signs: ProgressSigns) -> Isolation:
    moved = _moved(isolation.seen, signs)
    idle_since = None if signs.ranks else isolation.idle_since or signs.at
    progress_at = signs.at if moved else isolation.progress_at
    return replace(isolation, seen=signs, progress_at=progress_at, idle_since=idle_since)


def _moved(before: ProgressSigns, now: ProgressSigns) -> bool:
    if before.step is not None and now.step is not None:
        return now.step != before.step
    busy = now.cpu_s - before.cpu_s > _IDLE_SHARE * (now.at - before.at)
    return busy or now.output_bytes != before.output_bytes


def is_over(isolation: Isolation, timeout_s: float) -> bool:
    """Whether the service was unreachable, and the ranks made no progress, both for the timeout."""
    if isolation.idle_since is not None:
        return False
    return isolation.seen.at - max(isolation.since, isolation.progress_at) >= timeout_s


def is_hopeless(isolation: Isolation, give_up_s: float) -> bool:
    return isolation.idle_since is not None and isolation.seen.at - isolation.idle_since >= give_up_s


def pause_s(timeout_s: float) -> float:
    """Time to the next check: at most 10 % of the timeout, so that the agent reacts at most that late."""
    return min(10.0, timeout_s / 10.0)


def in_words(isolation: Isolation) -> str:
    cut, still = (isolation.seen.at - then for then in (isolation.since, isolation.progress_at))
    return (
        f"the rendezvous was unreachable for {cut:.0f} s, and the ranks made no progress for {still:.0f} s "
        "(--isolation-timeout). Check the network of this node"
    )
