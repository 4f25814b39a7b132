"""The reducer: averages the gradients of a model's backward, when torch's reducer would, and only then.

The way of a gradient, from top to bottom of this file. A forward of the wrapper that is to be averaged arms the counter
of the hooks (`prepare_for_backward`). Each gradient is counted in C (`Arrivals`). The first one begins the step
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import chain, repeat
from operator import and_, attrgetter, is_not
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.autograd.profiler import record_function
from torch.distributed.autograd import get_gradients, is_available

from ddp.reducer import agreement, plan
from ddp.reducer.bucket_sender import BucketSender, ReducerSettings
from ddp.reducer.collectives import GROUP_TIMEOUT, start_sum
from ddp.reducer.device import HostCopy, follow_streams, note_stream, to_device
from ddp.reducer.logging_data import ReducerLogger, Stopwatch
from ddp.telemetry import torch_api, torch_names

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    Call = Callable[[int], None]

_log = logging.getLogger("ddp")
_living: weakref.WeakSet[Reducer] = weakref.WeakSet()
_hooks_of, _hooks_after = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
_hooks_of_all_modules = [torch_api.get(each) for each in torch_names.HOOKS_OF_ALL_MODULES]


# --- hooks: a gradient has been added to `.grad` ---------------------------------------------------
#
# The hooks are on the accumulator nodes of the autograd graph, as in torch. The script's own hooks on a parameter or
# its gradient therefore run earlier.
#
# The engine owns the hooks, and the garbage collector does not see references through the engine. The hooks therefore
# hold weak references to their listeners, and `GradientHooks` removes them when it is deleted.

_engine = torch_api.get(torch_names.ENGINE)


class GradientHooks:
    """The hooks of one reducer, one on each parameter."""

    def __init__(self, parameters: Sequence[torch.Tensor], arrivals: PythonArrivals) -> None:
        self._handles: list[Any] = []  # first: it is deleted too if a parameter cannot have a hook
        # Keep the nodes alive: a node lives only while it is referenced, and its hooks are lost with it.
        self.accumulators = [accumulator(parameter) for parameter in parameters]
        self._callbacks = [arrivals.hook(i, each) for i, each in enumerate(parameters)]
        self._handles = [
            node.register_hook(call) for node, call in zip(self.accumulators, self._callbacks, strict=True)
        ]

    def report(self, index: int) -> None:
        """Report a gradient in place of a hook."""
        self._callbacks[index]()

    def __del__(self) -> None:
        self.remove()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def when_it_ends(callback: Callable[[], None]) -> None:
    """Call `callback` when the current backward ends without an error. `backward()` raises what `callback` raises."""
    _engine.queue_callback(callback)


def weakly(method: Callable[..., None], *arguments: Any) -> Callable[..., None]:
    """Return a function that calls `method(*arguments)` while its object exists. It ignores its own arguments."""
    call_method = weakly_with(method)

    def call(*_ignored: Any) -> None:
        call_method(*arguments)

    return call


def weakly_with(method: Any) -> Callable[..., None]:
    """Return a function that calls a bound method with its arguments while the method's object exists."""
    # Faster than weakref.WeakMethod, which makes a bound method for every call.
    owner, function = ref(method.__self__), method.__func__

    def call(*arguments: Any) -> None:  # a hook must return None: any other value would replace the gradients
        if (living := owner()) is not None:
            function(living, *arguments)

    return call


# --- count them ------------------------------------------------------------------------------------
#
# A call of Python costs more than the arrival of a small gradient, so a hook only counts. The counter is armed in the
# forward of a step that is averaged, and disarmed when the averages are there. While it is armed, a hook calls
#
#     begin(index)            for the first gradient
#     chunk_complete(chunk)   for the last gradient that a chunk waits for
#     surplus(index)          for a gradient that is not expected any more
#
# While it is not armed, a hook calls `local(index)` if `watch` asked for that, otherwise nothing: the gradient stays on
# this rank. Neither the thread nor the backward that computes a gradient makes a difference.
#
# The class exists twice: here, and compiled (`_core/arrivals.c`), which takes a sixth of the time.

