"""Environment variables for the watchdogs of NCCL and torch.

They let the launcher's timeout expire first, and let a failed rank exit at once. Sets only variables that the user did
not set, and only if ranks use GPUs: other backends do not read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DUMP_FILE = "flight-recorder-"  # + rank, in the folder of the rank's logs; a pickle of torch's
PIPE_FILE = (
    "flight-recorder-pipe-"  # + rank + ".pipe", in the node's scratch folder: not every disk has pipes
)

# Name, value, why; docs/communication-errors.md shows this table.
SHARED: tuple[tuple[str, str, str], ...] = (
    (
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
        "500",
        "after a timeout torch waits for the dumps of all ranks: 2 s (4 x this value) instead of 60 s",
    ),
    (
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "1",
        "a rank whose collective times out writes a dump of its flight recorder",
    ),
    ("TORCH_FR_BUFFER_SIZE", "2000", "switches the flight recorder on; it keeps the last 2,000 collectives"),
    (
        "TORCH_INCLUDE_STACK_TRACE",
        "0",
        "no stacks in dumps: they need the GIL, which another thread may hold",
    ),
)
OF_RANK: tuple[tuple[str, str], ...] = (
    ("TORCH_FR_DUMP_TEMP_FILE", "the rank writes dumps to the directory of its logs"),
    ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "the launcher requests a dump through this pipe"),
)
_FORMERLY = {  # the names in older versions of torch; a value that the user set there is kept
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
}


def _free(name: str, environ: Mapping[str, str]) -> bool:
    return name not in environ and _FORMERLY.get(name, name) not in environ


def shared(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value, _why in SHARED if _free(name, environ)}


def of_rank(directory: str, scratch: str, environ: Mapping[str, str]) -> dict[str, str]:
    values = {"TORCH_FR_DUMP_TEMP_FILE": f"{directory}/{DUMP_FILE}"}
    if scratch:
        values["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = f"{scratch}/{PIPE_FILE}"
    return {name: value for name, value in values.items() if _free(name, environ)}
