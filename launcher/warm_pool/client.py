"""What commands ask of a template: a zygote, its state, its end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from typing import TYPE_CHECKING, Any

from launcher.template import pool_key, pool_wire
from launcher.template.pool_folder import peer
from launcher.warm_pool.pooled_zygote import PooledZygote

if TYPE_CHECKING:
    from launcher.template.pool_folder import PoolFolder
    from launcher.template.pool_key import Key

_REPLY_S = 1.0
_END_S = 3.0


class NotServed(Exception):
    """Why no template serves this command."""


def serving(folder: PoolFolder, name: str, key: Key) -> str:
    """Return the name of a template that can serve a command with this key; else its own name."""
    fitting = [each for each, theirs in folder.keys().items() if not pool_key.differences(key, theirs)]
    return next((each for each in fitting if is_there(folder, each)), name)


def take(folder: PoolFolder, name: str, request: dict[str, Any]) -> PooledZygote:
    """Raises `NotServed`."""
    control, theirs = socket.socketpair()
    try:
        lifeline = _ask_for_zygote(folder, name, request, theirs)
    except BaseException:
        control.close()
        raise
    finally:
        theirs.close()
    return PooledZygote(control, lifeline)


def _ask_for_zygote(
    folder: PoolFolder, name: str, request: dict[str, Any], theirs: socket.socket
) -> socket.socket:
    try:
        connection = folder.connect(name, _REPLY_S)
    except OSError as error:
        raise NotServed(f"its template cannot be reached: {error.strerror}") from None
    try:
        # Without descriptors yet: those that are not received would keep the output of the command open.
        pool_wire.send(connection, {"want": "zygote", "key": request["key"]})
        reply, _ = pool_wire.receive(connection)
        if "taken" in reply:
            pool_wire.send(connection, request, (theirs.fileno(), 0, 1, 2))
    except OSError as error:
        connection.close()
        raise NotServed(f"its template does not answer: {error.strerror or error}") from None
    if "taken" not in reply:
        connection.close()
        raise NotServed(str(reply.get("refused", "its template does not know the request")))
    return connection


def state(folder: PoolFolder, name: str, timeout_s: float = _REPLY_S) -> dict[str, Any] | None:
    """Return None if the template has ended, or does not answer in time."""
    with contextlib.suppress(OSError), folder.connect(name, timeout_s) as connection:
        pool_wire.send(connection, {"want": "state"})
        return pool_wire.receive(connection)[0]
    return None


def is_there(folder: PoolFolder, name: str) -> bool:
    """Whether a process listens: it may still import."""
    with contextlib.suppress(OSError), folder.connect(name, _REPLY_S):
        return True
    return False


def end(folder: PoolFolder, name: str) -> bool:
    """End a template, by force if it does not answer. Its jobs go on. Return False if it had ended already."""
    try:
        connection = folder.connect(name, _REPLY_S)
    except OSError:
        folder.forget(name)
        return False
    with connection, contextlib.suppress(OSError):
        process = os.pidfd_open(peer(connection).pid)
        try:
            with contextlib.suppress(OSError):
                pool_wire.send(connection, {"want": "end"})
            if not _ends(process):
                signal.pidfd_send_signal(process, signal.SIGKILL)
                _ends(process)
        finally:
            os.close(process)
    folder.forget(name)
    return True


def _ends(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(_END_S * 1000))
