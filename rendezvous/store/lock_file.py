"""One process per file store. The kernel releases the lock when the process ends, also after a crash."""

from __future__ import annotations

import fcntl
import os

from rendezvous.store.protocol import StoreError


class LockFile:
    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"cannot open the lock file {path} of the store (--store): {error.strerror}. "
                "Check the permissions of its directory"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 20, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise StoreError(
                f"{path} is locked by process {holder or '?'}: only one process can use a file store."
                " Stop that process or use another file; several replicas need etcd."
            ) from error
        os.truncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)
