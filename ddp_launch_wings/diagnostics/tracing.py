"""`ddp.trace`: record a timeline of the steps of a wrapped module.

    with ddp.trace(model, "steps.json") as timeline:
        for batch in batches:
            ...
    print(timeline.summary)

A recorder is called with each bucket before the sender, and records the time of each event. Without a recorder the
reducer calls the sender directly, so a trace that is off costs nothing. On an accelerator the times are those of the
device: the moments are recorded in its streams, and read when it has passed them.
"""

from __future__ import annotations

import json
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp.reducer.device import clock_of
from ddp.reducer.torch_reducer import reducer_of
from ddp_launch_wings.diagnostics import timeline
from ddp_launch_wings.diagnostics.bucket_observer import BucketObserver
from ddp_launch_wings.diagnostics.timeline import BucketTimes, StepTimes, TimeSpan

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from ddp.reducer.bucket_sender import Used
    from ddp.reducer.reducer import Reducer

_MARKS = ("forward_start", "backward_start", "compute_end")


class StepRecorder(BucketObserver):
    """Records the times of each step."""

    not_capturable = (
        "ddp.trace records times, which a captured step does not have. End the trace before the capture"
    )

    def __init__(self, reducer: Reducer) -> None:
        super().__init__(reducer)
        self.clock = clock_of(reducer.sender.device)
        self._known: list[StepTimes] = []
        self._unread: deque[_Step] = deque()
        self._step = _Step()

    # --- events ------------------------------------------------------------------------------------

    def mark(self, name: str) -> None:
        if name == "comm_end":
            self._close_step()
            return
        if name == "forward_start":
            self._step = _Step()
        self._step.marks[name] = self.clock.now()

    def gather(self, number: int, start: int, end: int) -> None:
        began = self.clock.now()
        self._next.gather(number, start, end)
        self._step.copies.setdefault(number, []).append((began, self.clock.now()))

    def launch(self, number: int) -> Any:
        self._step.launched[number] = self.clock.now()
        work = self._next.launch(number)
        self._note_when_done(number, work, self._step.done)
        return work

    def _note_when_done(self, number: int, work: Any, done: dict[int, Any]) -> None:
        now = self.clock.now

        def note(_future: Any) -> None:  # on an accelerator, in a stream that has waited for the collective
            done.setdefault(number, now())

        future = work.get_future() if hasattr(work, "get_future") else work
        if hasattr(future, "add_done_callback"):
            future.add_done_callback(note)
        else:
            future.then(note)

    def finish(self, number: int, work: Any, used: Used) -> None:
        began = self.clock.now()
        if work is not None:
            work.wait()
        self._step.waits[number] = (began, self.clock.now())
        self._next.finish(number, work, used)

    # --- the end of a step -------------------------------------------------------------------------

    def _close_step(self) -> None:
        step, self._step = self._step, _Step()
        if all(name in step.marks for name in _MARKS) and step.waits:
            step.number, step.end = self.reducer.stopwatch.iteration, self.clock.now()
            facts, buckets = self.reducer.sender.facts, self.reducer.sender.plan.buckets
            numbers = (number for number in sorted(step.waits) if number in step.launched)
            step.sizes = {number: sum(facts[i].nbytes for i in buckets[number].members) for number in numbers}
            self._unread.append(step)
        while self._unread and self.clock.has_passed(self._unread[0].end):
            self._read_one()

    @property
    def steps(self) -> list[StepTimes]:
        """The recorded steps. On an accelerator this waits for the end of the last one."""
        while self._unread:
            self._read_one()
        return list(self._known)

    def _read_one(self) -> None:
        step, clock = self._unread.popleft(), self.clock
        forward, backward, computed, end = map(
            clock.nanoseconds, (*(step.marks[name] for name in _MARKS), step.end)
        )
        buckets = tuple(self._bucket(step, number) for number in step.sizes)
        self._known.append(StepTimes(step.number, forward, backward, computed, end, buckets))
        clock.measure_from(step.end)

    def _bucket(self, step: _Step, number: int) -> BucketTimes:
        time_of = self.clock.nanoseconds
        wait = TimeSpan(*map(time_of, step.waits[number]))
        done = time_of(step.done[number]) if number in step.done else wait.end
        return BucketTimes(
            number,
            step.sizes[number],
            tuple(TimeSpan(*map(time_of, copy)) for copy in step.copies[number]),
            time_of(step.launched[number]),
            min(done, wait.end),  # the callback may run late, but after our wait the bucket is done
            wait,
        )


@dataclass
class _Step:
    """The moments of one step, as the clock gives them. The dictionaries are by the number of the bucket."""

    marks: dict[str, Any] = field(default_factory=dict)
    copies: dict[int, list[tuple[Any, Any]]] = field(default_factory=dict)
    launched: dict[int, Any] = field(default_factory=dict)
    done: dict[int, Any] = field(default_factory=dict)
    waits: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    number: int = 0
    end: Any = None


class Timeline:
    """The steps of this rank that a trace has recorded so far."""

    def __init__(self, recorder: StepRecorder, rank: int, asynchronous: bool) -> None:
        self._recorder = recorder
        self._rank = rank
        self._asynchronous = asynchronous  # the device runs asynchronously, and has no clock of its own

    @property
    def steps(self) -> list[StepTimes]:
        return self._recorder.steps

    @property
    def summary(self) -> str:
        """One line: mean times, and the share of communication that is hidden."""
        return timeline.summary(self._recorder.steps, asynchronous=self._asynchronous)

    @property
    def hidden(self) -> float:
        """The share of communication for which the training loop did not wait, 0 to 1."""
        return timeline.hidden_share(self._recorder.steps)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write a Chrome trace of this rank and return its path; `steps.json` becomes `steps.rank0.json`."""
        asked = Path(path)
        written = asked.with_name(f"{asked.stem}.rank{self._rank}{asked.suffix or '.json'}")
        events = timeline.chrome_events(self._recorder.steps, self._rank)
        written.write_text(json.dumps({"traceEvents": events, "otherData": {"summary": self.summary}}))
        return written


@contextmanager
def trace(module: Any, path: str | os.PathLike[str] | None = None) -> Iterator[Timeline]:
    """Record every averaged step of `module` inside the block; at its end write the timeline to `path`, if given."""
    reducer = reducer_of(module, "ddp.trace")
    recorder = StepRecorder(reducer)
    asynchronous = reducer.sender.device.type != "cpu" and not recorder.clock.is_on_device
    seen = Timeline(recorder, reducer.rank, asynchronous)
    recorder.begin()
    try:
        yield seen
    finally:
        recorder.end()
        if path is not None:
            seen.write(path)
