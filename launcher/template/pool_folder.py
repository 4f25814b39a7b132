"""Where commands and templates of the warm pool meet: the key of a template, its folder, and their messages."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .import_variables import READ_NATIVELY

# --- the key of a template -------------------------------------------------------------------------
#
# What a warm template was started under, as names and values: pure functions.
#
# A rank inherits more than the environment: folder, limits, priority, control group, namespaces. The template
# cannot take these over from a command, so they must be equal. They form its key, whose digest is the name of its
# socket.

Key = dict[str, str]
_VARIABLE = "variable "
_MOST_WORDS = 4

_NOT_SET = ""
# Read by the interpreter at its start, or by the C library: no import shows that.
_READ_AT_START = tuple("PYTHON LC_ LANG LOCPATH LD_ GLIBC_TUNABLES TZ HOME SETUPTOOLS_ COVERAGE_".split())


def of_variables(environ: Mapping[str, str]) -> Key:
    """All variables of a command, as digests: the key is written to a file, and variables hold passwords."""
    return {_VARIABLE + name: digest(f"{name}={value}") for name, value in environ.items()}


def of_template(key: Key, read: Iterable[str]) -> Key:
    """The key of the command that has started the template, without the variables that do not matter.

    `read`: the names that its imports have read, whether they were set or not.
    """
    names = {_VARIABLE + name for name in read}
    kept = {name: value for name, value in key.items() if name in names or _is_of_start(name)}
    return dict.fromkeys(names, _NOT_SET) | kept


def _is_of_start(name: str) -> bool:
    variable = name.removeprefix(_VARIABLE)
    return variable == name or variable.startswith(_READ_AT_START) or variable.startswith(READ_NATIVELY)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def name_of(key: Key) -> str:
    return digest(json.dumps(sorted(key.items())))


def differences(mine: Key, theirs: Key) -> list[str]:
    """Say why a template does not serve a command. `theirs`: see `of_template`."""
    found = []
    for name in sorted(theirs.keys() | {each for each in mine if _is_of_start(each)}):
        here, there = mine.get(name, _NOT_SET), theirs.get(name, _NOT_SET)
        if here == there:
            continue
        if name.startswith(_VARIABLE):
            what = "has another value" if here and there else "is set" if here else "is not set"
            found.append(f"{name} {what}")
        else:
            found.append(f"{name} is {here or 'unknown'}, not {there or 'unknown'}")
    return found


def why_missed(mine: Key, templates: list[Key]) -> str:
    """Return how the command differs from the template that comes closest; "" if there is no template."""
    if not templates:
        return ""
    words = min((differences(mine, each) for each in templates), key=len)
    more = len(words) - _MOST_WORDS
    return "; ".join(words[:_MOST_WORDS]) + (f"; and {more} more" if more > 0 else "")


# --- messages --------------------------------------------------------------------------------------
#
# Messages between a command and a template of the pool: one JSON object per frame, with descriptors.
#
# Both sides are small programs that wait for each other for a limited time, so the sockets block, with a timeout.

_HEAD_BYTES = 4
_MOST_BYTES = 1 << 22  # an environment has at most a quarter of this
_MOST_FDS = 8


class Broken(OSError):
    """The other end has closed, or does not speak this protocol."""


def send(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    body = json.dumps(message).encode()
    frame = len(body).to_bytes(_HEAD_BYTES, "big") + body
    sent = socket.send_fds(sock, [frame], fds) if fds else 0
    sock.sendall(frame[sent:])


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its descriptors, which the caller owns. Raises OSError."""
    data, fds = bytearray(), []
    try:
        while len(data) < _HEAD_BYTES or len(data) < (wanted := _wanted(data)):
            part, more, flags, _address = socket.recv_fds(
                sock, (_HEAD_BYTES if len(data) < _HEAD_BYTES else wanted) - len(data), _MOST_FDS, _CLOEXEC
            )
            fds += more
            data += part
            if not part or flags & socket.MSG_CTRUNC:
                raise Broken("the connection has ended")
        message = json.loads(data[_HEAD_BYTES:])
        if not isinstance(message, dict):
            raise Broken("not a message")
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, ValueError):
            raise Broken("not a message") from None
        raise
    return message, fds


_CLOEXEC = socket.MSG_CMSG_CLOEXEC


def _wanted(data: bytearray) -> int:
    length = int.from_bytes(data[:_HEAD_BYTES], "big")
    if length > _MOST_BYTES:
        raise Broken("the message is too long")
    return _HEAD_BYTES + length


# --- the folder ------------------------------------------------------------------------------------
#
# The private folder of a user's warm pool: settings, sockets and keys of the templates, and notes for `warm status`.
#
#     pool.json     the settings. The pool is on as long as this file exists
#     NAME.sock     the socket of a template
#     NAME.json     its key, written when it is ready
#     seeds         locked by processes that will become templates
#     notes         why commands started cold, and why templates ended
#
# Everything in it belongs to one user. A folder that others can read or write, or that another user has made, is
# refused.

_SETTINGS, _NOTES, _LOCK, _SEEDS = "pool.json", "notes", "lock", "seeds"
_MOST_NOTE_BYTES = 1 << 14
_CREDENTIALS = struct.Struct("3i")


class Unusable(Exception):
    """Why this folder cannot hold the pool."""


class PoolSettings(NamedTuple):
    idle_s: float
    most_templates: int
    most_bytes: int
    boot: str  # of the machine: after a reboot the pool is off


