"""Compares what a program did under torch's class with what it did under ours.

Where torch's class raises, or makes its ranks wait for each other for ever, the comparison ends: there is nothing that
ours could be compared with. Only that ours raises as well is asked, or that the page says what it does instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from known_differences import known
from rank_crew import Stuck

if TYPE_CHECKING:
    from drawn_program import Program

Records = list[dict[str, Any]]

# With three ranks the order of a sum depends on the transport. A hook may sum in half precision.
_TOLERANCE = {"torch.bfloat16": 0.05, "torch.float16": 0.01, "torch.float32": 1e-4, "torch.complex64": 1e-4}
_OF_HOOK = 0.01


@dataclass(frozen=True)
class Difference:
    at: int  # the number of the operation, -1 for the construction
    rank: int
    what: str
    page: str = ""  # the line of docs/ddp.md that says so

    def __str__(self) -> str:
        return f"op {self.at}, rank {self.rank}: {self.what}{f' [{self.page}]' if self.page else ''}"


def differences(program: Program, torchs: list[Any], ours: list[Any]) -> list[Difference]:
    """`torchs` and `ours`: for each rank its records, or `Stuck`."""
    if any(isinstance(records, Stuck) for records in torchs):
        return []
    end = min(_end(records) for records in torchs)
    raised = [records[end].get("raised") if len(records) > end else None for records in torchs]
    if end == 0 and not program.in_backward:  # nothing would be compared
        return [Difference(-1, 0, f"torch's class cannot be constructed: {raised}")]
    found = []
    for rank in range(program.world):
        found += _of_rank(program, rank, torchs[rank], ours[rank], end)
        found += _at_end(program, rank, end, raised, ours[rank])
    return [_on_page(program, end, raised, each) for each in found]


def _end(records: Records) -> int:
    """The number of the record in which torch's class raised; otherwise the number of all records."""
    return len(records) - 1 if "raised" in records[-1] else len(records)


def _of_rank(program: Program, rank: int, torchs: Records, ours: Any, end: int) -> list[Difference]:
    if isinstance(ours, Stuck):
        at = ours.at
        return [Difference(at, rank, f"ours is stuck ({ours})")] if at + 1 < end or ours.died else []
    for i in range(min(end, len(torchs))):
        if i >= len(ours):
            return []
        if "raised" in ours[i]:
            names, message, trace = ours[i]["raised"]
            return [Difference(i - 1, rank, f"ours raises {names[0]}: {message[:400]}\n{trace}")]
        if wrong := _of_record(program, torchs[i], ours[i]):
            return [Difference(i - 1, rank, "; ".join(wrong[:3]))]
    return []


def _at_end(program: Program, rank: int, end: int, raised: list[Any], ours: Any) -> list[Difference]:
    if raised[rank] is None:
        return []
    torchs = raised[rank]
    if isinstance(ours, Stuck):
        if ours.at + 1 == end and all(raised):
            return [
                Difference(end - 1, rank, f"ours is stuck, torch raises {torchs[0][0]}: {torchs[1][:200]}")
            ]
        return []
    if len(ours) <= end:
        return []
    if "raised" not in ours[end]:
        return [Difference(end - 1, rank, f"ours goes on, torch raises {torchs[0][0]}: {torchs[1][:200]}")]
    names, message, _ = ours[end]["raised"]
    if torchs[0][0] not in names:
        what = f"ours raises {names[0]}: {message[:200]}, torch raises {torchs[0][0]}: {torchs[1][:200]}"
        return [Difference(end - 1, rank, what)]
    return []


def _on_page(program: Program, end: int, raised: list[Any], found: Difference) -> Difference:
    messages = [each[1] for each in raised if each is not None]
    page = known(program, found.at, end - 1, messages)
    return Difference(found.at, found.rank, found.what, page)


def _of_record(program: Program, torchs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    wrong = []
    for name in sorted({*torchs, *ours}):
        mine, theirs = ours.get(name, "nothing"), torchs.get(name, "nothing")
        if mine != theirs and not _near(program, mine, theirs):
            wrong.append(f"{name} is {_shown(mine)}, torch has {_shown(theirs)}")
    return wrong


def _near(program: Program, mine: Any, theirs: Any) -> bool:
    if type(mine) is not type(theirs) or mine is None or theirs is None:
        return False
    if isinstance(mine, list):
        same = len(mine) == len(theirs)
        return same and all(a == b or _near(program, a, b) for a, b in zip(mine, theirs, strict=True))
    if not isinstance(mine, tuple) or mine[0] != theirs[0]:
        return False
    a, b = _values(mine), _values(theirs)
    if a.is_complex():  # a division of an infinite number may give NaN in one part, or in both
        both = a.isfinite() | b.isfinite()
        a, b = a[both], b[both]
    if program.world == 2 and not program.hook:
        return mine[2] == theirs[2] and _but_for_underflow(program, a, b)
    tolerance = max(_TOLERANCE.get(mine[0][0], 1e-9), _OF_HOOK if program.hook == "fp16" else 0.0)
    return torch.allclose(a, b, tolerance, tolerance, equal_nan=True)


def _but_for_underflow(program: Program, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the two are equal, but for numbers that are too small to be halved: our transports divide the sum."""
    least = (
        0.0
        if program.backend == "gloo"
        else 2 * torch.finfo(a.dtype).smallest_normal * torch.finfo(a.dtype).eps
    )
    near = (a - b).abs() <= least
    return bool((near | (a == b) | (a.isnan() & b.isnan())).all()) and (a.is_complex() or least > 0)


def _values(seen: Any) -> torch.Tensor:
    dtype = getattr(torch, seen[0][0].removeprefix("torch."))
    return torch.frombuffer(bytearray(seen[1]), dtype=dtype) if seen[1] else torch.empty(0, dtype=dtype)


def _shown(seen: Any) -> str:
    if isinstance(seen, tuple) and len(seen) == 3:
        shape = "x".join(map(str, seen[0][1])) or "scalar"
        return f"{seen[0][0].removeprefix('torch.')}[{shape}] {[*_values(seen)[:4].tolist()]}"
    if isinstance(seen, list):
        return f"[{', '.join(map(_shown, seen[:3]))}{', ...' if len(seen) > 3 else ''}] ({len(seen)})"
    return str(seen)
