"""What a journal has in place of a text: a short hash, which does not give the text back.

Equal texts have equal hashes within one journal, because the state machines compare texts. The hash needs a random key,
which is not in the file. Otherwise a reader could try out which text has it.

Two rules look into a text, and these parts stay. One looks for phrases of torch in an error
(`diagnosing/diagnosis.py`). The other compares the reason of a drain with a text that contains it
(`rounds/orders.py`).
"""

from __future__ import annotations

from hashlib import blake2b

from rendezvous.rounds.orders import DRAINED
from rendezvous.values.cause_text import OUT_OF_TIME

_SIZE = 6  # bytes
_KEPT = 4096  # texts whose hash is remembered


class Hiding:
    def __init__(self, key: bytes) -> None:
        self._key = key
        self._known: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        if not text:
            return ""
        found = self._known.get(text)
        if found is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            found = self._known[text] = self._hidden(text)
        return found

    def _hidden(self, text: str) -> str:
        if text.startswith(DRAINED):
            return DRAINED + self(text.removeprefix(DRAINED))
        digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_SIZE, key=self._key).hexdigest()
        lower = text.lower()
        return " ".join([f"~{digest}", *(phrase for phrase in OUT_OF_TIME if phrase in lower)])