# The expected number of gradients if it is not known yet. Then the order is that of first gradients.
ANY_NUMBER = 0x7FFFFFFE


class PythonArrivals:
    """Counts the gradients of a step. It is used without the compiled counter, and the tests compare both."""

    def __init__(self, begin: Call, chunk_complete: Call, surplus: Call, local: Call) -> None:
        self._calls = begin, chunk_complete, surplus, local
        self._lock = threading.Lock()
        self._armed = self._begun = self._watched = self._exact = False
        self._expected: list[int] = []
        self._chunk_of: list[int] = []
        self._members: list[int] = []
        self._left: list[int] = []
        self._waiting: list[int] = []
        self._order: list[int] = []
        self._used: list[int] = []

    def hook(self, index: int, parameter: Any) -> Callable[..., None]:
        """Return the hook of a parameter."""
        begin, chunk_complete, surplus, local = self._calls

        def call(*_ignored: Any) -> None:
            with self._lock:
                if index >= len(self._expected):
                    return
                if self._exact and not self._armed and parameter.grad is None:
                    return
                self._used[index] = 1
                armed, first = self._armed, not self._begun
                self._begun |= armed
            if not armed:
                if self._watched:
                    local(index)
                return
            if first:
                begin(index)
                self._begun = True  # it may have planned and armed anew
            arrived, chunk = self._count(index)
            if not arrived:
                surplus(index)
            elif chunk is not None:
                chunk_complete(chunk)

        return call

    def _count(self, index: int) -> tuple[bool, int | None]:
        """Return whether the gradient was expected, and the chunk that it completes."""
        with self._lock:
            if not self._armed:
                return True, None
            if self._left[index] <= 0:
                return False, None
            self._left[index] -= 1
            left = self._left[index]
            if not left or left == ANY_NUMBER - 1:
                self._order.append(index)
            if left:
                return True, None
            chunk = self._chunk_of[index]
            self._waiting[chunk] -= 1
            return True, None if self._waiting[chunk] else chunk

    def plan(self, expected: list[int], chunk_of: list[int], n_chunks: int, exact: bool) -> None:
        """Set how often the gradient of each parameter arrives in a step, and its chunk. Disarm the counter.

        `exact`: also while it is not armed, count parameters as used only if they have a gradient.
        """
        with self._lock:
            self._exact = exact
            if len(self._used) != len(expected):
                self._used = [0] * len(expected)
            self._expected, self._chunk_of, self._armed = list(expected), list(chunk_of), False
            self._left, self._order, self._waiting = [0] * len(expected), [], [0] * n_chunks
            self._members = [0] * n_chunks
            for chunk in chunk_of:
                self._members[chunk] += 1

    def arm(self) -> None:
        with self._lock:
            self._left, self._waiting, self._order = list(self._expected), list(self._members), []
            self._armed, self._begun = True, False

    def settle(self, indices: Sequence[int]) -> list[int]:
        """Do not wait for the gradients of these parameters. Return the chunks that are complete now."""
        complete = []
        with self._lock:
            for index in indices:
                self._left[index] = 0
                chunk = self._chunk_of[index]
                self._waiting[chunk] -= 1
                if not self._waiting[chunk]:
                    complete.append(chunk)
        return complete

    def disarm(self) -> list[int]:
        """Stop counting. Return the parameters in the order in which their last expected gradient arrived."""
        with self._lock:
            self._armed = False
            return list(self._order)

    def left(self) -> list[int]:
        """Return how many gradients of each parameter have not arrived."""
        return list(self._left)

    def take_used(self) -> list[int]:
        """Return 1 for each parameter with a gradient since the last call, armed or not."""
        with self._lock:
            used, self._used = self._used, [0] * len(self._used)
            return used

    def watch(self, wanted: bool) -> None:
        """Set whether gradients are reported that arrive while the counter is not armed."""
        self._watched = wanted


def new_counter(begin: Call, chunk_complete: Call, surplus: Call, local: Call) -> PythonArrivals:
    """Return a counter: the compiled one if it is installed."""
    try:
        kind = import_module("ddp.reducer._arrivals").Arrivals
    except ImportError:
        kind = PythonArrivals
    counter: PythonArrivals = kind(begin, chunk_complete, surplus, local)
    return counter


