"""Who was turned away, and why: counted by reason, and logged in a way that no flood of them fills a log.

One line for each reason and peer, then none for a minute; after it, one that says how many more there were. Peers can
be many at will, so no more than a few dozen of them are told apart within that minute; all others share a line for each
reason.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rendezvous.metrics import Metrics

_log = logging.getLogger("rendezvous")
_QUIET_S = 60.0
_TOLD_APART = 32
_OTHERS = "other clients"


class Reason(StrEnum):
    """All there are: they are the values of a label."""

    NO_TOKEN = "no_token"
    BAD_TOKEN = "bad_token"
    UNKNOWN_KEY = "unknown_key"
    EXPIRED_TOKEN = "expired_token"
    ROLE = "role"
    OTHER_JOB = "other_job"
    REPLAYED_JOIN = "replayed_join"
    HTTP_PORT = "http_port"
    CUT_OFF = "cut_off"  # it was in, and broke a rule or a limit


@dataclass(slots=True)
class _Told:
    words: str
    more: int = 0


class Refusals:
    def __init__(self, metrics: Metrics, quiet_s: float = _QUIET_S) -> None:
        self._metrics, self._quiet_s = metrics, quiet_s
        self._told: dict[tuple[Reason, str], _Told] = {}
        for reason in Reason:
            metrics.count("refused", reason.value, 0)  # a rate needs to have seen the nought before the one

    def note(self, reason: Reason, peer: str, words: str) -> None:
        """In the event loop's thread."""
        self._metrics.count("refused", reason.value)
        key = (reason, peer)
        if key not in self._told and sum(1 for _, who in self._told if who != _OTHERS) >= _TOLD_APART:
            key = (reason, _OTHERS)
        if (told := self._told.get(key)) is not None:
            told.more += 1
            return
        self._told[key] = _Told(words)
        _log.warning("refused %s: %s", key[1], words, extra={"kind": reason.value})
        asyncio.get_running_loop().call_later(self._quiet_s, self._sum_up, key)

    def _sum_up(self, key: tuple[Reason, str]) -> None:
        told = self._told.pop(key)
        if told.more:
            reason, peer = key
            words = "refused %s %d more times within %g s: %s"
            extra = {"kind": reason.value}
            _log.warning(words, peer, told.more, self._quiet_s, told.words, extra=extra)
