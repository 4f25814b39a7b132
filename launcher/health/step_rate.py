"""How far the ranks of this node are, how fast, and how much time is left, in a few words for the progress line. Pure.

The slowest rank counts. The time left is known if the script tells how many steps it will take
(`ddp.status(total=...)`). It is computed from the average of all steps but the first: over a long time the last steps
are no better guess.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rendezvous.values.rank_view import RankView

_STUCK_S = 10.0  # without a step, and ...
_STUCK_STEPS = 5  # ... for so many times the time of a step: a rate would be a thing of the past


def in_words(views: Sequence[RankView]) -> str:
    """For example "step 120 of 5000, 3.2 steps/s, 25:25 left"; "" if no rank has finished a step."""
    shown = [view for view in views if view.known and view.process.alive]
    if not shown or not all(view.step for view in shown):
        return ""
    last = min(shown, key=lambda view: view.step)
    total = last.totals.total_steps
    parts = [f"step {last.step} of {total}" if total else f"step {last.step}"]
    step_s = max(view.mean_step_s for view in shown)
    if not step_s:
        return parts[0]
    if last.step_s > max(_STUCK_S, _STUCK_STEPS * step_s):
        return f"{parts[0]}, no step for {_clock(last.step_s)}"
    parts.append(f"{1 / step_s:.3g} steps/s" if step_s <= 1 else f"{step_s:.3g} s per step")
    return ", ".join([*parts, *_left(last, total)])


def _left(last: RankView, total: int) -> list[str]:
    steps = last.totals.steps
    measured = sum(steps.bins)
    if not measured or total <= last.step:
        return []
    return [f"{_clock((total - last.step) * steps.sum_s / measured)} left"]


def _clock(seconds: float) -> str:
    whole = int(min(seconds, 1e9))
    minutes = f"{whole // 60 % 60:02d}:{whole % 60:02d}"
    return f"{whole // 3600}:{minutes}" if whole >= 3600 else minutes.removeprefix("0")