# --- a step, from its forward to its averages ------------------------------------------------------


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
    arrived: list[int] = field(default_factory=list)  # one by one: parameters that had a gradient then


class Reducer:
    """The reducer of one model."""

    when_it_ends = staticmethod(when_it_ends)

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        sparse: Sequence[bool],
        settings: ReducerSettings,
    ) -> None:
        self.parameters, self.names, self.settings = list(parameters), list(names), settings
        self.sender = BucketSender(self.parameters, names, sparse, settings)
        self.before_launch: list[Call] = []  # observers of full buckets
        self.stopwatch = Stopwatch(self.sender.device)
        self.lock = threading.RLock()  # a launch may run code that calls another hook
        self.counter = new_counter(
            *map(weakly_with, (self._begin, self._chunk_complete, self._surplus, self._stays_local))
        )
        self.hooks = GradientHooks(self.parameters, self.counter)
        self.graph = GraphSearch(self.hooks.accumulators)
        # Called on all ranks at the end of each averaged step. The listeners may communicate and may raise.
        self.at_round_over: list[Callable[[], None]] = []
        self.wanted: Callable[[], bool] = lambda: True  # whether gradients should be averaged now
        self.log: Callable[[], ReducerLogger | None] = lambda: None
        self.static_graph = False
        self.module_hooks: list[dict[int, Any]] = []  # where modules register hooks of the backward
        self._one_by_one = False
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
        least = 0 if self._one_by_one else self.sender.costs.chunk
        self.chunks = plan.cut(self.sender.plan, self.sender.facts, least)
        chunk_of, self._waiting = [0] * len(self.parameters), [0] * len(self.sender.plan.buckets)
        for number, chunk in enumerate(self.chunks):
            self._waiting[chunk.bucket] += 1
            for member in chunk.members:
                chunk_of[member] = number
        expected = [1] * len(self.parameters)
        if self.static_graph:
            expected = self._expected or [ANY_NUMBER] * len(self.parameters)
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
            raise self.record_error(agreement.graph_changed(names, lacking, self.rank))
        raise self.record_error(agreement.unfinished(names, lacking, self.rank, self.settings.find_unused))

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """After a forward: average the gradients of the next backward."""
        self.step = step = Step(list(self._waiting), [None] * len(self._waiting), context=current_context())
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
            if self._is_watched() != self._one_by_one:
                self._one_by_one = not self._one_by_one
                self.sender.set_shared()
                self._cut()
                step.waiting = list(self._waiting)
                self.counter.arm()
            self.sender.unused = step.unused if self._used_at_first is None else self._unused_at_first
            if uses_rpc():
                stored = is_stored_in_context(step.context, self.parameters[index])
                step.missed_context = stored is None and step.context is None
                step.in_context = step.deferred = bool(stored)
            for chunk in self.counter.settle(sorted(step.unused)):
                self._chunk_complete(chunk)

    def _is_watched(self) -> bool:
        """Whether hooks of the script may see or change gradients that have arrived: each is copied when it arrives."""
        tensors = map(_hooks_of, self.parameters), map(_hooks_after, self.parameters)
        return any(chain(_hooks_of_all_modules, self.module_hooks, *tensors))

    def _surplus(self, index: int) -> None:
        """Raise for a gradient after the last one that is expected."""
        if self.static_graph:
            raise self.record_error(agreement.unexpected(self.names[index], self.rank))
        raise self.record_error(agreement.ready_twice(self.names[index], index, self.rank))

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
        if self._one_by_one:
            step.arrived += [i for i in chunk.members if self.parameters[i].grad is not None]
        with torch.no_grad():
            self.sender.gather(chunk.bucket, chunk.start, chunk.end)
        note_stream(step.streams, chunk.bucket, self.parameters[chunk.members[0]].device)

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
        follow_streams(step.streams.get(bucket, ()), self.parameters[members[0]].device)
        with torch.no_grad():
            for look in self.before_launch:
                look(bucket)
            step.works[bucket] = self.sender.launch(bucket)

    def _exchange_used(self, step: Step) -> None:
        if self.exchanges_used:
            has_gradient = list(map(is_not, map(attrgetter("grad"), self.parameters), repeat(None)))
            for i in step.arrived:  # a hook may have dropped it since
                has_gradient[i] = True
            here = list(map(and_, self.counter.take_used(), has_gradient))
            step.usage = Usage(here, self.sender.group, self.sender.device)

    def delay_all_reduce(self) -> None:
        """Average everything at the end of the first backward of a static graph, or of its first autograd.grad.

        torch's module calls it there.
        """
        step = self.step
        if step is None:
            raise self.record_error(agreement.static_graph_began_locally(self.rank))
        step.begun = step.deferred = True
        counts = [ANY_NUMBER - left for left in self.counter.left()]
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
                with in_place_of_grad(step.context, self.parameters) as without:
                    self._store_averages(step)
            else:
                self._store_averages(step)
        finally:
            self._step_ended(step)
        for listener in tuple(self.at_round_over):
            listener()
        if step.missed_context:
            raise self.record_error(agreement.forward_outside_context(self.rank))
        if names := [self.names[i] for i in without]:
            raise self.record_error(agreement.context_without_gradient(names, self.rank))

    def _store_averages(self, step: Step) -> None:
        if step.deferred:
            self._send_all(step)
        for bucket, work in enumerate(step.works):
            sent = work is not None and not step.missed_context
            used = UsedMembers(self.sender.plan.buckets[bucket].members, step.usage, sent=sent)
            self.sender.finish(bucket, work, used)
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
        error = agreement.stays_local(self.names[index], self.rank)
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
        chosen = self.sender.make_plan(self.agreed_order)
        agreement.same_plan(self.sender.group, self.sender.device, plan.plan_fingerprint(chosen))
        self.sender.adopt(chosen)
        self._cut()
        self.rebuilt, self._observed, self.step = True, (), None


