"""Leaves a process that becomes a template when the command has ended.

It is forked before the command changes its own limits and signals. So the template has the folder, limits, priority and
control group of the command. It only belongs to no terminal, as the zygote of a job. It waits until the command has
ended: the job needs the processors.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import time
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from launcher.template import memory_left
from launcher.warm_pool import client

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from launcher.template.pool_folder import PoolFolder, PoolSettings
    from launcher.template.pool_key import Key

_LEAST_FREE_BYTES = 1 << 30
_PRINTED_BYTES = 1 << 20  # by imports
_SET_PIPE_SIZE = 1031


class Recipe(NamedTuple):
    """What a template is started with. `command` makes argv and environment from the configuration of the pool."""

    folder: PoolFolder
    name: str
    key: Key
    title: str
    args: tuple[str, ...]
    command: Callable[[dict[str, Any]], tuple[tuple[str, ...], dict[str, str]]]


def plant(recipe: Recipe) -> int:
    """Leave a seed. It becomes a template once the returned descriptor is closed."""
    read, write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            gc.disable()
            os.setsid()
            if os.fork() == 0:
                _wait_and_become(recipe, read)
        finally:
            os._exit(0)
    os.close(read)
    os.waitpid(pid, 0)
    return write


def _wait_and_become(recipe: Recipe, read: int) -> NoReturn:
    """In a process of its own, which is not a child of the command any more."""
    try:
        spared = {read, recipe.folder.fd}
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in spared:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        for _ in range(3):
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        recipe.folder.hold_seed()
        while os.read(read, 1):
            pass
        _become(recipe)
    except BaseException as error:
        recipe.folder.note(f"no template of {recipe.title}: {type(error).__name__}: {error}")
    finally:
        os._exit(0)


def _become(recipe: Recipe) -> None:
    folder = recipe.folder
    with folder.locked():
        settings = folder.settings()
        if settings is None or client.is_there(folder, client.serving(folder, recipe.name, recipe.key)):
            return
        if memory_left.free_bytes() < _LEAST_FREE_BYTES:
            folder.note(f"no template of {recipe.title}: less than 1 GiB of memory is free")
            return
        _make_room(folder, settings)
        listener = folder.listen(recipe.name)
    argv, env = recipe.command(_configuration(recipe, settings, listener, _pipes()))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.set_inheritable(listener.fileno(), True)
    os.execve(argv[0], argv, env)


def _pipes() -> list[int]:
    """Lead standard output and error into pipes, as those of a rank do. Return their other ends.

    They keep what the imports print. When they are full, a write fails: they are read after the import.
    """
    reads = []
    for target in (1, 2):
        read, write = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.fcntl(write, _SET_PIPE_SIZE, _PRINTED_BYTES)
        os.dup2(write, target)
        os.set_blocking(write, False)
        os.set_blocking(read, False)
        os.set_inheritable(read, True)
        os.close(write)
        reads.append(read)
    return reads


def _configuration(
    recipe: Recipe, settings: PoolSettings, listener: socket.socket, output: list[int]
) -> dict[str, Any]:
    return {
        "listener": listener.fileno(),
        "output": output,
        "folder": recipe.folder.path,
        "name": recipe.name,
        "key": recipe.key,
        "title": recipe.title,
        "args": recipe.args,
        "idle_s": settings.idle_s,
        "most_bytes": settings.most_bytes,
        "started": time.time(),
    }


def _make_room(folder: PoolFolder, settings: PoolSettings) -> None:
    """End templates that were not used for the longest time, until one more is permitted."""
    known, silent = [], 0
    for name in folder.templates():
        if (state := client.state(folder, name)) is not None:
            known.append((state["last_used"], name, state))
        elif client.is_there(folder, name):
            silent += 1  # it still imports
        else:
            folder.forget(name)
    known.sort(key=lambda each: each[:2])
    while known and (
        silent + len(known) >= settings.most_templates
        or sum(each[2]["bytes"] for each in known) > settings.most_bytes
    ):
        _, name, state = known.pop(0)
        client.end(folder, name)
        folder.note(f"the template of {state['title']} has ended: another one takes its place")
