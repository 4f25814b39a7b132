"""Authenticate and authorize every call, and load the certificates of the service.

    right      agent   operator   viewer
    join         x                          open the stream of an agent
    read         x        x         x       list, get, watch
    control               x                 drain, resume, resize, restart, abort, checkpoint, profile, drill
    values       x        x                 values and barriers of scripts

Without a key file there are no tokens: every client that can connect has all rights. Run the service without a key file
only on loopback, with client certificates (`--client-ca`), or with `--insecure`.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import hmac
import json
import logging
import os
import stat
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rendezvous.access.secret import Secret, file_problem
from rendezvous.values.error_codes import Code, Coded

if TYPE_CHECKING:
    import grpc

    from rendezvous.metrics import Metrics

_log = logging.getLogger("rendezvous")


# --- count refused clients by reason, and log them at a limited rate --------------------------------
#
# The first refusal for each reason and peer is logged. Further ones are counted for a minute, and then logged as one
# line. An attacker can use any number of addresses, so at most 32 peers are logged separately in each minute. All
# others share one line per reason.

_QUIET_S = 60.0
_PEERS_LOGGED = 32
_OTHERS = "other clients"


class Reason(StrEnum):
    """The reasons for a refusal. Each is a value of the label `reason` of the metric `refused`."""

    NO_TOKEN = "no_token"
    BAD_TOKEN = "bad_token"
    UNKNOWN_KEY = "unknown_key"
    EXPIRED_TOKEN = "expired_token"
    ROLE = "role"
    OTHER_JOB = "other_job"
    REPLAYED_JOIN = "replayed_join"
    HTTP_PORT = "http_port"
    CROWD = "crowd"  # too many connections of clients that have not logged in
    STREAM_ABORTED = "stream_aborted"  # an open stream broke a rule or a limit


@dataclass(slots=True)
class _Logged:
    words: str
    more: int = 0


class Refusals:
    def __init__(self, metrics: Metrics, quiet_s: float = _QUIET_S) -> None:
        self._metrics, self._quiet_s = metrics, quiet_s
        self._logged: dict[tuple[Reason, str], _Logged] = {}
        for reason in Reason:
            metrics.count("refused", reason.value, 0)  # rate() needs a 0 before the first 1

    def note(self, reason: Reason, peer: str, words: str) -> None:
        """Count and log one refusal. Call it in the thread of the event loop."""
        self._metrics.count("refused", reason.value)
        key = (reason, peer)
        if key not in self._logged and sum(1 for _, who in self._logged if who != _OTHERS) >= _PEERS_LOGGED:
            key = (reason, _OTHERS)
        if (logged := self._logged.get(key)) is not None:
            logged.more += 1
            return
        self._logged[key] = _Logged(words)
        _log.warning("refused %s: %s", key[1], words, extra={"kind": reason.value})
        asyncio.get_running_loop().call_later(self._quiet_s, self._sum_up, key)

    def _sum_up(self, key: tuple[Reason, str]) -> None:
        logged = self._logged.pop(key)
        if logged.more:
            reason, peer = key
            words = "refused %s %d more times in the last %g s: %s"
            extra = {"kind": reason.value}
            _log.warning(words, peer, logged.more, self._quiet_s, logged.words, extra=extra)


# --- signed tokens: each grants a role for some jobs. The service does not store them ---------------
#
#     KEY-ID.PAYLOAD.SIGNATURE      payload: base64url of JSON {"id", "job", "role", "until"}
#
# The signature is HMAC-SHA256 over `KEY-ID.PAYLOAD`. A key file has one `KEY-ID SECRET` per line. Tokens are signed
# with the key in the last line, and verified with any key. To rotate keys, add one, wait until the old tokens have
# expired, and remove the first. The functions are pure, except that they read the key file. The current time is
# passed as `now`.

_SECRET_BYTES = 32
_TOKEN_CHARS = 4096
_PREFLIGHT = ".preflight"  # suffix of the job in which the nodes of another job run their pre-flight checks


class Role(StrEnum):
    AGENT = "agent"
    OPERATOR = "operator"
    VIEWER = "viewer"


class BadToken(ValueError):
    """The token is invalid. The message never contains the token."""

    def __init__(self, words: str, reason: Reason = Reason.BAD_TOKEN) -> None:
        super().__init__(words)
        self.reason = reason


class KeyFileUnusable(Coded, ValueError):
    """The key file cannot be used. The message is for the user who starts the service."""

    code = Code.KEY_FILE_UNUSABLE


class NoKeys(KeyFileUnusable):
    """The key file is readable but empty."""


@dataclass(frozen=True, slots=True)
class Grant:
    """`job` is a pattern: `*`, `team-a-*`, or one job's id."""

    id: str
    job: str
    role: Role
    until: float  # seconds since the epoch

    def covers(self, job_id: str) -> bool:
        """Whether the grant is valid for this job, or for the checks that run before such a job."""
        return fnmatchcase(job_id, self.job) or fnmatchcase(job_id.removesuffix(_PREFLIGHT), self.job)


