"""`bucket_cap_mb="auto"`: find the best bucket sizes during the first steps.

After the plan has been rebuilt in order of arrival, the tuner measures in a few steps when each gradient arrives. Then
it times a few all-reduces. Rank 0 selects the bucket sizes for which `bucket_search.py` predicts a short step, and
these sizes and the default are used alternately. All of this happens at the end of an averaged backward, where all
ranks are at the same step. The ranks exchange their times, so all of them choose the same sizes.

On an accelerator all times are those of the device. They are read when the tuner decides, not in each step.

The tuner stops if the buckets must not change. This is so with a communication hook, with a search for unused
parameters, with mixed precision, and in a `join`, where some ranks do not run the step.
"""

from __future__ import annotations

import logging
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ddp.reducer import agreement
from ddp.reducer.collectives import gather_rows
from ddp.reducer.device import clock_of
from ddp.reducer.plan import MIB, Limits
from ddp_launch_wings.diagnostics import bucket_search
from ddp_launch_wings.diagnostics.bucket_observer import BucketObserver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp.reducer.reducer import Reducer

_log = logging.getLogger("ddp")
_MEASURED_STEPS = 4
_REPEATS = 3


class ArrivalObserver(BucketObserver):
    """Measure when each parameter's gradient arrives after the start of the backward."""

    def begin(self) -> None:
        super().begin()
        self._clock = clock_of(self.reducer.sender.device)
        self._steps: list[tuple[Any, list[Any], Any]] = []
        self._began: Any = None
        self._at: list[Any] = [None] * len(self.reducer.parameters)

    def mark(self, name: str) -> None:
        if name == "backward_start":
            self._began = self._clock.now()
            self._at = [self._began] * len(self._at)
        elif name == "compute_end" and self._began is not None:
            self._steps.append((self._began, self._at, self._clock.now()))

    def gather(self, number: int, start: int, end: int) -> None:
        now = self._clock.now()
        for member in self.reducer.sender.plan.buckets[number].members[start:end]:
            self._at[member] = now
        super().gather(number, start, end)

    def read(self) -> tuple[list[list[float]], list[float]]:
        """Return the arrivals in each step and the length of each, in seconds. On an accelerator it waits for them."""
        arrived, computed = [], []
        for began, moments, ended in self._steps:
            times = {id(each): self._clock.nanoseconds(each) for each in [began, *moments, ended]}
            start = times[id(began)]
            computed.append((times[id(ended)] - start) / 1e9)
            arrived.append([max(0.0, (times[id(each)] - start) / 1e9) for each in moments])
        return arrived, computed


