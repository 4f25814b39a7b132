"""Requests, gathers and reads the dumps of the flight recorders.

A rank's guard writes its dump as JSON. If the guard cannot run, because another thread holds the GIL, torch's watchdog
thread can still write a pickle on request through a pipe. Only the NCCL backend has this. A pickle can call any
function, so this reader accepts no functions, only lists, dicts, numbers and texts. It uses Python's own unpickler,
because the C unpickler allocates memory for a size that the input claims, without a check.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pickle
import re
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from launcher.health.flight_recorder import (
    DUMP_FILE,
    PIPE_FILE,
    Dump,
    NotADump,
    dump_of,
    ranks_behind,
    with_members,
    with_own_members,
    with_recorded,
)
from rendezvous.diagnosing.diagnosis import of_recorders
from rendezvous.values.rank_view import RankReport

if TYPE_CHECKING:
    from launcher.health.guards import Guards

WITHIN_S = 2.0
JSON_NAME = "flight-recorder.json"
_MOST_BYTES = 64 << 20
_LOOK_AGAIN_S = 0.05
_ROOM = pickle.BYTEARRAY8  # the one opcode whose reader allocates before it reads


class _NothingCalled(pickle._Unpickler):
    dispatch: ClassVar = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code not in _ROOM
    }

    def find_class(self, module: str, name: str) -> NoReturn:
        raise NotADump(f"rejected: the pickle calls {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise NotADump("rejected: the pickle contains a persistent ID")


def read(path: str, rank: int) -> Dump:
    """Raise NotADump if the file is not a dump."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise NotADump(f"{path}: {error.strerror}") from None
    return parsed(data, rank)


def parsed(data: bytes, rank: int) -> Dump:
    if len(data) > _MOST_BYTES:
        raise NotADump(f"rejected: larger than {_MOST_BYTES >> 20} MiB")
    try:
        plain = json.loads(data) if data[:1] == b"{" else _NothingCalled(io.BytesIO(data)).load()
    except NotADump:
        raise
    except Exception as error:  # an unpickler fails in many ways on bytes that are not a pickle
        raise NotADump(f"{type(error).__name__}: {error}") from None
    return dump_of(rank, plain)


async def gather(
    guards: Guards, scratch: str, generation: int, folders: Mapping[int, str], within_s: float = WITHIN_S
) -> list[Dump]:
    """Return the dumps of this node's ranks, from their folders, without those that do not arrive in time."""
    for rank, folder in folders.items():
        for path in (os.path.join(folder, JSON_NAME), _pickled(folder, rank)):
            with contextlib.suppress(OSError):
                os.unlink(path)
    pipes = [rank for rank in folders if _request_dump(scratch, rank)]
    files = {rank: os.path.join(folder, JSON_NAME) for rank, folder in folders.items()}
    answers = await guards.dump(generation, files, within_s / 2)
    waited_for = [rank for rank in pipes if rank not in answers or answers[rank].problem]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s / 2 if answers else within_s):
            await _wait_for_dumps(waited_for, folders)
    found = await asyncio.to_thread(those_there, folders)
    return [with_members(dump, answers[dump.rank].groups) if dump.rank in answers else dump for dump in found]


async def _wait_for_dumps(ranks: list[int], folders: Mapping[int, str]) -> None:
    """Poll for the files: torch does not report when it has written a dump."""
    for rank in ranks:
        while not os.path.exists(_pickled(folders[rank], rank)):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(_LOOK_AGAIN_S)


def _pickled(folder: str, rank: int) -> str:
    return os.path.join(folder, f"{DUMP_FILE}{rank}")


def _request_dump(scratch: str, rank: int) -> bool:
    """Request a dump: write a line (any bytes) to the pipe of torch's watchdog, if the pipe is open."""
    try:
        fd = os.open(os.path.join(scratch, f"{PIPE_FILE}{rank}.pipe"), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    with contextlib.suppress(OSError):
        os.write(fd, b"1\n")
    os.close(fd)
    return True


def those_there(folders: Mapping[int, str]) -> list[Dump]:
    found = []
    for rank, folder in folders.items():
        for path in (os.path.join(folder, JSON_NAME), _pickled(folder, rank)):
            with contextlib.suppress(NotADump):
                found.append(read(path, rank))
                break
    return found


# --- for people --------------------------------------------------------------------------------------


def compared_folder(folder: str) -> tuple[int, list[str]]:
    """Compare all dumps below a folder, from any number of nodes. Return the number of ranks, and what they show."""
    found: dict[int, Dump] = {}
    for place, _folders, names in sorted(os.walk(folder)):
        named = re.search(r"(\d+)$", os.path.basename(place))
        rank = int(named[1]) if named else None
        for name in names:
            pickled = re.fullmatch(re.escape(DUMP_FILE) + r"(\d+)|nccl_trace_rank_(\d+)", name)
            of = int(pickled[1] or pickled[2]) if pickled else rank if name == JSON_NAME else None
            if of is not None and of not in found:
                with contextlib.suppress(NotADump):
                    found[of] = read(os.path.join(place, name), of)
    return len(found), compared(found.values())


def compared(dumps: Collection[Dump]) -> list[str]:
    """What these recorders show together, as the service would find it."""
    known = [with_own_members(dump) for dump in dumps]
    now_ns = max(
        (entry.at_ns for dump in known for group in dump.groups for entry in group.entries), default=0
    )
    reports = with_recorded(tuple(RankReport(dump.rank) for dump in known), known, now_ns)
    behind = ranks_behind(known)
    others = of_recorders({report.rank: report for report in reports})
    named = tuple(f"rank {rank}: " for rank in behind)
    return [
        *(f"rank {rank} {reason}" for rank, reason in behind.items()),
        *(line for line in others if not line.startswith(named) or not named),
    ]


def _main(folder: str) -> int:
    count, lines = compared_folder(folder)
    lines = lines or ["no mismatch found in these dumps"]
    sys.stdout.write(
        "\n".join((f"dumps of {count} ranks:", *lines)) + "\n"
        if count
        else f"{folder}: no flight recorder dumps found; use the log directory of a job\n"
    )
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1] if len(sys.argv) == 2 else "."))
