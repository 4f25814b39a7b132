"""A running job while strangers attack: clients without credentials that are idle, slow, malformed, or a flood.

    python bench/under_attack.py [--kinds KIND ...] [--port endpoint|http|web] [--count 10000] [--write-docs]

For each kind of stranger, a service serves a job of four agents, and a user who asks it ten times a second. Another
process keeps `--count` connections to a port of the service, and opens another for each that the service ends. The
answers to the user show how late the service takes heartbeats, as both wait for the same loop. In the middle a rank
fails: what is decided must be known to all agents.
"""

# ruff: noqa: E402 - the path has to be put right before the package is imported
from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import grpc
from shown import ROOT, machine, publish

sys.path[:0] = [ROOT, os.path.join(ROOT, "tests", "shell")]

from meet.attackers import KINDS
from meet.service import SERVE, Service, await_port, free_port, process
from meet.sessions import Sessions
from watched import RunFailed

from rendezvous.pb import rendezvous_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

NOBODY = "(nobody)"
_AGENTS = 4
_EVERY_S = 0.1
_LATE_S, _DECIDED_S, _MIB, _LOG_BYTES = 0.5, 1.0, 200, 1_000_000


@dataclass(slots=True)
class Held:
    """One kind. `opened`: connections that the strangers made; `problem`: why there are no figures."""

    kind: str
    opened: int = 0
    late: float = 0.0
    typical: float = 0.0
    decided: float = 0.0
    grown: float = 0.0
    cpu: float = 0.0
    log: int = 0
    problem: str = ""

    @property
    def is_met(self) -> bool:
        slow = self.late > _LATE_S or self.decided > _DECIDED_S
        return not (self.problem or slow or self.grown > _MIB or self.log > _LOG_BYTES)


class User(threading.Thread):
    """Asks again and again, on one connection, and notes how long each answer took."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self._channel = grpc.insecure_channel(endpoint)
        self._ask = self._channel.unary_unary("/rendezvous.v1.Operations/ListJobs")
        self._over = threading.Event()
        self.took: list[float] = []
        self._ask(pb.ListJobsRequest().SerializeToString(), timeout=60)
        self.start()

    def run(self) -> None:
        while not self._over.wait(_EVERY_S):
            at = time.monotonic()
            with contextlib.suppress(grpc.RpcError):
                self._ask(pb.ListJobsRequest().SerializeToString(), timeout=60)
            self.took.append(time.monotonic() - at)

    def end(self) -> list[float]:
        self._over.set()
        self.join()
        self._channel.close()
        return sorted(self.took)


@contextlib.contextmanager
def attacked(endpoint: str, kind: str, count: int) -> Iterator[Callable[[], int]]:
    """Tells how many connections they have made."""
    if kind == NOBODY:
        yield lambda: 0
        return
    program = os.path.join(ROOT, "bench", "meet", "attackers.py")
    with subprocess.Popen(
        [sys.executable, program, endpoint, kind, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as attacker:

        def opened() -> int:
            assert attacker.stdin is not None
            assert attacker.stdout is not None
            attacker.stdin.write(b"\n")
            attacker.stdin.flush()
            return int(attacker.stdout.readline())

        try:
            yield opened
        finally:
            attacker.kill()


def hold(kind: str, options: argparse.Namespace, folder: str) -> Held:
    held = Held(kind)
    ports = {name: f"127.0.0.1:{free_port()}" for name in ("endpoint", "http", "web")}
    log = os.path.join(folder, "service.log")
    command = [*SERVE, "--listen", ports["endpoint"], "--http", ports["http"], "--web", ports["web"]]
    with process(command, log) as pid:
        await_port(ports["endpoint"], pid, log)
        try:
            _measure(held, Service(ports["endpoint"], pid), ports[options.port], options)
        except RunFailed as failure:
            held.problem = str(failure)
        held.log = os.path.getsize(log)
    return held


def _measure(held: Held, service: Service, port: str, options: argparse.Namespace) -> None:
    with Sessions(service.endpoint, "beside", _AGENTS, 120.0) as sessions:
        sessions.meet()
        user, before, cpu = User(service.endpoint), service.resident_mib(), service.cpu_seconds()
        with attacked(port, held.kind, options.count) as opened:
            began = time.monotonic()
            time.sleep(options.seconds / 2)
            at = time.monotonic()
            answers = sessions.fail(1, node_rank=0)
            held.decided = max(answer["ready"] for answer in answers) - at
            largest = service.resident_mib()
            time.sleep(options.seconds / 2)
            held.opened, held.grown = opened(), max(largest, service.resident_mib()) - before
            held.cpu = (service.cpu_seconds() - cpu) / (time.monotonic() - began) * 100
        took = user.end()
        held.late, held.typical = took[-1], took[len(took) // 2]
        sessions.part()


def table(found: Sequence[Held], port: str) -> str:
    lines = [
        f"| strangers at `--{'listen' if port == 'endpoint' else port}` | connections made | answers: median (latest) "
        "| decision known to all | memory | service: CPU | log | |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for each in found:
        cells = [each.kind, f"{each.opened:,}", f"{each.typical:.3f} s ({each.late:.3f} s)"]
        cells += [f"{each.decided:.3f} s", f"+{each.grown:.0f} MiB", f"{each.cpu:.0f} %"]
        cells += [f"{each.log / 1000:.1f} kB", each.problem or ("met" if each.is_met else "not met")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    page = os.path.join(ROOT, "docs", "operations.md")
    parser.add_argument("--kinds", nargs="+", default=[NOBODY, *KINDS], help="default: all")
    parser.add_argument("--port", choices=("endpoint", "http", "web"), default="endpoint")
    parser.add_argument("--count", type=int, default=10_000, help="connections at once (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each kind (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write every figure there")
    parser.add_argument("--write-docs", metavar="FILE", nargs="?", const=page, help="default: %(const)s")
    options = parser.parse_args()
    machine_line, found = machine(), []
    with tempfile.TemporaryDirectory(prefix="bench-under-attack-") as folder:
        for kind in options.kinds:
            found.append(hold(kind, options, folder))
            print(table(found[-1:], options.port).splitlines()[-1], file=sys.stderr, flush=True)
    targets = f"<= {_LATE_S} s, <= {_DECIDED_S:g} s, <= {_MIB} MiB, <= {_LOG_BYTES // 10**6} MB"
    text = f"{table(found, options.port)}\n\nAsked: {targets}.\n\nMachine: {machine_line}."
    publish(
        "under-attack", text, {"machine": machine_line, "tables": [asdict(each) for each in found]}, options
    )


if __name__ == "__main__":
    main()
