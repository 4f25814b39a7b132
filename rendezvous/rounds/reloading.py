"""Reloads: all ranks start again with the edited files of the script, and with the earlier files if that fails. Pure.

An *edition* is a state of the script's files. `Reload.edition` counts them; an agent that gets an assignment of another
edition starts the ranks from a new template. Before a reload, the ranks ran the files as they were when some generation
started, and each agent has kept these. They are taken again, which is a *rollback*, if a rank fails before it has
finished `steps` further steps. If the script numbers its steps over all restarts, they are counted from the step that
the job had reached; otherwise from the start of the processes.

- A lost node says nothing about the script. Its failure is handled as any other, and the reload stays on trial. A
  condition of `--stop-when` ends the job.
- A rollback does not count against `--max-restarts`, `--crash-loop` or the node. It happens once: the failures after it
  are handled as any other.
- The decision is made at the first report, because the stop must not wait. It is carried out when all have stopped and
  the first cause is known.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.values.state import Reload
from rendezvous.values.types import Decision, FailureClass, SourceChange

if TYPE_CHECKING:
    from rendezvous.rounds.policy import Plan
    from rendezvous.values.state import JobState
    from rendezvous.values.types import Cause, Reached

MOST_STEPS = 1_000_000
# A program that finishes no steps, such as a server, is not on trial for ever.
_WITHOUT_STEPS_S = 3600.0


def ordered(state: JobState, steps: int) -> JobState:
    """The state in which a reload was ordered: the next ranks run the files as they are then."""
    was = state.reload
    return replace(
        state,
        reload=Reload(
            edition=was.edition + 1,
            before=(was.kept_from or state.generation) if steps else 0,
            steps=steps,
            reloads=was.reloads + 1,
            rollbacks=was.rollbacks,
        ),
    )


def begun(state: JobState, reached: Reached | None) -> JobState:
    """All ranks of the earlier files have stopped. `reached`: the steps that they had finished."""
    first = reached.step if reached is not None and reached.numbered else 0
    return replace(state, reload=replace(state.reload, first_step=first))


def is_early(state: JobState, cause: Cause) -> bool:
    """Whether this failure is answered with a rollback."""
    trial = state.reload
    if not trial.before or cause.final or cause.failure is FailureClass.NODE_LOST:
        return False
    if not cause.step:
        return cause.ran_s < _WITHOUT_STEPS_S
    return cause.step < trial_until(trial)


def trial_until(trial: Reload) -> int:
    """The step from which failures are no longer answered with a rollback; 0: no reload is on trial."""
    return trial.first_step + trial.steps if trial.before else 0


def rollback(state: JobState, cause: Cause, words: str, plan: Plan) -> Decision:
    """`words`: the cause in words."""
    when = f"within the first {state.reload.steps} steps" if cause.step else "before its first step"
    reason = (
        f"{words}; the edited script failed {when} after the reload, so its earlier files are taken again; "
        f"{plan.words}"
    )
    return replace(plan.decision(reason, state.generation, cause), sources=SourceChange.ROLLBACK)


def rolled_back(state: JobState) -> JobState:
    """The state in which all ranks of the edited files have stopped, and the next ones run the earlier files."""
    was = state.reload
    return replace(
        state,
        reload=Reload(
            edition=was.edition + 1,
            kept_from=was.before,
            reloads=was.reloads,
            rollbacks=was.rollbacks + 1,
        ),
    )
