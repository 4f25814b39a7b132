"""What NCCL's own monitor (RAS) knows about the communicators of a job: silent ranks, errors, and who is behind. Pure.

Every process that uses NCCL 2.24 or newer has a RAS thread. These threads watch each other over the network of the job,
and one of them answers questions on each node. From 2.28 on the answer is JSON. It covers all ranks, and collectives
that no other record has: those that C++ starts, and those of groups that torch does not know.

A node may run jobs of several users, but only one process of the node answers. So only communicators count that contain
one of this agent's ranks.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

MAX_FINDINGS = 8
_MAX_RANKS_SHOWN = 16
_MAX_NAME_CHARS = 64
_ERRORS = {  # ncclResult_t
    1: "a CUDA call failed",
    2: "a system call failed",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "a peer failed",
}
_IN_PROGRESS = 7


def findings(plain: object, pids: Collection[int]) -> tuple[str, ...]:
    """Return one sentence for each irregularity. `pids`: of this node's ranks. () for an answer that is not RAS's."""
    found: list[str] = []
    communicators = plain.get("communicators") if isinstance(plain, dict) else None
    for each in communicators if isinstance(communicators, list) else ():
        if isinstance(each, dict) and any(rank.get("pid") in pids for rank in _dicts(each.get("ranks"))):
            found += _of_communicator(each)
    return tuple(found[:MAX_FINDINGS])


def _of_communicator(communicator: dict[str, Any]) -> Iterator[str]:
    where = f"communicator of {_number(communicator.get('size'))} ranks"
    ranks = _dicts(communicator.get("ranks"))
    for what, key in (("is dead", "considered_dead"), ("does not respond", "unresponsive")):
        silent = [
            rank for rank in _dicts(communicator.get("missing_ranks")) if _status(rank).get(key) is True
        ]
        if silent:
            yield f"{where}: {_names(silent)} {what if len(silent) == 1 else _PLURAL[what]}"
    for error in sorted(
        {_number(_status(rank).get("async_error")) for rank in ranks} - {0, -1, _IN_PROGRESS}
    ):
        having = [rank for rank in ranks if _status(rank).get("async_error") == error]
        yield f"{where}: asynchronous error on {_names(having)}: {_ERRORS.get(error, f'error {error}')}"
    yield from _differing_counts(where, ranks)


_PLURAL = {"is dead": "are dead", "does not respond": "do not respond"}


def _differing_counts(where: str, ranks: list[dict[str, Any]]) -> Iterator[str]:
    """Name the ranks that have called a collective less often than most ranks."""
    counted = [(rank, counts) for rank in ranks if isinstance(counts := rank.get("collective_counts"), dict)]
    for op in sorted({str(name) for _rank, counts in counted for name in counts}):
        numbers = [(rank, _number(counts.get(op))) for rank, counts in counted]
        usual, _times = Counter(number for _rank, number in numbers).most_common(1)[0] if numbers else (0, 0)
        for other in sorted({number for _rank, number in numbers} - {usual}):
            having = [rank for rank, number in numbers if number == other]
            have = "has" if len(having) == 1 else "have"
            called = f"{op[:_MAX_NAME_CHARS]} {other} times"
            yield f"{where}: {_names(having)} {have} called {called}, most ranks {usual} times"


def _names(ranks: list[dict[str, Any]]) -> str:
    shown = sorted(ranks, key=lambda rank: _number(rank.get("rank")))[:_MAX_RANKS_SHOWN]
    text = ", ".join(f"{_number(rank.get('rank'))} ({_place(rank)})" for rank in shown)
    more = f" and {len(ranks) - len(shown)} more" if len(ranks) > len(shown) else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}{more}"


def _place(rank: dict[str, Any]) -> str:
    return f"pid {_number(rank.get('pid'))} on {str(rank.get('host', '?'))[:_MAX_NAME_CHARS]}"


def _status(rank: dict[str, Any]) -> dict[str, Any]:
    status = rank.get("status")
    return status if isinstance(status, dict) else {}


def _dicts(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _number(value: object) -> int:
    return value if type(value) is int and abs(value) < 1 << 62 else -1
