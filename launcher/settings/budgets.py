"""The time limits of hang detection: `--hang-timeout`. `launcher.health.stall_detection` applies them."""

from __future__ import annotations

from rendezvous.values.late_dataclass import dataclass

_LONG_S = 1800.0
# By default, a rank that others wait for, and that shows no sign of life for so long, hangs: torch's shortest default
# timeout of a process group.
ASLEEP_S = 600.0
_CHECKS_PER_LIMIT = 10
_LONGEST_PERIOD_S, _SHORTEST_PERIOD_S = 1.0, 0.1


@dataclass(frozen=True, slots=True)
class Budgets:
    """The user's time limits per phase. They apply if `step_s` is set. If it is None, only evidence ends a job."""

    enabled: bool = True
    step_s: float | None = None
    start_s: float = _LONG_S
    first_step_s: float = _LONG_S
    checkpoint_s: float = _LONG_S
    evaluation_s: float = _LONG_S

    @property
    def by_evidence(self) -> bool:
        return self.enabled and self.step_s is None

    @property
    def period_s(self) -> float:
        """Time between two checks."""
        shortest = min(self.step_s, self.start_s, self.first_step_s) if self.step_s else ASLEEP_S
        return min(_LONGEST_PERIOD_S, max(_SHORTEST_PERIOD_S, shortest / _CHECKS_PER_LIMIT))