# --- which parameters are used ---------------------------------------------------------------------
#
# Those that a backward from given outputs cannot reach, and those that any rank used.
#
# With `find_unused_parameters`, and in the first step of a static graph, the ranks exchange which parameters they used
# (`Usage`). Otherwise every parameter counts as used.


class GraphSearch:
    """Searches the graph of each forward for parameters that its backward cannot reach."""

    def __init__(self, accumulators: Sequence[Any]) -> None:
        self._accumulators = {accumulator: i for i, accumulator in enumerate(accumulators)}
        self._warned = False

    def unused(self, outputs: Sequence[torch.Tensor]) -> frozenset[int]:
        with record_function("torch.distributed.ddp.reducer::search_unused_parameters"):
            unused = unreachable(outputs, self._accumulators)
        if not unused and not self._warned:
            self._warned = True
            _log.warning(
                "find_unused_parameters=True is set, but this forward used all parameters. The search for unused "
                "parameters costs time in each step. If every forward uses all parameters, remove it."
            )
        return unused


def unreachable(outputs: Sequence[torch.Tensor], accumulators: dict[Any, int]) -> frozenset[int]:
    """Return the indices of the accumulators that the autograd graph does not reach from the outputs."""
    stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
    reached, left = set(stack), len(accumulators)
    while stack and left:
        for node, _ in stack.pop().next_functions:
            if node is None or node in reached:
                continue
            reached.add(node)
            if node in accumulators:  # nothing follows it, so it is not asked for what does
                left -= 1
            else:
                stack.append(node)
    return frozenset(accumulators[node] for node in accumulators.keys() - reached) if left else frozenset()


def accumulator(parameter: torch.Tensor) -> Any:
    """Return the node of the autograd graph that adds to `.grad`. Each parameter has one."""
    with torch.enable_grad():
        return parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


