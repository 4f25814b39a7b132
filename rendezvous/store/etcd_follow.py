"""Follow all keys below a prefix, and every change of them.

It begins with all keys (`Picture`), read at one revision. Then come the `Changes` from the next revision on. After a
broken stream it continues where it stopped, at any member that answers. If etcd has compacted the revisions between,
it sends another `Picture`, so the caller need not handle that case.

A watch is silent when nothing changes, but also when its member hangs or is separated from the others. So the follower
asks a quiet member for its progress, and leaves it if there is no answer. `hasleader` makes a member without a quorum
end the stream itself.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from rendezvous.pb import etcd_pb2 as pb
from rendezvous.store.etcd_requests import end_of, everything_in
from rendezvous.store.etcd_wire import RANGE, one_error_if_broken_off

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.store.etcd_client import EtcdClient
    from rendezvous.store.etcd_wire import Member, Metadata

    Stream = grpc.aio.StreamStreamCall[pb.WatchRequest, pb.WatchResponse]

_PATH = "/etcdserverpb.Watch/Watch"
_QUIET_S = 0.5
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Picture:
    revision: int
    entries: tuple[pb.KeyValue, ...]


@dataclass(frozen=True, slots=True)
class Changes:
    events: tuple[pb.Event, ...]


class _Compacted(Exception):
    pass


class Follower:
    """Calls `heard`, which must neither block nor raise, with a `Picture` and then with `Changes`."""

    def __init__(self, client: EtcdClient, prefix: bytes, heard: Callable[[Picture | Changes], None]) -> None:
        self._client, self._prefix, self._heard = client, prefix, heard
        self._next = 0  # the first revision not yet received

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            picture = await self._client.call(RANGE, everything_in(self._prefix))
            self._next = picture.header.revision + 1
            self._heard(Picture(picture.header.revision, tuple(picture.kvs)))
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
            with one_error_if_broken_off():
                used = await self._client.metadata()
                await self._one_stream(member, used)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                self._client.sign_in_again(used)
                return
        self._client.turn_from(member)

    async def _one_stream(self, member: Member, metadata: Metadata) -> None:
        """Follow one stream until the member ends it, or stops answering."""
        metadata = (*metadata, ("hasleader", "true"))
        stream = await member.stream(_PATH, pb.WatchRequest, pb.WatchResponse, metadata)
        try:
            async with asyncio.timeout(2 * _QUIET_S):
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
                await asyncio.wait([reading], timeout=_QUIET_S)
                if reading.done():
                    if not self._took(reading):
                        return
                    reading, asked = asyncio.ensure_future(stream.read()), False
                elif asked:
                    return
                else:
                    async with asyncio.timeout(_QUIET_S):
                        await stream.write(pb.WatchRequest(progress_request=pb.WatchProgressRequest()))
                    asked = True
        finally:
            reading.cancel()
            await asyncio.wait([reading])

    def _took(self, reading: asyncio.Future[object]) -> bool:
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
            self._heard(Changes(tuple(response.events)))
        return True


def _from(prefix: bytes, revision: int) -> pb.WatchRequest:
    request = pb.WatchCreateRequest(key=prefix, range_end=end_of(prefix), start_revision=revision)
    return pb.WatchRequest(create_request=request)
