"""The control plane while its leaders are killed: N simulated agents, three replicas of the service, three of etcd.

    python bench/control_plane.py [--sizes 100 1000 10000] [--kills 3] [--json FILE] [--write-docs]

The agents are real client sessions without ranks, each with its own connection. All of them join one job. Then,
`--kills` times for each kind of leader, the leader is killed (SIGKILL), and at the same moment a rank of one node
fails. Another replica must own the job before a failure can be decided, and etcd must have a leader before a decision
can be stored. After each kill, all agents are told the decision, stop, and run in the next generation. What was killed
is started again before the next kill.

Each agent notes what it is told. In the end these notes are compared with each other and with the outcome of the job:
each failure must have exactly one decision, the same for all agents. Replicas, etcd and agents share the processors of
this machine.
"""

# ruff: noqa: E402 - the path has to be put right before the package is imported
from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from shown import ROOT, machine, publish

# The package, not the bench of that name beside this one.
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests", "shell")]

from meet.plane import Plane, plane
from meet.sessions import Sessions
from watched import RunFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZES = (100, 1000, 10000)
KINDS = {"owner": "the owner of the job", "etcd": "the leader of etcd"}
RESTART = "restart"


@dataclass(slots=True)
class Kill:
    """Seconds after the kill; `contact`: until the last agent has heard from the job's owner again."""

    kind: str
    contact: float
    ready: float
    cpu: float


@dataclass(slots=True)
class Played:
    """One size. `problems`: why it has no figures, or not all of them."""

    agents: int
    sealed: float | None = None
    met_cpu: float = 0.0
    heartbeats: float = 0.0
    memory: float = 0.0
    kills: list[Kill] = field(default_factory=list)
    lost: int = 0  # decisions
    doubled: int = 0
    problems: list[str] = field(default_factory=list)

    def of(self, kind: str) -> list[Kill]:
        return [kill for kill in self.kills if kill.kind == kind]


# --- one size ----------------------------------------------------------------------------------------


def play(made: Plane, size: int, options: argparse.Namespace) -> Played:
    played, job = Played(size), f"bench-{size}"
    try:
        with Sessions(made.endpoints, job, size, options.timeout) as sessions:
            _meet(made, sessions, played, options.seconds)
            for number in range(2 * options.kills):
                _kill(made, sessions, played, job, number)
            _compare_with_outcomes(played, sessions.part())
    except RunFailed as failure:
        played.problems.append(str(failure))
    return played


def _meet(made: Plane, sessions: Sessions, played: Played, seconds: float) -> None:
    before = made.cpu_seconds()
    played.sealed = sessions.meet()["assigned"]
    played.met_cpu = made.cpu_since(before)
    before = made.cpu_seconds()
    sessions.stay(seconds)
    played.heartbeats = made.cpu_since(before) / seconds * 100
    played.memory = made.resident_mib()


def _kill(made: Plane, sessions: Sessions, played: Played, job: str, number: int) -> None:
    generation, kind = number + 1, list(KINDS)[number % 2]
    before, at = made.cpu_seconds(), time.monotonic()
    start_again = made.kill_owner(job) if kind == "owner" else made.kill_etcd_leader()
    answers = sessions.fail(generation, node_rank=number * 7 % played.agents)
    contact = max(answer["contact"] for answer in answers) - at
    ready = max(answer["ready"] for answer in answers) - at
    kill = Kill(kind, max(0.0, contact), ready, made.cpu_since(before))
    played.kills.append(kill)
    _say(played.agents, kill)
    _compare_with_each_other(played, generation, answers)
    start_again()


def _compare_with_each_other(played: Played, generation: int, answers: Sequence[dict[str, Any]]) -> None:
    told = {words for answer in answers for words in answer["decisions"]}
    wanted = f"error of generation {generation}"
    played.lost += sum(answer["untold"] for answer in answers)
    played.doubled += max(0, len(told) - 1)
    if others := [words for words in told if wanted not in words or not words.startswith(f"{RESTART}: ")]:
        played.problems.append(f"generation {generation}: {others[0]}")
    if {running for answer in answers for running in answer["generations"]} != {generation + 1}:
        played.problems.append(f"not all agents run in generation {generation + 1}")


