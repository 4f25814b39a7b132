"""The constants of each transport: fitted to runs by `bench/plan.py`, or taken from published figures."""

from __future__ import annotations

from launcher.plan.network import Link, MeasuredLink, Transport

_CHECKED = "2 to 8 ranks on CPUs, over links of 200 and 400 Mbit/s"  # docs/plan.md has the table
GLOO = Transport(
    "gloo",
    is_hierarchical=False,
    has_trees=False,
    share=0.96,
    message_s=17e-5,
    collective_s=1e-4,
    byte_s=0.0,
    error=0.07,
    checked=_CHECKED,
)
HIER = Transport(
    "hier",
    is_hierarchical=True,
    has_trees=False,
    share=0.96,
    message_s=9e-5,
    collective_s=0.0,
    byte_s=0.0,
    error=0.10,
    checked=_CHECKED,
)
# Latencies and shares as NVIDIA publishes them for NCCL with InfiniBand. No run has checked them.
NCCL = Transport(
    "nccl", is_hierarchical=True, has_trees=True, share=0.9, message_s=5e-6, collective_s=2e-5, byte_s=0.0
)
TRANSPORTS = {transport.name: transport for transport in (GLOO, HIER, NCCL)}

# Between the ranks of one machine, if the profile did not measure it.
SHARED_MEMORY = Link(4e9, 10e-6)
NVLINK = Link(2e11, 3e-6)


def usual(device: str) -> Transport:
    return HIER if device == "cpu" else NCCL


def usual_inside(device: str) -> Link:
    return SHARED_MEMORY if device == "cpu" else NVLINK


def measured_link(points: tuple[tuple[int, float], ...], ranks: int) -> MeasuredLink:
    """The link inside a machine from all-reduces of several sizes, as if each had been a ring."""
    messages = 2 * (ranks - 1)
    (_, quickest), (nbytes, seconds) = min(points), max(points)
    bandwidth = messages * nbytes / ranks / max(seconds - quickest, 1e-9)
    taken = tuple((nbytes / ranks, seconds / messages) for nbytes, seconds in sorted(points))
    return MeasuredLink(bandwidth, quickest / messages, taken)
