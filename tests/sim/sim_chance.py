"""Everything that the simulator leaves to chance, drawn from one seed; and a world in which nothing is.

`Chance` draws faults of the network, of stores, of processes and of ranks until `heal()`. `Calm` draws the mildest
value of each: the scenarios of tests/scenarios start from it, and say themselves what goes wrong.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rendezvous.values.types import (
    UNLIMITED,
    FailureClass,
    JobSpec,
    PolicyAction,
    PolicyRule,
    Recover,
    RestartBudget,
    ScaleUp,
)

_CLASSES = (FailureClass.USER_EXCEPTION, FailureClass.SIGNAL, FailureClass.HARDWARE, FailureClass.CONSEQUENCE)
_IGNORED = PolicyRule(FailureClass.NETWORK, PolicyAction.IGNORE)
_HEALED = PolicyRule(FailureClass.USER_EXCEPTION, PolicyAction.HEAL)
_SIGKILL = 9


@dataclass(frozen=True, slots=True)
class RankFailure:
    after_s: float
    local_rank: int
    failure: FailureClass


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What the ranks of one node will do, unless they are stopped first. None: never."""

    finish_s: float | None = None
    fails: RankFailure | None = None
    stuck_s: float | None = None
    loses_peer_s: float | None = None


class Chance:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.is_healed = False
        self._finish_at: dict[int, float] = {}
        self.uses_run = self.rng.random() < 0.8  # the script trains inside State.run
        self._can_join = self.rng.random() < 0.8

    def heal(self) -> None:
        """From here on the network delivers, stores answer, and ranks succeed."""
        self.is_healed = True

    def spec(self) -> JobSpec:
        rng = self.rng
        most = rng.randint(1, 4)
        return JobSpec(
            "sim",
            min_nodes=rng.randint(1, most),
            max_nodes=most,
            budget=RestartBudget(rng.choice((0, 1, 2, 5))),
            join_timeout_s=rng.choice((5.0, 30.0)),
            last_call_s=0.5,
            last_call_bound_s=2.0,
            replacement_timeout_s=5.0,
            lease_s=4.0,
            stop_budget_s=5.0,
            node_cooldown_s=5.0,
            spares=rng.choice((0, 0, 1)),
            scale_up=rng.choice(list(ScaleUp)),
            shrink_after_s=rng.choice((0.0, 0.0, 5.0)),
            rules=rng.choice(((), (), (_IGNORED,), (_HEALED,))),
            recover=rng.choice((Recover.AUTO, Recover.AUTO, Recover.IN_PLACE, Recover.RESTART)),
            heal_budget=rng.choice((RestartBudget(UNLIMITED), RestartBudget(1), RestartBudget(3))),
        )

    # --- the network

    def delay_s(self) -> float:
        return 0.001 if self.is_healed else self.rng.choice((0.001, 0.002, 0.005, 0.02, 0.2))

    def breaks(self) -> bool:
        return not self.is_healed and self.rng.random() < 0.02

    def late_copy_s(self) -> float | None:
        late = not self.is_healed and self.rng.random() < 0.03
        return self.rng.uniform(0.1, 8.0) if late else None

    def is_doubled(self) -> bool:
        return not self.is_healed and self.rng.random() < 0.05

    def agent_notices_s(self) -> float:
        return self.rng.uniform(0.0, 1.0)

    def service_notices_s(self) -> float | None:
        """None: only the lease tells."""
        return self.rng.uniform(0.0, 1.5) if self.rng.random() < 0.5 else None

    def falls_silent(self) -> bool:
        return not self.is_healed and self.rng.random() < 0.3

    def pause_s(self, least_s: float, most_s: float) -> float:
        return self.rng.uniform(least_s, most_s)

    def first_of(self, count: int) -> int:
        return self.rng.randrange(count)

    # --- services and stores

    def skew_s(self) -> float:
        return self.rng.uniform(-1000.0, 1000.0)

    def write_s(self) -> float:
        return 0.001 if self.is_healed else self.rng.choice((0.0, 0.002, 0.05))

    def answer_is_lost(self) -> bool:
        return not self.is_healed and self.rng.random() < 0.05

    # --- a node

    def store_port_is_taken(self) -> bool:
        return not self.is_healed and self.rng.random() < 0.005

    def store_is_out_of_reach(self) -> bool:
        return not self.is_healed and self.rng.random() < 0.03

    def ends_s(self, signum: int) -> float | None:
        """How long a rank lives on after a signal: longer than the stop budget at times. None: it is deaf to it."""
        if self.is_healed:
            return 0.01
        if signum != _SIGKILL and self.rng.random() < 0.1:
            return None
        return self.rng.choice((0.001, 0.01, 0.05, 0.2, 0.5, 1.0, 6.0, 60.0))

    def ends_badly(self) -> bool:
        return self.rng.random() < 0.3

    def sweep_s(self) -> float:
        return 0.01 if self.is_healed else self.rng.choice((0.001, 0.01, 0.2, 1.0, 8.0))

    def errand_s(self) -> float:
        """To look at ranks, to read their stacks, to reach a store; at times too late for anybody."""
        return 0.0 if self.is_healed else self.rng.choice((0.0, 0.0, 0.0, 0.1, 2.0, 60.0))

    def store_opens_s(self) -> float:
        return 0.02 if self.is_healed else self.rng.choice((0.02, 0.02, 1.0))

    def checkpoint_s(self) -> float:
        return self.rng.choice((0.1, 1.0, 2.0, 8.0))

    def checkpoint_is_taken(self) -> bool:
        return self.rng.random() < 0.9

    def zygote_starts(self) -> bool:
        return self.is_healed or self.rng.random() < 0.9

    # --- ranks

    def plan(self, generation: int, nproc: int, now: float) -> RankPlan:
        """Ranks of one world finish at about the same time."""
        rng = self.rng
        end = self._finish_at.setdefault(generation, now + rng.uniform(0.5, 8.0))
        finish_s = max(0.0, end - now) + rng.uniform(0.0, 0.3)
        if self.is_healed:
            return RankPlan(finish_s)
        fails = None
        if rng.random() < 0.35:
            fails = RankFailure(rng.uniform(0.0, 3.0), rng.randrange(nproc), rng.choice(_CLASSES))
        stuck_s = rng.uniform(0.0, 3.0) if rng.random() < 0.15 else None
        return RankPlan(finish_s, fails, stuck_s, rng.uniform(0.0, 3.0) if rng.random() < 0.05 else None)

    def enters_run_s(self) -> float | None:
        """None: the script does not train inside State.run."""
        return self.rng.choice((0.01, 0.01, 0.3, 1.5)) if self.uses_run else None

    def cannot_join(self) -> bool:
        """The script communicates before State.run, which only a new rank beside others finds out."""
        return not self._can_join

    def parks_s(self) -> float | None:
        """How long a rank takes to leave its collectives. None: it is stuck in native code."""
        if self.is_healed:
            return 0.01
        return None if self.rng.random() < 0.1 else self.rng.choice((0.001, 0.01, 0.01, 0.3, 1.5, 3.0))

    def notices_lost_peers(self) -> bool:
        return self.rng.random() < 0.3

    def parked_rank_ends_s(self) -> float | None:
        """When the process of a paused rank dies, if it does."""
        if self.is_healed or self.rng.random() > 0.05:
            return None
        return self.rng.choice((0.0, 0.01, 0.05, 0.5, 2.0))

    def exit_code(self) -> int:
        return self.rng.choice((0, 1, 7))

    def last_step(self) -> int | None:
        return self.rng.choice((None, 1, 2))

    def gets_on(self) -> bool:
        """Whether ranks that are cut off from the service make progress."""
        return self.rng.random() < 0.5


class Calm(Chance):
    """Nothing happens by itself: messages take a moment, signals end ranks, ranks run until they are told to end."""

    def __init__(self) -> None:
        super().__init__(0)
        self.is_healed = True
        self.uses_run = False

    def plan(self, generation: int, nproc: int, now: float) -> RankPlan:
        return RankPlan()

    def agent_notices_s(self) -> float:
        return 0.01

    def service_notices_s(self) -> float | None:
        return 0.01

    def pause_s(self, least_s: float, most_s: float) -> float:
        return most_s

    def first_of(self, count: int) -> int:
        return 0

    def skew_s(self) -> float:
        return 0.0

    def write_s(self) -> float:
        return 0.0

    def ends_badly(self) -> bool:
        return False

    def checkpoint_s(self) -> float:
        return 0.5

    def enters_run_s(self) -> float | None:
        return 0.01 if self.uses_run else None

    def cannot_join(self) -> bool:
        return False

    def notices_lost_peers(self) -> bool:
        return False

    def checkpoint_is_taken(self) -> bool:
        return True

    def exit_code(self) -> int:
        return 1

    def last_step(self) -> int | None:
        return None

    def gets_on(self) -> bool:
        return True
