"""Turns a fork of a template into the zygote of a command: what the template could not know is set here.

What cannot be set, such as limits or the control group, is equal already: it belongs to the key (`pool_key`).
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, NamedTuple

from . import command_line


class Handover(NamedTuple):
    """What a command has sent. The descriptors: the zygote's end of a socket, and the standard streams."""

    request: dict[str, Any]
    fds: list[int]


def take_over(handover: Handover, old_args: tuple[str, ...], printed: tuple[bytes, bytes]) -> None:
    """`printed`: what the imports of the template have written to standard output and error."""
    request, (_control, *streams) = handover
    for target, fd in enumerate(streams):
        os.dup2(fd, target)
        os.close(fd)
    _set_environment(request["env"])
    command_line.show(request["argv"])
    set_arguments(list(old_args), request["args"])
    _renew_standard_input()
    _renew_start_of_logging()
    for fd, text in zip((1, 2), printed, strict=True):
        if text:
            with contextlib.suppress(OSError):
                os.write(fd, text)


def _set_environment(wanted: dict[str, str]) -> None:
    """In the order of the command's own, which a script can see."""
    os.environ.clear()
    os.environ.update(wanted)


def set_arguments(old: list[str], new: list[str]) -> None:
    """The arguments of the script are the last words of the command line."""
    for words in (sys.argv, sys.orig_argv):
        del words[len(words) - len(old) :]
        words += new


def _renew_standard_input() -> None:
    """Open it as the interpreter does at its start: the stream remembers of its file whether it can be sought in."""
    old: Any = sys.stdin
    buffer: Any = open(0, "rb", -1, closefd=False)
    buffer.raw.name = "<stdin>"
    stream: Any = io.TextIOWrapper(
        buffer,
        encoding=old.encoding,
        errors=old.errors,
        newline="\n",
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )
    stream.mode = "r"
    for name in ("stdin", "__stdin__"):
        setattr(sys, name, stream)


def _renew_start_of_logging() -> None:
    """`%(relativeCreated)d` counts from the import of logging, which is the only one of torch that reads the time."""
    logging: Any = sys.modules.get("logging")
    if logging is not None:
        import time

        is_integer = isinstance(logging._startTime, int)
        logging._startTime = time.time_ns() if is_integer else time.time()
