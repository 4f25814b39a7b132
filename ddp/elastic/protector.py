"""This rank's part in the protection of commits against the loss of nodes.

A *round* protects one commit. Rank 0 leads it (`protection_rounds`):

1. Rank 0 names a number. Each rank holds the first commit in memory from this number on: its slot is not overwritten.
   A rank that has already overwritten it says so, and rank 0 names a later one.
2. For each stripe, the first holder of parity computes the parity chunks of that commit (`stripe_encoder`).
3. When all have finished, the commit is *protected*, and rank 0 says so until all ranks know it. A rank that knows it
   releases the commit that was protected before, with its parity.

A round that fails before step 3 is given up, and the last protected commit stays. The thread of the training only
compares a number at each commit. No rank waits for a round.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ddp.elastic import image
from ddp.elastic.peer_links import Reply, Words
from ddp.elastic.recovery import Protected
from ddp.elastic.stripe_encoder import StripeEncoder

if TYPE_CHECKING:
    from ddp.elastic.parity_store import ParityStore
    from ddp.elastic.peer_links import Links
    from ddp.elastic.scratch import Slot, Slots
    from ddp.elastic.stripes import Stripe

_ANSWER_WITHIN_S = 5.0


class Stopped(Exception):
    """This rank stops to protect commits."""


class Protector:
    """Holds commits, serves their chunks, and computes the parity of this rank's stripes."""

    def __init__(
        self, links: Links, stripes: tuple[Stripe, ...], slots: Slots, store: ParityStore, lineage: str
    ) -> None:
        self.links, self._slots, self._store, self._lineage = links, slots, store, lineage
        mine = [each for each in stripes if each.parity[0] == links.rank]
        self._encoders = [
            StripeEncoder(each, lineage, store, links, self.wait, self.check_held) for each in mine
        ]
        self._changed = threading.Condition()
        self._stopped = False
        self._newest: tuple[int, Slot] | None = None
        self._wish: int | None = None
        self._held: tuple[int, Slot] | None = None  # the commit of this round
        self._protected: tuple[int, Slot] | None = None
        self._results: dict[int, str] = {}  # by the number of a commit: "" or what went wrong

    def start(self) -> None:
        self.links.server.start(self)
        threading.Thread(target=self._encode_commits, name="ddp-parity", daemon=True).start()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self.links.stop()

    @property
    def protected(self) -> int | None:
        """The number of the last protected commit, as far as this rank knows."""
        return None if self._protected is None else self._protected[0]

    def newest(self) -> int | None:
        return None if self._newest is None else self._newest[0]

    # --- the thread of the training -----------------------------------------------------------------

    def committed(self, number: int, slot: Slot) -> None:
        with self._changed:
            self._newest = (number, slot)
            if self._wish is not None and number >= self._wish:
                self._hold(number, slot)
            self._changed.notify_all()

    def _hold(self, number: int, slot: Slot) -> None:
        self._release()
        slot.shared = True
        self._results.pop(number, None)
        self._wish, self._held = None, (number, slot)
        self._changed.notify_all()

    def _release(self) -> None:
        """Give up the commit of this round, unless it is the protected one."""
        if self._held is not None and (self._protected is None or self._held[1] is not self._protected[1]):
            self._held[1].shared = False
        self._held = None

    # --- waiting ------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Sleep. Raise Stopped when this rank stops."""
        give_up_at = time.monotonic() + seconds
        with self._changed:
            while not self._stopped and (left := give_up_at - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._stopped:
                raise Stopped

    def wait_for_commit(self, after: int | None) -> int:
        """Wait until there is a newer commit than this one. Raise Stopped when this rank stops."""
        with self._changed:
            while not self._stopped:
                if self._newest is not None and (after is None or self._newest[0] > after):
                    return self._newest[0]
                self._changed.wait()
            raise Stopped

    # --- requests of other ranks --------------------------------------------------------------------

    def place(self, words: Words, n_bytes: int) -> memoryview:
        key = (int(words["stripe"]), int(words["row"]))
        return self._store.data(
            key, int(words["number"]), int(words["begin"]), n_bytes, int(words["n_chunks"])
        )

    def answer(self, words: Words) -> Reply:
        number = int(words["number"])
        match words["do"]:
            case "hold":
                return Reply({"missed": self._try_to_hold(number)})
            case "describe":
                return self._describe(number)
            case "read":
                return self._read(number, int(words["begin"]), int(words["n_bytes"]))
            case "open":
                key = (int(words["stripe"]), int(words["row"]))
                self._store.open(key, number, int(words["n_chunks"]), int(words["n_bytes"]))
            case "finish":
                facts = words["facts"]
                self._store.finish((facts["stripe"], facts["row"]), number, facts, int(words["n_bytes"]))
            case "encoded":
                return self._encoded()
            case "protected":
                self._become_protected(number)
            case "give up":
                with self._changed:
                    self._wish = None
                    self._release()
            case "write":
                pass  # the bytes are in their place
            case other:
                raise OSError(f"unknown request {other}")
        return Reply({})

    def _try_to_hold(self, number: int) -> int | None:
        """Hold the first commit from this number on. Return the newest number if that commit may be overwritten."""
        with self._changed:
            newest = self._newest
            if newest is not None and newest[0] > number:
                return newest[0]
            if newest is not None and newest[0] == number:
                self._hold(*newest)
            else:
                self._release()
                self._wish = number
        return None

    def _wait_for_held(self, number: int) -> Slot | None:
        """Return the slot of a commit when it is held; None: not yet. Rank 0 may have told others of it first."""
        give_up_at = time.monotonic() + _ANSWER_WITHIN_S
        with self._changed:
            while not self._stopped and (left := give_up_at - time.monotonic()) > 0:
                if self._held is not None and self._held[0] >= number:
                    break
                self._changed.wait(left)
            if self._held is None or self._held[0] < number:
                return None
            return self._slot_of(number)

    def _slot_of(self, number: int) -> Slot:
        with self._changed:
            if self._held is None or self._held[0] != number:
                raise OSError(f"commit {number} is not held any more")
            return self._held[1]

    def check_held(self, number: int) -> None:
        """Raise OSError if this round has ended, or Stopped."""
        self.wait(0)
        self._slot_of(number)

    def _describe(self, number: int) -> Reply:
        slot = self._wait_for_held(number)
        if slot is None:
            return Reply({"busy": True})
        found = image.Image(slot.buffer)
        head = found.head
        fields = Protected(head.rank, head.part, head.parts, head.world_size, len(found.whole))
        return Reply({"image": {name: getattr(fields, name) for name in Protected.__slots__}})

    def _read(self, number: int, begin: int, n_bytes: int) -> Reply:
        slot = self._slot_of(number)
        if begin < 0 or begin + n_bytes > len(slot.buffer):
            raise OSError(f"commit {number} has no bytes from {begin} to {begin + n_bytes}")
        return Reply({}, slot.buffer[begin : begin + n_bytes], lambda: self._is_held(number))

    def _is_held(self, number: int) -> bool:
        with self._changed:
            return any(each is not None and each[0] == number for each in (self._held, self._protected))

    def _encoded(self) -> Reply:
        """Whether the stripes of this rank are complete, in this round."""
        give_up_at = time.monotonic() + _ANSWER_WITHIN_S
        with self._changed:
            while not self._stopped and (left := give_up_at - time.monotonic()) > 0:
                if self._held is not None and self._held[0] in self._results:
                    return Reply({"number": self._held[0], "problem": self._results[self._held[0]]})
                self._changed.wait(left)
        return Reply({"busy": True})

    def _become_protected(self, number: int) -> None:
        with self._changed:
            if self._protected is not None and self._protected[0] == number:
                return  # rank 0 says it again
            if self._held is None or self._held[0] != number:
                raise OSError(f"commit {number} is not held any more")
            if self._protected is not None and self._protected[1] is not self._held[1]:
                self._protected[1].shared = False
            self._protected, self._held = self._held, None
            self._slots.held.clear()
            self._results.clear()
            self._changed.notify_all()
        self._store.keep_only(number)

    # --- parity -------------------------------------------------------------------------------------

    def _encode_commits(self) -> None:
        try:
            while True:
                number = self._next_to_encode()
                problem = ""
                try:
                    for encoder in self._encoders:
                        encoder.encode(number)
                except OSError as error:
                    problem = error.strerror or str(error)
                with self._changed:
                    self._results[number] = problem
                    self._changed.notify_all()
        except Stopped:
            for encoder in self._encoders:
                encoder.close()

    def _next_to_encode(self) -> int:
        with self._changed:
            while not self._stopped:
                if self._held is not None and self._held[0] not in self._results:
                    return self._held[0]
                self._changed.wait()
            raise Stopped
