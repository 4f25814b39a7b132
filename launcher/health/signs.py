"""Whether a rank shows signs of life that its status page does not have. Pure.

The kernel counts what a rank and the processes that it has started do. Two looks at these sums, some seconds apart,
show whether they did something in between. A process that only sleeps still wakes up now and then, for example for a
watchdog thread, so small amounts do not count.
"""

from __future__ import annotations

from rendezvous.values.late_dataclass import dataclass

WINDOW_S = 10.0  # between two looks
_IDLE_SHARE = 0.01  # of a CPU; with the threads of torch and of ours, a process that sleeps uses about 0.3 %
_IDLE_S = 0.015  # the kernel counts CPU time in steps of 10 ms
_IDLE_BYTES_PER_S = 64.0
_IDLE_NETWORK_BYTES_PER_S = 1024.0  # monitors of libraries ask others for news


@dataclass(frozen=True, slots=True)
class Signs:
    """What the processes of a rank have done so far."""

    main_cpu_s: float = 0.0  # of its main thread
    other_cpu_s: float = 0.0  # of its other threads, and of the processes that it has started
    io_bytes: int = 0  # read and written, by all of them: files, pipes and terminals
    network_bytes: int = 0  # sent and received over TCP, by those that are still connected
    output: int = 0  # changes with each output of a rank of this node
    processes: frozenset[int] = frozenset()


def computes(before: Signs, now: Signs, passed_s: float) -> bool:
    return now.main_cpu_s - before.main_cpu_s > _idle_cpu_s(passed_s)


def does_more(before: Signs, now: Signs, passed_s: float) -> bool:
    """Whether there is another sign than CPU time of its main thread, which a rank may also use while it waits."""
    return (
        now.output != before.output
        or now.processes != before.processes
        or now.io_bytes - before.io_bytes > _IDLE_BYTES_PER_S * passed_s
        or now.network_bytes - before.network_bytes > _IDLE_NETWORK_BYTES_PER_S * passed_s
        or now.other_cpu_s - before.other_cpu_s > _idle_cpu_s(passed_s)
    )


def _idle_cpu_s(passed_s: float) -> float:
    return max(_IDLE_SHARE * passed_s, _IDLE_S)
