"""Replays the journals of a case: of its agents, and of its service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_launch_wings.replay.player import play
from ddp_launch_wings.replay.report import JournalFile, JournalUnreadable
from launcher.replaying import machine as agent
from rendezvous.replay.journal import service_machine as service
from rendezvous.replay.records import RecordUnreadable, records

if TYPE_CHECKING:
    from pathlib import Path

_MACHINES = {"agent": agent, "service": service}


def replay_problems(folder: Path) -> tuple[str, ...]:
    """What is wrong with the replay of any journal in this folder, or of all together."""
    problems, steps = [], dict.fromkeys(_MACHINES, 0)
    for path in sorted(folder.rglob("*.ddpj")):
        try:
            name, number, different = _replayed(str(path))
        except (JournalUnreadable, RecordUnreadable) as error:
            if "it is empty" not in str(error):  # as it is if its process was killed before it wrote anything
                problems.append(f"{path.name}: {error}")
            continue
        steps[name] += number
        if different:
            problems.append(f"{path.name}: {len(different)} of {number} steps differ, first {different[0]}")
    problems += [f"no journal of the {name} has a step" for name, number in steps.items() if not number]
    return tuple(problems)


def _replayed(path: str) -> tuple[str, int, list[str]]:
    file = JournalFile(path)
    machine = _MACHINES[file.header.machine]()
    steps = list(play(machine, records(machine, file.header, file.lines())))
    if file.damage:
        raise RecordUnreadable(file.damage)
    different = [f"{number}: {step}"[:2000] for number, step in enumerate(steps, 1) if not step.same]
    return machine.name, len(steps), different
