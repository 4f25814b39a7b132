"""What torch and NCCL record of collectives: settings, and the dumps of flight recorders. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.rank_view import MAX_CALLS, MAX_GROUPS, Collective, GroupView, RankReport

# --- the variables of the watchdogs ----------------------------------------------------------------
#
# Environment variables for the watchdogs of NCCL and torch.
#
# They let the launcher's timeout expire first, and let a failed rank exit at once. Sets only variables that the
# user did not set, and only if ranks use GPUs: other backends do not read them.

DUMP_FILE = "flight-recorder-"  # + rank, in the folder of the rank's logs; a pickle of torch's
PIPE_FILE = (
    "flight-recorder-pipe-"  # + rank + ".pipe", in the node's scratch folder: not every disk has pipes
)

# Name, value, why; docs/communication-errors.md shows this table.
SHARED: tuple[tuple[str, str, str], ...] = (
    (
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
        "500",
        "after a timeout torch waits for the dumps of all ranks: 2 s (4 x this value) instead of 60 s",
    ),
    (
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "1",
        "a rank whose collective times out writes a dump of its flight recorder",
    ),
    ("TORCH_FR_BUFFER_SIZE", "2000", "switches the flight recorder on; it keeps the last 2,000 collectives"),
    (
        "TORCH_INCLUDE_STACK_TRACE",
        "0",
        "no stacks in dumps: they need the GIL, which another thread may hold",
    ),
)
OF_RANK: tuple[tuple[str, str], ...] = (
    ("TORCH_FR_DUMP_TEMP_FILE", "the rank writes dumps to the directory of its logs"),
    ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "the launcher requests a dump through this pipe"),
)
_FORMERLY = {  # the names in older versions of torch; a value that the user set there is kept
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
}


def _free(name: str, environ: Mapping[str, str]) -> bool:
    return name not in environ and _FORMERLY.get(name, name) not in environ


def shared(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value, _why in SHARED if _free(name, environ)}


def of_rank(directory: str, scratch: str, environ: Mapping[str, str]) -> dict[str, str]:
    values = {"TORCH_FR_DUMP_TEMP_FILE": f"{directory}/{DUMP_FILE}"}
    if scratch:
        values["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = f"{scratch}/{PIPE_FILE}"
    return {name: value for name, value in values.items() if _free(name, environ)}


# --- dumps of flight recorders ---------------------------------------------------------------------
#
# Reads what torch's flight recorders of ranks show, and adds it to the reports of the ranks. Pure.
#
# A rank's recorder holds the last collectives of each process group, by their sequence number, also those that C++
# started. `rendezvous/diagnosing/diagnosis.py` compares the reports of all ranks. `launcher/health/dumps.py` reads
# the dumps. All values are checked, because ranks wrote them.

_MAX_NUMBER = 1 << 62
_MAX_TENSORS, _MAX_DIMENSIONS = 1024, 64
_MAX_WORD_CHARS = 1024
# Tensors of these have one shape on all ranks. In the others, each rank may use its own shape.
OF_ONE_SHAPE = ("all_reduce", "allreduce", "broadcast", "reduce", "_reduce_scatter_base", "_all_gather_base")


class NotADump(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class RecordedCall:
    sequence: int
    op: str  # "all_reduce"
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    done: bool
    at_ns: int = 0  # when it began, in wall-clock time


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """One process group in one rank's recorder."""

    name: str
    members: tuple[int, ...]  # () if the recorder does not report them
    entries: tuple[RecordedCall, ...]  # by number
    size: int = 0  # number of its ranks, from the guard; 0: unknown
    spelled: str = ""  # its ranks, as text: "0-3"


@dataclass(frozen=True, slots=True)
class Dump:
    rank: int
    groups: tuple[RecordedGroup, ...]


# --- one recorder ------------------------------------------------------------------------------------


