"""What backup, restore and compact do. A backup is a file store: `--store file:BACKUP` serves it, too.

So a backup of one kind of store can be restored into the other.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from dataclasses import dataclass
from typing import Any

import _ddp_launch_entry as doors
from ddp_launch_wings.upkeep import store_files as files
from rendezvous.store.open import BadUrl
from rendezvous.store.protocol import StoreError
from rendezvous.values.error_codes import Code, with_code

_FAILED = 1
_WITHIN_S = 300.0
_CONTINUE = (
    "Start the service: running jobs whose decisions are in the backup continue. Jobs that have restarted since then "
    "restart once more, and jobs that started since then are found again by their agents"
)


def carry_out(name: str, url: str, path: str) -> tuple[str, int]:
    """What to print, and the exit code."""
    try:
        return _WORK[name](store_of(url), path), 0
    except (StoreError, OSError, sqlite3.Error, doors.WingMissing, TimeoutError) as error:
        code = getattr(error, "code", Code.STORE_UNUSABLE)
        return f"ddp-rendezvous: {with_code(_words(error), code)}", _FAILED


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"the store did not answer within {_WITHIN_S:.0f} s. Check it with `ddp-rendezvous doctor`"
    if isinstance(error, OSError) and error.strerror:
        return (
            f"{error.filename}: {error.strerror}. Check the path, its permissions and the space of the disk"
        )
    return str(error)


@dataclass(frozen=True)
class LookedAfter:
    """A file, or a store of a wing, such as etcd."""

    rest: str
    wing: Any = None

    def call(self, name: str, *words: object) -> Any:
        async def within() -> Any:
            async with asyncio.timeout(_WITHIN_S):
                return await getattr(self.wing, name)(self.rest, os.environ, *words)

        return asyncio.run(within())


def store_of(url: str) -> LookedAfter:
    scheme, _, rest = url.partition(":")
    if scheme == "file" and rest:
        return LookedAfter(rest.removeprefix("//"))
    if rest.startswith("//") and (wing := doors.find(doors.STORE_UPKEEP, scheme)) is not None:
        return LookedAfter(rest[2:], wing)
    if url == "memory" or not url:
        raise BadUrl(
            "--store is missing: a store in memory cannot be looked after. Use the --store of the service"
        )
    raise BadUrl(f"unknown store {url.partition('?')[0]}: use file:PATH or etcd://HOST:PORT/PREFIX")


def _backup(store: LookedAfter, path: str) -> str:
    if store.wing is None:
        files.copy(store.rest, path)
    else:
        contents = store.call("dump")
        files.write(path, contents)
    jobs, size = files.examine(path)
    return f"wrote {path}: {jobs} jobs, {size:,} bytes. It can be restored with `ddp-rendezvous restore`"


def _restore(store: LookedAfter, path: str) -> str:
    jobs, _ = files.examine(path)
    if store.wing is None:
        with files.stopped(store.rest):
            files.copy(path, store.rest)
    else:
        store.call("fill", files.read(path))
    return f"restored {jobs} jobs. {_CONTINUE}"


def _compact(store: LookedAfter, _: str) -> str:
    before, after = files.compact(store.rest) if store.wing is None else store.call("compact")
    return f"compacted: {before:,} bytes before, {after:,} bytes now"


_WORK = {"backup": _backup, "restore": _restore, "compact": _compact}
