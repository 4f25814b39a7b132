"""Leases under fire: clocks that drift, messages that dawdle, replicas that freeze. Never are two of them certain.

The lease arithmetic is the real one; the store grants a lease, forgets it when its time is up, and frees what was
owned under it. A replica whose lease is in doubt keeps what it owns for as long as it cares to, and may find that
it stood all along. One seed per run.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ddp_launch_wings.etcd.owner import Lease

_TTL_S = 2.0
_STEP_S = 0.01
_STEPS = 4000


class FakeEtcd:
    """`late_s`: how much later than due it notices that a lease has run out; never earlier."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ends: dict[int, float] = {}
        self._ids = 0
        self.owner: int | None = None  # a lease

    def grant(self, now: float) -> int:
        self._ids += 1
        self._ends[self._ids] = now + _TTL_S
        return self._ids

    def renew(self, lease: int, now: float) -> float:
        self.expire(now)
        if lease not in self._ends:
            return 0.0
        self._ends[lease] = now + _TTL_S
        return _TTL_S

    def claim(self, lease: int, now: float) -> bool:
        self.expire(now)
        if lease in self._ends and self.owner is None:
            self.owner = lease
        return self.owner == lease

    def expire(self, now: float) -> None:
        for lease in [i for i, end in self._ends.items() if now >= end]:
            del self._ends[lease]
        if self.owner not in self._ends:
            self.owner = None


class FakeReplica:
    """Its clock runs at another rate and started at another time than everybody else's."""

    def __init__(self, etcd: FakeEtcd, rng: random.Random) -> None:
        self._etcd, self._rng = etcd, rng
        self._rate, self._offset = rng.uniform(0.97, 1.03), rng.uniform(-1e3, 1e3)
        self._lease: Lease | None = None
        self._owns = False
        self._in_flight: tuple[str, float, float, float] | None = (
            None  # kind, sent (own clock), arrives, answered
        )
        self._answer: tuple[str, float, object] | None = None
        self._next_at = 0.0
        self.frozen_until = 0.0
        self.regained = 0  # how often a doubt ended well

    def clock(self, now: float) -> float:
        return now * self._rate + self._offset

    def is_certain(self, now: float) -> bool:
        """What it would find if it looked at this very moment, frozen or not."""
        return self._owns and self._lease is not None and self._lease.is_certain(self.clock(now))

    def _in_doubt(self, now: float) -> bool:
        return self._lease is not None and not self._lease.is_certain(self.clock(now))

    def step(self, now: float) -> None:
        self._deliver(now)
        if now < self.frozen_until:
            return
        self._hear(now)
        if self._in_doubt(now) and self._rng.random() < 0.02:
            self._lease, self._owns = None, False
        if self._in_flight is None and now >= self._next_at:
            kind = "grant" if self._lease is None else self._rng.choice(("renew", "claim"))
            delay_s = self._rng.choice((0.0, 0.02, 0.3, 1.5))
            back_s = self._rng.choice((0.0, 0.02, 0.3, 1.5))
            self._in_flight = (kind, self.clock(now), now + delay_s, now + delay_s + back_s)

    def _deliver(self, now: float) -> None:
        """What is under way arrives, whether the sender is frozen or not."""
        if self._in_flight is None or self._answer is not None or now < self._in_flight[2]:
            return
        kind, _, _, answered = self._in_flight
        result: object = None
        if kind == "grant":
            result = self._etcd.grant(now)
        elif self._lease is not None:
            result = (
                self._etcd.renew(self._lease.id, now)
                if kind == "renew"
                else self._etcd.claim(self._lease.id, now)
            )
        self._answer = (kind, answered, result)

    def _hear(self, now: float) -> None:
        if self._answer is None or self._in_flight is None or now < self._answer[1]:
            return
        (kind, _, result), sent = self._answer, self._in_flight[1]
        self._answer = self._in_flight = None
        self._next_at = now + self._rng.uniform(0.0, 0.4)
        if kind == "grant":
            assert isinstance(result, int)
            self._lease, self._owns = Lease(result, _TTL_S, sent), False
        elif kind == "renew" and self._lease is not None:
            assert isinstance(result, float)
            doubted = self._owns and self._in_doubt(now)
            self._lease = self._lease.renewed(sent, result)
            self._owns = self._owns and self._lease is not None
            self.regained += doubted and self.is_certain(now)
        elif kind == "claim" and self._lease is not None:
            self._owns = bool(result)


def _run(seed: int, stretch: float = 1.0) -> tuple[int, int]:
    """How often the job changed hands, and how often a doubt ended well.

    `stretch`: believe that much longer in one's lease than one should.
    """
    rng = random.Random(seed)
    etcd = FakeEtcd(rng)
    replicas = [FakeReplica(etcd, rng) for _ in range(3)]
    last, changes = None, 0
    for i in range(_STEPS):
        now = i * _STEP_S
        etcd.expire(now)
        for replica in replicas:
            if rng.random() < 0.001:
                replica.frozen_until = now + rng.choice((0.5, 2.0, 5.0))
            replica.step(now)
            if stretch != 1.0 and replica._lease is not None and replica._lease.ttl_s == _TTL_S:
                replica._lease = replace(replica._lease, ttl_s=_TTL_S * stretch)
        certain = [n for n, replica in enumerate(replicas) if replica.is_certain(now)]
        if len(certain) > 1:
            raise AssertionError(f"seed {seed}, at {now:.2f} s: replicas {certain} are both certain")
        if certain and certain[0] != last:
            last, changes = certain[0], changes + 1
    return changes, sum(replica.regained for replica in replicas)


@pytest.mark.parametrize("part", range(4))
def test_never_are_two_replicas_certain(part: int) -> None:
    runs = [_run(seed) for seed in range(part, 80, 4)]
    assert sum(changes for changes, _ in runs) > 40
    assert sum(regained for _, regained in runs) > 10


def test_believing_longer_is_caught() -> None:
    def all_seeds() -> None:
        for seed in range(80):
            _run(seed, stretch=1.5)

    with pytest.raises(AssertionError, match="both certain"):
        all_seeds()
