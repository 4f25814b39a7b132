"""How long it takes N nodes to meet: torch's c10d rendezvous and ours, in turns, and ours on to 10,000 agents.

    python bench/rendezvous.py [--rounds 5] [--sizes 8 32 128 1024 4096 10000] [--stores memory file etcd]

All of it takes about four minutes: sizes beyond 1,024 are played at most twice, those beyond 4,096 once, and with the
memory store only.

Counted from the moment all N set off: until the last has its assignment (all of ours), and until the last knows
where the ranks meet (c10d returns no sooner, so this is what is compared). c10d: N real handlers, each a process,
connected before the clock starts. Ours: N real client sessions, whose connecting is counted, in as many processes as
there are processors (up to 256 in one). Service and clients share the machine's processors. After that, ours stay
for some seconds in which only heartbeats flow, one per second each.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

# A script's folder comes first on sys.path: to the scripts beside it, `import rendezvous` would mean this file.
# With this, it means the package nevertheless.
__path__ = [os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "rendezvous")]

from meet.service import STORES, Service, available, serving
from meet.sessions import Sessions
from shown import ROOT, draw_chart, machine, option_parser, publish
from watched import RunFailed

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

C10D = "c10d"
COMPARED = (8, 32, 128)
ALONE = (1024, 4096, 10000)
RATIO_TARGETS = {"memory": 0.03, "etcd": 0.1}
SEALED_TARGETS = {1024: 0.6, 4096: 2.5}
HEARTBEAT_TARGETS = {1024: 10.0}
LARGE, HUGE = 1024, 4096  # beyond these a round takes long, and says as much as five
_SPARE_FILES = 256  # a process's own, and the store's
_AGENTS = os.path.join(ROOT, "bench", "meet", "torch_agents.py")


@dataclass(slots=True)
class Played:
    """All rounds of one contender at one size; a round without a figure has none in its place."""

    contender: str
    nodes: int
    rounds: list[dict[str, float] | None] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def values(self, key: str) -> list[float]:
        return [figures[key] for figures in self.rounds if figures and key in figures]

    def median(self, key: str) -> float | None:
        values = self.values(key)
        return statistics.median(values) if values else None

    def ratio(self, theirs: Played, key: str = "ready") -> float | None:
        pairs = zip(self.rounds, theirs.rounds, strict=True)
        ratios = [ours[key] / other[key] for ours, other in pairs if ours and other]
        return statistics.median(ratios) if ratios else None


# --- the runs ----------------------------------------------------------------------------------------


def play(size: int, contenders: Sequence[str], options: argparse.Namespace) -> list[Played]:
    played = {name: Played(name, size) for name in contenders}
    if words := cannot(size):
        print(words, file=sys.stderr)
        for run in played.values():
            run.problems.append(words)
        return list(played.values())
    warm_up, rounds = _effort(size, options)
    with contextlib.ExitStack() as stack:
        services = {store: stack.enter_context(serving(store)) for store in contenders if store != C10D}
        for number in range(-warm_up, rounds):
            order = contenders if number % 2 == 0 else contenders[::-1]
            for name in order:
                figures, problem = _attempt(name, size, services, options, number)
                _say(number, name, size, figures, problem)
                if number >= 0:
                    played[name].rounds.append(figures)
                    played[name].problems += [problem] if problem else []
    return list(played.values())


def _effort(size: int, options: argparse.Namespace) -> tuple[int, int]:
    """Rounds that are thrown away, and rounds that count."""
    if size <= LARGE:
        return options.warm_up, options.rounds
    return 0, min(options.rounds, 2 if size <= HUGE else 1)


def cannot(size: int) -> str:
    """Every session is a connection, which the service has a file descriptor for."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if allowed == resource.RLIM_INFINITY or size + _SPARE_FILES <= allowed:
        return ""
    return f"{size} agents need more file descriptors than the {allowed} that are allowed here (ulimit -Hn)"


def _attempt(
    name: str, size: int, services: Mapping[str, Service], options: argparse.Namespace, number: int
) -> tuple[dict[str, float] | None, str]:
    try:
        return _measure(name, size, services, options, number), ""
    except RunFailed as failure:
        return None, str(failure)


def _measure(
    name: str, size: int, services: Mapping[str, Service], options: argparse.Namespace, number: int
) -> dict[str, float]:
    if name == C10D:
        return _torch_agents(size, options.timeout)
    seconds = options.seconds if number >= 0 else 0.0
    job = f"bench-{name}-{size}-{number}"
    with Sessions(
        services[name].endpoint, job, size, options.timeout, questions=options.questions
    ) as sessions:
        return _figures(services[name], sessions, seconds)


def _torch_agents(size: int, timeout_s: float) -> dict[str, float]:
    env = os.environ | {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"
    }  # else node rank 0's name look-up counts, too
    command = [sys.executable, _AGENTS, str(size)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"not met within {timeout_s:g} s") from None
    if done.returncode != 0:
        raise RunFailed(done.stderr.strip().rpartition("\n")[2])
    return dict(json.loads(done.stdout))


