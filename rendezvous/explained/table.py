"""All entries, in the order of their codes."""

from __future__ import annotations

from rendezvous.explained import failures, joining, library, serving, usage
from rendezvous.explained.entry import text
from rendezvous.values.error_codes import Code

ENTRIES = (*usage.ENTRIES, *joining.ENTRIES, *serving.ENTRIES, *failures.ENTRIES, *library.ENTRIES)
AREAS = {
    "1": "The command line, variables and files of options",
    "2": "Joining the rendezvous, and calls to the service",
    "3": "Running the service",
    "4": "Starting ranks on a node",
    "5": "Why a job failed",
    "6": "ddp.launch",
    "7": "The library ddp: groups and gradients",
    "8": "The library ddp: elastic state and checkpoints",
}
_BY_CODE = {entry.code: entry for entry in ENTRIES}


def explanation(word: str) -> str | None:
    """The text of a code, written as DDP-1001, ddp-1001 or 1001; None if there is no such code."""
    name = word.strip().strip("[]").upper()
    try:
        return text(_BY_CODE[Code(name if name.startswith("DDP-") else f"DDP-{name}")])
    except ValueError:
        return None


def contents() -> str:
    """All codes, a line each."""
    lines = []
    for digit, title in AREAS.items():
        lines += [f"{title}:"]
        lines += [f"  {each.code}  {each.code.phrase}" for each in ENTRIES if each.code[4] == digit]
    return "\n".join((*lines, "`ddpctl explain CODE` explains one."))
