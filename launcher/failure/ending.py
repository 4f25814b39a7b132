"""The end of an agent: the failure box, its JSON, the log folder, and the exit code."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from typing import TYPE_CHECKING

from launcher.output import frames
from launcher.output.lines import is_colored, printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.exchange import Finish
    from launcher.output.log_folder import LogFolder
    from launcher.settings.spec import LaunchSpec

_WIDTH = 100
_PATIENCE_S = 5.0
_FAILED = 1  # replaces a code that a scheduler would attribute to this machine


def tell(spec: LaunchSpec, folder: LogFolder, finish: Finish, all_shown: bool) -> int:
    """Report how the job ended, and return the exit code. The logs of a failed job stay."""
    if finish.outcome is None:
        said = "\n".join(map(printable, finish.reason.split("\n")))
        _say_last(spec, f"ddp-launch: {said}", "agent")
    elif not finish.outcome.succeeded:
        from launcher.failure.facts import write_outcome
        from launcher.failure.story import outcome_json, render_box, torch_error

        budget = str(spec.budget)
        summary = outcome_json(finish.outcome, log_dir=folder.path, budget=budget)
        try:
            write_outcome(os.path.join(folder.path, "failure.json"), summary)
        except OSError as error:
            _say(f"ddp-launch: cannot write {folder.path}/failure.json: {error.strerror}")
        box = render_box(
            finish.outcome,
            width=_width(),
            color=is_colored(spec.log.color, os.isatty(2), os.environ),
            log_dir=folder.path,
            budget=budget,
            unicode=(sys.stderr.encoding or "").lower().startswith("utf"),
        )
        _say_last(spec, box, "job", json.dumps(torch_error(finish.outcome, int(time.time()))))
    if not all_shown:
        _say(f"ddp-launch: some output could not be shown. {folder.path} has all of it.")
    elif folder.temporary and finish.exit_code == 0:
        folder.discard()
    if finish.outcome is not None and finish.exit_code in spec.reserved_exit_codes:
        return _FAILED
    return finish.exit_code


def _say_last(spec: LaunchSpec, text: str, whose: str, error: str = "") -> None:
    """Write to the terminal, or to the `--hosts` command, which shows the same text of all agents once."""
    if spec.has_ssh_control:
        _say(frames.framed("ending", whose=whose, text=text, error=error))
        return
    leave_error_file(error, _say)
    _say(text)


def leave_error_file(error: str, say: Callable[[str], None]) -> None:
    """Write the file that TORCHELASTIC_ERROR_FILE names, as torchrun does. Schedulers read it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not (path and error):
        return
    try:
        with open(path, "w", encoding="utf-8") as file:  # in place: it may be a mount of a container
            file.write(error)
    except OSError as failure:
        say(f"ddp-launch: cannot write TORCHELASTIC_ERROR_FILE {path}: {failure.strerror}")


def _say(text: str) -> None:
    left = text.rstrip("\n").encode(errors="replace") + b"\n"
    with contextlib.suppress(OSError):  # the reader may be gone; the exit code remains
        while left:
            try:
                left = left[os.write(2, left) :]
            except BlockingIOError:  # another process made the stream non-blocking
                if not select.select((), (2,), (), _PATIENCE_S)[1]:
                    return


def _width() -> int:
    try:
        return min(_WIDTH, os.get_terminal_size(2).columns)
    except OSError:
        return _WIDTH