def _compare_with_outcomes(played: Played, answers: Sequence[dict[str, Any]]) -> None:
    """Each failure has one decision, and all agents were told the same."""
    outcomes = [outcome for answer in answers for outcome in answer["outcomes"]]
    decided = [generation for generation, kind, _ in outcomes[0] if kind == RESTART]
    played.lost += len(set(range(1, len(played.kills) + 1)) - set(decided))
    played.doubled += len(decided) - len(set(decided))
    if any(outcome != outcomes[0] for outcome in outcomes):
        played.problems.append("agents were told different outcomes")


def _say(agents: int, kill: Kill) -> None:
    what = f"{KINDS[kill.kind]} killed"
    print(
        f"{agents:>6}  {what:<26}  contact {kill.contact:.3f}  ready {kill.ready:.3f}  cpu {kill.cpu:.3f}",
        file=sys.stderr,
        flush=True,
    )


# --- the table ---------------------------------------------------------------------------------------


def table(found: Sequence[Played]) -> str:
    lines = [
        "| agents | sealed | service: CPU till then | RSS of the owner | CPU for 1 Hz heartbeats | killed, times "
        "| until all agents have an owner: median (max) | until all run again: median (max) | service: CPU per kill "
        "| decisions lost | doubled |",
        "|---:|---:|---:|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for played in found:
        for number, (kind, words) in enumerate(KINDS.items()):
            cells = _meeting(played) if number == 0 else [""] * 5
            cells += _kills(words, played.of(kind))
            cells += [str(played.lost), str(played.doubled)] if number == 0 else ["", ""]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _meeting(played: Played) -> list[str]:
    sealed = "-" if played.sealed is None else f"{played.sealed:.3f} s"
    cells = [f"{played.agents:,}", sealed, f"{played.met_cpu:.3f} s", f"{played.memory:.0f} MiB"]
    return [*cells, f"{played.heartbeats:.1f} %"]


def _kills(words: str, kills: Sequence[Kill]) -> list[str]:
    if not kills:
        return [f"{words}, 0", "-", "-", "-"]
    contact = _spread([kill.contact for kill in kills]) if kills[0].kind == "owner" else "they keep theirs"
    cells = [f"{words}, {len(kills)}", contact, _spread([kill.ready for kill in kills])]
    return [*cells, f"{statistics.median(kill.cpu for kill in kills):.3f} s"]


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} s ({max(values):.2f} s)"


def tally(found: Sequence[Played]) -> str:
    kills = sum(len(played.kills) for played in found)
    lost, doubled = (sum(getattr(played, name) for played in found) for name in ("lost", "doubled"))
    problems = [f"{played.agents:,} agents: {words}" for played in found for words in played.problems]
    told = "".join(f"; {words}" for words in problems)
    return f"{kills} kills: {lost} decisions lost, {doubled} doubled, {len(problems)} other problems{told}."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    page = os.path.join(ROOT, "docs", "operations.md")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="default: %(default)s")
    parser.add_argument("--kills", type=int, default=3, help="of each kind of leader (default 3)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of heartbeats (default %(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, help="of each part (default %(default)s s)")
    parser.add_argument("--json", metavar="FILE", help="write every figure there")
    parser.add_argument("--write-docs", metavar="FILE", nargs="?", const=page, help="default: %(const)s")
    options = parser.parse_args()
    machine_line, found = machine(), []
    with tempfile.TemporaryDirectory(prefix="bench-control-plane-") as folder, plane(folder) as made:
        for size in options.sizes:
            found.append(play(made, size, options))
            print("; ".join(found[-1].problems), file=sys.stderr)
    text = f"{table(found)}\n\n{tally(found)}\n\nMachine: {machine_line}."
    publish(
        "control-plane", text, {"machine": machine_line, "tables": [asdict(each) for each in found]}, options
    )


if __name__ == "__main__":
    main()
