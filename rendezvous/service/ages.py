"""How long the jobs in the store have been finished, whatever happens to the clock of this machine.

Theory of operation
-------------------
The age decides what is deleted, and a deletion cannot be undone. The difference of two wall clock times is no
evidence: a machine may start in 2035, and be corrected an hour later. So the store keeps the age that is certain, and
when it was counted last. The time since then is added, but no more than this process has seen pass by its monotonic
clock. Of a time that this process has not seen, a fourteenth of `--history` counts at most: a day, unless told
otherwise. So a jump of the clock costs a day at most, and a service that was off for a month keeps finished jobs for
longer.
"""

from __future__ import annotations

from rendezvous.store.protocol import Store, ValuesFull
from rendezvous.values.late_dataclass import dataclass

_UNSEEN_PARTS = 14  # of the history, a time that this process has not seen is at most one
_STEPS = 100  # the store is told of an age when it has grown by a part of the history


@dataclass(frozen=True, slots=True)
class Age:
    """In seconds, and the wall clock time at which it was counted."""

    s: float
    counted_at: float

    def later(self, wall: float, most_s: float) -> Age:
        """The same age at the time `wall`, if at most `most_s` have passed."""
        return Age(self.s + min(max(wall - self.counted_at, 0.0), most_s), wall)

    def encode(self) -> bytes:
        return f"{self.s:.1f} {self.counted_at:.1f}".encode()

    @staticmethod
    def decode(data: bytes) -> Age:
        counted, _, at = data.decode().partition(" ")
        return Age(float(counted), float(at))


class Ages:
    """`key`: of the value in which each job keeps its age."""

    def __init__(self, store: Store, history_s: float, key: str) -> None:
        self._store, self._history_s, self._key = store, history_s, key
        self._counted: dict[str, tuple[float, Age]] = {}  # by this process: with its monotonic clock

    async def seconds(self, job_id: str, ended_at: float, wall: float, monotonic: float) -> float:
        values = self._store.values(job_id)
        stored = await values.get(self._key)
        seen_at, before = self._counted.get(job_id, (None, Age(0.0, ended_at)))
        if stored is not None:
            before = Age.decode(stored.data)
        unseen_s = self._history_s / _UNSEEN_PARTS
        after = before.later(wall, unseen_s if seen_at is None else max(0.0, monotonic - seen_at))
        if seen_at is None or abs(wall - before.counted_at) >= self._history_s / _STEPS:
            self._counted[job_id] = monotonic, after
            try:
                await values.put(self._key, after.encode())
            except ValuesFull:
                pass  # its scripts have used all of its values: this process alone knows the age
        return after.s

    def forget(self, job_id: str) -> None:
        self._counted.pop(job_id, None)
