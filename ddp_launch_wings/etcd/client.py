"""Calls to an etcd cluster that are retried until they succeed.

The client uses one member at a time. If it does not answer, the client asks all members at once, repeatedly, and then
continues with the first that answers. A member may have stopped, hang, or wait for a leader that has stopped. The only
sign of this is a missing answer. Each attempt has a short timeout, which grows while no member answers. So requests to
a slow cluster succeed in the end. A request may be executed more than once, or its answer may be lost. So all requests
are idempotent, and writes contain an id by which the writer recognises them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote, unquote

import grpc
import grpc.aio

from rendezvous.pb import etcd_pb2 as pb
from rendezvous.store.protocol import StoreError
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from google.protobuf.message import Message
Q = TypeVar("Q", bound="Message")
A = TypeVar("A", bound="Message")
_log = logging.getLogger(__name__)


# --- etcd wire --------------------------------------------------------------------------------------
#
# One etcd member: its channel, opened when needed, and reopened when the TLS files on disk have changed.
#
# `Member` uses `grpc.aio`. All of its channels in a process share one queue, which any event loop of the process may
# empty for all others. So a second loop would be woken by every message of the service, and would do its work.
# `MemberOfThread` is for a loop in another thread: it uses gRPC's other client, which has a queue for each channel.

Metadata = tuple[tuple[str, str], ...]


_CHECK_FILES_EVERY_S = 5.0
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.use_local_subchannel_pool", 1),  # a new channel must not find the old connection
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),  # etcd closes connections with more than one ping per 5 s
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
)


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, A]):
    path: str
    answer: type[A]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


RANGE: Method[pb.RangeRequest, pb.RangeResponse] = Method("/etcdserverpb.KV/Range", pb.RangeResponse)
TXN: Method[pb.TxnRequest, pb.TxnResponse] = Method("/etcdserverpb.KV/Txn", pb.TxnResponse)
COMPACT: Method[pb.CompactionRequest, pb.CompactionResponse] = Method(
    "/etcdserverpb.KV/Compact", pb.CompactionResponse
)
GRANT: Method[pb.LeaseGrantRequest, pb.LeaseGrantResponse] = Method(
    "/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantResponse
)
REVOKE: Method[pb.LeaseRevokeRequest, pb.LeaseRevokeResponse] = Method(
    "/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeResponse
)
# A stream for many requests. A call with one request is such a stream, too: it has one answer, and then it ends.
KEEP_ALIVE: Method[pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse] = Method(
    "/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse
)
AUTHENTICATE: Method[pb.AuthenticateRequest, pb.AuthenticateResponse] = Method(
    "/etcdserverpb.Auth/Authenticate", pb.AuthenticateResponse
)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """If `ca` is empty, the CAs of the system are used. `cert` and `key` are set together, for mutual TLS."""

    ca: str = ""
    cert: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class Access:
    """How to connect to the cluster. `password` is called for each login, so the password may change."""

    endpoints: tuple[str, ...]
    user: str = ""
    password: Callable[[], str] = str
    tls: TlsFiles | None = None


class Member:
    def __init__(self, endpoint: str, tls: TlsFiles | None) -> None:
        self.endpoint = endpoint
        self._tls = tls
        self._channel: Any = None
        self._calls: dict[str, Any] = {}  # of this channel
        self._stamp: tuple[object, ...] = ()
        self._check_at = 0.0

    async def ask(self, method: Method[Q, A], request: Q, metadata: Metadata, timeout_s: float) -> A:
        answer: A = await (await self._call(method, request))(request, metadata=metadata, timeout=timeout_s)
        return answer

    async def _call(self, method: Method[Q, A], request: Q) -> Any:
        channel = await self._open()
        if method.path not in self._calls:
            self._calls[method.path] = channel.unary_unary(
                method.path,
                request_serializer=type(request).SerializeToString,
                response_deserializer=method.answer.FromString,
            )
        return self._calls[method.path]

    async def stream(
        self, path: str, request: type[Q], answer: type[A], metadata: Metadata
    ) -> grpc.aio.StreamStreamCall[Q, A]:
        call: Any = (await self._open()).stream_stream(
            path, request_serializer=request.SerializeToString, response_deserializer=answer.FromString
        )
        opened: grpc.aio.StreamStreamCall[Q, A] = call(metadata=metadata)
        return opened

    async def close(self) -> None:
        channel, self._channel, self._calls = self._channel, None, {}
        if channel is not None:
            await self._hang_up(channel)

    async def _open(self) -> Any:
        if self._tls is not None:
            await self._renew_if_files_changed(self._tls)
        if self._channel is None:
            self._channel = self._dial()
        return self._channel

    def _dial(self) -> Any:
        if self._tls is None:
            return grpc.aio.insecure_channel(self.endpoint, options=_OPTIONS)
        return grpc.aio.secure_channel(self.endpoint, _credentials(self._tls), options=_OPTIONS)

    async def _hang_up(self, channel: Any) -> None:
        await channel.close()

    async def _renew_if_files_changed(self, tls: TlsFiles) -> None:
        """If the files do not match yet, they are checked again later. The old connection stays in use until then."""
        if time.monotonic() < self._check_at:
            return
        self._check_at = time.monotonic() + _CHECK_FILES_EVERY_S
        try:
            stamp = _stamp(tls)
            renewed = self._dial() if self._channel is not None and stamp != self._stamp else None
        except (OSError, StoreError, ValueError) as error:
            _log.warning(
                "cannot use the new TLS files of --store; the old connection stays in use, trying again: %s",
                error,
            )
            return
        self._stamp = stamp
        if renewed is not None and self._channel is not None:
            old, self._channel, self._calls = self._channel, renewed, {}
            await self._hang_up(old)


class MemberOfThread(Member):
    """For the event loop of another thread. It raises the same errors as `Member`."""

    async def ask(self, method: Method[Q, A], request: Q, metadata: Metadata, timeout_s: float) -> A:
        calling = (await self._call(method, request)).future(request, metadata=metadata, timeout=timeout_s)
        try:
            await _end_of(calling)
        finally:
            calling.cancel()  # without effect on a call that has ended
        if calling.code() is not grpc.StatusCode.OK:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(calling.code(), nothing, nothing, calling.details())
        answer = calling.result()
        if not isinstance(answer, method.answer):
            raise unavailable("etcd ended the call without an answer; the call is retried")
        return answer

    def _dial(self) -> Any:
        if self._tls is None:
            return grpc.insecure_channel(self.endpoint, options=_OPTIONS)
        return grpc.secure_channel(self.endpoint, _credentials(self._tls), options=_OPTIONS)

    async def _hang_up(self, channel: Any) -> None:
        channel.close()


async def _end_of(calling: Any) -> None:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def tell(_: object) -> None:
        with suppress(RuntimeError):  # the loop has ended before the call
            loop.call_soon_threadsafe(finish, ended)

    calling.add_done_callback(tell)
    await ended


def finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@contextmanager
def one_error_if_reopened() -> Iterator[None]:
    """Turn the errors of calls on a channel that was closed to reopen it into one error.

    Such a call ends with various errors, most often CancelledError although the task was not cancelled.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise unavailable("the connection was reopened; the call is retried") from None
    except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
        raise unavailable(str(error)) from error


