"""Limits of the service: per identity, per job, and in total."""

from __future__ import annotations

from dataclasses import field

from rendezvous.values.late_dataclass import dataclass

MESSAGE_BYTES = 1024 * 1024  # of one inbound message; gRPC rejects longer ones before it stores them


@dataclass(frozen=True, slots=True)
class Limits:
    jobs: int = 1000  # that are not over
    agents: int = 65_536
    agents_per_job: int = 16_384
    streams_per_identity: int = 16_384
    watches_per_identity: int = 64
    questions_per_identity: int = 64  # to agents, at once: an answer may have 4 MiB
    calls_per_identity: int = 256  # unary, at once
    barriers: int = 65_536  # that have a call waiting in them
    barriers_per_job: int = 1024
    joins_per_s: float = 2000.0  # per identity ...
    join_burst: int = 20_000  # ... beyond this many at once
    outbox_messages: int = 256  # not yet read by one client; then the service ends its stream
    outbox_bytes: int = 2 * 1024 * 1024
    messages_per_s: float = 200.0  # of one stream ...
    message_burst: int = 8192  # ... beyond this many at once: a failed node sends one message per rank
    backlog: int = (
        20_000  # events of one job that wait for its store; then the service stops reading its streams
    )


class LimitReached(Exception):
    """A limit is reached. The message is for the client that reached it."""


@dataclass(slots=True)
class Allowance:
    """A token bucket: `burst` tokens, refilled at `per_s`."""

    per_s: float
    burst: float
    left: float = field(init=False)
    at: float = 0.0

    def __post_init__(self) -> None:
        self.left = self.burst

    def take(self, now: float, count: int = 1) -> float:
        """Take `count` tokens. Returns how long to wait for them; 0 if they were available."""
        self.left = min(self.burst, self.left + (now - self.at) * self.per_s)
        self.at = now
        self.left -= count
        return max(0.0, -self.left / self.per_s)

    def is_full(self, now: float) -> bool:
        return self.left + (now - self.at) * self.per_s >= self.burst


class Counts:
    """How many open streams, watches or calls each identity has. `option` is the option that sets `overall`."""

    def __init__(self, what: str, each: int, overall: int | None = None, *, option: str = "") -> None:
        self._what, self._each, self._overall = what, each, overall
        self._option = option
        self._held: dict[str, int] = {}
        self.total = 0

    def enter(self, identity: str) -> None:
        held = self._held.get(identity, 0)
        if held >= self._each:
            raise LimitReached(
                f"{identity} already has {held} {self._what}, which is a fixed limit: try again after some have ended"
            )
        if self._overall is not None and self.total >= self._overall:
            limit = (
                f"the limit ({self._option})"
                if self._option
                else "a fixed limit: try again after some have ended"
            )
            raise LimitReached(f"the service already has {self.total} {self._what}, which is {limit}")
        self._held[identity] = held + 1
        self.total += 1

    def leave(self, identity: str) -> None:
        held = self._held[identity] - 1
        if held:
            self._held[identity] = held
        else:
            del self._held[identity]
        self.total -= 1


class Rates:
    """An allowance per identity. Allowances that are full again are dropped."""

    _KEPT = 4096

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s, self._burst = per_s, burst
        self._known: dict[str, Allowance] = {}

    def take(self, identity: str, now: float) -> float:
        allowance = self._known.get(identity)
        if allowance is None:
            if len(self._known) >= self._KEPT:
                self._known = {i: a for i, a in self._known.items() if not a.is_full(now)}
            allowance = self._known[identity] = Allowance(self._per_s, self._burst, at=now)
        return allowance.take(now)
