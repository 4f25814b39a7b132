"""From node to node: through the key-value store that the ranks of a generation have anyway. It needs no collective.

    asking   how many ranks have asked, so that they stop waiting if all of them did
    owner    the rank that answers
    0, 1...  the bundle in pieces
    answer   how many pieces there are

Nothing is written there unless a rank asks. The store ends with its generation.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from ddp.telemetry.contracts import GENERATION
from ddp_launch_wings.compiled import bundle

ANSWER_S = 10.0
_CONNECT_S, _PIECE, _LOOK_S = 5.0, 4 << 20, 0.05
_PREFIX = "ddp-compiled"


def generation() -> str:
    return os.environ.get(GENERATION, "")


def connected() -> Any:
    """A connection of our own: another thread may wait in the script's."""
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=_CONNECT_S),
    )


def ask(store: Any, key: str, ranks: int) -> bytes | None:
    """What another rank has under this key; None if all `ranks` ask, or nobody answers in time."""
    at, ends = f"{_PREFIX}/{key}", time.monotonic() + ANSWER_S
    store.add(f"{at}/asking", 1)
    while time.monotonic() < ends:
        if store.check([f"{at}/answer"]):
            pieces = int(store.get(f"{at}/answer"))
            return b"".join(store.get(f"{at}/{number}") for number in range(pieces))
        if store.add(f"{at}/asking", 0) >= ranks:
            return None
        time.sleep(_LOOK_S)
    return None


class PeerAnswers:
    """Answers for this rank, once a generation. Ranks ask when a generation begins, so later it disconnects."""

    _LASTS_S = 900.0

    def __init__(self) -> None:
        self._of, self._ends = "", 0.0
        self._store: Any = None

    def turn(self, key: str, path: str) -> None:
        """Called every now and then; an error ends it until the next generation."""
        if self._of != generation():
            self._of, self._store = generation(), None
            self._ends = time.monotonic() + self._LASTS_S
            if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
                with suppress(Exception):
                    self._store = connected()
        if self._store is not None and os.path.exists(path):
            try:
                is_done = self._answered(self._store, f"{_PREFIX}/{key}", path)
            except Exception:
                is_done = True
            if is_done or time.monotonic() > self._ends:
                self._store = None

    def _answered(self, store: Any, at: str, path: str) -> bool:
        if not store.check([f"{at}/asking"]):
            return False
        me = os.environ.get("RANK", "0")
        if store.compare_set(f"{at}/owner", "", me) == me.encode():
            with open(path, "rb") as file:
                data = file.read(bundle.MOST_BYTES + 4096)
            pieces = [data[begin : begin + _PIECE] for begin in range(0, len(data), _PIECE)]
            for number, piece in enumerate(pieces):
                store.set(f"{at}/{number}", piece)
            store.set(f"{at}/answer", str(len(pieces)))
        return True
