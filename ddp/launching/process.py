"""Runs the command `ddp-launch` as a child, and shows its output where the caller's output goes.

In a terminal the command writes to it directly, and Ctrl-C reaches the command as it does any program of that
terminal. In a notebook, or where `sys.stdout` was replaced, this process reads the output and writes it to `sys.stdout`
and `sys.stderr`; an interrupt of this process is passed on. If this process dies, the kernel sends SIGTERM to the
command, which stops the ranks.
"""

from __future__ import annotations

import codecs
import io
import os
import selectors
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_READ = 1 << 16
# PR_SET_PDEATHSIG, and a look at whether the parent is there still.
_COMMAND = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, int(signal.SIGTERM)); "
    "os.getppid() == int(sys.argv.pop(1)) or sys.exit(1); "
    "from _ddp_launch_entry import ddp_launch; sys.exit(ddp_launch())"
)


def run(options: Sequence[str], environ: Mapping[str, str]) -> int:
    """Return the exit code of the command. An interrupt stops the job, and is raised again when it has stopped."""
    words = [sys.executable, "-P", "-c", _COMMAND, str(os.getpid()), *options]
    if _is_plain(sys.stdout, 1) and _is_plain(sys.stderr, 2):
        return _run_in_place(words, environ)
    return _run_relayed(words, environ)


def _is_plain(stream: Any, fd: int) -> bool:
    """Whether what is written to the stream goes to the descriptor, as at the start of the interpreter."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == fd
    except (OSError, ValueError):
        return False


def _run_in_place(words: Sequence[str], environ: Mapping[str, str]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    is_ours = _has_terminal()
    process = subprocess.Popen(words, env=environ, process_group=None if is_ours else 0)
    interrupted = False
    while True:
        try:
            exit_code = process.wait()
        except KeyboardInterrupt:
            interrupted = True
            if not is_ours:  # otherwise the terminal has sent it to both
                process.send_signal(signal.SIGINT)
            continue
        if interrupted:
            raise KeyboardInterrupt
        return exit_code


def _has_terminal() -> bool:
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _run_relayed(words: Sequence[str], environ: Mapping[str, str]) -> int:
    process = subprocess.Popen(
        words,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    interrupted = False
    with process, selectors.DefaultSelector() as selector:
        for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert pipe is not None
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            selector.register(pipe, selectors.EVENT_READ, (stream, decoder))
        while selector.get_map():
            try:
                _show_next(selector)
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)
        while process.poll() is None:
            try:
                process.wait()
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)
    if interrupted:
        raise KeyboardInterrupt
    return process.returncode


def _show_next(selector: selectors.BaseSelector) -> None:
    for key, _ in selector.select():
        stream, decoder = key.data
        chunk = os.read(key.fd, _READ)
        if not chunk:
            selector.unregister(key.fileobj)
        if text := decoder.decode(chunk, final=not chunk):
            stream.write(text)
            stream.flush()
