"""The reducer: averages the gradients of a model's backward, when torch's reducer would, and only then.

The way of a gradient, from top to bottom of this file. A forward of the wrapper that is to be averaged arms the counter
of the hooks (`prepare_for_backward`). Each gradient is counted in C (`arrivals`). The first one begins the step
(`_begin`). The last one of a chunk lets the chunk be gathered into its bucket (`_chunk_complete`), and the bucket be
launched, if all buckets before it in the plan are (`_launch_full`). After the last bucket is launched, the end of the
running backward waits for all of them and stores the averages in `.grad` (`_finalize`).

Nothing else communicates. If no forward has armed the counter, gradients stay on this rank, and one line or an error
says so (`_stays_local`). An armed backward that does not reach all parameters lets the next forward raise.

After the first step, rank 0 broadcasts the order in which its gradients arrived. All ranks derive the plan of buckets
from it, and check that their plans are equal.

A module on several devices has hooks on several threads. `lock` guards the step, also while buckets are launched: all
ranks must launch the same collectives in the same order.
"""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ddp.reducer import agreement, arrivals, errors, extensions, plan, rpc_context, streams
from ddp.reducer.bucket_sender import BucketSender
from ddp.reducer.gradient_hooks import GradientHooks, weakly, weakly_with, when_it_ends
from ddp.reducer.logging_data import Stopwatch
from ddp.reducer.unused import GraphSearch, Usage, UsedMembers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddp.reducer.bucket_sender import BucketOperations, Settings
    from ddp.reducer.logging_data import Log

_log = logging.getLogger("ddp")
_living: weakref.WeakSet[Reducer] = weakref.WeakSet()


@dataclass
class Step:
    """One averaged backward, from its forward until `.grad` contains the averages."""

    waiting: list[int]  # for each bucket, the number of chunks that it waits for
    works: list[Any]  # of the buckets
    unused: frozenset[int] = frozenset()  # parameters that the backward does not reach
    context: int | None = None  # the context of torch.distributed.autograd in which the forward ran
    in_context: bool = False  # gradients are stored there, not in `.grad`
    missed_context: bool = False  # gradients are in another context, which nobody can find
    deferred: bool = False  # everything is sent when the backward ends
    begun: bool = False
    launched: int = 0  # the first buckets of the plan
    reduced: int = 0  # without those that were skipped, because no parameter in them was used
    usage: Usage | None = None  # which parameters any rank used. None: all
    order: Sequence[int] = ()  # in which gradients arrived
    streams: dict[int, list[torch.Stream]] = field(default_factory=dict)  # on which each bucket was gathered


