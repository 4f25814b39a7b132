"""Metrics of a node and its ranks in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import accumulate
from typing import TYPE_CHECKING

from launcher.health.page import times_of
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_time import CLASSES, RankTime

if TYPE_CHECKING:
    from launcher.health.node_health import HealthState, NodeReading
    from launcher.machine.gpu_state import Gpu
    from rendezvous.values.rank_view import Histogram, RankView

_PREFIX = "ddp_launch_"
_Sample = tuple[tuple[tuple[str, str], ...], float]


@dataclass(frozen=True, slots=True)
class Running:
    """Values that do not come from the ranks."""

    generation: int
    restarts: int
    ranks: int  # number of running ranks
    ready: bool
    job: str = ""
    node: str = ""


PARTS = ("detect", "stop", "meet", "fork", "init", "first step")  # of a restart


@dataclass(frozen=True, slots=True)
class OverTime:
    """Values that this agent has added up since its start, also over restarts."""

    ranks: Sequence[RankTime] = ()
    restarts: Mapping[str, Histogram] = field(default_factory=dict)  # by part, and "all"
    logged: Sequence[tuple[int, str, float]] = ()  # rank and name, of `ddp.log`


NOTHING = OverTime()


def text(
    running: Running, views: Sequence[RankView], health: HealthState, over_time: OverTime = NOTHING
) -> str:
    known = [view for view in views if view.known]
    out = [
        *_family(
            "job_info",
            "Always 1; its labels name the job and the node of this agent.",
            [((("job_id", running.job), ("node", running.node)), 1)] if running.job else [],
        ),
        *_family(
            "generation",
            "Number of the current generation; it increases at each restart.",
            [((), running.generation)],
        ),
        *_family("restarts_total", "Number of restarts of the job.", [((), running.restarts)]),
        *_family("ranks_running", "Number of running ranks of this node.", [((), running.ranks)]),
        *_family("ready", "1 if the ranks of this node run, otherwise 0.", [((), int(running.ready))]),
        *_ranks(known),
        *_histograms(known),
        *_over_time(over_time),
    ]
    if health.last is not None:
        out += _node(health.last)
        out += _use(health)
    out += _family("complaints", "Number of current problems of this node.", [((), len(health.texts))])
    return "\n".join(out) + "\n"


def _ranks(known: Sequence[RankView]) -> Iterator[str]:
    def each(value: str) -> list[_Sample]:
        return [((("rank", str(view.rank)),), getattr(view, value)) for view in known]

    yield from _family("steps_total", "Number of training steps that a rank has finished.", each("step"))
    yield from _family(
        "step_seconds", "Mean time of the last training steps of a rank, in seconds.", each("mean_step_s")
    )
    yield from _family(
        "own_seconds_total",
        "Seconds of the steps of a rank in which it did not wait for others: of a straggler more than of its peers.",
        [((("rank", str(view.rank)),), times_of(view).own_s) for view in known],
    )
    yield from _family("still_seconds", "Seconds since the last progress of a rank.", each("quiet_s"))
    spent = [
        ((("rank", str(view.rank)), ("phase", str(phase))), seconds)
        for view in known
        for phase, seconds in view.phase_times
    ]
    yield from _family(
        "phase_seconds_total", "Seconds that a rank has spent in each phase since its start.", spent
    )


def _histograms(known: Sequence[RankView]) -> Iterator[str]:
    steps: list[tuple[int | str, Histogram]] = [(view.rank, view.totals.steps) for view in known]
    yield from _histogram(
        "step_duration_seconds",
        "Duration of the training steps of a rank, without the first of each start.",
        steps,
    )
    calls: list[tuple[int | str, Histogram]] = [(view.rank, view.totals.calls) for view in known]
    yield from _histogram(
        "collective_duration_seconds",
        "Time from the start of a collective until the rank knows that it is finished.",
        calls,
    )


def _over_time(over_time: OverTime) -> Iterator[str]:
    logged = [((("rank", str(rank)), ("name", name)), value) for rank, name, value in over_time.logged]
    yield from _family("logged", "Latest number that the script of a rank has passed to ddp.log.", logged)
    spent = [
        ((("rank", str(rank.rank)), ("class", name)), getattr(rank.spent, name))
        for rank in over_time.ranks
        for name in CLASSES
    ]
    yield from _family(
        "time_seconds",
        "Seconds of a rank since its agent started, by what they were spent on; the classes add up to that time. "
        "Seconds move to another class if ranks are stopped after a failure.",
        spent,
    )
    by_part: list[tuple[int | str, Histogram]] = [
        (part.replace(" ", "_"), one) for part, one in over_time.restarts.items()
    ]
    yield from _histogram(
        "restart_duration_seconds",
        "Duration of the restarts of this node up to the first step, by part.",
        by_part,
        "part",
    )


def _histogram(
    name: str, what: str, found: Sequence[tuple[int | str, Histogram]], label: str = "rank"
) -> Iterator[str]:
    if not any(sum(one.bins) for _, one in found):
        return
    yield f"# HELP {_PREFIX}{name} {what}"
    yield f"# TYPE {_PREFIX}{name} histogram"
    for value, one in found:
        so_far = accumulate(one.bins)
        limits = [*map(_number, one.limits_s), "+Inf"]
        for limit, count in zip(limits, so_far, strict=True):
            yield f'{_PREFIX}{name}_bucket{{{label}="{value}",le="{limit}"}} {count}'
        yield f'{_PREFIX}{name}_sum{{{label}="{value}"}} {_number(one.sum_s)}'
        yield f'{_PREFIX}{name}_count{{{label}="{value}"}} {sum(one.bins)}'


def _node(reading: NodeReading) -> Iterator[str]:
    if reading.memory is not None:
        whose = (("whose", reading.memory.whose),)
        yield from _family(
            "memory_used_bytes",
            "Used memory of the cgroup with the least free memory, or of the machine.",
            [(whose, reading.memory.used)],
        )
        yield from _family(
            "memory_limit_bytes",
            "Memory limit that applies to memory_used_bytes.",
            [(whose, reading.memory.limit)],
        )
    if reading.throttling is not None:
        throttled = reading.throttling.throttled
        yield from _family(
            "cpu_throttled_periods_total",
            "Number of periods of the CPU quota in which the cgroup was throttled.",
            [((), throttled)],
        )
    free: list[_Sample] = [((("path", disk.path),), disk.free) for disk in reading.disks]
    yield from _family("disk_free_bytes", "Free bytes on the file system of the log directory.", free)
    errors: list[_Sample] = [((("interface", nic.name),), nic.errors) for nic in reading.nics]
    yield from _family(
        "network_errors_total", "Number of receive and transmit errors of a network interface.", errors
    )
    gpus = [((("gpu", str(gpu.index)),), gpu) for gpu in reading.gpus if not gpu.lost]
    for name, what, attribute in (
        (
            "gpu_utilisation_percent",
            "Percentage of time in which a CUDA kernel ran on the GPU.",
            "utilization",
        ),
        ("gpu_temperature_celsius", "Temperature of the GPU chip.", "temperature"),
        ("gpu_memory_used_bytes", "Used memory of the GPU.", "memory_used"),
        (
            "gpu_ecc_uncorrected_total",
            "Number of uncorrectable memory errors (ECC) since the driver was loaded.",
            "ecc_uncorrected",
        ),
    ):
        yield from _family(name, what, _gpu_samples(gpus, attribute))


def _use(health: HealthState) -> Iterator[str]:
    assert health.last is not None
    busy: list[_Sample] = [((), health.use["cpu_percent"])] if "cpu_percent" in health.use else []
    yield from _family("cpu_percent", "CPU time in use, of the cgroup's quota or else of the machine.", busy)
    nics = health.last.nics
    moved = [(nic.name, "received", nic.received) for nic in nics]
    moved += [(nic.name, "sent", nic.sent) for nic in nics]
    bytes_of: list[_Sample] = [
        ((("interface", name), ("direction", way)), count) for name, way, count in moved
    ]
    yield from _family("network_bytes_total", "Bytes that a network interface has carried.", bytes_of)
    disk: list[_Sample] = [
        ((("direction", way),), count)
        for way, count in zip(("read", "written"), health.last.disk, strict=True)
    ]
    yield from _family("disk_bytes_total", "Bytes that the disks have read and written.", disk)


def _gpu_samples(
    gpus: Iterable[tuple[tuple[tuple[str, str], ...], Gpu]], attribute: str
) -> Iterator[_Sample]:
    for label, gpu in gpus:
        value = getattr(gpu, attribute)
        if value is not None:
            yield label, value


def _family(name: str, what: str, samples: Iterable[_Sample]) -> Iterator[str]:
    lines = [f"{_PREFIX}{name}{_labels(labels)} {_number(value)}" for labels, value in samples]
    if lines:
        yield f"# HELP {_PREFIX}{name} {what}"
        yield f"# TYPE {_PREFIX}{name} {'counter' if name.endswith('_total') else 'gauge'}"
        yield from lines


def _labels(labels: Sequence[tuple[str, str]]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.9g}"