def unavailable(why: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, why)


def _credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    ca, cert, key = (_content(path) if path else None for path in (tls.ca, tls.cert, tls.key))
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise StoreError(
            f"cannot read {path}: {error.strerror}. Check cacert, cert and key in --store"
        ) from error


def _stamp(tls: TlsFiles) -> tuple[object, ...]:
    """A value that changes when one of the files is written or replaced."""
    found = [os.stat(path) for path in (tls.ca, tls.cert, tls.key) if path]
    return tuple((at.st_ino, at.st_mtime_ns, at.st_size) for at in found)


# --- etcd client ------------------------------------------------------------------------------------

_ATTEMPT_S = 0.6  # a request that was forwarded to a dead leader is never answered
_ATTEMPTS_OF_A_LENGTH = 4
_LOCAL_ANSWER_S = 0.5
_LONGEST_ATTEMPT_S = 6.0  # a little more than etcd itself waits for its own quorum
_SHORTEST_PAUSE_S = 0.02
_NO_SPACE = "database space exceeded"
_NO_SPACE_LOGGED_EVERY_S = 60.0
_LONGEST_PAUSE_S = 0.3


class Unreachable(Exception):
    """No member answered within the caller's timeout."""


class NotFound(StoreError):
    """The lease that the request refers to does not exist."""


class _Reaction(Enum):
    AGAIN = auto()  # another member, or later
    SIGN_IN = auto()  # etcd does not know our access token
    NOT_FOUND = auto()
    REFUSED = auto()