def dump_of(rank: int, plain: object) -> Dump:
    """Convert a dump read from pickle or JSON: torch writes the same fields in both."""
    if not isinstance(plain, dict) or not isinstance(plain.get("entries"), list):
        raise NotADump("not a dump of torch's flight recorder")
    members = _members(plain.get("pg_config"))
    by_group: dict[str, dict[int, RecordedCall]] = {}
    for each in plain["entries"]:
        if isinstance(each, dict) and not each.get("is_p2p"):
            group, entry = _entry(each)
            by_group.setdefault(group, {})[entry.sequence] = entry
    return Dump(
        rank,
        tuple(
            RecordedGroup(name, members.get(name, ()), tuple(sorted(entries.values(), key=_number)))
            for name, entries in sorted(by_group.items())
        ),
    )


def _number(entry: RecordedCall) -> int:
    return entry.sequence


def _entry(each: Mapping[str, Any]) -> tuple[str, RecordedCall]:
    try:
        name, _description = (_word(part) for part in each["process_group"])
        op = _word(each["profiling_name"]).rpartition(":")[2]
        sizes = tuple(_size(size) for size in (each.get("input_sizes") or ())[:_MAX_TENSORS])
        dtypes = tuple(_word(dtype) for dtype in each.get("input_dtypes") or ())
        done = bool(each.get("retired")) or each.get("state") == "completed"
        began = _number_of(each.get("time_created_ns") or 0)
        sequence = _number_of(each["collective_seq_id"])
        return name, RecordedCall(sequence, op, sizes, dtypes, done, began)
    except (KeyError, TypeError, ValueError, OverflowError) as error:  # Overflow: int() of Infinity
        raise NotADump(f"cannot parse an entry of the flight recorder dump: {error}") from None


def _size(size: Sequence[Any]) -> tuple[int, ...]:
    if len(size) > _MAX_DIMENSIONS:
        raise ValueError(f"too many tensor dimensions: {len(size)} (at most {_MAX_DIMENSIONS})")
    return tuple(map(_number_of, size))


def _number_of(part: Any) -> int:
    """Reject very large numbers: their product could take hours to compute."""
    number = int(part)
    if abs(number) > _MAX_NUMBER:
        raise ValueError("a number is too large (more than 62 bits)")
    return number


def _word(part: object) -> str:
    """Accept only names and numbers: a list with a cycle would produce text without end."""
    if not isinstance(part, str | int):
        raise TypeError(f"expected a name, got {type(part).__name__}")
    return str(part)[:_MAX_WORD_CHARS]


def _members(configured: object) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    if isinstance(configured, dict):
        for name, config in configured.items():
            if not isinstance(name, str | int):
                continue
            ranks = config.get("ranks") if isinstance(config, dict) else None
            if isinstance(ranks, str):
                try:
                    ranks = json.loads(ranks)
                except (ValueError, RecursionError):
                    continue
            if isinstance(ranks, list) and all(type(rank) is int and 0 <= rank < 1 << 31 for rank in ranks):
                found[str(name)] = tuple(ranks)
    return found


def with_members(dump: Dump, reported: Mapping[str, tuple[int, str]]) -> Dump:
    """Add the group members reported by the guard; the recorder does not have them for some groups."""

    def known(group: RecordedGroup) -> RecordedGroup:
        size, spelled = reported.get(group.name, (0, ""))
        return replace(group, size=size, spelled=spelled)

    return replace(dump, groups=tuple(map(known, dump.groups)))


def with_own_members(dump: Dump) -> Dump:
    """Take the group members from the recorder, where no guard reports them."""
    groups = ((group.name, (len(group.members), ",".join(map(str, group.members)))) for group in dump.groups)
    return with_members(dump, dict(groups))


# --- dumps of pending calls only -------------------------------------------------------------------
#
# torch can leave finished calls out of a dump. Then nothing tells how far a rank came in a group, except the oldest
# call that it still waits in. If other members wait in later calls only, they have finished this one. All members take
# part in it, so the rank has entered it, too: its GPU, or a link of it, has not finished what theirs have. In a
# broadcast and its like, a rank may finish while others have not begun, so these show nothing. If most members are
# behind, no single rank is the reason.

