"""One etcd member: its channel, opened when needed, and reopened when the TLS files on disk have changed.

`Member` uses `grpc.aio`. All of its channels in a process share one queue, which any event loop of the process may
empty for all others. So a second loop would be woken by every message of the service, and would do its work.
`MemberOfThread` is for a loop in another thread: it uses gRPC's other client, which has a queue for each channel.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc
import grpc.aio

from rendezvous.pb import etcd_pb2 as pb
from rendezvous.store.protocol import StoreError
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from google.protobuf.message import Message

    Metadata = tuple[tuple[str, str], ...]

Q = TypeVar("Q", bound="Message")
A = TypeVar("A", bound="Message")

_log = logging.getLogger(__name__)
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
