"""The store in etcd, for any number of replicas.

A write is one transaction: it succeeds if the job still has the version that was read and this replica still owns it.
etcd checks both. A random write id is stored before every value. If the answer to a write is lost, the writer
recognises its own write by this id. The state of a large job has two keys (`packing`), written in one transaction.
`client` has the layout of the keys.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import parse_qsl, unquote

from ddp_launch_wings.etcd.client import (
    RANGE,
    TXN,
    Access,
    EtcdClient,
    Keys,
    TlsFiles,
    Unreachable,
    created_at,
    deleting,
    end_of,
    exists,
    name_in,
    one,
    pages_of,
    putting,
    reading,
    version_is,
    when,
)
from ddp_launch_wings.etcd.owner import Changes, Claim, EtcdOwnership, Follower, Snapshot
from rendezvous.pb import etcd_pb2 as pb
from rendezvous.store.open import BadUrl
from rendezvous.store.protocol import (
    Conflict,
    JobStore,
    Notices,
    OwnershipLost,
    Packer,
    Store,
    StoreError,
    Value,
    Values,
    check_count,
    check_key,
    check_value,
)
from rendezvous.values.job_state import JobState
from rendezvous.values.late_dataclass import dataclass

WRITE_ID_BYTES = 8
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

    async def jobs(self) -> dict[str, int]:
        _, found = await pages_of(self._client, self._keys.all_jobs, keys_only=True)
        return dict(sorted((name_in(kv.key, self._keys.all_jobs), kv.mod_revision) for kv in found))

    async def delete(self, job_id: str) -> None:
        """Delete the job, if this replica owns it or it has no owner."""
        claim = self.ownership.claim_of(job_id)
        owner, job = self._keys.owner(job_id), self._keys.job(job_id)
        folders = self._keys.all_values(job_id), self._keys.all_marks(job_id)
        removal = [deleting(job), deleting(self._keys.base(job_id)), deleting(owner)]
        removal += [deleting(each, end_of(each)) for each in folders]
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
        claim = self._held_claim()
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

    def _held_claim(self) -> Claim:
        claim = self._claim
        if claim is None or not self._ownership.is_held(claim):
            raise OwnershipLost(f"this replica does not own job {self._job_id!r}")
        return claim

    async def _confirm(self, claim: Claim, revision: int) -> int:
        """Wait until the ownership is certain. After that the agents may be informed."""
        await self._ownership.wait_until_certain(claim)
        return revision


# --- etcd values ------------------------------------------------------------------------------------
#
# The values of scripts in etcd. Any replica can serve them: the owner of the job is not checked.
# A write takes effect once, also if its answer is lost and it is sent again. In the same transaction it moves a mark,
# which must have the version that this writer has given it. Each write that is under way has a mark of its own. So a
# transaction that arrives late, or twice, finds that the mark was moved. The marks of a job are removed with it.
#
# The limit on the number of keys is checked before a key is added, not in the same transaction. So concurrent writers
# may exceed it slightly.


@dataclass(slots=True)
class _Mark:
    key: bytes
    version: int = 0
    mine: bytes = b""  # the value of this write


class EtcdValues:
    """All waiters of a job share one watch on all its values. Without waiters there is no watch."""

    def __init__(self, client: EtcdClient, keys: Keys, job_id: str) -> None:
        self._client, self._keys, self._job_id = client, keys, job_id
        self._all = keys.all_values(job_id)
        self._writer, self._marks = os.urandom(8).hex(), 0
        self._free: list[_Mark] = []
        self._notices = Notices()
        self._waiters = 0
        self._following: asyncio.Task[None] | None = None

    async def get(self, key: str) -> Value | None:
        found = (await self._client.call(RANGE, one(self._key(key)))).kvs
        return Value(found[0].value[WRITE_ID_BYTES:], found[0].mod_revision) if found else None

    async def put(self, key: str, data: bytes) -> int:
        """An existing key needs one transaction. For a new key, the keys are counted first."""
        at, writes = self._key(key), self._putting(key, data)
        with self._marked() as mark:
            version = await self._once(mark, [exists(at)], writes)
            if version is None:
                check_count(await self._count())
                version = await self._once(mark, [], writes)
        assert version is not None  # nobody else moves the mark
        return version

    async def compare_and_put(self, key: str, data: bytes, expected_version: int) -> int:
        at, writes = self._key(key), self._putting(key, data)
        if expected_version == 0:
            check_count(await self._count())
        with self._marked() as mark:
            version = await self._once(mark, [version_is(at, expected_version)], writes)
        if version is None:
            raise Conflict
        return version

    async def delete(self, key: str) -> bool:
        with self._marked() as mark:
            at = self._key(key)
            return await self._once(mark, [exists(at)], [deleting(at)]) is not None

    async def _once(
        self, mark: _Mark, conditions: list[pb.Compare], writes: list[pb.RequestOp]
    ) -> int | None:
        """Write if the conditions hold, once. Returns the revision of the write; None if it had no effect."""
        while True:
            request = when(
                [version_is(mark.key, mark.version), *conditions],
                [*writes, putting(mark.key, mark.mine)],
                [reading(one(mark.key))],
            )
            answer = await self._client.call(TXN, request)
            if answer.succeeded:
                mark.version = answer.header.revision
                return mark.version
            held = answer.responses[0].response_range.kvs
            version = held[0].mod_revision if held else 0
            if held and held[0].value == mark.mine:  # by an attempt whose answer was lost
                mark.version = version
                return version
            if version == mark.version:
                return None
            mark.version = version  # moved by a write that was given up, or removed with the job

    @contextmanager
    def _marked(self) -> Iterator[_Mark]:
        """A mark that no other write uses. If the write is given up, the next one with this mark ends its chance."""
        if not self._free:
            self._marks += 1
            self._free.append(
                _Mark(self._keys.all_marks(self._job_id) + f"{self._writer}-{self._marks}".encode())
            )
        mark = self._free.pop()
        mark.mine = os.urandom(WRITE_ID_BYTES)
        try:
            yield mark
        finally:
            self._free.append(mark)

    async def _count(self) -> int:
        whole = pb.RangeRequest(key=self._all, range_end=end_of(self._all), count_only=True)
        return int((await self._client.call(RANGE, whole)).count)

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

    def _putting(self, key: str, data: bytes) -> list[pb.RequestOp]:
        check_key(key)
        check_value(data)
        return [putting(self._key(key), os.urandom(WRITE_ID_BYTES) + data)]

    def _follow(self) -> None:
        if self._following is None or self._following.done():
            follower = Follower(self._client, self._all, self._on_event, keys_only=True)
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


# --- the URL ----------------------------------------------------------------------------------------
#
#     etcd://[USER@]HOST[:PORT][,HOST[:PORT]...][/PREFIX][?tls=true&cacert=FILE&cert=FILE&key=FILE&password-file=FILE]
#
# The password comes from the file, from DDP_RENDEZVOUS_ETCD_PASSWORD, or from USER:PASSWORD@ in the URL. Write
# USER:PASSWORD@ only in a configuration file, since every user of the machine can read a command line. No message
# contains the password.

PASSWORD_VARIABLE = "DDP_RENDEZVOUS_ETCD_PASSWORD"
_PORT = 2379
_SETTINGS = ("tls", "cacert", "cert", "key", "password-file")


async def open_store(rest: str, address: str, environ: Mapping[str, str]) -> Store:
    access, prefix = parse_etcd(rest, environ)
    return await open_etcd_store(access, prefix, address)


def parse_etcd(rest: str, environ: Mapping[str, str]) -> tuple[Access, str]:
    place, _, query = rest.partition("?")
    settings = dict(parse_qsl(query, keep_blank_values=True))
    for name in settings:
        if name not in _SETTINGS:
            raise BadUrl(f"etcd store: unknown setting {name!r}; known settings: {', '.join(_SETTINGS)}")
    authority, _, prefix = place.partition("/")
    who, _, hosts = authority.rpartition("@")
    user, _, in_url = who.partition(":")
    endpoints = tuple(_endpoint(host) for host in hosts.split(",") if host)
    if not endpoints:
        raise BadUrl("etcd store: the host is missing; write etcd://HOST:PORT/PREFIX")
    password = _password(settings.get("password-file", ""), environ.get(PASSWORD_VARIABLE) or unquote(in_url))
    return Access(endpoints, unquote(user), password, _tls(settings)), prefix.strip("/") or "ddp-rendezvous"


def _endpoint(host: str) -> str:
    """Add the default port. Accepts host names, IPv4, and IPv6 in brackets."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return f"{host}:{_PORT}"
    if not name or not re.fullmatch(r"\d{1,5}", port, re.ASCII):
        raise BadUrl(f"etcd store: invalid address {host!r}: use HOST:PORT")
    return host


def _password(path: str, given: str) -> Callable[[], str]:
    if not path:
        return lambda: given

    def read() -> str:
        try:
            with open(path, encoding="utf-8") as file:
                return file.read().strip()
        except OSError as error:
            raise BadUrl(
                f"cannot read the etcd password from {path}: {error.strerror}. Check password-file in --store"
            ) from error

    return read


def _tls(settings: Mapping[str, str]) -> TlsFiles | None:
    files = TlsFiles(settings.get("cacert", ""), settings.get("cert", ""), settings.get("key", ""))
    if bool(files.cert) != bool(files.key):
        raise BadUrl("etcd store: cert and key must be set together: set both or neither")
    wanted = settings.get("tls", "true" if files != TlsFiles() else "false")
    if wanted not in ("true", "false"):
        raise BadUrl(f"etcd store: invalid tls {wanted!r}: use true or false")
    return files if wanted == "true" else None
