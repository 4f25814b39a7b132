"""`ddp.trace`: record a timeline of the steps of a wrapped module.

    with ddp.trace(model, "steps.json") as timeline:
        for batch in batches:
            ...
    print(timeline.summary)

A recorder is called with each bucket before the sender, and records the time of each event. Without a recorder the
reducer calls the sender directly, so a trace that is off costs nothing.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp.diagnostics import timeline
from ddp.diagnostics.bucket_observer import BucketObserver
from ddp.diagnostics.timeline import BucketTimes, Span, StepTimes
from ddp.reducer.torch_reducer import reducer_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from ddp.reducer.baseline import Baseline
    from ddp.reducer.bucket import Used
    from ddp.reducer.reducer import Reducer

_MARKS = ("forward_start", "backward_start", "compute_end")
_now = time.perf_counter_ns


class Recorder(BucketObserver):
    """Records the times of each step."""

    not_capturable = (
        "ddp.trace records times, which a captured step does not have. End the trace before the capture"
    )

    def __init__(self, reducer: Reducer) -> None:
        super().__init__(reducer)
        self.steps: list[StepTimes] = []
        self._marks: dict[str, int] = {}
        self._start_over()

    def _start_over(self) -> None:
        self._copies: dict[int, list[Span]] = {}
        self._launched: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._waits: dict[int, Span] = {}

    # --- events ------------------------------------------------------------------------------------

    def mark(self, name: str) -> None:
        if name == "comm_end":
            self._close_step(_now())
            return
        if name == "forward_start":
            self._marks.clear()
        self._marks[name] = _now()

    def gather(self, number: int, start: int, end: int, before: Baseline | None) -> None:
        began = _now()
        self._next.gather(number, start, end, before)
        self._copies.setdefault(number, []).append(Span(began, _now()))

    def launch(self, number: int) -> Any:
        self._launched[number] = _now()
        work = self._next.launch(number)
        self._note_when_done(number, work, self._done)
        return work

    @staticmethod
    def _note_when_done(number: int, work: Any, done: dict[int, int]) -> None:
        def note(_future: Any) -> None:
            done.setdefault(number, _now())

        future = work.get_future() if hasattr(work, "get_future") else work
        if hasattr(future, "add_done_callback"):
            future.add_done_callback(note)
        else:
            future.then(note)

    def finish(self, number: int, work: Any, used: Used) -> None:
        began = _now()
        if work is not None:
            work.wait()
        self._waits[number] = Span(began, _now())
        self._next.finish(number, work, used)

    # --- the end of a step -------------------------------------------------------------------------

    def _close_step(self, end: int) -> None:
        marks = self._marks
        if all(name in marks for name in _MARKS) and self._waits:
            buckets = tuple(
                self._bucket(number) for number in sorted(self._waits) if number in self._launched
            )
            forward, backward, computed = (marks[name] for name in _MARKS)
            number = self.reducer.stopwatch.iteration
            self.steps.append(StepTimes(number, forward, backward, computed, end, buckets))
        self._marks = {}
        self._start_over()

    def _bucket(self, number: int) -> BucketTimes:
        wait = self._waits[number]
        facts, members = self.reducer.sender.facts, self.reducer.sender.plan.buckets[number].members
        return BucketTimes(
            number,
            sum(facts[i].nbytes for i in members),
            tuple(self._copies[number]),
            self._launched[number],
            # The callback may run late, but after our wait the bucket is done.
            min(self._done.get(number, wait.end), wait.end),
            wait,
        )


class Timeline:
    """The steps of this rank that a trace has recorded so far."""

    def __init__(self, recorder: Recorder, rank: int, on_device: bool) -> None:
        self._recorder = recorder
        self._rank = rank
        self._on_device = on_device

    @property
    def steps(self) -> list[StepTimes]:
        return list(self._recorder.steps)

    @property
    def summary(self) -> str:
        """One line: mean times, and the share of communication that is hidden."""
        return timeline.summary(self._recorder.steps, on_device=self._on_device)

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
    recorder = Recorder(reducer)
    seen = Timeline(recorder, reducer.rank, reducer.sender.device.type != "cpu")
    recorder.begin()
    try:
        yield seen
    finally:
        recorder.end()
        if path is not None:
            seen.write(path)
