"""`ddp.launch`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp.launching import parcels, process
from ddp.launching.command_line import name_of, options_of
from ddp.launching.errors import CANNOT_PICKLE, INVALID_ARGUMENT, LaunchError, of_ending

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_ENDING = "DDP_ENDING_FILE"  # where the command writes how the job has ended
_FOLDER = "DDP_CALL_FOLDER"  # of the function, for the ranks
_STOPPED = (128 + 2, 128 + 15)


def launch(
    function: Callable[..., Any],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    nproc: int | str | None = None,
    **options: Any,
) -> list[Any]:
    """Call `function(*args, **kwargs)` in every rank of a new job, and return what each rank returned, by rank.

    `nproc` is the number of ranks; without it, there is one per GPU, or one per CPU. `options` are the options of
    `ddp-launch` with underscores: `max_restarts=3`, `hang_timeout="5m"`. Ranks are watched, restarted and healed as in
    any other job.

    Raises `ddp.LaunchError` with a `code`, and the traceback of the rank that failed first. An interrupt stops the job.
    """
    if not callable(function):
        raise LaunchError(
            f"ddp.launch needs a function, not {type(function).__name__}. Pass train, not train()",
            INVALID_ARGUMENT,
        )
    if not isinstance(args, list | tuple):
        raise LaunchError(
            f"args={args!r}: use a tuple of the arguments. One argument is args=({args!r},)"[:400],
            INVALID_ARGUMENT,
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise LaunchError(
            f"kwargs must be a dictionary of arguments by name, not {type(kwargs).__name__}", INVALID_ARGUMENT
        )
    if "RANK" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
        raise LaunchError(
            "ddp.launch was called inside a rank of a job. Call it in the process that starts the job. If a module "
            "that the function needs calls it when imported, move that call into a script",
            INVALID_ARGUMENT,
        )
    folder = Path(tempfile.mkdtemp(prefix="ddp-launch-call-"))
    try:
        parcels.write_call(folder, function, args, kwargs or {})
        return _run(function, folder, {"nproc_per_node": nproc, **options})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(function: Callable[..., Any], folder: Path, keywords: Mapping[str, Any]) -> list[Any]:
    flags = options_of(keywords)
    name = name_of(function)
    if str(keywords.get("nnodes") or 1) == "1" and not keywords.get("rdzv_id"):
        stamp = f"{time.strftime('%m%d-%H%M%S')}-{os.urandom(2).hex()}"
        flags.append(f"--rdzv-id={name}-{stamp}")
    ending = folder / "ending"
    # The same words on all nodes of a job; with several nodes, the job is named after the function.
    words = [*flags, "-m", "ddp.launching.rank", name]
    exit_code = process.run(words, {**os.environ, _ENDING: str(ending), _FOLDER: str(folder)})
    if exit_code == 0:
        return parcels.results_in(folder)
    if text := parcels.unsendable(folder):
        raise LaunchError(text, CANNOT_PICKLE, exit_code)
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(ending.read_text())
    if exit_code == _STOPPED[0] and not found.get("code"):
        raise KeyboardInterrupt
    raise of_ending(found, exit_code)