_FINISH_ALONE = ("broadcast", "reduce", "gather", "scatter")


def ranks_behind(dumps: Collection[Dump]) -> dict[int, str]:
    """Return what is known of each rank that has not finished a call which most others have finished."""
    oldest: dict[str, dict[int, RecordedCall]] = {}
    for dump in dumps:
        for group in dump.groups:
            if any(entry.done for entry in group.entries):
                return {}
            oldest.setdefault(group.name, {})[dump.rank] = group.entries[0]
    found: dict[int, str] = {}
    for name, calls in oldest.items():
        for rank, call in calls.items():
            ahead = [other for other in calls if calls[other].sequence > call.sequence]
            if call.op not in _FINISH_ALONE and len(ahead) * 2 >= len(calls):
                others = ", ".join(map(str, sorted(ahead)))
                found.setdefault(
                    rank,
                    f"has not finished {call.op} #{call.sequence} of group {name}, which others ({others}) have: check "
                    "its GPU and its links",
                )
    return dict(sorted(found.items()))


# --- what the service gets of it -------------------------------------------------------------------
#
# Torch enables its recorder by default, for Gloo and for NCCL.

_SHORT_CHARS = 64
_DTYPES = {  # torch's own names
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
}


def with_recorded(
    reports: tuple[RankReport, ...], dumps: Iterable[Dump], now_ns: int
) -> tuple[RankReport, ...]:
    """Add the dumps to the reports. `now_ns` is wall-clock time, like the times in the recorders."""
    by_rank = {dump.rank: dump for dump in dumps}
    return tuple(
        _with_dump(report, by_rank[report.rank], now_ns) if report.rank in by_rank else report
        for report in reports
    )


def _with_dump(report: RankReport, dump: Dump, now_ns: int) -> RankReport:
    """If there are too many groups, first keep those in which the rank waits, then the most recently used groups."""
    used = [group for group in dump.groups if group.entries]
    used.sort(key=lambda group: (not _pending(group), -group.entries[-1].at_ns))
    calls = [(group, entry) for group in used for entry in group.entries]
    waits = sorted((each for each in calls if not each[1].done), key=_begin_ns)[:MAX_CALLS]
    done = sorted((each for each in calls if each[1].done), key=_begin_ns, reverse=True)
    chosen = sorted([*waits, *done][:MAX_CALLS], key=_begin_ns)
    return replace(
        report,
        recorded=tuple(_call(group, entry, now_ns) for group, entry in chosen),
        recorder=tuple(map(_view, used[:MAX_GROUPS])),
    )


def _begin_ns(calls: tuple[RecordedGroup, RecordedCall]) -> int:
    return calls[1].at_ns


def _pending(group: RecordedGroup) -> int:
    return sum(not entry.done for entry in group.entries)


def _view(group: RecordedGroup) -> GroupView:
    entered = _limited(group.entries[-1].sequence)
    return GroupView(
        group.name[:_SHORT_CHARS], group.size, group.spelled, entered, max(0, entered - _pending(group))
    )


def _limited(value: int) -> int:
    """Limit the value to the range of the message field, because a rank may write any value."""
    return min(max(0, value), 1 << 62)


def _call(group: RecordedGroup, entry: RecordedCall, now_ns: int) -> Collective:
    entered_s = _limited(now_ns - entry.at_ns) / 1e9
    alike = entry.op in OF_ONE_SHAPE and bool(entry.dtypes)
    dtype = _DTYPES.get(entry.dtypes[0], entry.dtypes[0].lower())[:_SHORT_CHARS] if alike else ""
    return Collective(
        number=_limited(entry.sequence),
        group=group.name[:_SHORT_CHARS],
        seq=_limited(entry.sequence),
        op=entry.op[:_SHORT_CHARS],
        dtype=dtype,
        numel=_limited(sum(map(prod, entry.sizes))) if alike else 0,
        entered_s=entered_s,
        finished_s=entered_s if entry.done else None,
    )
