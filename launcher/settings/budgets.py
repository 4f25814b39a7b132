"""How long ranks may make no progress: `--hang-timeout`. `launcher.health.stall_detection` defines progress."""

from __future__ import annotations

from rendezvous.values.late_dataclass import dataclass

_LONG_S = 1800.0
AT_WORK_S = 600.0
ASLEEP_S = 120.0
_CHECKS_PER_LIMIT = 10
_LONGEST_PERIOD_S, _SHORTEST_PERIOD_S = 1.0, 0.1


@dataclass(frozen=True, slots=True)
class Budgets:
    """Time limits per phase. `step_s` is None for auto."""

    enabled: bool = True
    step_s: float | None = None
    start_s: float = _LONG_S
    first_step_s: float = _LONG_S
    checkpoint_s: float = _LONG_S
    evaluation_s: float = _LONG_S

    @property
    def period_s(self) -> float:
        """Time between two checks."""
        shortest = min(self.step_s or ASLEEP_S, self.start_s, self.first_step_s)
        return min(_LONGEST_PERIOD_S, max(_SHORTEST_PERIOD_S, shortest / _CHECKS_PER_LIMIT))
