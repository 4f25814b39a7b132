"""Turns a fresh fork of the zygote into a rank: its session, its streams, its environment."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from . import script_start, store, tree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .messages import Spawn

_CANNOT_EXECUTE = 126
_NOT_FOUND = 127
_INTERNAL = 70
_INTERRUPTED = 130


def become(order: Spawn, fds: tuple[int, ...], parent: int) -> None:
    os.setsid()
    tree.die_with_parent(parent)
    tree.allow_tracing_by_agent(parent)
    for fd, target in zip(fds, (1, 2), strict=True):
        os.dup2(fd, target)
        os.close(fd)
    renew_streams()
    if order.cpus:
        os.sched_setaffinity(0, order.cpus)
    for name, value in order.env.items():
        os.environ[name] = value
    if order.args:
        sys.argv[-len(order.args) :] = order.args
        sys.orig_argv[-len(order.args) :] = order.args
    script_start.keep_from_keyboard(order.env)
    _fresh_identity()
    if order.is_store_kept and order.env.get("RANK") == "0":
        store.join_instead_of_hosting()


def renew_streams() -> None:
    """Open streams as the interpreter has opened them, which was for descriptors of another kind.

    A text stream remembers whether its file has positions. The one of a command's file would ask a pipe for it when the
    script changes its encoding, and fail.
    """
    for name, fd in (("stdout", 1), ("stderr", 2)):
        _renew_stream(name, fd)


def _renew_stream(name: str, fd: int) -> None:
    old = getattr(sys, name)
    if not isinstance(old, io.TextIOWrapper) or old.seekable() == _has_positions(fd):
        return
    raw = io.FileIO(fd, "wb", closefd=False)
    raw.name = f"<{name}>"
    new = io.TextIOWrapper(
        raw,  # with -u, the interpreter has no buffer between the two
        old.encoding,
        old.errors,
        newline="\n",
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )
    new.mode = "w"  # type: ignore[misc]
    setattr(sys, name, new)
    setattr(sys, f"__{name}__", new)


def _has_positions(fd: int) -> bool:
    try:
        os.lseek(fd, 0, os.SEEK_CUR)
    except OSError:
        return False
    return True


def execute(argv: tuple[str, ...], *, is_python: bool) -> NoReturn:
    if is_python:
        script_start.announce()
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except FileNotFoundError:
        _die(
            f"cannot start {argv[0]}: the program is not on PATH; check the name, or use the full path",
            _NOT_FOUND,
        )
    except OSError as error:
        _die(f"cannot start {argv[0]}: {error.strerror}", _CANNOT_EXECUTE)


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Exit on an error: a child that fails before it is a rank must not continue as a second zygote."""
    try:
        yield
    except KeyboardInterrupt:  # the job ends before this rank has begun
        os._exit(_INTERRUPTED)
    except BaseException as error:
        _die(f"a rank could not be started: {type(error).__name__}: {error}", _INTERNAL)


def _fresh_identity() -> None:
    """Create per-process state again (random seeds, PID caches); the standard library handles the rest after a fork."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)
    threads = sys.modules.get("threading")
    if threads is not None:
        threads.main_thread()._native_id = threads.get_native_id()


def _die(text: str, code: int) -> NoReturn:
    os.write(2, f"ddp-launch: {text}\n".encode(errors="surrogateescape"))
    os._exit(code)