class PoolFolder:
    """An open folder. Names in it are reached through its descriptor, so a renamed path leads nowhere else."""

    def __init__(self, path: str, fd: int) -> None:
        self.path, self.fd = path, fd

    def inside(self, name: str) -> str:
        """Return a path that is short enough for a socket."""
        return f"/proc/self/fd/{self.fd}/{name}"

    def close(self) -> None:
        os.close(self.fd)

    # --- settings ------------------------------------------------------------------------------------

    def settings(self) -> PoolSettings | None:
        """Return None if the pool is off."""
        try:
            with open(self.inside(_SETTINGS), encoding="utf-8") as file:
                found = PoolSettings(**json.load(file))
        except (OSError, ValueError, TypeError):
            return None
        return found if found.boot == boot_id() else None

    def is_on(self) -> bool:
        """Also turn the pool off if no command has used it for too long. A template does that itself."""
        settings = self.settings()
        if settings is None:
            return False
        with contextlib.suppress(OSError):
            age_s = time.time() - os.stat(self.inside(_SETTINGS)).st_mtime
            if age_s > settings.idle_s and not self.templates() and not self._has_seeds():
                self.turn_off()
                return False
            os.utime(self.inside(_SETTINGS))
        return True

    def hold_seed(self) -> int:
        """Return a descriptor that keeps the pool on, until it is closed."""
        seeds = os.open(self.inside(_SEEDS), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(seeds, fcntl.LOCK_SH)
        return seeds

    def _has_seeds(self) -> bool:
        seeds = os.open(self.inside(_SEEDS), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(seeds, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(seeds)
        return False

    def turn_on(self, settings: PoolSettings) -> None:
        self._write(_SETTINGS, json.dumps(settings._asdict()))

    def turn_off(self) -> None:
        self.remove(_SETTINGS)

    # --- templates -----------------------------------------------------------------------------------

    def templates(self) -> list[str]:
        """Return the names of all templates that were started and have not ended in order."""
        with contextlib.suppress(OSError):
            return sorted(
                each.removesuffix(".sock") for each in os.listdir(self.fd) if each.endswith(".sock")
            )
        return []

    def keys(self) -> dict[str, Key]:
        """Return the keys of the templates that are ready."""
        found = {}
        for name in self.templates():
            with contextlib.suppress(OSError, ValueError), open(self.inside(f"{name}.json")) as file:
                found[name] = json.load(file)
        return found

    def is_ready(self, name: str) -> bool:
        return os.path.exists(self.inside(f"{name}.json"))

    def announce(self, name: str, key: Key) -> None:
        self._write(f"{name}.json", json.dumps(key))

    def connect(self, name: str, timeout_s: float) -> socket.socket:
        """Connect to a template of the same user. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(self.inside(f"{name}.sock"))
            if peer(sock).uid != os.geteuid():
                raise PermissionError(errno.EPERM, "the socket belongs to another user")
        except OSError:
            sock.close()
            raise
        return sock

    def listen(self, name: str) -> socket.socket:
        self.forget(name)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(self.inside(f"{name}.sock"))
        sock.listen(16)
        return sock

    def forget(self, name: str) -> None:
        """Remove the files of a template that has ended."""
        self.remove(f"{name}.json")
        self.remove(f"{name}.sock")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time starts or removes templates."""
        lock = os.open(self.inside(_LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    # --- notes ---------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Write a line for `warm status`. If that is not possible, do nothing."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {' '.join(text.split())}\n"
        with contextlib.suppress(OSError):
            old = self.notes()
            if sum(map(len, old)) > _MOST_NOTE_BYTES:
                self._write(_NOTES, "\n".join((*old[len(old) // 2 :], line)))
                return
            with open(self.inside(_NOTES), "a", encoding="utf-8", errors="replace") as file:
                file.write(line)

    def notes(self) -> list[str]:
        with (
            contextlib.suppress(OSError),
            open(self.inside(_NOTES), encoding="utf-8", errors="replace") as file,
        ):
            return file.read().splitlines()
        return []

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.inside(name))

    def _write(self, name: str, text: str) -> None:
        part = f"{name}.{os.getpid()}.part"
        with open(self.inside(part), "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.rename(self.inside(part), self.inside(name))


def usual_place() -> str:
    """Return the same folder for all shells of a user, whatever their environment."""
    uid = os.geteuid()
    runtime = f"/run/user/{uid}"
    with contextlib.suppress(OSError):
        found = os.lstat(runtime)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == uid and os.access(runtime, os.W_OK):
            return f"{runtime}/ddp-launch-warm"
    return f"/tmp/ddp-launch-warm-{uid}"


def open_folder(path: str, create: bool = False) -> PoolFolder:
    """Raises FileNotFoundError if there is no pool, and `Unusable` if the folder is not private."""
    old_mask = os.umask(0o077)
    try:
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unusable(f"{path} cannot be used: {error.strerror}") from None
    finally:
        os.umask(old_mask)
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(fd)
        whose = "belongs to another user" if found.st_uid != os.geteuid() else "can be used by others"
        raise Unusable(f"{path} {whose}. Remove it, or choose another folder with --warm-dir")
    return PoolFolder(path, fd)


class PeerCredentials(NamedTuple):
    pid: int
    uid: int
    gid: int


def peer(sock: socket.socket) -> PeerCredentials:
    """Return who has opened the other end: the kernel says it."""
    return PeerCredentials(
        *_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    )


def boot_id() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""