class Tuning:
    """The tuner of one reducer, from its construction until `stop`."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._observer: ArrivalObserver | None = None
        self._measured = 0
        self._limits: list[Limits] = []
        self._trial: bucket_search.Trial | None = None
        self._clock = clock_of(reducer.sender.device)
        self._times: list[list[tuple[Any, Any]]] = []  # of each plan: the begin and the end of its backwards
        self._began: Any = None
        reducer.at_round_over.insert(0, self._round_over)

    def _round_over(self) -> None:
        """Called at the end of every averaged backward, on all ranks."""
        reducer = self._reducer
        if reason := reducer.sender.fixed_by:
            self.stop(f"keeps the default bucket size, because it must not change with {reason}")
        elif self._trial is not None:
            self._end_trial_step(self._trial)
        elif self._observer is not None:
            self._measured += 1
            if self._measured == _MEASURED_STEPS:
                self._propose(self._observer)
        elif reducer.rebuilt:
            self._observer = ArrivalObserver(reducer)
            self._observer.begin()

    def stop(self, why: str) -> None:
        reducer = self._reducer
        if self._observer is not None:
            self._observer.end()
        reducer.stopwatch.remove_listener(self._mark)
        reducer.at_round_over.remove(self._round_over)
        reducer.tuner = None
        if reducer.rank == 0:
            _log.info('ddp: bucket_cap_mb="auto" %s', why)

    # --- what to try -------------------------------------------------------------------------------

    def _propose(self, observer: ArrivalObserver) -> None:
        reducer, default = self._reducer, self._reducer.settings.limit
        observer.end()
        self._observer = None
        curve = self._measure_curve()
        candidates = self._candidates(observer, curve) if reducer.rank == 0 else []
        sizes = [size for limit in candidates for size in limit.rebuilt]
        padding = [0] * (2 * bucket_search.CANDIDATES - len(sizes))
        agreed = self._from_rank_0([len(candidates), *sizes, *padding])
        pairs = [(agreed[1 + 2 * i], agreed[2 + 2 * i]) for i in range(agreed[0])]
        if not pairs:
            self.stop("keeps the default bucket size, because other sizes result in the same buckets")
            return
        self._limits = [default, *(Limits(default.first, pair) for pair in pairs)]
        self._times = [[] for _ in self._limits]
        self._trial = bucket_search.Trial(len(self._limits))
        reducer.stopwatch.add_listener(self._mark)

    def _candidates(self, observer: ArrivalObserver, curve: bucket_search.Curve) -> list[Limits]:
        reducer, sender = self._reducer, self._reducer.sender
        arrived, computed = observer.read()
        if not arrived:
            return []
        seen = bucket_search.arrivals(arrived, computed)
        default = reducer.settings.limit
        return bucket_search.candidates(
            sender.facts, reducer.agreed_order, default, sender.transport, seen, curve
        )

    def _measure_curve(self) -> bucket_search.Curve:
        sender, clock = self._reducer.sender, self._clock
        measured: list[tuple[int, Any, Any]] = []
        for size in bucket_search.sizes_to_measure(sum(facts.nbytes for facts in sender.facts)):
            tensor = torch.zeros(size // 4, device=sender.device)
            for _ in range(_REPEATS):
                began = clock.now()
                sender.try_out(tensor)
                measured.append((size, began, clock.now()))
        shortest: dict[int, float] = {}
        for size, began, ended in measured:  # on an accelerator this waits for them, once
            took = (clock.nanoseconds(ended) - clock.nanoseconds(began)) / 1e9
            shortest[size] = min(took, shortest.get(size, took))
        return bucket_search.Curve(tuple(shortest.items()))

    def _from_rank_0(self, numbers: Sequence[int]) -> list[int]:
        sender = self._reducer.sender
        return agreement.order_of_rank_0(sender.group, sender.device, numbers)

    # --- the trial ---------------------------------------------------------------------------------

    def _mark(self, name: str) -> None:
        if name == "backward_start":
            self._began = self._clock.now()

    def _end_trial_step(self, trial: bucket_search.Trial) -> None:
        """Record a step of the trial. The first turn belongs to the default plan, which is active already."""
        if trial.counts and self._began is not None:
            self._times[trial.plan].append((self._began, self._clock.now()))
        self._began = None
        self._trial = following = trial.next_step()
        if following.over:
            self._decide()
        elif following.changes:
            self._reducer.resize(self._limits[following.plan])

    def _median(self, spans: Sequence[tuple[Any, Any]]) -> int:
        clock = self._clock
        return (
            int(median(clock.nanoseconds(ended) - clock.nanoseconds(began) for began, ended in spans))
            if spans
            else 0
        )

    def _decide(self) -> None:
        reducer = self._reducer
        mine = [self._median(spans) for spans in self._times]
        times = torch.tensor(mine, dtype=torch.int64, device=reducer.sender.device)
        kept = bucket_search.choose_plan(gather_rows(reducer.sender.group, times))
        reducer.resize(self._limits[kept])
        first, cap = (size / MIB for size in self._limits[kept].rebuilt)
        sizes = [limit.largest / MIB for limit in self._limits]
        tried = ", ".join(f"{size:g} MiB {took / 1e6:.1f} ms" for size, took in zip(sizes, mine, strict=True))
        self.stop(f"selected bucket size {cap:g} MiB (first bucket: {first:g} MiB); backward times: {tried}")
