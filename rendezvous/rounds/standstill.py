"""Failures in a row without a further step: with `--crash-loop` they end the job, and heals of them are limited. Pure.

A budget per time window never ends a job that fails slowly: `--max-restarts 10/1h` permits a failure every seven
minutes for ever. So progress is counted in steps. Agents report with each stop how many steps their ranks have
finished. A generation that fails has made no progress

- if the script numbers its steps over all restarts (`ddp.elastic`, `ddp.status(step=...)`): if its highest step is not
  above that of all generations before it;
- otherwise, if it was formed in place, so that the counts of its ranks go on: if it has finished no further step;
- otherwise, if it has finished no step at all, although earlier generations have.

Steps that new processes have finished are progress: the next ones may resume after them. If no rank has a status page
(programs without torch), or if ranks have saved checkpoints but finished no step, the generation counts neither way. A
script that has never finished a step, such as a server, may fail in several ways and go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rendezvous.values.state import Standstill
from rendezvous.values.types import Reached

if TYPE_CHECKING:
    from rendezvous.values.state import JobState
    from rendezvous.values.types import Cause, JobSpec


def after_failure(state: JobState, first: Cause) -> Standstill:
    """The standstill after this generation. All nodes have stopped, and `first` is the first cause."""
    was, now, manner = state.standstill, reached(state), f"{first.rank} {first.failure} {first.exit_code}"
    if now is None:
        return was
    times = 1 if _is_further(state, now, manner) else was.times + 1
    return _noted(was, now, times, manner)


def after_order(state: JobState) -> Standstill:
    """The same after a stop that is no failure, such as growth. It ends a standstill if there were further steps."""
    was, now = state.standstill, reached(state)
    if now is None or not _is_further(state, now, was.manner):
        return was
    return _noted(was, now, 0, "")


def in_words(spec: JobSpec, standstill: Standstill) -> str:
    """Why the job ends; empty if it does not."""
    limit, step = spec.crash_loop.without_step, standstill.step
    if limit <= 0 or standstill.times < limit:
        return ""
    if not step:
        where = "without finishing a step"
    elif standstill.numbered:
        where = f"without getting beyond step {max(step, standstill.highest)}"
    else:
        where = f"each time after {step} steps"
    return (
        f"the job failed {standstill.times} times in a row {where}; "
        "it ends, because it would probably fail again (--crash-loop)"
    )


def reached(state: JobState) -> Reached | None:
    """The most steps that a rank of this generation has finished, as far as this is known."""
    told = list(state.reached.values())
    if not told:
        steps = [cause.step for cause in state.causes.values() if cause.step is not None]
        return Reached(max(steps)) if steps else None
    numbered = [each for each in told if each.numbered]
    return max(numbered or told, key=lambda each: each.step)


def _noted(was: Standstill, now: Reached, times: int, manner: str) -> Standstill:
    highest = max(was.highest, now.step) if now.numbered else was.highest
    return Standstill(times, now.step, now.numbered, highest, was.stepped or now.step > 0, manner)


def _is_further(state: JobState, now: Reached, manner: str) -> bool:
    was = state.standstill
    if now.numbered:
        return now.step > was.highest
    if now.step == 0:
        return not was.stepped and manner != was.manner
    return now.step != was.step or not _formed_in_place(state)


def _formed_in_place(state: JobState) -> bool:
    before = (d.in_place for d in reversed(state.decisions) if d.generation == state.generation - 1)
    return next(before, False)
