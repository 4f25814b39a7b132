"""What the measured scripts tell the benchmark: one line per event, on the clock that all processes of a host share."""

import os
import time


def stamp(event: str) -> None:
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    line = f"{os.environ['RANK']} {attempt} {os.getpid()} {event} {now!r}\n"
    pipe = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY)
    os.write(pipe, line.encode())  # short enough to arrive whole
    os.close(pipe)


def wait_at_gate() -> None:
    """Until the benchmark lets this rank go on."""
    gate = os.open(os.environ["BENCH_GATE"], os.O_RDONLY)
    os.read(gate, 1)
    os.close(gate)
