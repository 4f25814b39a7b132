"""The values of scripts in etcd. Any replica can serve them: the owner of the job is not checked.

The limit on the number of keys is checked before a key is added, not in the same transaction. So concurrent writers may
exceed it slightly.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from rendezvous.pb import etcd_pb2 as pb
from rendezvous.store.bounds import check_count, check_key, check_value
from rendezvous.store.etcd_follow import Changes, Follower, Snapshot
from rendezvous.store.etcd_requests import (
    created_at,
    deleting,
    end_of,
    name_in,
    one,
    putting,
    reading,
    version_is,
    when,
)
from rendezvous.store.etcd_wire import RANGE, TXN
from rendezvous.store.notices import Notices
from rendezvous.store.protocol import Conflict, Value

if TYPE_CHECKING:
    from rendezvous.store.etcd_client import EtcdClient
    from rendezvous.store.etcd_requests import Keys

_WRITE_ID_BYTES = 8


class EtcdValues:
    """All waiters of a job share one watch on all its values. Without waiters there is no watch."""

    def __init__(self, client: EtcdClient, keys: Keys, job_id: str) -> None:
        self._client, self._keys, self._job_id = client, keys, job_id
        self._all = keys.all_values(job_id)
        self._notices = Notices()
        self._waiters = 0
        self._following: asyncio.Task[None] | None = None

    async def get(self, key: str) -> Value | None:
        found = (await self._client.call(RANGE, one(self._key(key)))).kvs
        return Value(found[0].value[_WRITE_ID_BYTES:], found[0].mod_revision) if found else None

    async def put(self, key: str, data: bytes) -> int:
        """An existing key needs one transaction. For a new key, the keys are counted first."""
        value = _with_write_id(key, data)
        put = putting(self._key(key), value)
        answer = await self._client.call(
            TXN, when([created_at(self._key(key), 0)], [self._counting()], [put])
        )
        if answer.succeeded:
            check_count(answer.responses[0].response_range.count)
            answer = await self._client.call(TXN, when([], [put]))
        return answer.header.revision

    async def compare_and_put(self, key: str, data: bytes, expected_version: int) -> int:
        value = _with_write_id(key, data)
        at = self._key(key)
        if expected_version == 0:
            count = await self._client.call(TXN, when([], [self._counting()]))
            check_count(count.responses[0].response_range.count)
        request = when([version_is(at, expected_version)], [putting(at, value)], [reading(one(at))])
        answer = await self._client.call(TXN, request)
        if answer.succeeded:
            return answer.header.revision
        held = answer.responses[0].response_range.kvs
        if held and held[0].value[:_WRITE_ID_BYTES] == value[:_WRITE_ID_BYTES]:
            return held[0].mod_revision
        raise Conflict

    async def delete(self, key: str) -> bool:
        answer = await self._client.call(TXN, when([], [deleting(self._key(key))]))
        return answer.responses[0].response_delete_range.deleted > 0

    async def wait(self, key: str, after_version: int = 0) -> Value:
        async def read() -> Value | None:
            self._follow()
            return await self.get(key)

        self._waiters += 1
        try:
            return await self._notices.wait(key, after_version, read)
        finally:
            self._waiters -= 1
            if not self._waiters:
                await self.close()

    async def close(self) -> None:
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            await asyncio.wait([following])

    def _key(self, key: str) -> bytes:
        return self._keys.value(self._job_id, key)

    def _counting(self) -> pb.RequestOp:
        return reading(pb.RangeRequest(key=self._all, range_end=end_of(self._all), count_only=True))

    def _follow(self) -> None:
        if self._following is None or self._following.done():
            follower = Follower(self._client, self._all, self._on_event)
            self._following = asyncio.create_task(follower.run(), name=f"etcd values of {self._job_id}")
            self._following.add_done_callback(self._broken)

    def _broken(self, following: asyncio.Task[None]) -> None:
        """Wake all waiters: their next read raises the error."""
        if not following.cancelled() and following.exception() is not None:
            self._notices.announce_all()

    def _on_event(self, news: Snapshot | Changes) -> None:
        if isinstance(news, Snapshot):
            self._notices.announce_all()
            return
        for event in news.events:
            self._notices.announce(name_in(event.kv.key, self._all))


def _with_write_id(key: str, data: bytes) -> bytes:
    check_key(key)
    check_value(data)
    return os.urandom(_WRITE_ID_BYTES) + data