class EtcdClient:
    """`kind`: how to connect to a member; `MemberOfThread` in another thread than that of the service."""

    def __init__(self, access: Access, kind: type[Member] = Member) -> None:
        self.access = access
        self.members = [kind(endpoint, access.tls) for endpoint in access.endpoints]
        self._at = random.randrange(len(self.members))
        self._token: str | None = None if access.user else ""
        self._signing_in = asyncio.Lock()
        self._not_answering = False
        self._no_space_logged_at = -_NO_SPACE_LOGGED_EVERY_S
        self._closed = False

    async def call(
        self,
        method: Method[Q, A],
        request: Q,
        *,
        attempt_s: float = _ATTEMPT_S,
        give_up_at: float | None = None,
    ) -> A:
        """Call a method. Raises `Unreachable` at `give_up_at` (monotonic); with None it keeps trying."""
        failures = 0
        while True:
            longest_s = min(attempt_s * 2 ** (failures // _ATTEMPTS_OF_A_LENGTH), _LONGEST_ATTEMPT_S)
            limit_s = _within(longest_s, give_up_at)
            asked = list(self.members) if failures else [self.member()]
            answer = await self._first_answer(asked, method, request, limit_s)
            if answer is not None:
                return answer
            failures += 1
            await _pause(failures - 2, give_up_at)

    async def _first_answer(
        self, asked: list[Member], method: Method[Q, A], request: Q, limit_s: float
    ) -> A | None:
        """The first answer; None if no member answered."""
        if len(asked) == 1:
            return await self._ask(asked[0], method, request, limit_s)
        attempts = [asyncio.ensure_future(self._ask(member, method, request, limit_s)) for member in asked]
        try:
            for attempt in asyncio.as_completed(attempts):
                answer = await attempt
                if answer is not None:
                    return answer
            return None
        finally:
            for task in attempts:
                task.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)

    async def _ask(self, member: Member, method: Method[Q, A], request: Q, limit_s: float) -> A | None:
        used: Metadata = ()
        try:
            with one_error_if_reopened():
                used = await self.metadata(limit_s)
                answer = await member.ask(method, request, used, limit_s)
        except grpc.aio.AioRpcError as error:
            self._react(member, method.name, error, used)
            return None
        self._at = self.members.index(member)
        if self._not_answering:
            self._not_answering = False
            _log.info("etcd at %s answers again", member.endpoint)
        return answer

    async def most_members_answer(self, patience: float = 1.0) -> bool:
        """Whether a majority of the members answers, with or without a leader. `patience` times the usual timeout.

        If so, no other majority exists that could serve another replica.
        """
        limit_s = patience * _LOCAL_ANSWER_S
        answers = await asyncio.gather(*(self._answers(member, limit_s) for member in self.members))
        return 2 * sum(answers) > len(self.members)

    async def _answers(self, member: Member, limit_s: float) -> bool:
        request = pb.RangeRequest(key=b"\0", serializable=True, count_only=True)
        try:
            with one_error_if_reopened():
                used = (("token", self._token),) if self._token else ()
                await member.ask(RANGE, request, used, limit_s)
        except grpc.aio.AioRpcError as error:
            return _reaction(error) is not _Reaction.AGAIN
        return True

    async def metadata(self, limit_s: float = _ATTEMPT_S) -> Metadata:
        if self._token is None:
            await self._sign_in(limit_s)
        return (("token", self._token),) if self._token else ()

    def member(self) -> Member:
        """The member in use."""
        if self._closed:
            raise StoreError("internal error: the store was used after it was closed")
        return self.members[self._at]

    def switch_from(self, member: Member) -> None:
        """Use the next member after a failure of this one, unless the client has already switched."""
        if self.members[self._at] is member:
            self._at = (self._at + 1) % len(self.members)

    def sign_in_again(self, used: Metadata) -> None:
        """Drop the token, unless it was renewed since `used`."""
        if self.access.user and used == (("token", self._token),):
            self._token = None

    async def close(self) -> None:
        self._closed = True
        for member in self.members:
            await member.close()

    def _react(self, member: Member, name: str, error: grpc.aio.AioRpcError, used: Metadata) -> None:
        match _reaction(error):
            case _Reaction.AGAIN if _NO_SPACE in (error.details() or ""):
                self._note_no_space(member)
            case _Reaction.AGAIN:
                if not self._not_answering:
                    _log.warning(
                        "etcd at %s does not answer: %s; retrying with all members",
                        member.endpoint,
                        words(error),
                    )
                self._not_answering = True
                self.switch_from(member)
            case _Reaction.SIGN_IN:
                if not self.access.user:
                    raise StoreError(
                        f"etcd requires a user and a password: use etcd://USER@HOST ({words(error)})"
                    ) from error
                self.sign_in_again(used)
            case _Reaction.NOT_FOUND:
                raise NotFound(words(error)) from error
            case _Reaction.REFUSED:
                raise StoreError(
                    f"etcd at {member.endpoint} refused {name}: {words(error)}. Check the role of the user in etcd"
                ) from error

    def _note_no_space(self, member: Member) -> None:
        """It answers, and serves reads. Every member refuses writes until an administrator has ended the alarm."""
        now = time.monotonic()
        if now - self._no_space_logged_at < _NO_SPACE_LOGGED_EVERY_S:
            return
        self._no_space_logged_at = now
        _log.error(
            "etcd at %s has no space left (--quota-backend-bytes) and refuses all writes, so no job can start, restart "
            "or end. Compact and defragment etcd, then run: etcdctl alarm disarm. The writes are retried",
            member.endpoint,
        )

    async def _sign_in(self, limit_s: float) -> None:
        async with self._signing_in:
            if self._token is not None:
                return
            request = pb.AuthenticateRequest(name=self.access.user, password=self.access.password())
            try:
                answer = await self.member().ask(AUTHENTICATE, request, (), limit_s)
            except grpc.aio.AioRpcError as error:
                if "authentication is not enabled" not in (error.details() or ""):
                    raise
                _log.warning(
                    "etcd does not use authentication, so user and password have no effect: remove USER@ from --store"
                )
                self._token = ""
            else:
                self._token = answer.token


_STATUS = grpc.StatusCode
_REFUSALS = (
    _STATUS.INVALID_ARGUMENT,
    _STATUS.PERMISSION_DENIED,
    _STATUS.UNIMPLEMENTED,
    _STATUS.OUT_OF_RANGE,
    _STATUS.FAILED_PRECONDITION,
)


def _reaction(error: grpc.aio.AioRpcError) -> _Reaction:
    code, details = error.code(), error.details() or ""
    is_signed_out = "user name is empty" in details or "auth store is old" in details
    if code is _STATUS.UNAUTHENTICATED or (code is _STATUS.INVALID_ARGUMENT and is_signed_out):
        return _Reaction.SIGN_IN
    if code is _STATUS.NOT_FOUND:
        return _Reaction.NOT_FOUND
    return _Reaction.REFUSED if code in _REFUSALS else _Reaction.AGAIN


def words(error: grpc.aio.AioRpcError) -> str:
    return f"{error.details() or 'etcd gave no reason'} ({error.code().name})"


def _within(limit_s: float, give_up_at: float | None) -> float:
    if give_up_at is None:
        return limit_s
    left_s = give_up_at - time.monotonic()
    if left_s <= 0.0:
        raise Unreachable("no member of etcd answered within the timeout")
    return min(limit_s, left_s)


async def _pause(rounds: int, give_up_at: float | None) -> None:
    """Wait before a retry. There is no wait until every member was asked once, then growing waits with jitter."""
    if rounds < 0:
        return
    longest_s = min(_SHORTEST_PAUSE_S * 2 ** min(rounds, 10), _LONGEST_PAUSE_S)
    await asyncio.sleep(_within(random.uniform(0.5, 1.0) * longest_s, give_up_at))


# --- helpers that build etcd requests, and the layout of the keys -----------------------------------
#
#     PREFIX/jobs/JOB             the write id, followed by the packed state
#     PREFIX/bases/JOB            the snapshot that the packed state of a large job refers to
#     PREFIX/owners/JOB           address of the replica that owns the job; deleted when that replica's lease ends
#     PREFIX/values/JOB/KEY       the write id, followed by a value of a script
#     PREFIX/marks/JOB/WRITER     the write id of the last write of a value by this writer
#
# Job ids and keys are percent-encoded, so a name cannot refer to another key. Keys and values contain no secrets.


_PAGE = 1000  # keys, or addresses of owners: no page is near a limit on messages


class Keys:
    """`prefix` separates services that share an etcd cluster."""

    def __init__(self, prefix: str) -> None:
        self._root = f"/{prefix.strip('/')}"
        self.root = f"{self._root}/".encode()
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

    def all_marks(self, job_id: str) -> bytes:
        return f"{self._root}/marks/".encode() + _quoted(job_id) + b"/"


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


async def pages_of(
    client: EtcdClient, prefix: bytes, *, keys_only: bool
) -> tuple[int, tuple[pb.KeyValue, ...]]:
    """All below `prefix`, and the revision of the first page. Later pages may be newer: no revision must be kept."""
    start, revision, found = prefix, 0, list[pb.KeyValue]()
    while True:
        page = pb.RangeRequest(key=start, range_end=end_of(prefix), limit=_PAGE, keys_only=keys_only)
        answer = await client.call(RANGE, page)
        revision = revision or answer.header.revision
        found += answer.kvs
        if not answer.more:
            return revision, tuple(found)
        start = answer.kvs[-1].key + b"\0"


def version_is(key: bytes, revision: int) -> pb.Compare:
    """Compare: the key was last modified at `revision`; 0: the key does not exist."""
    return pb.Compare(target=pb.Compare.MOD, result=pb.Compare.EQUAL, key=key, mod_revision=revision)


def created_at(key: bytes, revision: int) -> pb.Compare:
    """Compare: the key was created at `revision` and exists since then; 0: the key does not exist."""
    return pb.Compare(target=pb.Compare.CREATE, result=pb.Compare.EQUAL, key=key, create_revision=revision)


def exists(key: bytes) -> pb.Compare:
    return pb.Compare(target=pb.Compare.CREATE, result=pb.Compare.GREATER, key=key, create_revision=0)


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