def _figures(service: Service, sessions: Sessions, seconds: float) -> dict[str, float]:
    cpu = service.cpu_seconds()
    figures = sessions.meet()
    figures["service_cpu"] = service.cpu_seconds() - cpu
    if seconds:
        cpu = service.cpu_seconds()
        figures["clients_cpu"] = sessions.stay(seconds) / seconds * 100
        figures["heartbeats_cpu"] = (service.cpu_seconds() - cpu) / seconds * 100
    figures["rss"] = service.resident_mib()
    return figures


def _say(number: int, name: str, size: int, figures: dict[str, float] | None, problem: str) -> None:
    label = f"round {number + 1}" if number >= 0 else "warm-up"
    shown = "  ".join(f"{key} {value:.3f}" for key, value in (figures or {}).items())
    print(f"{label:>8}  {size:>6}  {name:<8}  {shown or problem}", file=sys.stderr, flush=True)


# --- the tables --------------------------------------------------------------------------------------


def compared(played: Sequence[Played]) -> str:
    """One line per size and contender, beside c10d."""
    lines = [
        "| nodes | c10d | ours | median | median of the rounds' ratios | target | |",
        "|---:|---:|---|---:|---:|---:|---|",
    ]
    for theirs in (p for p in played if p.contender == C10D):
        for ours in (p for p in played if p.nodes == theirs.nodes and p.contender != C10D):
            ratio, target = ours.ratio(theirs), RATIO_TARGETS.get(ours.contender)
            cells = [str(ours.nodes), _s(theirs.median("ready")), ours.contender, _s(ours.median("ready"))]
            cells += ["-" if ratio is None else f"{ratio:.4f}", "" if target is None else f"<= {target:g}"]
            lines.append(f"| {' | '.join(cells)} | {_verdict(ratio, target)} |")
    return "\n".join(lines)


def alone(played: Sequence[Played]) -> str:
    lines = [
        "| agents | store | last assignment | last knows the store | service: CPU till then | RSS "
        "| CPU for 1 Hz heartbeats | targets | |",
        "|---:|---|---:|---:|---:|---:|---:|---|---|",
    ]
    for run in (p for p in played if p.contender in STORES):
        sealed, beats, memory = run.median("assigned"), run.median("heartbeats_cpu"), run.median("rss")
        cells = [
            str(run.nodes),
            run.contender,
            _s(sealed),
            _s(run.median("ready")),
            _s(run.median("service_cpu")),
        ]
        cells += ["-" if memory is None else f"{memory:.0f} MiB", "-" if beats is None else f"{beats:.1f} %"]
        wants = _targets(run)
        cells += ["; ".join(text for text, _, _ in wants)]
        lines.append(f"| {' | '.join(cells)} | {'; '.join(_verdict(v, t) for _, v, t in wants)} |")
    return "\n".join(lines)


def _targets(run: Played) -> list[tuple[str, float | None, float]]:
    if run.contender != "memory":
        return []
    wants = []
    if target := SEALED_TARGETS.get(run.nodes):
        wants.append((f"assigned <= {target:g} s", run.median("assigned"), target))
    if target := HEARTBEAT_TARGETS.get(run.nodes):
        wants.append((f"heartbeats <= {target:g} %", run.median("heartbeats_cpu"), target))
    return wants


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def _verdict(value: float | None, target: float | None) -> str:
    if target is None:
        return ""
    if value is None:
        return "no figure"
    return "met" if value <= target else "not met"


def tally(played: Sequence[Played]) -> str:
    runs = sum(len(p.rounds) for p in played)
    failed = [f"{p.contender} with {p.nodes}: {problem}" for p in played for problem in p.problems]
    told = "".join(f"; {text}" for text in failed[:8])
    return f"{runs} runs, {len(failed)} without a figure{told}."


# --- the command -------------------------------------------------------------------------------------


def main() -> None:
    parser = option_parser(__doc__ or "", rounds=5, timeout_s=120.0)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[*COMPARED, *ALONE], help="default: %(default)s"
    )
    parser.add_argument(
        "--stores", nargs="+", choices=STORES, default=available(), help="default: all there are"
    )
    parser.add_argument("--c10d-up-to", type=int, default=max(COMPARED), help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=5.0, help="of heartbeats (default %(default)s)")
    parser.add_argument(
        "--questions",
        action="store_true",
        help="agents can be asked, as those of ddp-launch: a second stream each",
    )
    options = parser.parse_args()
    machine_line = machine()
    played: list[Played] = []
    for size in options.sizes:
        beside = [C10D] if size <= options.c10d_up_to else []
        stores = options.stores if size <= HUGE else options.stores[:1]
        played += play(size, [*beside, *stores], options)
    report(played, machine_line, options)


def report(played: list[Played], machine_line: str, options: argparse.Namespace) -> None:
    tables = [compared(played)] if any(p.contender == C10D for p in played) else []
    text = "\n\n".join([*tables, alone(played), tally(played), f"Machine: {machine_line}."])
    publish("rendezvous", text, {"machine": machine_line, "tables": [_as_json(p) for p in played]}, options)
    draw_chart(options, "rendezvous", lambda path: _draw(path, played, machine_line))


def _draw(path: str, played: list[Played], machine_line: str) -> None:
    from meet.chart import draw

    draw(path, played, machine_line)


def _as_json(played: Played) -> dict[str, object]:
    return {name: getattr(played, name) for name in ("contender", "nodes", "rounds", "problems")}


if __name__ == "__main__":
    main()
