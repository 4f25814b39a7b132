"""etcd's requests as short expressions, and where the keys lie.

    PREFIX/jobs/JOB             the packed snapshot, behind the token of the write that put it there
    PREFIX/owners/JOB           address of the replica that owns the job; goes with that replica's lease
    PREFIX/values/JOB/KEY       what scripts keep, likewise behind a token

Job ids and keys are percent-encoded, so none reaches outside its place. There is nothing secret in any of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from rendezvous.pb import etcd_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable


class Keys:
    """`prefix` keeps several services apart in one etcd."""

    def __init__(self, prefix: str) -> None:
        self._root = f"/{prefix.strip('/')}"
        self.all_jobs = f"{self._root}/jobs/".encode()
        self.all_owners = f"{self._root}/owners/".encode()

    def job(self, job_id: str) -> bytes:
        return self.all_jobs + _quoted(job_id)

    def owner(self, job_id: str) -> bytes:
        return self.all_owners + _quoted(job_id)

    def all_values(self, job_id: str) -> bytes:
        return f"{self._root}/values/".encode() + _quoted(job_id) + b"/"

    def value(self, job_id: str, key: str) -> bytes:
        return self.all_values(job_id) + _quoted(key)


def name_in(key: bytes, prefix: bytes) -> str:
    """The job id, or the script's key, that `key` stands for below `prefix`."""
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
    """Last written at `revision`; 0: not there."""
    return pb.Compare(target=pb.Compare.MOD, result=pb.Compare.EQUAL, key=key, mod_revision=revision)


def created_at(key: bytes, revision: int) -> pb.Compare:
    """There without a break since `revision`; 0: not there."""
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
