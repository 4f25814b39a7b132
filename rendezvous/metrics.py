"""Counters and gauges in the Prometheus text format. Small, so it needs no library, threads or locks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

_PREFIX = "ddp_rendezvous_"

# name -> (label, what it counts)
_COUNTERS = {
    "events": (
        "kind",
        "Events of jobs, by kind: joined, lost, sealed (a world was formed), decision, ended, ...",
    ),
    "turned_away": ("why", "Rejected joins: temporary (the agent tries again) or final."),
    "calls": ("code", "Finished calls and streams, by gRPC status."),
    "refused": ("reason", "Connections and calls of clients that the service refused or ended, by reason."),
}


class Metrics:
    def __init__(self) -> None:
        self._counted: dict[str, dict[str, int]] = {name: {} for name in _COUNTERS}
        self._gauges: list[tuple[str, str, str, Callable[[], Mapping[str, float]]]] = []

    def count(self, name: str, label: str, times: int = 1) -> None:
        counted = self._counted[name]
        counted[label] = counted.get(label, 0) + times

    def gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        self._gauges.append((name, help_text, "", lambda: {"": read()}))

    def gauges(self, name: str, help_text: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        """Register one gauge per value of the label."""
        self._gauges.append((name, help_text, label, read))

    def text(self) -> str:
        out: list[str] = []
        for name, (label, help_text) in _COUNTERS.items():
            out += [f"# HELP {_PREFIX}{name}_total {help_text}", f"# TYPE {_PREFIX}{name}_total counter"]
            out += [_sample(f"{name}_total", label, at, n) for at, n in sorted(self._counted[name].items())]
        for name, help_text, label, read in self._gauges:
            out += [f"# HELP {_PREFIX}{name} {help_text}", f"# TYPE {_PREFIX}{name} gauge"]
            out += [_sample(name, label, at, value) for at, value in sorted(read().items())]
        return "\n".join(out) + "\n"


def _sample(name: str, label: str, at: str, value: float) -> str:
    where = f'{{{label}="{_escaped(at)}"}}' if label else ""
    return (
        f"{_PREFIX}{name}{where} {value:g}" if isinstance(value, float) else f"{_PREFIX}{name}{where} {value}"
    )


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