class Usage:
    """Which parameters any rank used in one backward. Reading that waits for the device, so it is read only if needed.

    A rank knows about the parameters that it used itself. About the others it has to read the sum over all ranks.
    """

    def __init__(self, used_here: Sequence[int], group: ProcessGroup, device: torch.device) -> None:
        self._used_here = used_here
        self.counts = to_device(torch.tensor(used_here, dtype=torch.int32), device)
        self._work: Any = start_sum(group, self.counts)
        self._copy: HostCopy | None = None
        self._used_anywhere: Sequence[int] | None = None

    def wait(self) -> None:
        """Wait for the sum as for a bucket: on an accelerator the device waits, not the host."""
        if self._work is not None:
            self._work.wait(GROUP_TIMEOUT)
            self._work = None
            if not all(self._used_here):
                self._copy = HostCopy(self.counts)

    @property
    def unused_here(self) -> frozenset[int]:
        return frozenset(i for i, used in enumerate(self._used_here) if not used)

    def used_all_here(self, members: Sequence[int]) -> bool:
        return all(map(self._used_here.__getitem__, members))

    def __getitem__(self, index: int) -> bool:
        if self._used_here[index]:
            return True
        if self._used_anywhere is None:
            self.wait()
            assert self._copy is not None
            self._used_anywhere, self._copy = self._copy.read(), None
        return bool(self._used_anywhere[index])


class UsedMembers:
    """The members of one bucket that any rank used. Only their `.grad` receives the average."""

    def __init__(self, members: Sequence[int], usage: Usage | None, *, sent: bool) -> None:
        """`members`: the parameter indices of the bucket. `sent`: whether the ranks averaged the bucket."""
        self._members, self._usage, self._sent = members, usage, sent

    def __call__(self, member: int, average: torch.Tensor) -> bool:
        return self._sent and (self._usage is None or self._usage[self._members[member]])

    def includes_all(self) -> bool:
        return self._sent and (self._usage is None or self._usage.used_all_here(self._members))


# --- gradients of a distributed backward (RPC) -----------------------------------------------------
#
# A torch.distributed.autograd context holds them instead of `.grad`.
#
# `dist_autograd.backward(context_id, ...)` adds a gradient to its context, then calls the same hooks as a local
# backward. Python can read the gradients of a context. It gets the tensors themselves, so averaging them in place
# averages them in the context. At the end of such a backward, the reducer therefore puts the context's gradients into
# `.grad`, lets the buckets be sent, and restores the script's own `.grad`.
#
# Hooks run on torch's threads, where the context is not set. The forward records the context, so the forward must also
# run in the context.

_rpc_is_used: Callable[[], bool] = torch_api.get(torch_names.RPC_IS_USED) if is_available() else bool


def uses_rpc() -> bool:
    """Whether the script has started RPC."""
    return _rpc_is_used()


def current_context() -> int | None:
    """Return the context of this thread, or None."""
    if not _rpc_is_used():
        return None
    try:
        return torch_api.rpc_context_id()
    except RuntimeError:  # the script uses RPC, but this forward runs outside a context
        return None


def _gradients_of_context(context: int) -> dict[torch.Tensor, torch.Tensor]:
    try:
        return get_gradients(context)
    except RuntimeError:  # the context has ended
        return {}


def is_stored_in_context(context: int | None, parameter: torch.Tensor) -> bool | None:
    """Whether the context has the gradient that was computed for this parameter, and not its `.grad`.

    None: neither has it, so it is in a context in which the forward did not run.
    """
    if context is not None and parameter in _gradients_of_context(context):
        return True
    return None if parameter.grad is None else False


@contextmanager
def in_place_of_grad(context: int, parameters: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Move the context's gradients to `.grad` inside the block.

    Yields the parameters with a gradient on other ranks only.
    """
    without: list[int] = []
    held = _gradients_of_context(context)
    own = [parameter.grad for parameter in parameters]
    gradients = [held.get(parameter) for parameter in parameters]
    try:
        _place_gradients(parameters, gradients)
        yield without
        averages = [parameter.grad for parameter in parameters]
    finally:
        _place_gradients(parameters, own)
    for i, (gradient, average) in enumerate(zip(gradients, averages, strict=True)):
        if gradient is None and average is not None:
            without.append(i)
        elif gradient is not average and gradient is not None and average is not None:
            with torch.no_grad():
                gradient.copy_(average)


def _place_gradients(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
