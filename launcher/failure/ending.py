"""The end of an agent: prints the failure report, writes it as JSON, keeps or removes the logs, sets the exit code.

`Farewell` does the slow part in threads: the reader of a pipe may be slow. A stop signal ends the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import sys
import textwrap
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from launcher import ending_file
from launcher.output import lines
from launcher.output.lines import is_colored, printable
from rendezvous.values.cause_text import code_of_outcome
from rendezvous.values.error_codes import with_code

if TYPE_CHECKING:
    from launcher.exchange import Finish
    from launcher.output.log_file import LogFolder
    from launcher.output.logs import LogPump
    from launcher.settings.spec import LaunchSpec
    from rendezvous.values.types import Outcome

_WIDTH = 100
_PATIENCE_S = 5.0
_TERMINAL_S = 5.0  # for a terminal that is slow to take the last lines
_STOPPED_S = 5.0  # for the reader of a pipe after a stop signal: its sender waits for us
_LAST_WORDS_S = 0.5  # for the final message after a signal, if there is a reader
_FAILED = 1  # replaces a code that a scheduler would attribute to this machine


class Farewell:
    def __init__(
        self,
        spec: LaunchSpec,
        folder: LogFolder,
        logs: LogPump,
        finish: Finish,
        keep: Callable[[bool], object],
        time_words: str = "",
    ) -> None:
        """`time_words`: what the time of the job was spent on; "" if that is unknown.

        `keep` keeps the history of the job, and is told whether the logs are about to be removed.
        """
        self._spec, self._folder, self._logs, self._finish = spec, folder, logs, finish
        self._keep, self._time_words = keep, time_words
        self._hurried = asyncio.Event()
        self._limit: asyncio.TimerHandle | None = None

    def hurry(self, _signum: int) -> None:
        """Wait for no reader any more."""
        self._hurried.set()
        self._logs.abandon()

    async def show_output(self) -> bool:
        """Show the rest of the output. Return whether all of it was shown, since the start."""
        if self._finish.outcome is None:
            self._limit = asyncio.get_running_loop().call_later(_STOPPED_S, self.hurry, 0)
        has_box = self._finish.outcome is not None and not self._finish.outcome.succeeded
        return await asyncio.to_thread(self._logs.close, _TERMINAL_S, has_box)

    async def tell(self, all_shown: bool) -> int:
        """Report how the job ended, and return the exit code."""
        missing = "" if all_shown else _missing(self._folder, self._logs.lacks_beginnings)
        words = (missing, self._time_words)
        call = asyncio.to_thread(tell, self._spec, self._folder, self._finish, self._keep, *words)
        telling = asyncio.ensure_future(call)
        hurried = asyncio.ensure_future(self._hurried.wait())
        await asyncio.wait((telling, hurried), return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if self._limit is not None:
            self._limit.cancel()
        await asyncio.wait((telling,), timeout=_LAST_WORDS_S)
        return telling.result() if telling.done() else exit_code(self._spec, self._finish)


def _missing(folder: LogFolder, lacks_beginnings: bool) -> str:
    has = "has all of it"
    if lacks_beginnings:
        has = f"has the last {folder.file_limit >> 20} MiB or more of each stream (--log-dir keeps all of it)"
    return f"some output was not shown. {folder.path} {has}."


def exit_code(spec: LaunchSpec, finish: Finish) -> int:
    outcome = finish.outcome
    if outcome is None or outcome.is_crash_loop:  # this code is ours
        return finish.exit_code
    if finish.exit_code in spec.reserved_exit_codes:
        return _FAILED
    return finish.exit_code


def tell(
    spec: LaunchSpec,
    folder: LogFolder,
    finish: Finish,
    keep: Callable[[bool], object],
    missing: str,
    time_words: str = "",
) -> int:
    """Report how the job ended, and return the exit code. The logs of a failed job are kept.

    `missing`: what to say of output that was not shown; "" if all was shown.
    """
    from launcher.failure import story

    if time_words:
        text = f"ddp-launch: {time_words}"
        _say(textwrap.fill(text, _width(), subsequent_indent="  ") if os.isatty(2) else text)
    if finish.outcome is None:
        reason = with_code(finish.reason, finish.code) if finish.code else finish.reason
        said = "\n".join(map(printable, reason.split("\n")))
        logs = f"; {story.logs_are_in(_place(spec, folder))}" if folder.has_logs() else ""
        ending_file.leave(finish.exit_code, finish.reason, finish.code)
        _say_last(spec, f"ddp-launch: {said}{logs}", "agent")
    elif not finish.outcome.succeeded:
        _tell_of_failure(spec, folder, finish.outcome)
    # A job that failed keeps its report there, also if no rank was started.
    is_over = finish.exit_code == 0 or (finish.outcome is None and not folder.has_logs())
    removes = folder.temporary and is_over and not missing
    keep(removes)
    if missing:
        _say(f"ddp-launch: {missing}")
    if removes:
        folder.discard()
    return exit_code(spec, finish)


def _tell_of_failure(spec: LaunchSpec, folder: LogFolder, outcome: Outcome) -> None:
    from launcher.failure import story
    from launcher.failure.rank_facts import write_outcome

    budget = str(spec.job.budget)
    summary = story.outcome_json(outcome, log_dir=folder.path, budget=budget)
    ending_file.leave(outcome.exit_code, outcome.reason, code_of_outcome(outcome), summary)
    try:
        write_outcome(os.path.join(folder.path, "failure.json"), summary)
    except OSError as error:
        _say(f"ddp-launch: cannot write {folder.path}/failure.json: {error.strerror}")
    box = story.render_box(
        outcome,
        width=_width(),
        color=is_colored(spec.log.color, os.isatty(2), os.environ),
        log_dir=_place(spec, folder),
        budget=budget,
        unicode=(sys.stderr.encoding or "").lower().startswith("utf"),
    )
    _say_last(spec, box, "job", json.dumps(story.torch_error(outcome, int(time.time()))))


def _place(spec: LaunchSpec, folder: LogFolder) -> str:
    """The folder as a person finds it: the `--hosts` command shows the message on another machine."""
    return f"{folder.path} on {os.uname().nodename}" if spec.has_ssh_control else folder.path


def _say_last(spec: LaunchSpec, text: str, whose: str, error: str = "") -> None:
    """Write to the terminal, or to the `--hosts` process, which shows a text that all agents send only once."""
    if spec.has_ssh_control:
        _say(lines.framed("ending", whose=whose, text=text, error=error))
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
        return min(_WIDTH, os.get_terminal_size(2).columns or _WIDTH)  # 0: a terminal without a size
    except OSError:
        return _WIDTH
