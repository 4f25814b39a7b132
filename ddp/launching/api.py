"""`ddp.launch`."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp.launching import parcels
from ddp.launching.errors import CANNOT_PICKLE, INVALID_ARGUMENT, LaunchError, name_of, of_ending, options_of
from ddp.telemetry.contracts import CALL_FOLDER, ENDING_FILE

# --- the command as a child ------------------------------------------------------------------------
#
# Runs the command `ddp-launch` as a child, and shows its output where the caller's output goes.
#
# In a terminal the command writes to it directly, and Ctrl-C reaches the command as it does any program of that
# terminal. In a notebook, or where `sys.stdout` was replaced, this process reads the output and writes it to
# `sys.stdout` and `sys.stderr`; an interrupt of this process is passed on. If this process dies, the kernel sends
# SIGTERM to the command, which stops the ranks.

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


# --- launch ----------------------------------------------------------------------------------------

_STOPPED = (128 + 2, 128 + 15)


def launch(
    function: Callable[..., Any],
    *values: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    nproc: int | str | None = None,
    **options: Any,
) -> list[Any]:
    """Call `function(*values, **kwargs)` in every rank of a new job, and return what each rank returned, by rank.

    `args=(...)`, or a tuple as the only value, has the values too, as for `torch.multiprocessing.spawn`.
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
    if values and args:
        raise LaunchError("use the values after the function, or args=(...), not both", INVALID_ARGUMENT)
    if values:
        args = values[0] if len(values) == 1 and isinstance(values[0], tuple) else values
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
    exit_code = run(words, {**os.environ, ENDING_FILE: str(ending), CALL_FOLDER: str(folder)})
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
