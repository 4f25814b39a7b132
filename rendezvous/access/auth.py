"""Authenticate and authorize every call, and load the certificates of the service.

    right      agent   operator   viewer
    join         x                          open the stream of an agent
    read         x        x         x       list, get, watch
    control               x                 drain, resume, resize, restart, abort, checkpoint, profile
    values       x        x                 values and barriers of scripts

Without a key file there are no tokens: every client that can connect has all rights. Run the service without a key file
only on loopback, with client certificates (`--client-ca`), or with `--insecure`.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import grpc

from rendezvous.access.certificates import file_problem
from rendezvous.access.refusals import Reason
from rendezvous.access.tokens import BadToken, Grant, KeyFileUnusable, NoKeys, Role, read_keys, verify

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rendezvous.access.secret import Secret

_log = logging.getLogger("rendezvous")
_BEARER = "bearer "
_RELOAD_S = 1.0


class Right(StrEnum):
    JOIN = "join jobs"
    READ = "read jobs"
    CONTROL = "control jobs"
    VALUES = "use the values of jobs"


RIGHTS = {
    Role.AGENT: (Right.JOIN, Right.READ, Right.VALUES),
    Role.OPERATOR: (Right.READ, Right.CONTROL, Right.VALUES),
    Role.VIEWER: (Right.READ,),
}


class Denied(Exception):
    def __init__(self, code: grpc.StatusCode, words: str, reason: Reason) -> None:
        super().__init__(words)
        self.code, self.words, self.reason = code, words, reason


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of the caller. `grant` is None if the service does not use tokens."""

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
        if self.may(right):
            words = f"the token is for job {self.grant.job!r}, not for job {job_id!r}: create a token for this job"
            raise Denied(grpc.StatusCode.PERMISSION_DENIED, words, Reason.OTHER_JOB)
        roles = " or ".join(role.value for role, rights in RIGHTS.items() if right in rights)
        words = f"a token with role {self.grant.role} does not permit to {right.value}: use a token with role {roles}"
        raise Denied(grpc.StatusCode.PERMISSION_DENIED, words, Reason.ROLE)


class Gate:
    """Checks tokens against `key_file`, which is read again when it changes. If it is empty, tokens are not used."""

    def __init__(self, key_file: str) -> None:
        self._key_file = key_file
        self._keys = read_keys(key_file) if key_file else ()
        self._stamp = _stamp(key_file)
        self._looked_at = time.monotonic()

    def identify(self, context: Any) -> Identity:
        """The identity of the caller. Raises `Denied` (UNAUTHENTICATED)."""
        if not self._key_file:
            return Identity(peer_name(context))
        return self.holder_of(_token(context.invocation_metadata() or ()))

    @property
    def uses_tokens(self) -> bool:
        return bool(self._key_file)

    def holder_of(self, token: str) -> Identity:
        """The identity that a token gives. Raises `Denied` (UNAUTHENTICATED)."""
        self._reload()
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
            _log.error("all tokens are rejected: %s", error)
        except KeyFileUnusable as error:
            _log.error(
                "cannot reload the key file, so the keys that were loaded before remain valid: %s", error
            )


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
    peer = str(context.peer())
    return "a user of this machine" if peer.startswith("unix:") else peer.rpartition(":")[0]


def _stamp(*paths: str) -> tuple[tuple[int, int, int], ...]:
    """A value that changes when one of the files is written or replaced; empty if one of them cannot be read."""
    try:
        found = [os.stat(path) for path in paths if path]
    except OSError:
        return ()
    return tuple((s.st_mtime_ns, s.st_ino, s.st_size) for s in found)


# --- certificates --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Certificates:
    """The paths of the service's certificate files. With `client_ca`, clients need a certificate of this CA."""

    certificate: str
    key: str
    client_ca: str = ""


def server_credentials(files: Certificates) -> grpc.ServerCredentials:
    """Credentials that read the files again for new connections. Open connections are not affected.

    While the files are being replaced, key and certificate may not match. Then the previous pair stays in use, and
    the next connection checks again. At the start there is no previous pair: raises `OSError` with a message.
    """
    if words := file_problem(files.certificate, files.key, files.client_ca):
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
        return not file_problem(files.certificate, files.key, files.client_ca)
    except OSError:
        return False


def _configuration(files: Certificates) -> grpc.ServerCertificateConfiguration:
    ca = _read(files.client_ca) if files.client_ca else None
    return grpc.ssl_server_certificate_configuration([(_read(files.key), _read(files.certificate))], ca)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
