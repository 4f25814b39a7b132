"""Decides whether the ranks of this node still make progress while the service is unreachable. Pure.

Theory of operation
-------------------
A healthy run must survive an outage of the service. Ranks that wait for peers of an abandoned world must not keep
their GPUs for ever. Only the ranks show the difference, so the agent watches them: it stops them if the service has
been unreachable for `--isolation-timeout` *and* the last sign of progress is at least that old.

Signs of progress, from the strongest to the weakest: a new training step (if ranks publish it), a line of output,
processor time above that of idle processes. Each errs towards letting the ranks continue: a rank that spins in a
collective looks busy, and its own timeout must end it. Stopping a healthy run would be the worse error. See
docs/decisions/0009.

If no rank runs, there is nothing to protect: the agent retries for as long as it would have waited to join, and
then ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# A rank that waits, with all its threads, uses well under 1 % of a processor; one that trains, all of it.
_IDLE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Signs:
    """Of all ranks of the node together, as they grow."""

    at: float
    cpu_s: float = 0.0
    output_bytes: int = 0
    ranks: int = 1
    step: int | None = None  # of the rank that is furthest behind; None: no rank publishes it


@dataclass(frozen=True, slots=True)
class Isolation:
    since: float
    progress_at: float
    seen: Signs
    idle_since: float | None = None  # no rank has run from then on


def cut_off(signs: Signs) -> Isolation:
    """Nobody has looked before: the ranks get the benefit of the doubt."""
    return Isolation(signs.at, signs.at, signs, None if signs.ranks else signs.at)


def look(isolation: Isolation, signs: Signs) -> Isolation:
    moved = _moved(isolation.seen, signs)
    idle_since = None if signs.ranks else isolation.idle_since or signs.at
    progress_at = signs.at if moved else isolation.progress_at
    return replace(isolation, seen=signs, progress_at=progress_at, idle_since=idle_since)


def _moved(before: Signs, now: Signs) -> bool:
    if before.step is not None and now.step is not None:
        return now.step != before.step
    busy = now.cpu_s - before.cpu_s > _IDLE_SHARE * (now.at - before.at)
    return busy or now.output_bytes != before.output_bytes


def is_over(isolation: Isolation, timeout_s: float) -> bool:
    """Both have lasted: the silence of the service, and that of the ranks."""
    if isolation.idle_since is not None:
        return False
    return isolation.seen.at - max(isolation.since, isolation.progress_at) >= timeout_s


def is_hopeless(isolation: Isolation, give_up_s: float) -> bool:
    return isolation.idle_since is not None and isolation.seen.at - isolation.idle_since >= give_up_s


def next_look_s(timeout_s: float) -> float:
    """Often enough to be a tenth late at most, and seldom enough to cost nothing."""
    return min(10.0, timeout_s / 10.0)


def in_words(isolation: Isolation) -> str:
    cut, still = (isolation.seen.at - then for then in (isolation.since, isolation.progress_at))
    return (
        f"cut off from the rendezvous for {cut:.0f} s, and its ranks made no progress for {still:.0f} s "
        "(--isolation-timeout)"
    )
