"""Authenticate and authorize every call, and load the certificates of the service.

    right    agent   operator   viewer
    attend     x                          the stream of an agent
    look       x        x         x       list, get, watch
    order               x                 drain, resume, resize, restart, abort
    scratch    x        x                 values and barriers

Without a key file there are no tokens: every client that can connect has all rights. That is meant for loopback, for
client certificates (`--client-ca`), and for `--insecure`.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import grpc

from rendezvous.access.certificates import fault
from rendezvous.access.refusals import Reason
from rendezvous.access.tokens import BadToken, Grant, KeyFileUnusable, NoKeys, Role, read_keys, verify

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rendezvous.access.secret import Secret

_log = logging.getLogger("rendezvous")
_BEARER = "bearer "
_RELOAD_S = 1.0


class Right(StrEnum):
    ATTEND = "attend"
    LOOK = "look"
    ORDER = "order"
    SCRATCH = "scratch"


RIGHTS = {
    Role.AGENT: (Right.ATTEND, Right.LOOK, Right.SCRATCH),
    Role.OPERATOR: (Right.LOOK, Right.ORDER, Right.SCRATCH),
    Role.VIEWER: (Right.LOOK,),
}


class Denied(Exception):
    def __init__(self, code: grpc.StatusCode, words: str, reason: Reason) -> None:
        super().__init__(words)
        self.code, self.words, self.reason = code, words, reason


@dataclass(frozen=True, slots=True)
class Identity:
    """Who calls. `grant` is None if the service does not use tokens."""

    name: str
    grant: Grant | None = None

    def may(self, right: Right, job_id: str | None = None) -> bool:
        if self.grant is None:
            return True
        return right in RIGHTS[self.grant.role] and (job_id is None or self.grant.covers(job_id))

    def require(self, right: Right, job_id: str | None = None) -> None:
        if self.may(right, job_id):
            return
        assert self.grant is not None
        what = f"a token with role {self.grant.role} for job {self.grant.job!r}"
        on = "" if job_id is None else f" on job {job_id!r}"
        reason = Reason.OTHER_JOB if self.may(right) else Reason.ROLE
        raise Denied(grpc.StatusCode.PERMISSION_DENIED, f"{what} does not permit {right.value!r}{on}", reason)


class Gate:
    """Checks tokens against `key_file`, which is read again when it changes. If it is empty, tokens are not used."""

    def __init__(self, key_file: str) -> None:
        self._key_file = key_file
        self._keys = read_keys(key_file) if key_file else ()
        self._stamp = _stamp(key_file)
        self._looked_at = time.monotonic()

    def identify(self, context: Any) -> Identity:
        """Who calls. Raises `Denied` (UNAUTHENTICATED)."""
        if not self._key_file:
            return Identity(peer_name(context))
        self._reload()
        token = _token(context.invocation_metadata() or ())
        if not token:
            raise Denied(
                grpc.StatusCode.UNAUTHENTICATED,
                "this service requires a token: set DDP_RENDEZVOUS_TOKEN or DDP_RENDEZVOUS_TOKEN_FILE",
                Reason.NO_TOKEN,
            )
        try:
            grant = verify(token, self._keys, time.time())
        except BadToken as error:
            raise Denied(grpc.StatusCode.UNAUTHENTICATED, str(error), error.reason) from error
        return Identity(f"token {grant.id}", grant)

    def _reload(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < _RELOAD_S:
            return
        self._looked_at = now
        stamp = _stamp(self._key_file)
        if stamp == self._stamp or not stamp:
            return
        self._stamp = stamp
        try:
            self._keys = read_keys(self._key_file)
        except NoKeys as error:  # the last key was removed, so its tokens must not be accepted any more
            self._keys = ()
            _log.error("rejecting all tokens: %s", error)
        except KeyFileUnusable as error:
            _log.error("keeping the keys that were loaded before: %s", error)


def _token(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    for key, value in metadata:
        words = value if isinstance(value, str) else ""
        if key == "authorization" and words[: len(_BEARER)].lower() == _BEARER:
            return words[len(_BEARER) :].strip()
    return ""


def peer_name(context: Any) -> str:
    """The name in the client certificate if there is one, else the address without its port."""
    names = context.auth_context().get("x509_common_name")
    if names:
        return "certificate " + str(names[0], "utf-8", "replace")
    return str(context.peer()).rpartition(":")[0]


def _stamp(*paths: str) -> tuple[tuple[int, int, int], ...]:
    """A value that changes when a file is written or replaced; empty if one of them cannot be read."""
    try:
        found = [os.stat(path) for path in paths if path]
    except OSError:
        return ()
    return tuple((s.st_mtime_ns, s.st_ino, s.st_size) for s in found)


# --- certificates --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths. With `client_ca`, every client needs a certificate that this CA signed."""

    certificate: str
    key: str
    client_ca: str = ""


def server_credentials(files: Certificates) -> grpc.ServerCredentials:
    """Credentials that read the files again for new connections. Open connections are not affected.

    While the files are being replaced, key and certificate may not match. Then the previous pair stays in use, and
    the next connection checks again. At the start there is no previous pair: raises `OSError` with a message.
    """
    if words := fault(files.certificate, files.key, files.client_ca):
        raise OSError(words)
    last = [_stamp(files.certificate, files.key, files.client_ca)]

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        stamp = _stamp(files.certificate, files.key, files.client_ca)
        if not stamp or stamp == last[0] or not _fits(files):
            return None  # keep the previous pair
        last[0] = stamp
        return _configuration(files)

    need_client = bool(files.client_ca)
    return grpc.dynamic_ssl_server_credentials(_configuration(files), fetch, need_client)  # type: ignore[arg-type]


def secret_credentials(secret: Secret) -> grpc.ServerCredentials:
    """Credentials from a job's secret: only clients that have the secret can connect."""
    pair = [(secret.key, secret.certificate)]
    return grpc.ssl_server_credentials(pair, secret.certificate, require_client_auth=True)


def _fits(files: Certificates) -> bool:
    try:
        return not fault(files.certificate, files.key, files.client_ca)
    except OSError:
        return False


def _configuration(files: Certificates) -> grpc.ServerCertificateConfiguration:
    ca = _read(files.client_ca) if files.client_ca else None
    return grpc.ssl_server_certificate_configuration([(_read(files.key), _read(files.certificate))], ca)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