@dataclass(frozen=True, slots=True)
class Key:
    id: str
    secret: bytes

    def __repr__(self) -> str:
        return f"Key({self.id!r})"


_SESSION = "session of the page: "  # before what is signed, so that a session is not a token of the API


def sign(grant: Grant, key: Key, purpose: str = "") -> str:
    fields = {"id": grant.id, "job": grant.job, "role": grant.role.value, "until": grant.until}
    payload = _text(json.dumps(fields, separators=(",", ":")).encode())
    signed = f"{key.id}.{payload}"
    return f"{signed}.{_signature(purpose + signed, key)}"


def verify(token: str, keys: tuple[Key, ...], now: float, purpose: str = "") -> Grant:
    parts = token.split(".") if len(token) <= _TOKEN_CHARS and token.isascii() else []
    if len(parts) != 3:
        raise BadToken("invalid token: expected KEY-ID.PAYLOAD.SIGNATURE; `ddp-rendezvous token` creates one")
    key_id, payload, signature = parts
    key = next((k for k in keys if k.id == key_id), None)
    if key is None:
        raise BadToken(
            "the token was signed with a key that this service does not have; create one with a current key",
            Reason.UNKNOWN_KEY,
        )
    if not hmac.compare_digest(_signature(f"{purpose}{key_id}.{payload}", key), signature):
        raise BadToken(
            "the token is damaged, or it was signed with another key of the same id; create a new token"
        )
    grant = _grant(payload)
    if now >= grant.until:
        raise BadToken(
            f"the token expired {now - grant.until:.0f} s ago; `ddp-rendezvous token` creates a new one",
            Reason.EXPIRED_TOKEN,
        )
    return grant


def granted_by(token: str) -> Grant:
    """What the token says that it permits. Only `verify` tells whether it is true. Raises `BadToken`."""
    parts = token.split(".")
    if len(parts) != 3:
        raise BadToken("invalid token: expected KEY-ID.PAYLOAD.SIGNATURE; `ddp-rendezvous token` creates one")
    return _grant(parts[1])


