"""`bucket_cap_mb="auto"`: the buckets that the first steps show to be best.

Once the plan follows the order of arrival, some steps are looked at: when does which gradient arrive? Then a few
all-reduces are timed, rank 0 names the bucket sizes for which `bucket_search.py` predicts a short step, and they are
tried in turns beside the default. All of it happens at the end of a backward that is averaged, where every rank is
at the same step; what is chosen follows from times that all ranks know of each other.

It stands off, and the buckets stay, where they are somebody else's business: with a communication hook, unused
parameters that are looked for, mixed precision, or in a `join`, where some ranks have no step to look at.
"""

from __future__ import annotations

import logging
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ddp.diagnostics import bucket_search
from ddp.diagnostics.bucket_observer import Onlooker
from ddp.reducer import agreement
from ddp.reducer.carrier import gathered
from ddp.reducer.plan import MIB, Limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp.reducer.reducer import Reducer

_log = logging.getLogger("ddp")
_LOOKED_AT = 4
_REPEATS = 3


class Look(Onlooker):
    """When the gradient of each parameter was there, after the start of the backward."""

    def begin(self) -> None:
        super().begin()
        self.steps: list[list[float]] = []
        self.computed: list[float] = []
        self._began = 0.0
        self._at = [0.0] * len(self.reducer.parameters)

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        if name == "backward_start":
            self._began = now
        elif name == "compute_end" and self._began:
            self.computed.append(now - self._began)
            self.steps.append([max(0.0, at - self._began) for at in self._at])

    def gather(self, number: int, start: int, end: int, before: Sequence[Any] | None) -> None:
        now = time.perf_counter()
        for member in self.reducer.sending.plan.buckets[number].members[start:end]:
            self._at[member] = now
        super().gather(number, start, end, before)


class Tuning:
    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._look: Look | None = None
        self._looked_at = 0
        self._limits: list[Limits] = []
        self._trial: bucket_search.Trial | None = None
        self._times: list[list[int]] = []
        self._began = 0
        self.going = True
        reducer.at_round_over.insert(0, self._round_over)

    def _round_over(self) -> None:
        """At the end of every averaged backward, on all ranks."""
        reducer = self._reducer
        if not reducer.sending.may_resize:
            self.stop("leaves the buckets alone: others have a say in them")
        elif self._trial is not None:
            self._tried(self._trial)
        elif self._look is not None:
            self._looked_at += 1
            if self._looked_at == _LOOKED_AT:
                self._propose(self._look)
        elif reducer.rebuilt:
            self._look = Look(reducer)
            self._look.begin()

    def stop(self, why: str) -> None:
        reducer = self._reducer
        if self._look is not None:
            self._look.end()
        reducer.stopwatch.forget(self._mark)
        reducer.at_round_over.remove(self._round_over)
        self.going = False
        if reducer.rank == 0:
            _log.info('ddp: bucket_cap_mb="auto" %s', why)

    # --- what to try -------------------------------------------------------------------------------

    def _propose(self, look: Look) -> None:
        reducer, default = self._reducer, self._reducer.settings.limit
        look.end()
        self._look = None
        curve = self._curve()
        promising = self._promising(look, curve) if reducer.rank == 0 else []
        sizes = [size for limit in promising for size in limit.rebuilt]
        told = self._from_rank_0([len(promising), *sizes, *[0] * (2 * bucket_search.CANDIDATES - len(sizes))])
        pairs = [(told[1 + 2 * i], told[2 + 2 * i]) for i in range(told[0])]
        if not pairs:
            self.stop("leaves the buckets alone: other sizes would make the same ones")
            return
        self._limits = [default, *(Limits(default.first, pair) for pair in pairs)]
        self._times = [[] for _ in self._limits]
        self._trial = bucket_search.Trial(len(self._limits))
        reducer.stopwatch.tell(self._mark)

    def _promising(self, look: Look, curve: bucket_search.Curve) -> list[Limits]:
        reducer, sending = self._reducer, self._reducer.sending
        if not look.steps:
            return []
        seen = bucket_search.arrivals(look.steps, look.computed)
        default = reducer.settings.limit
        return bucket_search.candidates(
            sending.facts, reducer.agreed_order, default, sending.transport, seen, curve
        )

    def _curve(self) -> bucket_search.Curve:
        sending = self._reducer.sending
        points = []
        for size in bucket_search.sizes_to_measure(sum(facts.nbytes for facts in sending.facts)):
            tensor = torch.zeros(size // 4, device=sending.device)
            points.append((size, min(self._one(tensor) for _ in range(_REPEATS))))
        return bucket_search.Curve(tuple(points))

    def _one(self, tensor: torch.Tensor) -> float:
        began = time.perf_counter()
        self._reducer.sending.try_out(tensor)
        return time.perf_counter() - began

    def _from_rank_0(self, numbers: Sequence[int]) -> list[int]:
        sending = self._reducer.sending
        return agreement.order_of_rank_0(sending.group, sending.device, numbers)

    # --- trying it ---------------------------------------------------------------------------------

    def _mark(self, name: str) -> None:
        if name == "backward_start":
            self._began = time.perf_counter_ns()

    def _tried(self, trial: bucket_search.Trial) -> None:
        """The end of a step of the trial; its first turn is the default's, which is in force."""
        if trial.counts and self._began:
            self._reducer.sending.settle_device()
            self._times[trial.plan].append(time.perf_counter_ns() - self._began)
        self._began = 0
        self._trial = following = trial.stepped()
        if following.over:
            self._decide()
        elif following.changes:
            self._reducer.resize(self._limits[following.plan])

    def _decide(self) -> None:
        reducer = self._reducer
        mine = [int(median(times)) if times else 0 for times in self._times]
        told = torch.tensor(mine, dtype=torch.int64, device=reducer.sending.device)
        kept = bucket_search.chosen(gathered(reducer.sending.group, told))
        reducer.resize(self._limits[kept])
        first, cap = (size / MIB for size in self._limits[kept].rebuilt)
        sizes = [limit.largest / MIB for limit in self._limits]
        tried = ", ".join(f"{size:g} MiB {took / 1e6:.1f} ms" for size, took in zip(sizes, mine, strict=True))
        self.stop(f"keeps {cap:g} MiB, the first bucket {first:g} MiB; a backward took with {tried}")
