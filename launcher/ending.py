"""The last words of an agent: the box, its JSON, and what becomes of the logs."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.log_folder import LogFolder
    from launcher.spec import LaunchSpec
    from launcher.supervision import Finish

_WIDTH = 100


def tell(spec: LaunchSpec, folder: LogFolder, finish: Finish) -> int:
    """Says how it ended; the exit code of the command."""
    if finish.outcome is None:
        _say(f"ddp-launch: {finish.reason}")
    elif not finish.outcome.succeeded:
        from launcher.facts import write_outcome
        from launcher.story import outcome_json, render_box

        write_outcome(os.path.join(folder.path, "failure.json"), outcome_json(finish.outcome))
        _say(render_box(finish.outcome, width=_width(), color=_color(spec), log_dir=folder.path))
    if folder.temporary and finish.exit_code == 0:
        folder.discard()
    return finish.exit_code


def _say(text: str) -> None:
    try:
        os.write(2, text.rstrip("\n").encode(errors="replace") + b"\n")
    except OSError:
        pass  # nobody is there to read it any more; the JSON and the exit code say it too


def _width() -> int:
    try:
        return min(_WIDTH, os.get_terminal_size(2).columns)
    except OSError:
        return _WIDTH


def _color(spec: LaunchSpec) -> bool:
    return spec.log.color == "always" or (spec.log.color == "auto" and sys.stderr.isatty())