class Reducer:
    """The reducer of one model."""

    tuner: extensions.Tuner | None = None
    when_it_ends = staticmethod(when_it_ends)

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        sparse: Sequence[bool],
        settings: Settings,
    ) -> None:
        self.parameters, self.names, self.settings = list(parameters), list(names), settings
        self.sender = BucketSender(self.parameters, names, sparse, settings)
        self.operations: BucketOperations = self.sender  # or an observer in front of it
        self.stopwatch = Stopwatch(self.sender.device)
        self.lock = threading.RLock()  # a launch may run code that calls another hook
        self.counter = arrivals.new_counter(
            *map(weakly_with, (self._begin, self._chunk_complete, self._surplus, self._stays_local))
        )
        self.hooks = GradientHooks(self.parameters, self.counter)
        self.graph = GraphSearch(self.hooks.accumulators)
        # Called on all ranks at the end of each averaged step. The listeners may communicate and may raise.
        self.at_round_over: list[Callable[[], None]] = []
        self.wanted: Callable[[], bool] = lambda: True  # whether gradients should be averaged now
        self.log: Callable[[], Log | None] = lambda: None
        self.static_graph = False
        self.limit = settings.limit
        self._said_local = settings.groups[0].size() == 1
        self.forget()
        self._share()

    def forget(self) -> None:
        """Return to the state before the first backward, with the sender's first plan."""
        self.step: Step | None = None
        self.previous: Step | None = None
        self.graph_is_static = True
        self.agreed_order: Sequence[int] = ()
        self.rebuilt = False
        self._observed: Sequence[int] = ()  # the order of the last step, if the buckets are to be rebuilt
        # Of a static graph, from its first step: how often each gradient arrives, and what any rank used.
        self._expected: list[int] | None = None
        self._used_at_first: Usage | None = None
        self._unused_at_first: frozenset[int] = frozenset()  # on this rank
        self._cut()
        self.counter.watch(not self._said_local)

    def _share(self) -> None:
        """Let reducers of the same parameters average copies: they may run in the same backward."""
        mine = set(map(id, self.parameters))
        for other in tuple(_living):
            if not mine.isdisjoint(map(id, other.parameters)):
                other.sender.set_shared()
                self.sender.set_shared()
        _living.add(self)

    def _cut(self) -> None:
        """Cut the buckets into chunks, and tell the counter what to wait for."""
        self.chunks = plan.cut(self.sender.plan, self.sender.facts, self.sender.costs.chunk)
        chunk_of = [0] * len(self.parameters)
        for number, chunk in enumerate(self.chunks):
            for member in chunk.members:
                chunk_of[member] = number
        expected = [1] * len(self.parameters)
        if self.static_graph:
            expected = self._expected or [arrivals.ANY_NUMBER] * len(self.parameters)
        self.counter.plan(expected, chunk_of, len(self.chunks), self.exchanges_used)

    @property
    def rank(self) -> int:
        return self.settings.groups[0].rank()

    @property
    def looks_for_unused(self) -> bool:
        return self.settings.find_unused and not self.static_graph

    @property
    def observes_graph(self) -> bool:
        """Whether this is the first step of a static graph, which counts gradients and sends everything at its end."""
        return self.static_graph and self._expected is None

    @property
    def exchanges_used(self) -> bool:
        """Whether the ranks exchange in this step which parameters they used."""
        return self.looks_for_unused or self.observes_graph

    def make_static(self) -> None:
        self.static_graph = True
        self._cut()

    def record_error(self, error: RuntimeError) -> RuntimeError:
        """Record the error in the logging data, like torch, and return it."""
        if (log := self.log()) is not None:
            log.set_error_and_log(str(error))
        return error

    # --- a forward ---------------------------------------------------------------------------------

    def prepare_for_forward(self) -> None:
        self.stopwatch.next_iteration()
        self.stopwatch.mark("forward_start")

    def rebuild_buckets(self) -> bool:
        """Before a forward, check the previous backward, and follow its order once. Return whether it was followed."""
        self.check_finished()
        if not self._observed or not self.should_rebuild:
            return False
        self.rebuild(self._observed)
        return True

    def check_finished(self) -> None:
        """Raise if gradients of the previous step have arrived, but it has not ended."""
        if self.step is None or not self.step.begun:
            return
        left = self.counter.left()
        if all(left):  # a static graph: no gradient arrived as often as in its first step, and torch goes on
            self._stays_local(next((i for i, used in enumerate(self.counter.take_used()) if used), 0))
            return
        lacking = [i for i, count in enumerate(left) if count]
        names = [self.names[i] for i in lacking]
        if self.static_graph:
            raise self.record_error(errors.graph_changed(names, lacking, self.rank))
        raise self.record_error(errors.unfinished(names, lacking, self.rank, self.settings.find_unused))

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """After a forward: average the gradients of the next backward."""
        n = len(self.sender.plan.buckets)
        self.step = step = Step([0] * n, [None] * n, context=rpc_context.current_context())
        for chunk in self.chunks:
            step.waiting[chunk.bucket] += 1
        if self.looks_for_unused:
            step.unused = self.graph.unused(outputs)
        elif self._expected is not None:
            step.unused = frozenset(i for i, count in enumerate(self._expected) if not count)
        step.usage = self._used_at_first
        self.counter.arm()
        self.stopwatch.mark("backward_start")

    def keep_local(self) -> None:
        """After a forward under no_sync(): it is meant that the gradients of the next backward stay on this rank."""
        self.counter.watch(False)

    # --- its backward: gradients arrive ------------------------------------------------------------

    def _begin(self, index: int) -> None:
        """Handle the arrival of the first gradient of a step."""
        with self.lock:
            step = self.step
            if step is None:
                return
            step.begun = True
            self.sender.unused = step.unused if self._used_at_first is None else self._unused_at_first
            if rpc_context.uses_rpc():
                stored = rpc_context.is_stored_in_context(step.context, self.parameters[index])
                step.missed_context = stored is None and step.context is None
                step.in_context = step.deferred = bool(stored)
            for chunk in self.counter.settle(sorted(step.unused)):
                self._chunk_complete(chunk)

    def _surplus(self, index: int) -> None:
        """Raise for a gradient after the last one that is expected."""
        if self.static_graph:
            raise self.record_error(errors.unexpected(self.names[index], self.rank))
        raise self.record_error(errors.ready_twice(self.names[index], index, self.rank))

    def _chunk_complete(self, number: int) -> None:
        """Handle the last gradient of a chunk: gather it into its bucket, and launch the buckets that are full."""
        with self.lock:
            step, chunk = self.step, self.chunks[number]
            if step is None:
                return
            if not step.deferred:
                self._gather(step, chunk)
            step.waiting[chunk.bucket] -= 1
            self._launch_full(step)

    def _gather(self, step: Step, chunk: plan.Chunk) -> None:
        with torch.no_grad():
            self.operations.gather(chunk.bucket, chunk.start, chunk.end)
        streams.note(step.streams, chunk.bucket, self.parameters[chunk.members[0]].device)

    def _launch_full(self, step: Step) -> None:
        """Launch full buckets in the order of the plan."""
        n = len(step.waiting)
        while step.launched < n and not step.waiting[step.launched]:
            bucket, step.launched = step.launched, step.launched + 1
            if not step.deferred:
                self._launch(step, bucket)
            if bucket + 1 == n:
                if not step.deferred:
                    self._exchange_used(step)
                self.when_it_ends(weakly(self._finalize))

    def _launch(self, step: Step, bucket: int) -> None:
        members = self.sender.plan.buckets[bucket].members
        self.stopwatch.mark_first("comm_start")
        skips = self.settings.skip_unused and not self.sender.hooked
        if skips and self.looks_for_unused and step.unused.issuperset(members):
            return
        step.reduced += 1
        streams.follow(step.streams.get(bucket, ()), self.parameters[members[0]].device)
        with torch.no_grad():
            step.works[bucket] = self.operations.launch(bucket)

    def _exchange_used(self, step: Step) -> None:
        if self.exchanges_used:
            used = self.counter.take_used()
            here = [int(bool(u) and p.grad is not None) for u, p in zip(used, self.parameters, strict=True)]
            step.usage = Usage(here, self.sender.group, self.sender.device)

    def delay_all_reduce(self) -> None:
        """Average everything at the end of the first backward of a static graph, or of its first autograd.grad.

        torch's module calls it there.
        """
        step = self.step
        if step is None:
            raise self.record_error(errors.static_graph_began_locally(self.rank))
        step.begun = step.deferred = True
        counts = [arrivals.ANY_NUMBER - left for left in self.counter.left()]
        step.unused = self.sender.unused = frozenset(i for i, count in enumerate(counts) if not count)
        self._finalize()
        if not any(counts):  # autograd.grad: torch averages what there is, and no later backward
            return
        self._expected, self._used_at_first = counts, step.usage
        self._unused_at_first = step.usage.unused_here if step.usage is not None else frozenset()
        self._cut()

    def _send_all(self, step: Step) -> None:
        """Gather and launch all buckets at once."""
        for chunk in self.chunks:
            self._gather(step, chunk)
        for bucket in range(len(step.works)):
            self._launch(step, bucket)
        self._exchange_used(step)

    # --- the backward ends -------------------------------------------------------------------------

    def _finalize(self) -> None:
        """Wait for every bucket and store the averages in `.grad`."""
        step = self.step
        if step is None:
            return
        self.step, step.order = None, self.counter.disarm()
        self.stopwatch.mark("compute_end")
        without: list[int] = []
        try:
            if step.in_context and step.context is not None:
                with rpc_context.in_place_of_grad(step.context, self.parameters) as without:
                    self._store_averages(step)
            else:
                self._store_averages(step)
        finally:
            self._step_ended(step)
        for listener in tuple(self.at_round_over):
            listener()
        if step.missed_context:
            raise self.record_error(errors.forward_outside_context(self.rank))
        if names := [self.names[i] for i in without]:
            raise self.record_error(errors.context_without_gradient(names, self.rank))

    def _store_averages(self, step: Step) -> None:
        if step.deferred:
            self._send_all(step)
        for bucket, work in enumerate(step.works):
            sent = work is not None and not step.missed_context
            used = UsedMembers(self.sender.plan.buckets[bucket].members, step.usage, sent=sent)
            self.operations.finish(bucket, work, used)
        if step.usage is not None:
            step.usage.wait()

    def _step_ended(self, step: Step) -> None:
        if self.previous is not None:
            self.graph_is_static &= step.unused == self.previous.unused
        self.previous, step.works = step, []
        self.sender.step_ended()
        self.stopwatch.step_ended()
        self.counter.watch(not self._said_local)
        if self.should_rebuild and not self.observes_graph:
            self._observed = (*step.order, *sorted({*range(len(self.parameters))} - {*step.order}))

    # --- a backward that is not averaged -------------------------------------------------------------

    def _stays_local(self, index: int) -> None:
        """Say once, or raise if it is strict, that gradients stay on this rank although no `no_sync()` asked for it."""
        others = [p for each in tuple(_living) if each is not self for p in each.parameters]
        if not self.wanted() or any(p is self.parameters[index] for p in others):
            return
        error = errors.stays_local(self.names[index], self.rank)
        if self.settings.strict:
            raise self.record_error(error)
        self._said_local = True
        self.counter.watch(False)
        _log.warning("%s", error)

    # --- which buckets -----------------------------------------------------------------------------

    @property
    def should_rebuild(self) -> bool:
        return not self.rebuilt and not self.looks_for_unused

    def follow_step(self) -> None:
        """Follow a step of the others on a rank without input. For a rebuild, any order of rank 0 is acceptable."""
        self.sender.rounds += 1
        if self.observes_graph:
            self._expected = [1] * len(self.parameters)
            self._cut()
        elif self.should_rebuild and not self._observed:
            self._observed = tuple(reversed(range(len(self.parameters))))

    def rebuild(self, order: Sequence[int]) -> None:
        """Follow the order of arrival on rank 0."""
        self.agreed_order = agreement.order_of_rank_0(self.sender.group, self.sender.device, order)
        self._follow(self.sender.make_plan(self.agreed_order))
        self.rebuilt, self._observed, self.step = True, (), None

    def _follow(self, chosen: plan.BucketPlan) -> None:
        agreement.same_plan(self.sender.group, self.sender.device, plan.plan_fingerprint(chosen))
        self.sender.adopt(chosen)
        self._cut()

    def resize(self, limit: plan.Limits) -> None:
        """Change the bucket sizes and keep the order. All ranks call it between two steps."""
        self._follow(self.sender.make_plan(self.agreed_order, limit))
        self.limit = limit

    def start_over(self) -> None:
        """Reset the state after the sender has returned to its first plan."""
        self.limit = self.settings.limit
        self.forget()
        if self.tuner is not None:
            self.tuner.stop("starts again, because the reducer was reset")
        if self.settings.tuned:
            self.tune()

    def tune(self) -> None:
        """Start tuning the bucket size, instead of using the configured one."""
        if extensions.start_tuner is not None:
            self.tuner = extensions.start_tuner(self)
