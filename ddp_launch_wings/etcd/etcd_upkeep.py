"""Backup, restore, compaction and checks of a store in etcd (the door `ddp_launch.store_upkeep`).

A backup has the keys below our prefix only, at one revision. etcd's own snapshots have all of etcd.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import unquote

import grpc.aio

from ddp_launch_wings.etcd.client import (
    COMPACT,
    RANGE,
    TXN,
    EtcdClient,
    Keys,
    Member,
    Method,
    Unreachable,
    created_at,
    end_of,
    putting,
    when,
    words,
)
from ddp_launch_wings.etcd.store import WRITE_ID_BYTES, parse_etcd
from rendezvous.pb import etcd_pb2 as pb
from rendezvous.store.protocol import StoreContents, StoreError

STATUS: Method[pb.StatusRequest, pb.StatusResponse] = Method(
    "/etcdserverpb.Maintenance/Status", pb.StatusResponse
)
DEFRAGMENT: Method[pb.DefragmentRequest, pb.DefragmentResponse] = Method(
    "/etcdserverpb.Maintenance/Defragment", pb.DefragmentResponse
)
_ANSWER_S, _DEFRAGMENT_S = 10.0, 120.0
_PAGE = 200
_BATCH_KEYS, _BATCH_BYTES = 100, 500_000  # of a request: etcd takes 128 writes and 1.5 MiB


@asynccontextmanager
async def _opened(rest: str, environ: Mapping[str, str]) -> AsyncIterator[tuple[EtcdClient, Keys]]:
    access, prefix = parse_etcd(rest, environ)
    client = EtcdClient(access)
    try:
        yield client, Keys(prefix)
    except Unreachable:
        raise StoreError(
            f"no answer from etcd at {', '.join(access.endpoints)}. Check that etcd runs, and the addresses and TLS "
            "files of --store"
        ) from None
    finally:
        await client.close()


async def dump(rest: str, environ: Mapping[str, str]) -> StoreContents:
    async with _opened(rest, environ) as (client, keys):
        revision, found = await _all(client, keys.root)
    contents = StoreContents(revision)
    for kv in found:
        kind, _, name = kv.key[len(keys.root) :].decode().partition("/")
        job, _, key = (unquote(each) for each in name.partition("/"))
        if kind == "jobs":
            contents.jobs.append((job, kv.mod_revision, kv.value[WRITE_ID_BYTES:]))
        elif kind == "bases":
            contents.bases.append((job, kv.value))
        elif kind == "values":
            contents.values.append((job, key, kv.mod_revision, kv.value[WRITE_ID_BYTES:]))
    return contents


async def _all(client: EtcdClient, prefix: bytes) -> tuple[int, list[pb.KeyValue]]:
    """All below the prefix, at one revision."""
    start, revision, found = prefix, 0, list[pb.KeyValue]()
    while True:
        page = pb.RangeRequest(key=start, range_end=end_of(prefix), limit=_PAGE, revision=revision)
        answer = await client.call(
            RANGE, page, attempt_s=_ANSWER_S, give_up_at=time.monotonic() + 2 * _ANSWER_S
        )
        revision = revision or answer.header.revision
        found += answer.kvs
        if not answer.more:
            return revision, found
        start = answer.kvs[-1].key + b"\0"


async def fill(rest: str, environ: Mapping[str, str], contents: StoreContents) -> None:
    async with _opened(rest, environ) as (client, keys):
        whole = pb.RangeRequest(key=keys.root, range_end=end_of(keys.root), count_only=True)
        there = await client.call(RANGE, whole, give_up_at=time.monotonic() + _ANSWER_S)
        if there.count:
            raise StoreError(
                f"the store already has {there.count} keys: nothing was written. Stop the services and use an empty "
                "prefix, or delete the keys below it"
            )
        writes = [(keys.base(job), state) for job, state in contents.bases]
        writes += [
            (keys.value(job, key), os.urandom(WRITE_ID_BYTES) + data) for job, key, _, data in contents.values
        ]
        writes += [(keys.job(job), os.urandom(WRITE_ID_BYTES) + state) for job, _, state in contents.jobs]
        while writes:
            batch, writes = _cut(writes)
            await _put(client, batch)


def _cut(writes: list[tuple[bytes, bytes]]) -> tuple[list[tuple[bytes, bytes]], list[tuple[bytes, bytes]]]:
    size = count = 0
    for count, (key, value) in enumerate(writes[:_BATCH_KEYS]):
        size += len(key) + len(value)
        if count and size > _BATCH_BYTES:
            return writes[:count], writes[count:]
    return writes[: count + 1], writes[count + 1 :]


async def _put(client: EtcdClient, batch: list[tuple[bytes, bytes]]) -> None:
    """Without overwriting: a service may have started meanwhile."""
    request = when(
        [created_at(key, 0) for key, _ in batch],
        [putting(*each) for each in batch],
        [pb.RequestOp(request_range=pb.RangeRequest(key=batch[0][0]))],
    )
    answer = await client.call(TXN, request, attempt_s=_ANSWER_S, give_up_at=time.monotonic() + 3 * _ANSWER_S)
    ours = answer.succeeded or [kv.value for kv in answer.responses[0].response_range.kvs] == [batch[0][1]]
    if not ours:
        raise StoreError(
            "a service has written to the store meanwhile, so a part is missing. Stop all services, delete the keys "
            "below the prefix, and restore again"
        )


async def compact(rest: str, environ: Mapping[str, str]) -> tuple[int, int]:
    """The size of the first member before and after. It concerns all users of this etcd."""
    async with _opened(rest, environ) as (client, keys):
        first = client.members[0]
        try:
            before = (await _status(client, first)).db_size
            now = await client.call(
                RANGE,
                pb.RangeRequest(key=keys.root, count_only=True),
                give_up_at=time.monotonic() + _ANSWER_S,
            )
            await _compact_before(client, now.header.revision)
            for member in client.members:  # one after the other: a member does not answer meanwhile
                metadata = await client.metadata()
                await member.ask(DEFRAGMENT, pb.DefragmentRequest(), metadata, _DEFRAGMENT_S)
            return before, (await _status(client, first)).db_size
        except grpc.aio.AioRpcError as error:
            raise StoreError(
                f"etcd did not compact: {words(error)}. Check it with `ddp-rendezvous doctor`"
            ) from error


async def _compact_before(client: EtcdClient, revision: int) -> None:
    try:
        await client.call(
            COMPACT,
            pb.CompactionRequest(revision=revision, physical=True),
            attempt_s=_ANSWER_S,
            give_up_at=time.monotonic() + 3 * _ANSWER_S,
        )
    except StoreError as error:
        if "has been compacted" not in str(error):
            raise


async def _status(client: EtcdClient, member: Member) -> pb.StatusResponse:
    return await member.ask(STATUS, pb.StatusRequest(), await client.metadata(), _ANSWER_S)


async def examine(rest: str, environ: Mapping[str, str]) -> list[tuple[bool, str]]:
    """Whether each member is well, and why not."""
    access, prefix = parse_etcd(rest, environ)
    client = EtcdClient(access)
    found = []
    try:
        for member in client.members:
            try:
                found.append(_verdict(member.endpoint, await _status(client, member)))
            except grpc.aio.AioRpcError as error:
                found.append(
                    (False, f"etcd at {member.endpoint} does not answer: {words(error)}. Check that it runs")
                )
        if any(good for good, _ in found):
            listed = pb.RangeRequest(
                key=Keys(prefix).all_jobs, range_end=end_of(Keys(prefix).all_jobs), count_only=True
            )
            answer = await client.call(RANGE, listed, give_up_at=time.monotonic() + _ANSWER_S)
            found.append((True, f"{answer.count} jobs"))
    except Unreachable:
        found.append(
            (False, "most members of etcd do not answer, so no decision can be stored. Check the members")
        )
    finally:
        await client.close()
    return found


def _verdict(endpoint: str, status: pb.StatusResponse) -> tuple[bool, str]:
    name = f"etcd {status.version} at {endpoint}"
    if any("NOSPACE" in each for each in status.errors):
        return False, (
            f"{name} has no space left and refuses writes. Run `ddp-rendezvous compact`, then `etcdctl alarm disarm`"
        )
    if not status.leader:
        return False, f"{name} has no leader, so no decision can be stored. Check the other members"
    if status.errors:
        return False, f"{name}: {'; '.join(status.errors)}. See the log of etcd"
    return True, f"{name} uses {status.db_size_in_use:,} of {status.db_size:,} bytes"