def _grant(payload: str) -> Grant:
    """Decode the payload. We have signed it, but check it: another version may have written it."""
    try:
        fields = json.loads(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        grant = Grant(str(fields["id"]), str(fields["job"]), Role(fields["role"]), float(fields["until"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise BadToken("the payload of the token cannot be read; create a new token") from error
    if isnan(grant.until):
        raise BadToken("the token has no valid expiry time; create a new token")
    return grant


def _signature(signed: str, key: Key) -> str:
    return _text(hmac.digest(key.secret, signed.encode(), hashlib.sha256))


def _text(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


# --- key files -----------------------------------------------------------------------------------------


def read_keys(path: str) -> tuple[Key, ...]:
    try:
        with open(path, encoding="ascii") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRWXO | stat.S_IWGRP):
                raise KeyFileUnusable(
                    f"other users can read {path}, or its group can write it. Run: chmod 640 {path}"
                )
            keys = _keys_in(file, path)
    except OSError as error:
        raise KeyFileUnusable(
            f"cannot read the key file {path}: {error}. Check --token-keys and the permissions of the file"
        ) from error
    if not keys:
        raise NoKeys(f"the key file {path} is empty; `ddp-rendezvous key {path}` adds a key")
    return keys


def _keys_in(file: TextIO, path: str) -> tuple[Key, ...]:
    try:
        lines = enumerate(file, start=1)
        rows = [(n, line.split()) for n, line in lines if line.strip() and not line.startswith("#")]
    except UnicodeDecodeError as error:
        raise KeyFileUnusable(
            f"cannot read the key file {path}: {error}. Check --token-keys and the permissions of the file"
        ) from error
    return tuple(_key(path, number, row) for number, row in rows)


def _key(path: str, number: int, row: list[str]) -> Key:
    try:
        key_id, secret = row
        key = Key(key_id, urlsafe_b64decode(secret + "=" * (-len(secret) % 4)))
    except (ValueError, binascii.Error) as error:
        raise KeyFileUnusable(
            f"line {number} of the key file {path} is invalid: expected KEY-ID SECRET. Correct or remove it"
        ) from error
    if len(key.secret) < 16 or "." in key.id:
        raise KeyFileUnusable(
            f"key {key.id} in {path} is shorter than 16 bytes, or has a dot in its id. Remove it; "
            f"`ddp-rendezvous key {path}` adds a valid key"
        )
    return key


def add_key(path: str) -> str:
    """Append a new key, and return its id. Creates the file if it is missing; rejects a file with other contents."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    key_id = os.urandom(4).hex()
    with os.fdopen(descriptor, "a", encoding="ascii") as file:
        if length := os.fstat(descriptor).st_size:
            with open(path, encoding="ascii") as present:
                _keys_in(present, path)
        if length and os.pread(descriptor, 1, length - 1) != b"\n":
            file.write("\n")  # an editor or a vault may have removed the last line break
        file.write(f"{key_id} {_text(os.urandom(_SECRET_BYTES))}\n")
    return key_id


def new_grant_id() -> str:
    return os.urandom(6).hex()


# --- auth -------------------------------------------------------------------------------------------

_BEARER = "bearer "
_RELOAD_S = 1.0
_PROBLEM_LOGGED_EVERY_S = 600.0


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


# These callers are known, but must not do what they asked for.
_OF_A_KNOWN_CALLER = (Reason.ROLE, Reason.OTHER_JOB, Reason.REPLAYED_JOIN)


class Denied(Exception):
    def __init__(self, words: str, reason: Reason) -> None:
        super().__init__(words)
        self.words, self.reason = words, reason

    @property
    def code(self) -> grpc.StatusCode:
        import grpc  # here, since `ddp-rendezvous --help` and completion read the roles of this module

        known = self.reason in _OF_A_KNOWN_CALLER
        return grpc.StatusCode.PERMISSION_DENIED if known else grpc.StatusCode.UNAUTHENTICATED


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
            raise Denied(words, Reason.OTHER_JOB)
        roles = " or ".join(role.value for role, rights in RIGHTS.items() if right in rights)
        words = f"a token with role {self.grant.role} does not permit to {right.value}: use a token with role {roles}"
        raise Denied(words, Reason.ROLE)


class Gate:
    """Checks tokens against `key_file`, which is read again when it changes. If it is empty, tokens are not used.

    If the file is deleted or cannot be used, the keys that were read last remain valid: a volume that fails must not
    end all access. Then `problem` says why, the log does too, every ten minutes, and no key can be revoked. A file
    without keys is not such a case: it rejects all tokens.

    `known` gets the context of each call with an identity.
    """

    def __init__(self, key_file: str, known: Callable[[Any], None] = lambda _context: None) -> None:
        self._key_file, self._known = key_file, known
        self._keys = read_keys(key_file) if key_file else ()
        self._stamp = _stamp(key_file)
        self._looked_at = time.monotonic()
        self._problem, self._logged_at = "", 0.0

    def identify(self, context: Any) -> Identity:
        """The identity of the caller. Raises `Denied` (UNAUTHENTICATED)."""
        if self._key_file:
            identity = self.holder_of(_token(context.invocation_metadata() or ()))
        else:
            identity = Identity(peer_name(context))
        self._known(context)
        return identity

    @property
    def uses_tokens(self) -> bool:
        return bool(self._key_file)

    @property
    def problem(self) -> str:
        """Why the key file cannot be used now; empty if it can."""
        if self._key_file:
            self._reload()
        return self._problem

    def holder_of(self, token: str) -> Identity:
        """The identity that a token gives. Raises `Denied` (UNAUTHENTICATED)."""
        return self._identity(token)

    def session_of(self, token: str) -> str:
        """A session of the page for the holder of this token. It ends with the token or its key. Raises `Denied`."""
        grant = self.holder_of(token).grant
        key_id = token.split(".")[0]
        key = next((key for key in self._keys if key.id == key_id), None)
        assert grant is not None
        assert key is not None, "internal error: a verified token has a key"
        return sign(grant, key, _SESSION)

    def holder_of_session(self, session: str) -> Identity:
        """Raises `Denied`."""
        return self._identity(session, _SESSION)

    def _identity(self, token: str, purpose: str = "") -> Identity:
        self._reload()
        if not token:
            raise Denied(
                "this service requires a token: set DDP_RENDEZVOUS_TOKEN or DDP_RENDEZVOUS_TOKEN_FILE",
                Reason.NO_TOKEN,
            )
        try:
            grant = verify(token, self._keys, time.time(), purpose)
        except BadToken as error:
            raise Denied(str(error), error.reason) from error
        return Identity(f"token {grant.id}", grant)

    def _reload(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < _RELOAD_S:
            return
        self._looked_at = now
        stamp = _stamp(self._key_file)
        if stamp and stamp == self._stamp and not self._problem:
            return
        self._stamp, before, self._problem = stamp, self._problem, ""
        try:
            self._keys = read_keys(self._key_file)
        except NoKeys as error:  # the last key was removed, so its tokens must not be accepted any more
            if self._keys:
                _log.error("all tokens are rejected: %s", error)
            self._keys = ()
        except KeyFileUnusable as error:
            self._problem = str(error)
            self._log_problem(before, now)
        else:
            if before:
                _log.info("the key file can be used again: its keys are valid, and no others")

    def _log_problem(self, before: str, now: float) -> None:
        if self._problem == before and now - self._logged_at < _PROBLEM_LOGGED_EVERY_S:
            return
        self._logged_at = now
        _log.error(
            "cannot reload the key file, so the keys that were loaded before remain valid, also those that you have "
            "removed: %s. To reject all tokens, put a file without keys in its place",
            self._problem,
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


def _stamp(*paths: str) -> tuple[tuple[int, int, int, int], ...]:
    """A value that changes when a file is written, replaced, or gets another mode; empty if one cannot be found."""
    try:
        found = [os.stat(path) for path in paths if path]
    except OSError:
        return ()
    return tuple((s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_size) for s in found)


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
    import grpc

    return grpc.dynamic_ssl_server_credentials(_configuration(files), fetch, need_client)  # type: ignore[arg-type]


def secret_credentials(secret: Secret) -> grpc.ServerCredentials:
    """Credentials from a job's secret: only clients that have the secret can connect."""
    import grpc

    pair = [(secret.key, secret.certificate)]
    return grpc.ssl_server_credentials(pair, secret.certificate, require_client_auth=True)


def _fits(files: Certificates) -> bool:
    try:
        return not file_problem(files.certificate, files.key, files.client_ca)
    except OSError:
        return False


def _configuration(files: Certificates) -> grpc.ServerCertificateConfiguration:
    import grpc

    ca = Path(files.client_ca).read_bytes() if files.client_ca else None
    return grpc.ssl_server_certificate_configuration(
        [(Path(files.key).read_bytes(), Path(files.certificate).read_bytes())], ca
    )
