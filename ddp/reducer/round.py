"""The state of one backward, from its forward until `.grad` contains the averages.

A gradient passes through these methods, in the order below. A hook reports the gradient (`gradient_arrived`), or a
sentinel reports a whole chunk (`sentinel_arrived`). The last gradient completes its chunk (`_settle`). The round
gathers the chunk into its bucket (`_gather`), and launches full buckets in the order of the plan (`_launch_full`). When
the backward ends, the round gathers the remaining chunks (`complete`), and waits for every bucket (`average`).

A chunk is a sequence of adjacent gradients in a bucket. If every parameter has a hook, a chunk is complete when each of
its gradients has arrived as often as expected. With sentinels, it is complete when its sentinel has arrived and a check
finds the other gradients.

A module on several devices has hooks on several threads. `Setup.lock` guards the round, also while a chunk is gathered.
It is not held while a bucket is launched, see `ddp/reducer/launch_queue.py`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ddp.reducer import engine, errors, rpc_context, streams, unowned_gradients
from ddp.reducer.baseline import Baseline, baseline
from ddp.reducer.chunks import Mode
from ddp.reducer.launch_queue import LaunchQueue
from ddp.reducer.unused import Usage, UsedMembers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddp.reducer.arrivals import Arrivals
    from ddp.reducer.bucket_sender import BucketOperations, BucketSender, Settings
    from ddp.reducer.chunks import Chunk
    from ddp.reducer.logging_data import Log, Stopwatch


@dataclass
class Setup:
    """The state that all rounds of a reducer share. It holds only weak references to the reducer."""

    parameters: list[torch.Tensor]
    names: list[str]
    settings: Settings
    sender: BucketSender
    operations: BucketOperations  # `sender`, or an observer in front of it
    stopwatch: Stopwatch
    rank: int
    backward_ended: Callable[[], None]
    expected: list[int]  # for each parameter, how often its gradient arrives
    arrivals: Arrivals  # counts gradients in the hooks, if a round has armed it
    chunks: list[Chunk] = field(default_factory=list)
    chunk_of: dict[int, int] = field(default_factory=dict)
    mode: Mode = Mode.OBSERVE
    static_graph: bool = False
    trust_graph: bool = True  # the search for unused parameters has not been wrong yet
    used_between: set[int] = field(default_factory=set)  # in backwards that are not averaged
    # Gradients that a failed backward left partly averaged: parameter, gradient, version.
    partly_averaged: Sequence[tuple[int, torch.Tensor, int]] = ()
    # The engine's tasks of the last backward that raised. Its hooks may still run on other threads.
    failed_tasks: frozenset[int] = frozenset()
    said_lacking: bool = False  # the warning about parameters without a gradient
    log: Callable[[], Log | None] = staticmethod(lambda: None)
    # Guards the reducer and its round. A hook may run code that calls another hook, so it is reentrant.
    lock: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))

    @property
    def looks_for_unused(self) -> bool:
        return self.settings.find_unused and not self.static_graph

    @property
    def exchanges_used(self) -> bool:
        """Whether the ranks exchange in this step which parameters they used."""
        return self.looks_for_unused or (self.static_graph and self.mode is Mode.OBSERVE)

    def in_failed_backward(self) -> bool:
        """Whether this thread still runs a part of a backward that raised on another thread."""
        return bool(self.failed_tasks) and engine.current_task() in self.failed_tasks

    def names_of(self, indices: Sequence[int]) -> list[str]:
        return [self.names[i] for i in indices]

    def record_error(self, error: RuntimeError) -> RuntimeError:
        """Record the error in the logging data, like torch, and return it."""
        log = self.log()
        if log is not None:
            log.set_error_and_log(str(error))
        return error

    def unexpected(self, index: int) -> RuntimeError:
        if self.static_graph:
            return self.record_error(errors.unexpected(self.names[index], self.rank))
        return self.record_error(errors.ready_twice([self.names[index]], index, self.rank))

    def unfinished(self, lacking: list[int]) -> RuntimeError:
        """The error for parameters without a gradient in the previous backward."""
        names = self.names_of(lacking)
        if self.static_graph:
            return self.record_error(errors.graph_changed(names, lacking, self.rank))
        find_unused = self.settings.find_unused
        return self.record_error(errors.unfinished(names, lacking, self.rank, find_unused=find_unused))

    def baseline(self) -> Baseline:
        left, self.partly_averaged = self.partly_averaged, ()
        still = [i for i, grad, was in left if self.parameters[i].grad is grad and grad._version == was]
        if still:
            raise self.record_error(errors.partly_averaged(self.names_of(still), self.rank))
        return baseline(self.parameters, exact=not self.settings.as_views)


@dataclass
class Round:
    """The progress of one backward."""

    setup: Setup
    queue: LaunchQueue
    waiting: list[int]  # for each chunk, the number of gradients it waits for
    counts: list[int]  # for each parameter, how often its gradient has arrived
    gathered: list[bool]  # for each chunk
    unused: frozenset[int] = frozenset()  # the graph of the forward does not reach them
    searched: bool = False
    settled: set[int] = field(default_factory=set)  # parameters for which the round does not wait
    order: list[int] = field(default_factory=list)
    tasks: set[int] = field(default_factory=set)  # the engine's graph tasks in which gradients arrived
    # For each bucket, the streams of its device on which chunks were gathered.
    streams: dict[int, list[torch.Stream]] = field(default_factory=dict)
    reduced: int = 0  # number of sent buckets; buckets without a used parameter may be skipped
    before: Baseline | None = None
    begun: bool = False
    # The end of the outermost backward will be reported; it has been reported.
    end_known: bool = False
    ended: bool = False
    # Gradients arrived before the backward reached an output. They belong to a layer applied after the forward.
    early: bool = False
    # The torch.distributed.autograd context of the forward; whether gradients go there instead of `.grad`.
    context: int | None = None
    in_context: bool = False
    # Chunks whose sentinel arrived before the check could find all their other gradients.
    disordered: set[int] = field(default_factory=set)
    finishing: bool = False
    counted_by_hooks: bool = False
    usage: Usage | None = None  # which parameters any rank gave a gradient. None: not exchanged

    @property
    def is_unfinished(self) -> bool:
        """Whether its backward is running, or has raised. The caller knows which."""
        return self.end_known and not self.ended

    # --- a gradient arrives ------------------------------------------------------------------------

    def gradient_arrived(self, index: int) -> None:
        """Record that a gradient has been added to `.grad` of a watched parameter. Any thread may call it."""
        with self.setup.lock:
            if self.setup.in_failed_backward():
                return
            self._take_counts()
            self._count_arrival(index)
            self._let_hooks_count()
        self._launch_full()

    def chunk_complete(self, number: int) -> None:
        """Handle the last gradient of a chunk, which a hook has counted. Any thread may call it."""
        with self.setup.lock:
            if not self.setup.in_failed_backward():
                self._gather(number)
        self._launch_full()

    def _let_hooks_count(self) -> None:
        """Let the hooks count the rest, if this is a plain backward: each gradient once, in one task of the engine."""
        setup = self.setup
        if self.counted_by_hooks or setup.mode is not Mode.COUNT or not self.end_known or self.in_context:
            return
        self.counted_by_hooks = True  # once in a round: an unusual gradient ends it
        if setup.static_graph or max(setup.expected) > 1:
            return
        states = [int(count > 0) for count in self.counts]
        for i in self.settled:
            states[i] = 1
        chunk_of = [setup.chunk_of[i] for i in range(len(states))]
        setup.arrivals.arm(engine.current_task(), states, chunk_of, self.waiting)

    def _take_counts(self) -> None:
        """Take over what the hooks have counted. They do not count any more in this round."""
        taken = self.setup.arrivals.take()
        if taken is not None:
            order, self.waiting = taken
            self.order += order
            for index in order:
                self.counts[index] += 1

    def _count_arrival(self, index: int) -> None:
        setup = self.setup
        if not self.end_known:
            self.early = True
            if index in self.unused:  # of a layer applied after the forward, which the search cannot find
                setup.trust_graph, self.unused = False, frozenset()
        if not self.begun:
            self.begin((index,))
        self.counts[index] += 1
        self.tasks.add(engine.current_task())
        if self.counts[index] == 1:
            self.order.append(index)
        if setup.mode is Mode.OBSERVE or self.in_context:  # everything is sent at the end
            if not self.end_known and len(self.order) == len(setup.parameters) - len(self.unused):
                self._finish_at_the_end()
        else:
            self._count(index)

    def begin(self, first: Sequence[int] = ()) -> None:
        """Begin the round: the first gradients have arrived, or the backward ends without any."""
        setup = self.setup
        self.begun = True
        unowned_gradients.serve(engine.current_task())
        if self.before is None:
            self.before = setup.baseline()
        self.in_context = rpc_context.writes_to_context(self, setup.parameters, first)
        if setup.mode is Mode.COUNT and not self.in_context:
            frozen = [i for i, parameter in enumerate(setup.parameters) if not parameter.requires_grad]
            never = [i for i, count in enumerate(setup.expected) if count == 0] if setup.static_graph else []
            for i in sorted({*self.unused, *frozen, *never}):
                self.settled.add(i)
                self._settle(i)

    def _count(self, index: int) -> None:
        setup = self.setup
        surplus = self.counts[index] > max(setup.expected[index], 0 if setup.static_graph else 1)
        if index in self.settled or surplus:
            # A graph that is not static may change until the gradient is sent.
            if (setup.static_graph and surplus) or self.gathered[setup.chunk_of[index]]:
                setup.trust_graph = setup.trust_graph and index not in self.unused
                raise setup.unexpected(index)
        elif self.counts[index] >= setup.expected[index]:
            self._settle(index)

    def _settle(self, index: int) -> None:
        chunk = self.setup.chunk_of[index]
        self.waiting[chunk] -= 1
        if self.waiting[chunk] == 0:
            self._gather(chunk)

    def sentinel_arrived(self, number: int) -> None:
        """Handle the last gradient of a chunk: gather the chunk if its other gradients have arrived."""
        with self.setup.lock:
            if self.setup.in_failed_backward():
                return
            self._examine_chunk(number)
        self._launch_full()

    def _examine_chunk(self, number: int) -> None:
        setup, chunk = self.setup, self.setup.chunks[number]
        if not self.begun:
            self.begin(chunk.members)
        if not self.end_known:
            self._finish_at_the_end()
        if self.gathered[number]:
            raise setup.unexpected(chunk.members[-1])
        before = self.before
        assert before is not None
        grads = [setup.parameters[i].grad for i in chunk.members]
        if before.exact and not self.in_context and before.all_arrived(chunk.members, grads):
            self._gather(number)
        else:
            self.disordered.add(number)

    # --- a chunk is gathered into a bucket, and the bucket is sent ---------------------------------

    def _gather(self, number: int) -> None:
        """Gather a chunk. The caller holds the lock, and launches full buckets after it releases the lock."""
        if self.gathered[number]:
            return
        setup, chunk = self.setup, self.setup.chunks[number]
        before = self.before if self.before is not None and self.before.grads is not None else None
        with torch.no_grad():
            setup.operations.gather(chunk.bucket, chunk.start, chunk.end, before)
        self.gathered[number] = True
        streams.note(self.streams, chunk.bucket, setup.parameters[chunk.members[0]].device)
        self.queue.filled(chunk.bucket, chunk.end - chunk.start)

    def _launch_full(self) -> None:
        if self.queue.has_full:
            self.queue.launch_full(self._launch)

    def _launch(self, bucket: int) -> Any:
        setup = self.setup
        members = setup.sender.plan.buckets[bucket].members
        setup.stopwatch.mark_first("comm_start")
        skips = setup.settings.skip_unused and not setup.sender.hooked
        work = None
        if not (skips and self.unused.issuperset(members)):
            self.reduced += 1
            streams.follow(self.streams.get(bucket, ()), setup.parameters[members[0]].device)
            with torch.no_grad():
                work = setup.operations.launch(bucket)
        if bucket + 1 == len(self.queue.works):
            self._all_launched()
        return work

    def _all_launched(self) -> None:
        setup = self.setup
        if setup.exchanges_used:
            with setup.lock:
                self._take_counts()
                used = {i for i, count in enumerate(self.counts) if count} | setup.used_between
                here = [int(i in used and p.grad is not None) for i, p in enumerate(setup.parameters)]
                setup.used_between.clear()
            self.usage = Usage(here, setup.sender.group, setup.sender.device)
        if not self.end_known:
            self._finish_at_the_end()

    def _finish_at_the_end(self) -> None:
        """Finish at the end of the current backward, because the outermost one is not known."""
        if not self.finishing:
            self.finishing = True
            engine.when_it_ends(self.setup.backward_ended)

    # --- the backward ends -------------------------------------------------------------------------

    def anything_arrived(self) -> bool:
        """Whether any gradient arrived that a hook did not report."""
        before = self.before
        if self.setup.mode is not Mode.SENTINEL or before is None:
            return False
        return any(before.arrived(i, parameter.grad) for i, parameter in enumerate(self.setup.parameters))

    def missing(self) -> list[int]:
        """Return the parameters whose gradients were expected but did not arrive."""
        setup = self.setup
        if setup.static_graph and setup.mode is Mode.OBSERVE:
            return []  # every later step uses the same parameters as the first one
        with setup.lock:
            self._take_counts()
        lost = self._absent()
        return [i for i in lost if setup.parameters[i].requires_grad and i not in self.unused]

    def _absent(self) -> list[int]:
        """Return the parameters without a detectable new gradient in this backward."""
        parameters = self.setup.parameters
        if self.setup.mode is not Mode.SENTINEL:
            return [i for i, count in enumerate(self.counts) if not count and i not in self.settled]
        if self.in_context:
            return [i for i, parameter in enumerate(parameters) if parameter.grad is None]
        before = self.before
        assert before is not None
        if not before.exact:
            return []
        return [
            i
            for n, chunk in enumerate(self.setup.chunks)
            if not self.gathered[n]
            for i in chunk.members
            if not before.arrived(i, parameters[i].grad)
            and not (n in self.disordered and before.had_gradient(i))
        ]

    def complete(self) -> None:
        """Gather the remaining chunks with the gradients that they have, and launch the remaining buckets."""
        with self.setup.lock:
            self._take_counts()
            if not self.begun:
                self.begin()
            self.finishing = True
            for number in range(len(self.setup.chunks)):
                self._gather(number)
        # After a failed launch, another thread may still be launching.
        while not self.queue.complete:
            self.queue.wait_for_launcher()
            self.queue.launch_full(self._launch)

    def average(self) -> None:
        """Wait for every bucket and store the averages in `.grad`."""
        setup = self.setup
        for bucket, work in enumerate(self.queue.works):
            members = setup.sender.plan.buckets[bucket].members
            used = UsedMembers(members, setup.parameters, self.usage, sent=work is not None)
            setup.operations.finish(bucket, work, used)
        if self.usage is not None:
            self.usage.wait()

    def release(self) -> None:
        """Drop the references to gradients, so that they can be released before the next backward."""
        self.queue.works, self.before = [], None

    def changed_order(self, before: Round | None) -> bool:
        """Whether the observed order of arrival differs from that of the previous backward."""
        if before is None:
            return False
        return bool(self.disordered or (before.order and self.order and before.order != self.order))


def new_round(setup: Setup, unused: frozenset[int] = frozenset()) -> Round:
    setup.arrivals.take()  # a round that was replaced may have left the hooks counting
    return Round(
        setup,
        queue=LaunchQueue([len(bucket.members) for bucket in setup.sender.plan.buckets], setup.lock),
        waiting=[len(chunk.members) for chunk in setup.chunks],
        counts=[0] * len(setup.parameters),
        gathered=[False] * len(setup.chunks),
        unused=unused,
    )
