"""Metrics of a node and its ranks in the text format of Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from launcher.health.node_health import Health, NodeReading
    from rendezvous.values.rank_view import RankView

_PREFIX = "ddp_launch_"
_Sample = tuple[tuple[tuple[str, str], ...], float]


@dataclass(frozen=True, slots=True)
class Running:
    """Facts that the agent knows without the ranks."""

    generation: int
    restarts: int
    ranks: int  # that run
    ready: bool


def text(running: Running, views: Sequence[RankView], health: Health) -> str:
    known = [view for view in views if view.known]
    out = [
        *_family("generation", "gauge", "Number of the present world.", [((), running.generation)]),
        *_family("restarts_total", "counter", "Restarts of the job.", [((), running.restarts)]),
        *_family("ranks_running", "gauge", "Ranks of this node that run.", [((), running.ranks)]),
        *_family("ready", "gauge", "1 while the ranks of this node run.", [((), int(running.ready))]),
        *_ranks(known),
    ]
    if health.last is not None:
        out += _node(health.last)
    out += _family(
        "complaints", "gauge", "What is wrong with this node, in number.", [((), len(health.texts))]
    )
    return "\n".join(out) + "\n"


def _ranks(known: Sequence[RankView]) -> Iterator[str]:
    def each(value: str) -> list[_Sample]:
        return [((("rank", str(view.rank)),), getattr(view, value)) for view in known]

    yield from _family("steps_total", "counter", "Steps that a rank has finished.", each("step"))
    yield from _family("step_seconds", "gauge", "Mean time of a rank's latest steps.", each("mean_step_s"))
    yield from _family("still_seconds", "gauge", "Since a rank last gave a sign of life.", each("quiet_s"))
    spent = [
        ((("rank", str(view.rank)), ("phase", str(phase))), seconds)
        for view in known
        for phase, seconds in view.phase_times
    ]
    yield from _family(
        "phase_seconds_total", "counter", "What a rank has spent its time on since it began.", spent
    )


def _node(vitals: NodeReading) -> Iterator[str]:
    if vitals.memory is not None:
        whose = (("whose", vitals.memory.whose),)
        yield from _family(
            "memory_used_bytes", "gauge", "Where it is tightest.", [(whose, vitals.memory.used)]
        )
        yield from _family("memory_limit_bytes", "gauge", "That limit.", [(whose, vitals.memory.limit)])
    if vitals.throttling is not None:
        throttled = vitals.throttling.throttled
        yield from _family(
            "cpu_throttled_periods_total", "counter", "Time slices cut by the CPU quota.", [((), throttled)]
        )
    free: list[_Sample] = [((("path", disk.path),), disk.free) for disk in vitals.disks]
    yield from _family("disk_free_bytes", "gauge", "Room for logs.", free)
    errors: list[_Sample] = [((("interface", nic.name),), nic.errors) for nic in vitals.nics]
    yield from _family("network_errors_total", "counter", "Of a network interface.", errors)
    gpus = [((("gpu", str(gpu.index)),), gpu) for gpu in vitals.gpus if not gpu.lost]
    for name, kind, what, attribute in (
        ("gpu_utilisation_percent", "gauge", "Share of time in which a kernel ran.", "utilisation"),
        ("gpu_temperature_celsius", "gauge", "Of the chip.", "temperature"),
        ("gpu_memory_used_bytes", "gauge", "Of the device's memory.", "memory_used"),
        ("gpu_ecc_uncorrected_total", "counter", "Since the driver was loaded.", "ecc_uncorrected"),
    ):
        yield from _family(name, kind, what, [(label, getattr(gpu, attribute)) for label, gpu in gpus])


def _family(name: str, kind: str, what: str, samples: Iterable[_Sample]) -> Iterator[str]:
    lines = [f"{_PREFIX}{name}{_labels(labels)} {_number(value)}" for labels, value in samples]
    if lines:
        yield f"# HELP {_PREFIX}{name} {what}"
        yield f"# TYPE {_PREFIX}{name} {kind}"
        yield from lines


def _labels(labels: Sequence[tuple[str, str]]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.9g}"
