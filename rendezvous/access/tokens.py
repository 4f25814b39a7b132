"""Signed tokens: each grants a role for some jobs. The service does not store them.

    KEY-ID.PAYLOAD.SIGNATURE      payload: base64url of JSON {"id", "job", "role", "until"}

The signature is HMAC-SHA256 over `KEY-ID.PAYLOAD`. A key file has one `KEY-ID SECRET` per line. Tokens are signed with
the key in the last line, and verified with any key. To rotate keys, add one, wait until the old tokens have expired,
and remove the first. The functions are pure, except that they read the key file. The current time is passed as `now`.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import json
import os
import stat
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from math import isnan
from typing import TYPE_CHECKING

from rendezvous.access.refusals import Reason
from rendezvous.values.error_codes import Code, Coded

if TYPE_CHECKING:
    from typing import TextIO

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


def sign(grant: Grant, key: Key) -> str:
    fields = {"id": grant.id, "job": grant.job, "role": grant.role.value, "until": grant.until}
    payload = _text(json.dumps(fields, separators=(",", ":")).encode())
    signed = f"{key.id}.{payload}"
    return f"{signed}.{_signature(signed, key)}"


def verify(token: str, keys: tuple[Key, ...], now: float) -> Grant:
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
    if not hmac.compare_digest(_signature(f"{key_id}.{payload}", key), signature):
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
    """Decode the payload. It is signed by us but still checked: another version may have written it."""
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
