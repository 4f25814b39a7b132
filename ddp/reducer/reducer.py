"""From gradients that arrive to gradients that are averaged: the part of torch's Reducer, with its interface.

A forward arms the reducer. When the backward reaches an output of that forward, a round begins: gradients arrive,
chunks of them are gathered into buckets, full buckets are launched in the order of the plan, and at the end of the
outermost backward what is still missing goes as it is, everything is waited for, and `.grad` holds the averages.

At the end nothing is left local: a parameter that got no gradient contributes what it has, zeros if nothing. Its
name is in the error that the next forward raises, as torch's does; but the gradients of this step are right. For the
same reason a second backward of the same forward, or of an earlier one, is simply averaged again: what was averaged
before is the same on all ranks, so the average of the sum is the sum of the averages.

The first round observes (all is sent at its end); the next ones follow the order that rank 0 observed. See
`gradient_hooks.py` for how arrivals are noticed, `bucket_sender.py` for how buckets travel, `bucket.py` for where
gradients lie, `between_steps.py` for what goes on between two steps.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import record_function

from ddp.reducer import engine, errors, rpc_context, unowned_gradients
from ddp.reducer.bucket_sender import Sending
from ddp.reducer.gradient_hooks import Watch
from ddp.reducer.launch_order import arrived
from ddp.reducer.logging_data import Stopwatch
from ddp.reducer.round import Baseline, Lesson, Mode, Round, absent, baseline, cut, lesson, new_round
from ddp.reducer.unused import learn_used, unreachable, was_used
from ddp.telemetry.comm_error import explained

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddp.reducer.bucket_sender import Carrying, Settings
    from ddp.reducer.plan import BucketPlan

_log = logging.getLogger("ddp")
_NONE_UNUSED: frozenset[int] = frozenset()


class Reducer:
    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        sparse: Sequence[bool],
        settings: Settings,
    ) -> None:
        self.parameters = list(parameters)
        self.names = list(names)
        self.settings = settings
        self.sending = Sending(self.parameters, names, sparse, settings)
        # Who is given the buckets: `sending`, or somebody in front of it who looks at a clock.
        self.carrying: Carrying = self.sending
        self.static_graph = False
        self.rebuilt = False
        self.stopwatch = Stopwatch()
        self._watch = Watch(self.parameters, self._arrived)
        self._mode = Mode.OBSERVE
        self._lessons = 0
        self._lesson: Lesson | None = None
        self._expected = [1] * len(self.parameters)
        self._own_order: tuple[int, ...] = ()
        self._adopt(self.sending.plan)
        self._round: Round | None = None
        self._end_task = -1
        self._lacking: set[int] | None = None
        self.synchronizes = True
        self.stray_task = -1
        # Whether gradients are meant to be averaged just now, as the module has it.
        self.wanted: Callable[[], bool] = lambda: True
        self._trust_graph = True
        self.graph_is_static = True
        self._told_that_none_are_unused = False
        self._hooked_by_others = False
        self.previous: Round | None = None
        self._used_between: set[int] = set()  # in backwards that were not to be averaged
        self._used_at_first: list[int] | None = None
        self.rank = settings.groups[0].rank()
        if settings.groups[0].size() > 1:  # else there are no others to drift away from
            unowned_gradients.own(self, self.parameters)
        self._watch.every_parameter()

    def shares_parameters_with(self, other: unowned_gradients.Guarded) -> None:
        raise NotImplementedError

    def _adopt(self, chosen: BucketPlan) -> None:
        self._chunks = cut(chosen, self.sending.facts)
        self._chunk_of = {member: i for i, chunk in enumerate(self._chunks) for member in chunk.members}

    def _names(self, indices: Sequence[int]) -> list[str]:
        return [self.names[i] for i in indices]

    @property
    def _looks_for_unused(self) -> bool:
        return self.settings.find_unused and not self.static_graph

    @property
    def tells_used(self) -> bool:
        """Whether ranks tell each other in this step which parameters they used."""
        return self._looks_for_unused or (self.static_graph and self._mode is Mode.OBSERVE)

    # --- before a backward -------------------------------------------------------------------------

    def _within_own_backward(self) -> bool:
        """A checkpoint computes the forward again while its backward runs: that is a part of this step, no other."""
        seen = self._round
        running = seen is not None and seen.end_known and not seen.ended
        return running and engine.current_task() == self._end_task

    def prepare_for_forward(self) -> None:
        if self._within_own_backward():
            return
        self.stopwatch.next_iteration()
        self.stopwatch.mark("forward_start")

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        if self._within_own_backward():
            return
        unused = self._search(outputs) if self._looks_for_unused else _NONE_UNUSED
        if self._round is not None and self._looks_for_unused and self._round.searched:
            unused &= self._round.unused  # two forwards, and then a backward of both
        self._lacking = None
        self.synchronizes = True
        self._arm(unused).searched = bool(outputs)
        self.stopwatch.mark("backward_start")

    def _search(self, outputs: Sequence[torch.Tensor]) -> frozenset[int]:
        if not outputs or not self._trust_graph:
            return _NONE_UNUSED
        with record_function("torch.distributed.ddp.reducer::search_unused_parameters"):
            unused = unreachable(outputs, self._watch.accumulators)
        if not unused and not self._told_that_none_are_unused:
            self._told_that_none_are_unused = True
            _log.warning(
                "find_unused_parameters=True was given, and the forward left no parameter unused: each step walks "
                "the whole autograd graph for nothing. If it never does, leave the flag out."
            )
        return unused

    def _arm(self, unused: frozenset[int]) -> Round:
        self._round = new_round(self.sending.plan, self._chunks, len(self.parameters), unused)
        self._round.used = self._used_at_first
        return self._round

    def forward_without_synchronization(self) -> None:
        """Its gradients are meant to stay local. A forward before it arms the reducer again when it is reached."""
        self.synchronizes = False
        if self._round is not None and not self._round.begun and not self._round.end_known:
            self._round = None

    def watch_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        """To know when a backward of this forward begins, and in which of the engine's tasks, hence when it ends."""
        if self._within_own_backward():
            return
        seen = self._round
        if seen is not None and not seen.searched and self._looks_for_unused:
            seen.unused = self._search(outputs)  # they lie in an object that torch does not look into
        unused, context = seen.unused if seen is not None else _NONE_UNUSED, rpc_context.current()
        if seen is not None:
            seen.context = context
        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(partial(self._reached, unused, context))

    def _baseline(self) -> Baseline:
        return baseline(self.parameters, exact=not self.settings.as_views)

    def _reached(self, unused: frozenset[int], context: int | None, _gradient: torch.Tensor) -> None:
        task = engine.current_task()
        if task == self._end_task:
            return
        seen = self._round or self._arm(unused)
        if seen.end_known and not seen.ended:
            self._abandon(seen)  # its backward raised, and here is another
            seen = self._arm(unused)
        self._end_task = task
        seen.end_known, seen.ended = True, False
        if not seen.begun:
            seen.before, seen.context = self._baseline(), context
        engine.when_it_ends(self._backward_ended)

    # --- gradients arrive --------------------------------------------------------------------------

    def _begin(self, seen: Round, first: Sequence[int] = ()) -> None:
        seen.begun = True
        unowned_gradients.serve(engine.current_task())
        if seen.before is None:
            seen.before = self._baseline()
        seen.in_context = rpc_context.took_one(seen, self.parameters, first)
        if self._mode is Mode.COUNT and not seen.in_context:
            unasked = [i for i, parameter in enumerate(self.parameters) if not parameter.requires_grad]
            for i in sorted({*seen.unused, *unasked, *self._never_used()}):
                seen.settled.add(i)
                self._settle(seen, i)

    def _never_used(self) -> list[int]:
        return [i for i, count in enumerate(self._expected) if count == 0] if self.static_graph else []

    def _arrived(self, index: int) -> None:
        """A gradient has been added to `.grad` of a parameter that is watched."""
        seen = self._round
        if seen is None:
            self._used_between.add(index)
            unowned_gradients.arrived(self, index)
            return
        if not seen.end_known:
            seen.early = True
            if index in seen.unused:  # a layer that is applied after the forward: the search cannot find it
                self._trust_graph, seen.unused = False, _NONE_UNUSED
        if not seen.begun:
            self._begin(seen, (index,))
        seen.counts[index] += 1
        seen.tasks.add(torch._C._current_graph_task_id())
        if seen.counts[index] == 1:
            seen.order.append(index)
        if self._mode is Mode.OBSERVE or seen.in_context:
            if not seen.end_known and len(seen.order) == len(self.parameters) - len(seen.unused):
                self._finish_at_the_end(seen)
        else:
            self._count(seen, index)

    def _count(self, seen: Round, index: int) -> None:
        surplus = seen.counts[index] > max(self._expected[index], 0 if self.static_graph else 1)
        if index in seen.settled or surplus:
            # An ordinary graph may change, as long as its gradient has not been sent.
            if (self.static_graph and surplus) or seen.gathered[self._chunk_of[index]]:
                self._trust_graph = self._trust_graph and index not in seen.unused
                raise self._unwelcome(index)
        elif seen.counts[index] >= self._expected[index]:
            self._settle(seen, index)

    def _unwelcome(self, index: int) -> RuntimeError:
        if self.static_graph:
            return self._told(errors.unexpected(self.names[index], self.rank))
        return self._told(errors.ready_twice([self.names[index]], index, self.rank))

    def _told(self, error: RuntimeError) -> RuntimeError:
        """For those who keep a record of errors."""
        return error

    def _settle(self, seen: Round, index: int) -> None:
        chunk = self._chunk_of[index]
        seen.waiting[chunk] -= 1
        if seen.waiting[chunk] == 0:
            self._gather(seen, chunk)

    def _sentinel(self, number: int) -> None:
        seen = self._round
        chunk = self._chunks[number]
        if seen is None:
            unowned_gradients.arrived(self, chunk.members[-1])
            return
        if not seen.begun:
            self._begin(seen, chunk.members)
        if not seen.end_known:
            self._finish_at_the_end(seen)
        if seen.gathered[number]:
            raise self._unwelcome(chunk.members[-1])
        before = seen.before
        assert before is not None
        grads = [self.parameters[i].grad for i in chunk.members]
        if before.exact and not seen.in_context and before.all_arrived(chunk.members, grads):
            self._gather(seen, number)
        else:
            seen.disordered.add(number)

    def _gather(self, seen: Round, number: int) -> None:
        if seen.gathered[number]:
            return
        chunk = self._chunks[number]
        before = seen.before.of(self.sending.plan.buckets[chunk.bucket].members) if seen.before else None
        with torch.no_grad():
            self.carrying.gather(chunk.bucket, chunk.start, chunk.end, before)
            seen.gathered[number] = True
            seen.readiness, launches = arrived(seen.readiness, chunk.bucket, chunk.end - chunk.start)
            for bucket in launches:
                self.stopwatch.mark_first("comm_start")
                seen.works.append(self._launch(seen, bucket))
        if seen.readiness.complete:
            self._all_launched(seen)

    def _launch(self, seen: Round, bucket: int) -> Any:
        members = self.sending.plan.buckets[bucket].members
        skips = self.settings.skip_unused and not self.sending.hooked
        if skips and seen.unused.issuperset(members):
            return None
        seen.reduced += 1
        return self.carrying.launch(bucket)

    def _all_launched(self, seen: Round) -> None:
        if self.tells_used:
            used = {i for i, count in enumerate(seen.counts) if count} | self._used_between
            seen.used = [int(i in used and p.grad is not None) for i, p in enumerate(self.parameters)]
            self._used_between.clear()
            seen.used_anywhere, seen.used_work = self.sending.tell_used(seen.used)
        if not seen.end_known and not seen.finishing:
            self._finish_at_the_end(seen)

    def _finish_at_the_end(self, seen: Round) -> None:
        """Nobody has told us which backward is the outermost: take the one that we are in."""
        if not seen.finishing:
            seen.finishing = True
            engine.when_it_ends(self._backward_ended)

    # --- the end of a backward ---------------------------------------------------------------------

    @explained("the averaging of gradients")
    def _backward_ended(self) -> None:
        seen = self._round
        self._end_task, task = -1, self._end_task
        if seen is None:
            return
        seen.ended = True
        if not seen.begun and not self._anything_arrived(seen):
            seen.end_known = seen.ended = False  # autograd.grad: it asked for gradients of something else
            return
        self.stopwatch.mark("compute_end")
        missed = rpc_context.was_missed(seen, self.parameters)
        try:
            with rpc_context.in_place_of_grad(seen, self.parameters) as without:
                lacking = self._missing(seen)
                self._complete(seen)
                late = self.sending.late if self._mode is Mode.SENTINEL else None
                self._finish(seen)
        finally:
            self.graph_is_static &= not seen.changed_order(self.previous)
            # It is remembered, but what it holds of gradients is not: they may be let go of before the next.
            self._round, self.previous, seen.works, seen.before = None, seen, [], None
            self.sending.step_ended()
            self.stopwatch.step_ended()
        self.round_over()
        if missed:
            raise self._told(errors.forward_outside_context(self.rank))
        if without:
            raise self._told(errors.context_without_gradient(self._names(without), self.rank))
        if late is not None:
            raise self._unwelcome(late)
        self._learn(seen, task, lacking)

    def round_over(self) -> None:
        """All ranks come here once in every step that is averaged, and may talk."""

    def _abandon(self, seen: Round) -> None:
        """The backward raised: what is owed to the other ranks is for who knows of the steps around it."""
        raise NotImplementedError

    def _anything_arrived(self, seen: Round) -> bool:
        before = seen.before
        if self._mode is not Mode.SENTINEL or before is None:
            return False
        return any(before.arrived(i, parameter.grad) for i, parameter in enumerate(self.parameters))

    def _missing(self, seen: Round) -> list[int]:
        """Parameters whose gradients were to come and did not."""
        if self.static_graph and self._mode is Mode.OBSERVE:
            return []  # what is used at first is what is used ever after
        lost = absent(seen, self._mode, self._chunks, self.parameters)
        return [i for i in lost if self.parameters[i].requires_grad and i not in seen.unused]

    def _complete(self, seen: Round) -> None:
        """What has not been gathered goes as it is."""
        if not seen.begun:
            self._begin(seen)
        seen.finishing = True
        for bucket in range(len(self.sending.plan.buckets)):
            for number, chunk in enumerate(self._chunks):
                if chunk.bucket == bucket:
                    self._gather(seen, number)

    def _may_change(self, seen: Round, bucket: int, work: Any, member: int, average: torch.Tensor) -> bool:
        index = self.sending.plan.buckets[bucket].members[member]
        return work is not None and was_used(seen, index, self.parameters[index], average)

    def _finish(self, seen: Round) -> None:
        for bucket, work in enumerate(seen.works):
            self.carrying.finish(bucket, work, partial(self._may_change, seen, bucket, work))
        learn_used(seen)
        if self.static_graph and self._mode is Mode.OBSERVE:
            self._used_at_first = seen.used

    def _learn(self, seen: Round, task: int, lacking: Sequence[int]) -> None:
        self._lacking = set(lacking) if self._lacking is None else self._lacking & set(lacking)
        if self._mode is Mode.OBSERVE or seen.disordered:
            self._lesson = lesson(seen, task, dynamic=self._looks_for_unused, lacking=lacking)
