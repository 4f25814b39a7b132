"""What happened in a step, and what it says: instants of a rank -> a line of text, and events for a Chrome trace.

A bucket is *ready* with its last copy, *launched* when its turn has come, *done* when its collective is. Communication
is the time in which any bucket was between launched and done. What of it the training loop had to wait for, at the
end of the backward, is *exposed*; the rest is hidden behind the computing of gradients.

Instants are nanoseconds of one clock, which all ranks of a host have in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Span:
    start: int
    end: int

    @property
    def length(self) -> int:
        return max(0, self.end - self.start)


@dataclass(frozen=True, slots=True)
class BucketTimes:
    number: int
    nbytes: int
    copies: tuple[Span, ...]
    launched: int
    done: int
    wait: Span

    @property
    def ready(self) -> int:
        return self.copies[-1].end

    @property
    def in_flight(self) -> Span:
        return Span(self.launched, self.done)


@dataclass(frozen=True, slots=True)
class StepTimes:
    number: int
    forward_start: int
    backward_start: int
    compute_end: int
    end: int
    buckets: tuple[BucketTimes, ...]

    @property
    def forward(self) -> Span:
        return Span(self.forward_start, self.backward_start)

    @property
    def backward(self) -> Span:
        return Span(self.backward_start, self.compute_end)

    @property
    def copying(self) -> int:
        return sum(copy.length for bucket in self.buckets for copy in bucket.copies)

    @property
    def communication(self) -> int:
        return covered([bucket.in_flight for bucket in self.buckets])

    @property
    def exposed(self) -> int:
        return sum(bucket.wait.length for bucket in self.buckets)


def covered(spans: Sequence[Span]) -> int:
    """How long at least one of them lasted."""
    total, reached = 0, None
    for span in sorted(spans, key=lambda one: one.start):
        start = span.start if reached is None else max(span.start, reached)
        total += max(0, span.end - start)
        reached = span.end if reached is None else max(reached, span.end)
    return total


def hidden_share(steps: Sequence[StepTimes]) -> float:
    """Which part of communication nobody waited for; 1 where there was none."""
    communication = sum(step.communication for step in steps)
    exposed = sum(step.exposed for step in steps)
    return 1 - min(1.0, exposed / communication) if communication else 1.0


def summary(steps: Sequence[StepTimes], *, on_device: bool = False) -> str:
    if not steps:
        return "no step was averaged"
    count = len(steps)

    def mean(values: Sequence[int]) -> str:
        return f"{sum(values) / count / 1e6:.1f} ms"

    noun = "step" if count == 1 else "steps"
    buckets = len(steps[-1].buckets)
    text = (
        f"{count} {noun}: forward {mean([step.forward.length for step in steps])}, backward "
        f"{mean([step.backward.length for step in steps])} (of it copying {mean([s.copying for s in steps])}), "
        f"communication {mean([step.communication for step in steps])} in {buckets} bucket{'s' * (buckets != 1)}, "
        f"exposed {mean([step.exposed for step in steps])}: {hidden_share(steps):.0%} hidden"
    )
    return f"{text} (times of the processor, which only gives the device its orders)" if on_device else text


# --- a Chrome trace ----------------------------------------------------------------------------------

_STEP, _COPIES, _FIRST_BUCKET = 0, 1, 2
Event = dict[str, object]


def chrome_events(steps: Sequence[StepTimes], rank: int) -> list[Event]:
    """For chrome://tracing or ui.perfetto.dev; a rank is a process there, a bucket one of its threads."""
    events = [_name("process_name", f"rank {rank}", rank, _STEP), _name("thread_name", "step", rank, _STEP)]
    events.append(_name("thread_name", "copies", rank, _COPIES))
    most = max((len(step.buckets) for step in steps), default=0)
    events += [_name("thread_name", f"bucket {i}", rank, _FIRST_BUCKET + i) for i in range(most)]
    for step in steps:
        told: Event = {"step": step.number}
        events.append(_event("forward", step.forward, rank, _STEP, told))
        events.append(_event("backward", step.backward, rank, _STEP, told))
        for bucket in step.buckets:
            events += _of_bucket(bucket, rank, told)
    return events


def _of_bucket(bucket: BucketTimes, rank: int, told: Event) -> list[Event]:
    said: Event = {**told, "bucket": bucket.number, "bytes": bucket.nbytes}
    lane = _FIRST_BUCKET + bucket.number
    events = [_event("copy", copy, rank, _COPIES, said) for copy in bucket.copies]
    if bucket.launched > bucket.ready:
        events.append(_event("waits for its turn", Span(bucket.ready, bucket.launched), rank, lane, said))
    events.append(_event("transfer", bucket.in_flight, rank, lane, said))
    events.append(_event(f"exposed: bucket {bucket.number}", bucket.wait, rank, _STEP, said))
    return events


def _event(name: str, span: Span, rank: int, lane: int, told: Event) -> Event:
    place: Event = {"ph": "X", "pid": rank, "tid": lane, "cat": "ddp", "args": told}
    return {"name": name, "ts": span.start / 1000, "dur": span.length / 1000, **place}


def _name(what: str, name: str, rank: int, lane: int) -> Event:
    return {"name": what, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}
