"""Count refused clients by reason, and log them at a limited rate.

The first refusal for each reason and peer is logged. Further ones are counted for a minute, and then logged as one
line. An attacker can use any number of addresses, so at most 32 peers are logged separately in each minute. All others
share one line per reason.
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
_PEERS_LOGGED = 32
_OTHERS = "other clients"


class Reason(StrEnum):
    """The reasons for a refusal. Each is a value of the label `reason` of the metric `refused`."""

    NO_TOKEN = "no_token"
    BAD_TOKEN = "bad_token"
    UNKNOWN_KEY = "unknown_key"
    EXPIRED_TOKEN = "expired_token"
    ROLE = "role"
    OTHER_JOB = "other_job"
    REPLAYED_JOIN = "replayed_join"
    HTTP_PORT = "http_port"
    STREAM_ABORTED = "stream_aborted"  # an open stream broke a rule or a limit


@dataclass(slots=True)
class _Logged:
    words: str
    more: int = 0


class Refusals:
    def __init__(self, metrics: Metrics, quiet_s: float = _QUIET_S) -> None:
        self._metrics, self._quiet_s = metrics, quiet_s
        self._logged: dict[tuple[Reason, str], _Logged] = {}
        for reason in Reason:
            metrics.count("refused", reason.value, 0)  # rate() needs a 0 before the first 1

    def note(self, reason: Reason, peer: str, words: str) -> None:
        """Count and log one refusal. Call it in the thread of the event loop."""
        self._metrics.count("refused", reason.value)
        key = (reason, peer)
        if key not in self._logged and sum(1 for _, who in self._logged if who != _OTHERS) >= _PEERS_LOGGED:
            key = (reason, _OTHERS)
        if (logged := self._logged.get(key)) is not None:
            logged.more += 1
            return
        self._logged[key] = _Logged(words)
        _log.warning("refused %s: %s", key[1], words, extra={"kind": reason.value})
        asyncio.get_running_loop().call_later(self._quiet_s, self._sum_up, key)

    def _sum_up(self, key: tuple[Reason, str]) -> None:
        logged = self._logged.pop(key)
        if logged.more:
            reason, peer = key
            words = "refused %s %d more times in the last %g s: %s"
            extra = {"kind": reason.value}
            _log.warning(words, peer, logged.more, self._quiet_s, logged.words, extra=extra)
