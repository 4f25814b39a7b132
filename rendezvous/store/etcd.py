"""The store in etcd, for any number of replicas.

A write is one transaction: it succeeds if the job still has the version that was read and this replica still owns it.
etcd checks both. A random write id is stored before every value. If the answer to a write is lost, the writer
recognises its own write by this id. The state of a large job has two keys (`packing`), written in one transaction.
`etcd_requests` has the layout of the keys.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from rendezvous.pb import etcd_pb2 as pb
from rendezvous.store.etcd_client import EtcdClient, Unreachable
from rendezvous.store.etcd_owner import EtcdOwnership
from rendezvous.store.etcd_requests import (
    Keys,
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
from rendezvous.store.etcd_values import EtcdValues
from rendezvous.store.etcd_wire import RANGE, TXN
from rendezvous.store.packing import Packer
from rendezvous.store.protocol import Conflict, OwnershipLost, StoreError
from rendezvous.values.state import JobState

if TYPE_CHECKING:
    from rendezvous.store.etcd_owner import Claim
    from rendezvous.store.etcd_wire import Access
    from rendezvous.store.protocol import JobStore, Values

WRITE_ID_BYTES = 8
_PAGE = 1000
_LARGEST = 1_500_000  # etcd's own limit on a request is 1.5 MiB, keys and overhead included
_FIRST_ANSWER_S = 10.0


async def open_etcd_store(access: Access, prefix: str, address: str) -> EtcdStore:
    """Open the store. `address` is where agents reach this replica; the other replicas redirect them there."""
    client = EtcdClient(access)
    keys = Keys(prefix)
    try:
        await client.call(RANGE, one(keys.all_jobs), give_up_at=time.monotonic() + _FIRST_ANSWER_S)
    except Unreachable:
        await client.close()
        raise StoreError(
            f"no answer from etcd at {', '.join(access.endpoints)}. Check that etcd runs, and the addresses and TLS "
            "files of --store"
        ) from None
    except BaseException:
        await client.close()
        raise
    return EtcdStore(client, keys, address)


class EtcdStore:
    def __init__(self, client: EtcdClient, keys: Keys, address: str) -> None:
        self._client, self._keys = client, keys
        self.ownership = EtcdOwnership(client, keys, address)
        self._values: dict[str, EtcdValues] = {}
        self._closed = False

    def job(self, job_id: str) -> JobStore:
        return EtcdJob(self._client, self._keys, job_id, self.ownership)

    def values(self, job_id: str) -> Values:
        if job_id not in self._values:
            self._values[job_id] = EtcdValues(self._client, self._keys, job_id)
        return self._values[job_id]

    async def jobs(self) -> list[str]:
        found: list[str] = []
        start, end = self._keys.all_jobs, end_of(self._keys.all_jobs)
        while True:
            page = pb.RangeRequest(key=start, range_end=end, limit=_PAGE, keys_only=True)
            answer = await self._client.call(RANGE, page)
            found += [name_in(kv.key, self._keys.all_jobs) for kv in answer.kvs]
            if not answer.more:
                return sorted(found)
            start = answer.kvs[-1].key + b"\0"

    async def delete(self, job_id: str) -> None:
        """Delete the job, if this replica owns it or it has no owner."""
        claim = self.ownership.claim_of(job_id)
        owner, job = self._keys.owner(job_id), self._keys.job(job_id)
        values = self._keys.all_values(job_id)
        removal = [
            deleting(job),
            deleting(self._keys.base(job_id)),
            deleting(values, end_of(values)),
            deleting(owner),
        ]
        no_other_owner = created_at(owner, claim.fence if claim is not None else 0)
        request = when([no_other_owner], removal, [reading(one(owner)), reading(one(job))])
        self.ownership.drop(job_id)
        self._values.pop(job_id, None)
        answer = await self._client.call(TXN, request)
        if not answer.succeeded and any(r.response_range.kvs for r in answer.responses):
            raise OwnershipLost(f"job {job_id!r} is owned by another replica")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for values in self._values.values():
            await values.close()
        await self.ownership.close()
        await self._client.close()


class EtcdJob:
    def __init__(self, client: EtcdClient, keys: Keys, job_id: str, ownership: EtcdOwnership) -> None:
        self._client, self._ownership, self._job_id = client, ownership, job_id
        self._key, self._base_key, self._owner_key = keys.job(job_id), keys.base(job_id), keys.owner(job_id)
        self._claim = ownership.claim_of(job_id)
        self._packer = Packer()

    async def load(self) -> tuple[JobState, int]:
        both = when([], [reading(one(self._key)), reading(one(self._base_key))])  # at one instant
        state, base = (r.response_range.kvs for r in (await self._client.call(TXN, both)).responses)
        if not state:
            return JobState(), 0
        value = state[0].value[WRITE_ID_BYTES:]
        unpacked = await self._packer.unpack(value, base[0].value if base else b"", self._job_id)
        return unpacked, state[0].mod_revision

    async def save(self, state: JobState, expected_version: int) -> int:
        claim = self._kept()
        packed = await self._packer.pack(state)
        value = os.urandom(WRITE_ID_BYTES) + packed.value
        size = len(value) + len(packed.base or b"")
        if size > _LARGEST:
            raise StoreError(
                f"the state of job {self._job_id!r} has {size:,} bytes, the limit of etcd is {_LARGEST:,}"
            )
        writes = [putting(self._key, value)]
        if packed.base is not None:
            writes.append(putting(self._base_key, packed.base) if packed.base else deleting(self._base_key))
        request = when(
            [created_at(self._owner_key, claim.fence), version_is(self._key, expected_version)],
            writes,
            [reading(one(self._owner_key)), reading(one(self._key))],
        )
        answer = await self._client.call(TXN, request)
        if answer.succeeded:
            self._packer.stored(packed)
            return await self._confirm(claim, answer.header.revision)
        owner, held = (r.response_range.kvs for r in answer.responses)
        if not owner or owner[0].create_revision != claim.fence:
            raise OwnershipLost(f"another replica owns job {self._job_id!r} now")
        if held and held[0].value[:WRITE_ID_BYTES] == value[:WRITE_ID_BYTES]:
            self._packer.stored(packed)
            return await self._confirm(claim, held[0].mod_revision)
        raise Conflict

    def _kept(self) -> Claim:
        claim = self._claim
        if claim is None or not self._ownership.is_held(claim):
            raise OwnershipLost(f"this replica does not own job {self._job_id!r}")
        return claim

    async def _confirm(self, claim: Claim, revision: int) -> int:
        """Wait until the ownership is certain. After that the agents may be informed."""
        await self._ownership.wait_until_certain(claim)
        return revision
