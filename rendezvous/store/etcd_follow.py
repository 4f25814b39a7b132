"""Follow all keys below a prefix, and every change of them.

It first delivers all keys (`Snapshot`), read at one revision. Then it delivers `Changes`, starting with the next
revision. After a broken stream it continues where it stopped, at any member that answers. If etcd has compacted the
revisions in between, it delivers another `Snapshot`, so the caller need not handle that case.

A watch delivers nothing if nothing changes, but also if its member hangs or is separated from the others. So the
follower sends a progress request if no event arrives, and switches to another member if it is not answered. With
`hasleader`, a member that has no leader ends the stream.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from rendezvous.pb import etcd_pb2 as pb
from rendezvous.store.etcd_requests import end_of, everything_in
from rendezvous.store.etcd_wire import RANGE, one_error_if_reopened
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.store.etcd_client import EtcdClient
    from rendezvous.store.etcd_wire import Member, Metadata

    Stream = grpc.aio.StreamStreamCall[pb.WatchRequest, pb.WatchResponse]

_PATH = "/etcdserverpb.Watch/Watch"
_IDLE_S = 0.5
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Snapshot:
    revision: int
    entries: tuple[pb.KeyValue, ...]


@dataclass(frozen=True, slots=True)
class Changes:
    events: tuple[pb.Event, ...]


class _Compacted(Exception):
    pass


class Follower:
    """Calls `on_event`, which must neither block nor raise, with a `Snapshot` and then with `Changes`."""

    def __init__(
        self, client: EtcdClient, prefix: bytes, on_event: Callable[[Snapshot | Changes], None]
    ) -> None:
        self._client, self._prefix, self._on_event = client, prefix, on_event
        self._next = 0  # the first revision not yet received

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            snapshot = await self._client.call(RANGE, everything_in(self._prefix))
            self._next = snapshot.header.revision + 1
            self._on_event(Snapshot(snapshot.header.revision, tuple(snapshot.kvs)))
            try:
                while True:
                    await self._one_member()
                    await asyncio.sleep(_PAUSE_S)
            except _Compacted:
                continue

    async def _one_member(self) -> None:
        member = self._client.member()
        used: Metadata = ()
        try:
            with one_error_if_reopened():
                used = await self._client.metadata()
                await self._one_stream(member, used)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                self._client.sign_in_again(used)
                return
        self._client.switch_from(member)

    async def _one_stream(self, member: Member, metadata: Metadata) -> None:
        """Follow one stream until the member ends it, or stops answering."""
        metadata = (*metadata, ("hasleader", "true"))
        stream = await member.stream(_PATH, pb.WatchRequest, pb.WatchResponse, metadata)
        try:
            async with asyncio.timeout(2 * _IDLE_S):
                await stream.write(_from(self._prefix, self._next))
            await self._listen(stream)
        except TimeoutError:
            return
        finally:
            stream.cancel()

    async def _listen(self, stream: Stream) -> None:
        """Receive messages. Reading is a separate task because cancelling a read ends the stream."""
        asked = False
        reading = asyncio.ensure_future(stream.read())
        try:
            while True:
                await asyncio.wait([reading], timeout=_IDLE_S)
                if reading.done():
                    if not self._handle(reading):
                        return
                    reading, asked = asyncio.ensure_future(stream.read()), False
                elif asked:
                    return
                else:
                    async with asyncio.timeout(_IDLE_S):
                        await stream.write(pb.WatchRequest(progress_request=pb.WatchProgressRequest()))
                    asked = True
        finally:
            reading.cancel()
            await asyncio.wait([reading])

    def _handle(self, reading: asyncio.Future[object]) -> bool:
        """Handle one message; False if the stream has ended."""
        if reading.cancelled():
            return False
        response = reading.result()
        if not isinstance(response, pb.WatchResponse):
            return False
        if response.compact_revision:
            raise _Compacted
        if response.canceled:
            return False
        if response.events:
            self._next = response.header.revision + 1
            self._on_event(Changes(tuple(response.events)))
        return True


def _from(prefix: bytes, revision: int) -> pb.WatchRequest:
    request = pb.WatchCreateRequest(key=prefix, range_end=end_of(prefix), start_revision=revision)
    return pb.WatchRequest(create_request=request)
