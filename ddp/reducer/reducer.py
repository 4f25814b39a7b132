"""The reducer's state between backwards: the hooks, the bucket plan, and what was observed in the last backward.

A forward creates a `Round` for the next backward. The round begins when the backward reaches an output of that forward.
As gradients arrive, the round gathers chunks of them into buckets, and launches full buckets in the order of the plan.
At the end of the outermost backward it sends the buckets that are not full, with the gradients that they have, and
waits for every bucket. Then `.grad` contains the averages.

Every parameter is averaged at the end. A parameter without a new gradient contributes its old `.grad`, or zeros. A
second backward of the same forward, or of an earlier one, is averaged too. This is correct: gradients from earlier
averages are equal on all ranks, so another average does not change them. `lenient` has what torch would refuse.

The first round only observes, and sends all buckets at its end. Before the next forward, rank 0 broadcasts the order in
which its gradients arrived. All ranks derive a plan from it, and check that their plans are equal. After that,
gradients are sent by this plan. If the order is stable, fewer hooks are installed.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

from ddp.reducer import agreement, arrivals, engine, errors, extensions, lenient, plan, rpc_context
from ddp.reducer.bucket_sender import BucketSender
from ddp.reducer.chunks import Mode, cut, sentinels
from ddp.reducer.failed_backward import abandon
from ddp.reducer.gradient_hooks import GradientHooks, weakly, weakly_with
from ddp.reducer.logging_data import Stopwatch
from ddp.reducer.observation import observe, unobserved
from ddp.reducer.round import Round, Setup, new_round
from ddp.reducer.unowned_gradients import arrived as without_round
from ddp.reducer.unowned_gradients import own
from ddp.reducer.unused import GraphSearch, Usage
from ddp.reducer.unwatched_gradients import watch
from ddp.telemetry.comm_error import explaining

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ddp.reducer.bucket_sender import Settings
    from ddp.reducer.observation import Observation
    from ddp.reducer.unowned_gradients import Guarded

_NONE_UNUSED: frozenset[int] = frozenset()
# How often the reducer adapts to a changed order. After that it always has a hook on every parameter.
_MAX_OBSERVED = 3


class Reducer:
    """The reducer of one model."""

    tuner: extensions.Tuner | None = None

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
        self.sender = BucketSender(self.parameters, names, sparse, settings)
        self.stopwatch = Stopwatch(self.sender.device)
        self.setup = Setup(
            self.parameters,
            self.names,
            settings,
            self.sender,
            self.sender,
            self.stopwatch,
            settings.groups[0].rank(),
            weakly(self._backward_ended),
            [1] * len(self.parameters),
            arrivals.new(engine.current_task, weakly_with(self.arrived), weakly_with(self._chunk_complete)),
        )
        # Called on all ranks at the end of each averaged step. The listeners may communicate and may raise.
        self.at_round_over: list[Callable[[], None]] = []
        self.wanted: Callable[[], bool] = lambda: True  # whether gradients should be averaged now
        self.follow_module: Callable[[], None] = lambda: None  # before gradients past a forward are averaged
        self.hooks = GradientHooks(self.parameters, self.setup.arrivals)
        self.without_hooks = False
        self.round: Round | None = None
        self.rebuilt, self.limit = False, settings.limit
        self.forget()
        self._observed: Observation | None = None
        self._lacking: set[int] | None = None
        self.graph = GraphSearch(self.hooks.accumulators)
        # Other reducers that share parameters, and the mode to restore when they are gone.
        self._sharing: Sequence[weakref.ref[Guarded]] = ()
        self._cut()
        if settings.groups[0].size() > 1:  # a single rank cannot diverge from others
            own(self, self.parameters)
            watch(self)
        self.hooks.watch_all()

    def forget(self) -> None:
        """Forget the last backward, and what was observed in earlier ones."""
        self.previous: Round | None = None
        self.synchronizes = self.graph_is_static = True
        self.stray_task = self.end_task = -1
        self.agreed_order: Sequence[int] = ()
        self.own_order: tuple[int, ...] = ()
        self._n_observed = 0
        self._used_at_first: Usage | None = None
        self._mode_alone = Mode.COUNT

    @property
    def rank(self) -> int:
        return self.setup.rank

    @property
    def mode(self) -> Mode:
        return self.setup.mode

    def _cut(self) -> None:
        chunks = cut(self.sender.plan, self.sender.facts, self.sender.costs.chunk)
        self.setup.chunks = chunks
        self.setup.chunk_of = {member: i for i, chunk in enumerate(chunks) for member in chunk.members}

    # --- before a forward --------------------------------------------------------------------------

    def within_own_backward(self) -> bool:
        """Whether activation checkpointing runs the forward again during the backward. It is part of the same step."""
        seen = self.round
        running = seen is not None and seen.end_known and not seen.ended
        return running and engine.current_task() == self.end_task

    def rebuild_buckets(self) -> bool:
        """Before a forward, check the previous backward and apply its observation.

        Return whether buckets were rebuilt.
        """
        if self.within_own_backward():
            return False
        self.check_finished()
        self._check_sharers()
        observed, self._observed = self._observed, None
        if observed is None:
            return False
        rebuild = self.should_rebuild
        if rebuild:
            self.rebuild(observed.order)
        if self.mode is Mode.OBSERVE:
            self.setup.expected = list(observed.expected)
            self.own_order = observed.order
        self._n_observed += 1
        steady = self._n_observed <= _MAX_OBSERVED and not self.without_hooks
        self._mode_alone = observed.mode if steady else Mode.COUNT
        self._watch_as(self._mode_alone if self.sender.alone else Mode.COUNT)
        return rebuild

    def prepare_for_forward(self) -> None:
        if self.within_own_backward():
            return
        self.stopwatch.next_iteration()
        self.stopwatch.mark("forward_start")

    def check_finished(self) -> None:
        """Raise if parameters got no gradient in the previous backward.

        If that backward raised, clean up its state instead.
        """
        with self.setup.lock:
            seen, lacking, self._lacking = self.round, self._lacking, None
            if seen is not None and seen.begun and not seen.end_known:
                self.round = None  # gradients arrived, but the backward never reached an output
                raise self.setup.unfinished([i for i, count in enumerate(seen.counts) if not count])
            if seen is not None and seen.is_unfinished:
                abandon(self, seen)
                return
        if lacking and not self.setup.looks_for_unused:
            lenient.accept_lacking(self.setup, sorted(lacking))

    # --- before a backward -------------------------------------------------------------------------

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        if self.within_own_backward():
            return
        unused = self._search(outputs) if self.setup.looks_for_unused else _NONE_UNUSED
        if self.round is not None and self.setup.looks_for_unused and self.round.searched:
            unused &= self.round.unused  # two forwards, then one backward of both
        self._lacking = None
        self.synchronizes = True
        self.begin_round(unused).searched = bool(outputs)
        self.stopwatch.mark("backward_start")

    def _search(self, outputs: Sequence[torch.Tensor]) -> frozenset[int]:
        return self.graph.unused(outputs) if self.setup.trust_graph else _NONE_UNUSED

    def begin_round(self, unused: frozenset[int]) -> Round:
        self.round = new_round(self.setup, unused)
        self.round.usage = self._used_at_first
        return self.round

    def forward_without_synchronization(self) -> None:
        """Keep this forward's gradients local.

        A backward that includes an earlier, synchronized forward is averaged.
        """
        self.synchronizes = False
        if self.round is not None and not self.round.begun and not self.round.end_known:
            self.round = None

    def watch_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        """Hook the outputs, to learn when a backward of this forward begins and in which task of the engine."""
        if self.within_own_backward():
            return
        seen = self.round
        if seen is not None and not seen.searched and self.setup.looks_for_unused:
            seen.unused = self._search(outputs)  # the outputs are in an object that torch does not search
        unused, context = seen.unused if seen is not None else _NONE_UNUSED, rpc_context.current()
        if seen is not None:
            seen.context = context
        for output in (each for each in outputs if each.grad_fn is not None):
            output.register_hook(partial(self._reached, self.hooks, unused, context))

    # --- during a backward -------------------------------------------------------------------------

    def _reached(
        self, hooks: GradientHooks, unused: frozenset[int], context: int | None, _gradient: torch.Tensor
    ) -> None:
        """The backward has reached an output of a forward. Outputs on two devices are reached on two threads."""
        with self.setup.lock:
            if self.round is not None and self.round.is_unfinished:
                self.round.queue.wait_for_launcher()  # other threads may change the round meanwhile
            if (task := engine.current_task()) == self.end_task:
                return
            if self.round is not None and self.round.is_unfinished:
                abandon(self, self.round)  # its backward raised, and another one has begun
            if lenient.left_local(self):
                return
            # After a forward, parameters may have been replaced. Then the numbers of its unused ones are wrong.
            seen = self.round or self.begin_round(unused if hooks is self.hooks else _NONE_UNUSED)
            self.end_task = task
            seen.end_known, seen.ended = True, False
            if not seen.begun:
                seen.before, seen.context = self.setup.baseline(), context
            engine.when_it_ends(self._backward_ended)

    def arrived(self, index: int) -> None:
        """Record that a gradient has been added to `.grad` of a watched parameter."""
        if not lenient.left_local(self) and (seen := self.round) is not None:
            seen.gradient_arrived(index)
        elif not self.setup.in_failed_backward():
            self.setup.used_between.add(index)
            without_round(self, index, lenient.past_forward(self))

    def _chunk_complete(self, number: int) -> None:
        if (seen := self.round) is not None:
            seen.chunk_complete(number)

    def _sentinel_arrived(self, number: int) -> None:
        if not lenient.left_local(self) and (seen := self.round) is not None:
            seen.sentinel_arrived(number)
        elif not self.setup.in_failed_backward():
            last = self.setup.chunks[number].members[-1]
            without_round(self, last, lenient.past_forward(self))

    # --- after a backward --------------------------------------------------------------------------

    @explaining("the averaging of gradients")
    def _backward_ended(self) -> None:
        seen, setup = self.round, self.setup
        self.end_task, task = -1, self.end_task
        if seen is None:
            return
        seen.ended = True
        if not seen.begun and not seen.anything_arrived():
            seen.end_known = seen.ended = False  # autograd.grad computed gradients of other tensors
            return
        self.stopwatch.mark("compute_end")
        missed = rpc_context.missed_context(seen, self.parameters)
        try:
            with rpc_context.in_place_of_grad(seen, self.parameters) as without:
                lacking = seen.missing()
                seen.complete()
                late = self.sender.late if self.mode is Mode.SENTINEL else None
                self.average(seen)
        finally:
            self.graph_is_static &= not seen.changed_order(self.previous)
            self.round, self.previous = None, seen
            seen.release()
            self.sender.step_ended()
            self.stopwatch.step_ended()
        self.round_over()
        if missed:
            raise setup.record_error(errors.forward_outside_context(self.rank))
        if without:
            raise setup.record_error(errors.context_without_gradient(setup.names_of(without), self.rank))
        if late is not None:
            raise setup.unexpected(late)
        self._observe(seen, task, lacking)

    def average(self, seen: Round) -> None:
        seen.average()
        if self.setup.static_graph and self.mode is Mode.OBSERVE:
            self._used_at_first = seen.usage

    def round_over(self) -> None:
        for listener in tuple(self.at_round_over):
            listener()

    def _observe(self, seen: Round, task: int, lacking: Sequence[int]) -> None:
        self._lacking = set(lacking) if self._lacking is None else self._lacking & set(lacking)
        if self.mode is Mode.OBSERVE or seen.disordered:
            self._observed = observe(seen, task, dynamic=self.setup.looks_for_unused, lacking=lacking)

    def take_part_in_rebuild(self) -> None:
        """Let a rank that has not observed a backward take part in the rebuild. On rank 0 any order is acceptable."""
        if self.should_rebuild and self._observed is None:
            self._observed = unobserved(len(self.parameters))

    # --- which buckets, and which hooks ------------------------------------------------------------

    @property
    def should_rebuild(self) -> bool:
        return not self.rebuilt and not self.setup.looks_for_unused

    def rebuild(self, order: Sequence[int]) -> None:
        self.agreed_order = agreement.order_of_rank_0(self.sender.group, self.sender.device, order)
        self._follow(self.sender.make_plan(self.agreed_order))
        self.rebuilt = True
        self.round = None

    def _follow(self, chosen: plan.BucketPlan) -> None:
        agreement.same_plan(self.sender.group, self.sender.device, plan.plan_fingerprint(chosen))
        self.sender.adopt(chosen)
        self._cut()

    def resize(self, limit: plan.Limits) -> None:
        """Change the bucket sizes and keep the order. All ranks call it between two steps."""
        self._follow(self.sender.make_plan(self.agreed_order, limit))
        self.limit = limit
        self._watch_as(self.mode)

    def settle(self, order: Sequence[int]) -> None:
        """Fix the buckets to this order, because the caller's memory layout depends on them."""
        self.rebuild(order)
        self._watch_as(Mode.OBSERVE)

    def start_over(self) -> None:
        """Reset the state after the sender has returned to its first plan."""
        self._cut()
        self.round, self._observed, self._lacking = None, None, None
        self.rebuilt, self.limit = False, self.settings.limit
        self._watch_as(Mode.OBSERVE)
        if self.tuner is not None:
            self.tuner.stop("starts again, because the reducer was reset")
        if self.settings.tuned:
            self.tune()

    def tune(self) -> None:
        """Start tuning the bucket size, instead of using the configured one."""
        if extensions.start_tuner is not None:
            self.tuner = extensions.start_tuner(self)

    def remove_hooks(self) -> None:
        """Remove the hooks. With mixed precision, torch's module calls `arrived` directly."""
        self._cut()
        self.without_hooks = True
        self.hooks.remove()

    def watch_every_parameter(self) -> None:
        """Keep a hook on every parameter from now on."""
        self._mode_alone, self._n_observed = Mode.COUNT, _MAX_OBSERVED
        self._watch_as(Mode.COUNT)

    def _watch_as(self, mode: Mode) -> None:
        self.setup.mode = mode
        if mode is Mode.SENTINEL:
            chosen = sentinels(self.setup.chunks, self.own_order)
            self.hooks.watch_sentinels(chosen, self._sentinel_arrived)
        elif not self.without_hooks:
            self.hooks.watch_all()

    # --- other reducers of the same parameters -----------------------------------------------------

    def shares_parameters_with(self, other: Guarded) -> None:
        """Handle another reducer of the same parameters. Each reducer gathers only gradients from autograd."""
        self._sharing = [*self._sharing, weakref.ref(other)]
        self.sender.set_shared(True)
        if self.mode is Mode.SENTINEL:  # this mode detects late gradients by their versions
            self._mode_alone = Mode.SENTINEL
            self._watch_as(Mode.COUNT)

    def _check_sharers(self) -> None:
        """After the other reducers were deleted, switch back to the faster mode. Call it between two backwards."""
        if not self._sharing or any(other() is not None for other in self._sharing):
            return
        self._sharing = ()
        self.sender.set_shared(False)
        if self.mode is Mode.COUNT:
            self._watch_as(self._mode_alone)
