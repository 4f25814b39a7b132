"""Convert the measured times of a rank into a one-line summary and into events of a Chrome trace (pure functions).

A bucket is *ready* after its last copy, *launched* when its collective starts, and *done* when its collective ends.
Communication is the time during which at least one collective is running. The part of it for which the training loop
waits at the end of the backward is *exposed*. The rest is hidden behind the computation of gradients.

All times are nanoseconds of one clock, which all ranks of a host share. On an accelerator they are those of the device,
counted from a time of this clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class TimeSpan:
    start: int
    end: int

    @property
    def length(self) -> int:
        return max(0, self.end - self.start)


@dataclass(frozen=True, slots=True)
class BucketTimes:
    number: int
    nbytes: int
    copies: tuple[TimeSpan, ...]
    launched: int
    done: int
    wait: TimeSpan

    @property
    def ready(self) -> int:
        return self.copies[-1].end

    @property
    def in_flight(self) -> TimeSpan:
        return TimeSpan(self.launched, self.done)


@dataclass(frozen=True, slots=True)
class StepTimes:
    number: int
    forward_start: int
    backward_start: int
    compute_end: int
    end: int
    buckets: tuple[BucketTimes, ...]

    @property
    def forward(self) -> TimeSpan:
        return TimeSpan(self.forward_start, self.backward_start)

    @property
    def backward(self) -> TimeSpan:
        return TimeSpan(self.backward_start, self.compute_end)

    @property
    def copying(self) -> int:
        return sum(copy.length for bucket in self.buckets for copy in bucket.copies)

    @property
    def communication(self) -> int:
        return covered([bucket.in_flight for bucket in self.buckets])

    @property
    def exposed(self) -> int:
        return sum(bucket.wait.length for bucket in self.buckets)


def covered(spans: Sequence[TimeSpan]) -> int:
    """Return the total time that the spans cover."""
    total, reached = 0, None
    for span in sorted(spans, key=lambda one: one.start):
        start = span.start if reached is None else max(span.start, reached)
        total += max(0, span.end - start)
        reached = span.end if reached is None else max(reached, span.end)
    return total


def hidden_share(steps: Sequence[StepTimes]) -> float:
    """The share of communication for which the training loop did not wait; 1 if there was no communication."""
    communication = sum(step.communication for step in steps)
    exposed = sum(step.exposed for step in steps)
    return 1 - min(1.0, exposed / communication) if communication else 1.0


def summary(steps: Sequence[StepTimes], *, asynchronous: bool = False) -> str:
    if not steps:
        return "no step with gradient averaging was recorded. Run at least one step without no_sync()"
    count = len(steps)

    def mean(values: Sequence[int]) -> str:
        return f"{sum(values) / count / 1e6:.1f} ms"

    noun = "step" if count == 1 else "steps"
    buckets = len(steps[-1].buckets)
    text = (
        f"{count} {noun}: forward {mean([step.forward.length for step in steps])}, backward "
        f"{mean([step.backward.length for step in steps])} (including {mean([s.copying for s in steps])} copying), "
        f"communication {mean([step.communication for step in steps])} in {buckets} bucket{'s' * (buckets != 1)} "
        f"({mean([step.exposed for step in steps])} exposed, {hidden_share(steps):.0%} hidden)"
    )
    return f"{text} (CPU times only: the device runs asynchronously)" if asynchronous else text


# --- a Chrome trace ----------------------------------------------------------------------------------

_STEP, _COPIES, _FIRST_BUCKET = 0, 1, 2
Event = dict[str, object]


def chrome_events(steps: Sequence[StepTimes], rank: int) -> list[Event]:
    """Events for chrome://tracing or ui.perfetto.dev, which show a rank as a process and a bucket as a thread."""
    events = [_name("process_name", f"rank {rank}", rank, _STEP), _name("thread_name", "step", rank, _STEP)]
    events.append(_name("thread_name", "copies", rank, _COPIES))
    most = max((len(step.buckets) for step in steps), default=0)
    events += [_name("thread_name", f"bucket {i}", rank, _FIRST_BUCKET + i) for i in range(most)]
    for step in steps:
        args: Event = {"step": step.number}
        events.append(_event("forward", step.forward, rank, _STEP, args))
        events.append(_event("backward", step.backward, rank, _STEP, args))
        for bucket in step.buckets:
            events += _bucket_events(bucket, rank, args)
    return events


def _bucket_events(bucket: BucketTimes, rank: int, step_args: Event) -> list[Event]:
    args: Event = {**step_args, "bucket": bucket.number, "bytes": bucket.nbytes}
    lane = _FIRST_BUCKET + bucket.number
    events = [_event("copy", copy, rank, _COPIES, args) for copy in bucket.copies]
    if bucket.launched > bucket.ready:
        events.append(
            _event("waits for earlier buckets", TimeSpan(bucket.ready, bucket.launched), rank, lane, args)
        )
    events.append(_event("transfer", bucket.in_flight, rank, lane, args))
    events.append(_event(f"exposed: bucket {bucket.number}", bucket.wait, rank, _STEP, args))
    return events


def _event(name: str, span: TimeSpan, rank: int, lane: int, args: Event) -> Event:
    place: Event = {"ph": "X", "pid": rank, "tid": lane, "cat": "ddp", "args": args}
    return {"name": name, "ts": span.start / 1000, "dur": span.length / 1000, **place}


def _name(what: str, name: str, rank: int, lane: int) -> Event:
    return {"name": what, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}
