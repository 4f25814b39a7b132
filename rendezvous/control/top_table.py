"""The table of `ddpctl top`: one row per rank, in as many columns as the terminal is wide. Pure.

The share of communication and the own time of a rank are those of the last seconds, or of the whole run at the first
look. A rank that is slower than the others has a lower share than they have: they wait for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from statistics import median

from rendezvous.diagnosing.stragglers import Standing, standings
from rendezvous.values.cause_text import counted
from rendezvous.values.durations import short_duration
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.questions import RankSeen
from rendezvous.values.rank_view import RankPhase

_KIB, _UNITS = 1024.0, "BKMGTP"
_SHORT = {RankPhase.COMMUNICATE: "comm", RankPhase.EVALUATION: "evaluate"}
_NO_NUMBER = "-"
_MOST_LOGGED = 8
_FEWEST_STEPS, _SHORTEST_S = 3, 2.0  # between two looks from which figures are computed


@dataclass(frozen=True, slots=True)
class RankRow:
    node: str
    seen: RankSeen
    share: float | None = None  # of communication, 0 to 1
    standing: Standing | None = None  # None: too few steps so far


@dataclass(frozen=True, slots=True)
class Look:
    """The figures of a rank between two looks, and the later one, from which the next figures count."""

    seen: RankSeen
    share: float | None = None
    own_s: float | None = None


Spent = dict[tuple[int, int], Look]  # by rank and pid
NodeUse = dict[str, dict[str, float]]  # by node: how much of it is used, as its agent names it


@dataclass(frozen=True, slots=True)
class TableHead:
    """What the lines above the table show."""

    job: str
    phase: str = ""
    generation: int = 0
    nodes: int = 0
    restarts: int = 0
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sorting:
    column: str = "rank"
    is_reversed: bool = False


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    key: Callable[[RankRow], object]
    text: Callable[[RankRow], str]
    is_left: bool = False
    least: int = 0  # width, so that the table does not move with every update
    keep: int = 9  # columns with a smaller number are dropped first where there is no room


def rows_of(seen: Iterable[tuple[str, RankSeen]], before: Spent) -> tuple[list[RankRow], Spent]:
    """The rows, with the figures since the looks `before`; and what the next look compares with."""
    ranks = [(node, rank, _looked(rank, before.get((rank.rank, rank.pid)))) for node, rank in seen]
    own = {rank.rank: look.own_s for _, rank, look in ranks if rank.alive and look.own_s is not None}
    found = standings(
        own, median(rank.mean_step_s for _, rank, _ in ranks if rank.rank in own) if own else 0.0
    )
    rows = [RankRow(node, rank, look.share, found.get(rank.rank)) for node, rank, look in ranks]
    return rows, {(rank.rank, rank.pid): look for _, rank, look in ranks}


def _looked(seen: RankSeen, before: Look | None) -> Look:
    since = before.seen if before is not None else RankSeen(seen.rank, seen.local_rank)
    steps, spent_s = seen.step - since.step, seen.spent_s - since.spent_s
    if steps < _FEWEST_STEPS or spent_s < _SHORTEST_S:
        return before or Look(since)
    waited_s = min(spent_s, max(0.0, seen.waited_s - since.waited_s))
    return Look(seen, waited_s / spent_s, (spent_s - waited_s) / steps)


def own_s(row: RankRow) -> float:
    """Per step: the time in which the rank does not wait for others. 0: unknown."""
    return row.standing.own_s if row.standing is not None else 0.0


_COLUMNS: Mapping[str, _Column] = {
    "rank": _Column("RANK", lambda row: row.seen.rank, lambda row: str(row.seen.rank)),
    "node": _Column("NODE", lambda row: row.node, lambda row: row.node, is_left=True, keep=3),
    "phase": _Column(
        "PHASE", lambda row: phase_text(row.seen), lambda row: phase_text(row.seen), is_left=True
    ),
    "step": _Column(
        "STEP", lambda row: row.seen.step, lambda row: str(row.seen.step) if row.seen.known else _NO_NUMBER
    ),
    "time": _Column(
        "OWN TIME", own_s, lambda row: short_duration(own_s(row)) if row.standing else _NO_NUMBER
    ),
    "median": _Column(
        "/MED",
        lambda row: row.standing.ratio if row.standing else 0.0,
        lambda row: f"{row.standing.ratio:.2f}x" if row.standing else _NO_NUMBER,
        keep=7,
    ),
    "comm": _Column(
        "COMM", lambda row: -1.0 if row.share is None else row.share, lambda row: percent(row.share), least=4
    ),
    "memory": _Column("MEM", lambda row: row.seen.memory, lambda row: size(row.seen.memory), keep=6),
    "gpu": _Column("GPU", lambda row: _gpu_use(row), lambda row: _gpu_text(row), keep=5),
    "gpu-memory": _Column("GMEM", lambda row: _gpu_memory(row), lambda row: size(_gpu_memory(row)), keep=4),
    "restarts": _Column(
        "RST", lambda row: row.seen.starts, lambda row: str(max(0, row.seen.starts - 1)), keep=8
    ),
    "quiet": _Column("QUIET", lambda row: row.seen.quiet_s, lambda row: _quiet(row), keep=2),
}
COLUMNS = tuple(_COLUMNS)
_GPU_COLUMNS = ("gpu", "gpu-memory")
_NARROWEST_NODE, _WIDEST_NODE = 8, 24


def table(rows: Sequence[RankRow], sorting: Sorting, width: int) -> tuple[str, list[str]]:
    """The head of the table, and its rows in the wanted order."""
    has_gpus = any(row.seen.gpu is not None for row in rows)
    names = [name for name in COLUMNS if has_gpus or name not in _GPU_COLUMNS]
    ordered = sort(rows, sorting)
    cells = {name: [_COLUMNS[name].text(row) for row in ordered] for name in names}
    widths = {
        name: max(len(_COLUMNS[name].title), _COLUMNS[name].least, *map(len, cells[name])) for name in names
    }
    _fit(names, widths, width)
    lines = [
        " ".join(_aligned(cells[name][place], name, widths[name]) for name in names).rstrip()
        for place in range(len(ordered))
    ]
    head = " ".join(_aligned(_COLUMNS[name].title, name, widths[name]) for name in names)
    return head.rstrip()[:width], [line[:width] for line in lines]


def sort(rows: Sequence[RankRow], sorting: Sorting) -> list[RankRow]:
    key = _COLUMNS[sorting.column].key
    by_rank = sorted(rows, key=lambda row: row.seen.rank)
    return sorted(by_rank, key=key, reverse=sorting.is_reversed)  # type: ignore[arg-type]


def _fit(names: list[str], widths: dict[str, int], width: int) -> None:
    """Shorten the names of nodes, then drop columns, until a row fits."""

    def excess() -> int:
        return sum(widths[name] for name in names) + len(names) - 1 - width

    widths["node"] = min(widths["node"], _WIDEST_NODE)
    if excess() > 0:
        widths["node"] = max(min(widths["node"], _NARROWEST_NODE), widths["node"] - excess())
    while excess() > 0 and len(names) > 2:
        names.remove(min(names, key=lambda name: _COLUMNS[name].keep))


def _aligned(text: str, name: str, width: int) -> str:
    if len(text) > width:
        text = text[: width - 1] + "~"
    return text.ljust(width) if _COLUMNS[name].is_left else text.rjust(width)


def summary(rows: Sequence[RankRow], head: TableHead) -> list[str]:
    """The lines above the table: the job, and its speed."""
    alive = [row.seen for row in rows if row.seen.alive]
    times = [seen.mean_step_s for seen in alive if seen.mean_step_s > 0]
    nodes = counted(head.nodes or len({row.node for row in rows}), "node")
    where = f"{counted(len(rows), 'rank')} on {nodes}, " if rows else ""
    restarts = counted(head.restarts, "restart")
    lines = [f"{head.phase}, generation {head.generation}, {where}{restarts}, job {head.job}"]
    if times:
        steps = [seen.step for seen in alive if seen.known]
        shares = sorted(row.share for row in rows if row.share is not None)
        words = [f"step {min(steps)}" if min(steps) == max(steps) else f"steps {min(steps)} to {max(steps)}"]
        words.append(f"{short_duration(median(times))} each")
        if own := sorted(own_s(row) for row in rows if row.standing is not None):
            words.append(f"own time of a rank {short_duration(own[0])} to {short_duration(own[-1])}")
        if shares:
            words.append(f"communication {percent(median(shares))}")
        lines.append(", ".join(words))
    if logged := _logged_words(rows):
        lines.append(logged)
    return lines + list(head.problems)


def _logged_words(rows: Sequence[RankRow]) -> str:
    """What the script measures, of the lowest rank that tells it."""
    first = min((row.seen for row in rows if row.seen.logged), key=lambda seen: seen.rank, default=None)
    if first is None:
        return ""
    values = ", ".join(
        f"{_printable(each.name)} {_printable(each.value)}" for each in first.logged[:_MOST_LOGGED]
    )
    return f"{values} (rank {first.rank}, step {max(each.step for each in first.logged)})"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


# --- texts of cells --------------------------------------------------------------------------------------


def phase_text(seen: RankSeen) -> str:
    if not seen.alive:
        return "ended"
    if seen.process in ("T", "t"):
        return "stopped"
    if seen.process == "F":
        return "frozen"
    return _SHORT.get(seen.phase, str(seen.phase)) if seen.known else "runs"


def _quiet(row: RankRow) -> str:
    return short_duration(row.seen.quiet_s) if row.seen.known and row.seen.alive else _NO_NUMBER


def _gpu_use(row: RankRow) -> float:
    return -1.0 if row.seen.gpu is None or row.seen.gpu.utilization is None else row.seen.gpu.utilization


def _gpu_text(row: RankRow) -> str:
    return _NO_NUMBER if _gpu_use(row) < 0 else f"{_gpu_use(row):.0f}%"


def _gpu_memory(row: RankRow) -> int:
    return 0 if row.seen.gpu is None else row.seen.gpu.memory_used


def percent(share: float | None) -> str:
    return _NO_NUMBER if share is None else f"{100 * share:.0f}%"


def size(number: float) -> str:
    if number <= 0:
        return _NO_NUMBER
    power = 0
    while number >= 999.5 and power + 1 < len(_UNITS):
        number /= _KIB
        power += 1
    return f"{number:.0f}{_UNITS[power]}" if number >= 9.95 or not power else f"{number:.1f}{_UNITS[power]}"


# --- top screen -------------------------------------------------------------------------------------
#
# The screen of `ddpctl top`, and what its keys do. Pure: rows of text from a view and a size.

_REVERSE, _PLAIN, _BOLD = "\x1b[7m", "\x1b[0m", "\x1b[1m"
_MOST_PROBLEMS = 4
_FEWEST_RANKS = 3
_KEYS = re.compile(rb"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|.", re.DOTALL)
_NAMES = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"k": "up",
    b"\x1b[B": "down", b"\x1bOB": "down", b"j": "down",
    b"\x1b[5~": "page up", b"\x1b[6~": "page down",
    b"\x1b[H": "first", b"\x1b[1~": "first", b"g": "first",
    b"\x1b[F": "last", b"\x1b[4~": "last", b"G": "last",
    b"\x1b[C": "next column", b"\x1bOC": "next column", b">": "next column", b"s": "next column",
    b"\x1b[D": "previous column", b"\x1bOD": "previous column", b"<": "previous column",
    b"\r": "open", b"\n": "open", b"\x1b": "close", b"b": "close",
    b"r": "reverse", b" ": "pause", b"p": "pause", b"q": "quit", b"Q": "quit", b"\x03": "quit",
}  # fmt: skip
_HELP = "q quit  <> sort  r reverse  arrows select  Enter one rank  p pause"
_HELP_ONE = "b back  arrows next rank  p pause  q quit"


@dataclass(frozen=True, slots=True)
class View:
    head: TableHead
    rows: tuple[RankRow, ...] = ()
    sorting: Sorting = Sorting()
    at: int = 0  # the row of the table that is selected
    rank: int | None = None  # only this one is shown
    is_paused: bool = False
    is_over: bool = False
    note: str = ""  # why the table is not of this moment
    node_use: NodeUse = field(default_factory=dict)


def keys_in(data: bytes) -> Iterator[str]:
    return (_NAMES[key] for key in _KEYS.findall(data) if key in _NAMES)


def pressed(view: View, key: str, height: int) -> View:
    """The view after a key. `height`: of the terminal, for the keys that scroll by a page."""
    page = _room(view, height)
    last = max(0, len(view.rows) - 1)
    at = COLUMNS.index(view.sorting.column)
    match key:
        case "quit":
            return replace(view, is_over=True)
        case "pause":
            return replace(view, is_paused=not view.is_paused)
        case "reverse":
            return replace(
                view, sorting=replace(view.sorting, is_reversed=not view.sorting.is_reversed), at=0
            )
        case "open" | "close":
            return replace(view, rank=_selected(view) if key == "open" else None)
        case "next column" | "previous column":
            column = COLUMNS[(at + (1 if key == "next column" else -1)) % len(COLUMNS)]
            return replace(
                view, sorting=Sorting(column, column not in ("rank", "node", "phase", "step")), at=0
            )
        case _:
            moved = {"up": -1, "down": 1, "page up": -page, "page down": page, "first": -last, "last": last}
            there = replace(view, at=min(last, max(0, view.at + moved[key])))
            return there if view.rank is None else replace(there, rank=_selected(there))


def _selected(view: View) -> int | None:
    rows = sort(view.rows, view.sorting)
    return rows[min(view.at, len(rows) - 1)].seen.rank if rows else None


def screen(view: View, width: int, height: int, *, color: bool = False) -> list[str]:
    """At most `height` rows of at most `width` columns."""
    if (row := next((row for row in view.rows if row.seen.rank == view.rank), None)) is not None:
        return _one_rank(view, row, width, height)
    upper = _upper(view, height)
    head, rows = table(view.rows, view.sorting, width)
    room = _room(view, height)
    at = min(view.at, max(0, len(rows) - 1))
    top = min(max(0, at - room + 1), max(0, len(rows) - room))
    shown = rows[top : top + room]
    if color and shown:
        shown[at - top] = f"{_REVERSE}{shown[at - top].ljust(width)}{_PLAIN}"
    painted = f"{_REVERSE}{head[:width].ljust(width)}{_PLAIN}" if color else head[:width]
    lower = _lower(view, top, len(shown), len(rows))
    body = [line[:width] for line in upper] + [painted] + shown
    body += [""] * (height - 1 - len(body))
    return [*body[: height - 1], lower[:width]]


def _one_rank(view: View, row: RankRow, width: int, height: int) -> list[str]:
    """All that is known of one rank."""
    seen, standing = row.seen, row.standing
    facts = [
        ("node", f"{row.node}, process {seen.pid}, started {counted(seen.starts, 'time')}"),
        ("doing", f"{seen.doing or phase_text(seen)}, for {short_duration(seen.phase_s)}"),
        ("says", seen.message),
        ("step", f"{seen.step}, {short_duration(seen.mean_step_s)} each" if seen.known else "no steps"),
        (
            "own time",
            f"{short_duration(standing.own_s)}, {standing.ratio:.2f} times that of its peers"
            if standing
            else "",
        ),
        ("waits", f"{percent(row.share)} of its time in collectives" if row.share is not None else ""),
        ("last sign", f"{short_duration(seen.quiet_s)} ago"),
        ("memory", size(seen.memory)),
        (
            "gpu",
            f"{_gpu_text(row)} busy, {size(_gpu_memory(row))} of {size(seen.gpu.memory_total)}"
            if seen.gpu
            else "",
        ),
        ("its node", use_words(view.node_use.get(row.node, {}))),
        *((_printable(each.name), f"{_printable(each.value)} (step {each.step})") for each in seen.logged),
    ]
    lines = [f"rank {seen.rank}", *(f"{name:<12}{_printable(words)}" for name, words in facts if words)]
    body = [*summary(view.rows, replace(view.head, problems=()))[:2], "", *lines][: height - 1]
    return [
        *(line[:width] for line in body),
        *[""] * (height - 1 - len(body)),
        (view.note or _HELP_ONE)[:width],
    ]


def use_words(use: Mapping[str, float]) -> str:
    """How much of a node is used, of what its agent knows."""
    shares = (("CPU", "cpu"), ("memory", "memory"), ("GPUs", "gpu"))
    words = [f"{name} {use[key]:.0f}%" for name, short in shares if (key := f"{short}_percent") in use]
    if "gpu_celsius" in use:
        words.append(f"{use['gpu_celsius']:.0f} C")
    for name, first, second in (("network", "received", "sent"), ("disk", "read", "written")):
        if f"{first}_bytes" in use:
            rates = [(each, use[f"{each}_bytes"]) for each in (first, second)]
            amounts = [f"{size(rate) if rate >= 1 else 0}/s {each}" for each, rate in rates]
            words.append(f"{name} {' and '.join(amounts)}")
    return ", ".join(words)


def _upper(view: View, height: int) -> list[str]:
    lines = summary(view.rows, replace(view.head, problems=()))
    problems = view.head.problems
    most = max(0, min(_MOST_PROBLEMS, height - len(lines) - _FEWEST_RANKS - 2))
    if len(problems) > most:
        problems = (*problems[: max(0, most - 1)], f"and {len(problems) - max(0, most - 1)} more problems")[
            :most
        ]
    return [*lines, *problems]


def _room(view: View, height: int) -> int:
    return max(1, height - 2 - len(_upper(view, height)))


def _lower(view: View, top: int, shown: int, of: int) -> str:
    if view.note:
        return view.note
    which = f"ranks {top + 1}-{top + shown} of {of:,}" if shown < of else ""
    order = f"by {view.sorting.column}{' (descending)' if view.sorting.is_reversed else ''}"
    words = [which, order, "paused" if view.is_paused else "", _HELP]
    return "  ".join(word for word in words if word)
