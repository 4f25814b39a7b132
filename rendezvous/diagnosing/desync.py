"""Find ranks that called a different collective under the same sequence number of a group. Pure.

The finding names the ranks of the minority. If there is no majority, it names the ranks of all groups, and is not
certain.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rendezvous.diagnosing import hang_text as words
from rendezvous.diagnosing.finding import BlamedRank, Finding, Kind
from rendezvous.diagnosing.waits import POINT_TO_POINT

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from rendezvous.diagnosing.waits import Waits
    from rendezvous.values.rank_view import Collective


UNKNOWN = "?"  # the type of tensors of the script's own classes, which ranks do not look at
_Signature = tuple[str, str, int, int]


def _signature(call: Collective) -> _Signature:
    """The properties of a call that must be equal on all ranks. Status pages contain only sizes that must be equal."""
    return (call.op, call.dtype, call.numel, call.peer if call.op == "broadcast" else -1)


def desync(waits: Waits, ranks: Collection[int], *, all_wait: bool = False) -> Finding | None:
    """`all_wait`: only if all members of the group are among `ranks` and wait in these calls."""
    pending = {call.group for rank in ranks for call in waits.calls.get(rank, ()) if call.between is None}
    entered: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, report in waits.reports.items():
        for call in report.calls:
            if call.group in pending and call.op not in POINT_TO_POINT and call.dtype != UNKNOWN:
                entered.setdefault((call.group, call.seq), {})[rank] = call
    for where in sorted(entered):
        by_rank = entered[where]
        kinds = Counter(_signature(call) for call in by_rank.values())
        waiting = [rank for rank, call in by_rank.items() if call.finished_s is None]
        if all_wait and not all(r in waiting and r in ranks for r in waits.members[where[0]]):
            continue
        if len(kinds) > 1 and waiting:
            return _finding(by_rank, kinds, len(waits.members[where[0]]))
    return None


def _finding(by_rank: Mapping[int, Collective], kinds: Counter[_Signature], n_members: int) -> Finding:
    ((most, n_most),) = kinds.most_common(1)
    majority = [rank for rank, call in by_rank.items() if _signature(call) == most]
    minority = [rank for rank in by_rank if rank not in majority]
    if n_most * 2 <= max(len(by_rank), n_members):
        groups = "; ".join(
            f"{words.ranks([r for r, c in by_rank.items() if _signature(c) == kind])} entered "
            + _first(by_rank, kinds, kind)
            for kind in kinds
        )
        reason = f"the ranks called different collectives: {groups}"
        everyone = tuple(BlamedRank(rank, reason) for rank in sorted(by_rank))
        return Finding(Kind.DESYNC, everyone, certain=False)
    rest = f"while {words.ranks(majority)} entered {_first(by_rank, kinds, most)}"
    blamed = tuple(
        BlamedRank(rank, f"entered {_described(by_rank[rank], kinds)}, {rest}") for rank in sorted(minority)
    )
    return Finding(Kind.DESYNC, blamed, certain=True)


def _first(by_rank: Mapping[int, Collective], kinds: Counter[_Signature], kind: _Signature) -> str:
    return next(_described(call, kinds) for call in by_rank.values() if _signature(call) == kind)


def _described(call: Collective, kinds: Counter[_Signature]) -> str:
    """Describe a call. Name the root of a broadcast if the roots differ."""
    roots = {kind[3] for kind in kinds if kind[0] == "broadcast"}
    differs = call.op == "broadcast" and len(roots) > 1
    return f"{words.call(call)} from rank {call.peer}" if differs else words.call(call)
