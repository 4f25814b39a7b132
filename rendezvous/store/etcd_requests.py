"""Helpers that build etcd requests, and the layout of the keys.

    PREFIX/jobs/JOB             the write id, followed by the packed state
    PREFIX/bases/JOB            the snapshot that the packed state of a large job refers to
    PREFIX/owners/JOB           address of the replica that owns the job; deleted when that replica's lease ends
    PREFIX/values/JOB/KEY       the write id, followed by a value of a script

Job ids and keys are percent-encoded, so a name cannot refer to another key. Keys and values contain no secrets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from rendezvous.pb import etcd_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable


class Keys:
    """`prefix` separates services that share an etcd cluster."""

    def __init__(self, prefix: str) -> None:
        self._root = f"/{prefix.strip('/')}"
        self.all_jobs = f"{self._root}/jobs/".encode()
        self.all_owners = f"{self._root}/owners/".encode()

    def job(self, job_id: str) -> bytes:
        return self.all_jobs + _quoted(job_id)

    def base(self, job_id: str) -> bytes:
        return f"{self._root}/bases/".encode() + _quoted(job_id)

    def owner(self, job_id: str) -> bytes:
        return self.all_owners + _quoted(job_id)

    def all_values(self, job_id: str) -> bytes:
        return f"{self._root}/values/".encode() + _quoted(job_id) + b"/"

    def value(self, job_id: str, key: str) -> bytes:
        return self.all_values(job_id) + _quoted(key)


def name_in(key: bytes, prefix: bytes) -> str:
    """The job id, or the key of a script, that `key` contains after `prefix`."""
    return unquote(key[len(prefix) :].decode())


def _quoted(name: str) -> bytes:
    return quote(name, safe="").encode()


def end_of(prefix: bytes) -> bytes:
    """The first key after all that start with `prefix`, which ends in a slash."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def one(key: bytes) -> pb.RangeRequest:
    return pb.RangeRequest(key=key)


def everything_in(prefix: bytes) -> pb.RangeRequest:
    return pb.RangeRequest(key=prefix, range_end=end_of(prefix))


def version_is(key: bytes, revision: int) -> pb.Compare:
    """Compare: the key was last modified at `revision`; 0: the key does not exist."""
    return pb.Compare(target=pb.Compare.MOD, result=pb.Compare.EQUAL, key=key, mod_revision=revision)


def created_at(key: bytes, revision: int) -> pb.Compare:
    """Compare: the key was created at `revision` and exists since then; 0: the key does not exist."""
    return pb.Compare(target=pb.Compare.CREATE, result=pb.Compare.EQUAL, key=key, create_revision=revision)


def putting(key: bytes, value: bytes, lease: int = 0) -> pb.RequestOp:
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))


def deleting(key: bytes, range_end: bytes = b"") -> pb.RequestOp:
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key, range_end=range_end))


def reading(request: pb.RangeRequest) -> pb.RequestOp:
    return pb.RequestOp(request_range=request)


def when(
    conditions: Iterable[pb.Compare], then: Iterable[pb.RequestOp], otherwise: Iterable[pb.RequestOp] = ()
) -> pb.TxnRequest:
    return pb.TxnRequest(compare=conditions, success=then, failure=otherwise)
