"""What differs between two outcomes of a program. Each difference is a defect, or one that the README's table lists."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outcomes import Outcome
    from random_programs import Program

KILLED = -signal.SIGKILL  # the launcher, because the program took too long
_MOST = 4  # lines that are shown of each kind

# By what the difference says: the row of the table "Move from torchrun" in the README that allows it.
KNOWN = {
    re.compile(r"said: ddp-launch: warm start is not possible"): "start of a rank",
    re.compile(r"said: ddp-launch: goodput"): "a job that trained ends",
}
# torch's destructors abort a rank that leaves groups open: at times, and not in a warm rank (row "the end of a rank").
_ABORTED = "terminate called without an active exception"


def differences(program: Program, torchruns: Outcome, ours: Outcome) -> list[str]:
    if program.needs_torch and any(_ABORTED in text for text in torchruns.logs.values()):
        return []
    if torchruns.code == ours.code == KILLED:  # what was left then depends on when it was looked at
        return ["it ends under neither launcher: the program is wrong"]
    found = _of_values("code", torchruns.code, ours.code) + _of_values("first", torchruns.first, ours.first)
    for name in ("out", "err"):
        found += _of_streams(program, name, getattr(torchruns, name), getattr(ours, name))
    for name, text in torchruns.logs.items():
        found += _of_values(name, text, ours.logs.get(name))
    for name in sorted({*torchruns.files, *ours.files}):
        found += _of_values(f"file {name}", torchruns.files.get(name), ours.files.get(name))
    found += [f"left: {name}" for name in ours.left]
    if ours.code == 0 and "TRY) <" not in program.source:  # nothing failed, so there is nothing to say
        found += [f"said: {line}" for line in ours.own]
    return [each for each in found if not any(known.match(each) for known in KNOWN)]


def _of_values(name: str, theirs: object, mine: object) -> list[str]:
    return [] if theirs == mine else [f"{name}: torchrun {theirs!r}, ours {mine!r}"]


def _of_streams(program: Program, name: str, theirs: list[str], mine: list[str]) -> list[str]:
    """On the terminal. With -t, torchrun breaks lines wherever it has read to, and we break those over 64 KiB."""
    if "-t" in program.flags:
        theirs, mine = _words(theirs), _words(mine)
    rest, found = list(mine), []
    for line in theirs:
        if line in rest:
            rest.remove(line)
        else:
            found.append(f"{name}: only torchrun {line!r}")
    return found[:_MOST] + [f"{name}: only ours {line!r}" for line in rest[:_MOST]]


def _words(lines: list[str]) -> list[str]:
    return [word for line in lines for word in line.split()]
