"""A reducer over many steps: what one backward has taught is put to use before the next.

Before each forward it is asked whether the backward before went well. The first one that did decides the buckets:
rank 0 tells the order in which its gradients arrived, all ranks make the same plan of it, and compare. From then on
the hooks follow the plan, fewer where the order proved steady.
"""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ddp.reducer import agreement, errors, plan
from ddp.reducer.reducer import Reducer
from ddp.reducer.round import Lesson, Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddp.reducer.round import Baseline, Round
    from ddp.reducer.unowned_gradients import Guarded


# How often a changed order is learned anew before every parameter is watched for good.
_MOST_LESSONS = 3


class LastingReducer(Reducer):
    agreed_order: Sequence[int] = ()
    # Gradients as a backward that raised has left them, some of them averaged; and their versions.
    _spoilt: Sequence[tuple[int, torch.Tensor, int]] = ()
    # Other reducers of some of the same parameters, and the mode that was left because of them.
    _sharing: Sequence[weakref.ref[Guarded]] = ()
    _mode_alone = Mode.COUNT

    @cached_property
    def at_round_over(self) -> list[Callable[[], None]]:
        """Called on all ranks at the end of each step that was averaged; they may talk, and may raise."""
        return []

    def round_over(self) -> None:
        for listener in tuple(self.at_round_over):
            listener()

    def resize(self, limit: plan.Limits) -> None:
        """Between two steps, on all ranks: other buckets in the same order."""
        self._follow(self.sending.planned(self.agreed_order, limit))
        self._watch_as(self._mode)

    def shares_parameters_with(self, other: Guarded) -> None:
        """Each gathers what autograd gave, nothing of the other's."""
        self._sharing = [*self._sharing, weakref.ref(other)]
        self.sending.shares_gradients(True)
        if self._mode is Mode.SENTINEL:  # which tells by the gradients whether anything came late
            self._mode_alone = Mode.SENTINEL
            self._watch_as(Mode.COUNT)

    def _look_for_sharers(self) -> None:
        """Between two backwards: once the others are gone, what they made slow is undone."""
        if not self._sharing or any(other() is not None for other in self._sharing):
            return
        self._sharing = ()
        self.sending.shares_gradients(False)
        if self._mode is Mode.COUNT:
            self._watch_as(self._mode_alone)

    def _ensure_prior_finished(self) -> None:
        seen, lacking = self._round, self._lacking
        self._lacking = None
        if seen is not None and seen.begun and not seen.end_known:
            self._round = None
            lacking = {i for i, count in enumerate(seen.counts) if not count}
        elif seen is not None and seen.end_known and not seen.ended:
            self._abandon(seen)
            return
        if lacking and not self._looks_for_unused:
            raise self._told(self._unfinished(sorted(lacking)))

    @property
    def _should_rebuild(self) -> bool:
        return not self.rebuilt and not self._looks_for_unused

    def learn_nothing(self) -> None:
        """The others will rebuild their buckets: take part. Rank 0 knows the order, or, if it is we, any will do."""
        count = len(self.parameters)
        self._lesson = Lesson(Mode.COUNT, tuple(reversed(range(count))), (1,) * count)

    def _abandon(self, seen: Round) -> None:
        """The backward raised. The other ranks may be waiting for our buckets: send them, and keep our gradients.

        Those that lie in a bucket by now are no longer ours alone, and must not be added to.
        """
        grads = [parameter.grad for parameter in self.parameters]
        taken = self.sending.taken(grads)
        values = [None if grad is None else grad.detach().clone() for grad in grads]
        if self._should_rebuild:
            self.learn_nothing()
        try:
            self._complete(seen)
            self._finish(seen)
        finally:
            self._round, self._end_task = None, -1
            self.sending.step_ended()
        with torch.no_grad():
            for parameter, grad, value in zip(self.parameters, grads, values, strict=True):
                parameter.grad = grad
                if grad is not None and value is not None:
                    grad.copy_(value)
        self._spoilt = [(i, grad, grad._version) for i, grad in taken.items()]
        self.round_over()

    def _baseline(self) -> Baseline:
        spoilt, self._spoilt = self._spoilt, ()
        still = [i for i, grad, was in spoilt if self.parameters[i].grad is grad and grad._version == was]
        if still:
            raise self._told(errors.spoilt(self._names(still), self.rank))
        return super()._baseline()

    def _unfinished(self, lacking: list[int]) -> RuntimeError:
        if self.static_graph:
            return errors.graph_changed(self._names(lacking), lacking, self.rank)
        return errors.unfinished(
            self._names(lacking), lacking, self.rank, find_unused=self.settings.find_unused
        )

    def _rebuild_buckets(self) -> bool:
        """Before each forward: did the backward before go well, and is there something to learn from it?"""
        if self._within_own_backward():
            return False
        self._ensure_prior_finished()
        self._look_for_sharers()
        learned, self._lesson = self._lesson, None
        if learned is None:
            return False
        rebuild = self._should_rebuild
        if rebuild:
            self._rebuild(learned.order)
        if self._mode is Mode.OBSERVE:
            self._expected = list(learned.expected)
            self._own_order = learned.order
        self._lessons += 1
        steady = self._lessons <= _MOST_LESSONS and not self._hooked_by_others
        self._mode_alone = learned.mode if steady else Mode.COUNT
        self._watch_as(self._mode_alone if self.sending.alone else Mode.COUNT)
        return rebuild

    def _rebuild(self, order: Sequence[int]) -> None:
        self.agreed_order = agreement.order_of_rank_0(self.sending.group, self.sending.device, order)
        self._follow(self.sending.planned(self.agreed_order))
        self.rebuilt = True
        self._round = None

    def _follow(self, chosen: plan.BucketPlan) -> None:
        agreement.same_plan(self.sending.group, self.sending.device, plan.plan_fingerprint(chosen))
        self.sending.adopt(chosen)
        self._adopt(chosen)

    def settle(self, order: Sequence[int]) -> None:
        """The buckets are those of this order from now on, whatever arrives: somebody lays out memory by them."""
        self._rebuild(order)
        self._watch_as(Mode.OBSERVE)

    def _watch_as(self, mode: Mode) -> None:
        self._mode = mode
        if mode is Mode.SENTINEL:
            place = {member: i for i, member in enumerate(self._own_order)}
            last = {max(chunk.members, key=place.__getitem__): i for i, chunk in enumerate(self._chunks)}
            self._watch.sentinels(last, self._sentinel)
        elif not self._hooked_by_others:
            self._watch.every_parameter()
