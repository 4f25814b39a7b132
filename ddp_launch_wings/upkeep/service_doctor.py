"""`ddp-rendezvous doctor`: checks what a service with these settings needs, whether it runs now or not."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import resource
import shutil
import socket
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import _ddp_launch_entry as doors
from ddp_launch_wings.upkeep import store_work as files
from ddp_launch_wings.upkeep.store_work import store_of
from rendezvous.access.auth import KeyFileUnusable, read_keys
from rendezvous.access.secret import file_problem
from rendezvous.service import condition, settings
from rendezvous.store.file import LockFile
from rendezvous.store.protocol import StoreError

_FAILED = 1
_DAY_S, _SOON_DAYS = 86_400.0, 7
_LEAST_FREE, _LEAST_FILES = 1 << 30, 4096
_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)


class DoctorFinding(NamedTuple):
    what: str
    words: str
    is_good: bool = True


def carry_out(arguments: argparse.Namespace) -> int:
    try:
        settled = settings.settle(arguments, os.environ)
        findings = list(examine(settled))
    except settings.SettingsUnusable as error:
        findings = [DoctorFinding("settings", str(error), False)]
    for each in findings:
        sys.stdout.write(f"{'ok     ' if each.is_good else 'problem'}  {each.what}: {each.words}\n")
    return 0 if all(each.is_good for each in findings) else _FAILED


def examine(settled: Mapping[str, object]) -> Iterator[DoctorFinding]:
    for address in settled["listen"]:  # type: ignore[attr-defined]
        yield _port(address)
    yield from _store(str(settled["store"]))
    yield from _certificates(settled)
    yield from _keys(str(settled["token_keys"]))
    yield _clock()
    yield _descriptors(int(settled["max_agents"]))  # type: ignore[call-overload]
    if settled["journal_dir"]:
        yield _disk("journals", str(settled["journal_dir"]))


def _port(address: str) -> DoctorFinding:
    if address.startswith("unix:"):
        return DoctorFinding("listen", f"{address} is a socket of this machine")
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[0][4])
    except OSError as error:
        if port != "0" and _is_served(host.strip("[]"), int(port)):
            return DoctorFinding("listen", f"a program, which should be the service, answers at {address}")
        why = error.strerror or str(error)
        return DoctorFinding("listen", f"cannot listen on {address}: {why}. Check --listen", False)
    return DoctorFinding("listen", f"{address} is free, so no service runs there")


def _is_served(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 5.0):
        return True
    return False


def _store(url: str) -> Iterator[DoctorFinding]:
    if url == "memory":
        yield DoctorFinding(
            "store",
            "the jobs are in memory: a restart of the service forgets them. Set --store file:PATH or etcd://...",
            False,
        )
        return
    try:
        store = store_of(url)
        if store.wing is None:
            yield from _file_store(store.rest)
            return
        for is_good, words in store.call("examine"):
            yield DoctorFinding("store", words, is_good)
    except (StoreError, OSError, sqlite3.Error, TimeoutError, doors.WingMissing) as error:
        yield DoctorFinding("store", f"{error or 'no answer in time. Check that the store runs'}", False)


def _file_store(path: str) -> Iterator[DoctorFinding]:
    folder = os.path.dirname(os.path.abspath(path))
    if not os.access(folder, os.W_OK):
        yield DoctorFinding(
            "store", f"{folder} cannot be written by this user. Check its permissions, or --store", False
        )
        return
    if not os.path.exists(path):
        yield DoctorFinding("store", f"{path} does not exist yet: the service creates it")
    else:
        jobs, size = files.examine(path)
        yield DoctorFinding("store", f"{path} has {jobs} jobs in {size:,} bytes, and is {_used(path)}")
        if mode := os.stat(path).st_mode & 0o077:
            yield DoctorFinding(
                "store", f"other users can open {path} (mode {mode:04o}): run chmod 600 {path}", False
            )
    yield _disk("store", folder)


def _used(path: str) -> str:
    try:
        LockFile(f"{path}.lock").release()
    except StoreError:
        return "in use by a service"
    return "not in use"


def _disk(what: str, folder: str) -> DoctorFinding:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return DoctorFinding(what, f"{folder}: {error.strerror}. Create it, or check its permissions", False)
    if free < _LEAST_FREE:
        return DoctorFinding(
            what,
            f"{folder} has only {free >> 20:,} MiB left. If it is full, no decision can be stored. Free some space",
            False,
        )
    return DoctorFinding(what, f"{folder} has {free >> 20:,} MiB left")


def _certificates(settled: Mapping[str, object]) -> Iterator[DoctorFinding]:
    certificate, key, authority = (str(settled[name]) for name in ("tls_cert", "tls_key", "client_ca"))
    if not certificate:
        yield DoctorFinding("certificates", "none (--tls-cert): connections are not encrypted")
    try:
        if problem := file_problem(certificate, key, authority):
            yield DoctorFinding("certificates", problem, False)
    except OSError as error:
        yield DoctorFinding("certificates", f"{error.filename}: {error.strerror}. Check the path", False)
    for name, path in settings.certificate_files(settled).items():
        try:
            left = condition.left_s(name, path) / _DAY_S
        except (OSError, ValueError) as error:
            yield DoctorFinding(
                "certificates", f"{path} ({name}) cannot be read: {error}. Replace the file", False
            )
            continue
        words = f"{path} ({name}) is valid for {left:.1f} days"
        if left < _SOON_DAYS:
            words += ". After that nobody can connect. Replace the file: a service reads it again without a restart"
        yield DoctorFinding("certificates", words, left >= _SOON_DAYS)


def _keys(path: str) -> Iterator[DoctorFinding]:
    if not path:
        yield DoctorFinding("keys", "none (--token-keys): clients need no token")
        return
    try:
        keys = read_keys(path)
    except KeyFileUnusable as error:
        yield DoctorFinding("keys", str(error), False)
        return
    yield DoctorFinding("keys", f"{path} has {len(keys)} {'key' if len(keys) == 1 else 'keys'}")


def _clock() -> DoctorFinding:
    """By adjtimex(2), which asks only, as long as the first field of its structure is 0."""
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    if state == _UNSYNCHRONISED:
        return DoctorFinding(
            "clock",
            "the kernel says that nothing synchronises the clock of this machine. Tokens and certificates end too "
            "early or too late. Start chrony, systemd-timesyncd or ntpd",
            False,
        )
    return DoctorFinding(
        "clock", f"synchronised; it is {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC"
    )


def _descriptors(agents: int) -> DoctorFinding:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < min(agents, _LEAST_FILES):
        return DoctorFinding(
            "descriptors",
            f"at most {hard:,} files may be open, and each agent needs one. Raise the limit: LimitNOFILE= of systemd, "
            "or ulimit -n",
            False,
        )
    return DoctorFinding(
        "descriptors", f"{hard:,} files may be open, so about {min(agents, hard * 3 // 4):,} agents can join"
    )
