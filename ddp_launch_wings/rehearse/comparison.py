"""Compares the recording of a run with that of an undisturbed one. Pure.

A step is known by the weights that it begins with. So a step of a process that was restarted is the step of the
undisturbed run with the same weights, wherever the script itself thinks that it is. From the first step on that has
other weights than any, steps are counted on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rendezvous.values.late_dataclass import dataclass

_FIELDS = ("weights", "optimizer", "rates", "inputs")


@dataclass(frozen=True, slots=True)
class RecordedStep:
    process: int  # number of the process of this rank, from 0
    weights: str
    optimizer: str
    rates: Sequence[float]
    inputs: str
    generators: Mapping[str, str]
    values: Sequence[Mapping[str, float]] = ()  # given since this step began
    done_at: float | None = None  # None: not finished

    @property
    def is_done(self) -> bool:
        return self.done_at is not None


@dataclass(frozen=True, slots=True)
class Track:
    """What one rank did, over all its processes."""

    steps: tuple[RecordedStep, ...]
    final: Mapping[str, str]  # digests of parameters and buffers at the end; empty: not recorded
    lines: Mapping[str, str]  # of the script: "step", "forward", "manual_seed", "save"
    wrote: tuple[tuple[str, str, bool], ...] = ()  # path, line of the script, appends
    problem: str = ""
    began: float = 0.0
    ended: float = 0.0
    processes: int = 1
    begun_from: tuple[str, ...] = ()  # what was saved after a failure, for its next processes


def track(processes: Iterable[Iterable[Mapping[str, Any]]]) -> Track:
    """From the lines of the files of one rank, in the order of its processes."""
    steps: list[dict[str, Any]] = []
    final: Mapping[str, str] = {}
    lines: dict[str, str] = {}
    wrote: dict[tuple[str, str, bool], None] = {}
    begun_from: list[str] = []
    problem, times, number = "", [], -1
    for number, records in enumerate(processes):
        final = {}
        for each in records:
            times.append(each["at"])
            match each["kind"]:
                case "process" if each.get("began_from"):
                    begun_from.append(each["began_from"])
                case "step":
                    kept = {name: each[name] for name in (*_FIELDS, "generators")}
                    steps.append({**kept, "process": number, "values": [], "done_at": None})
                case "done" if steps:
                    steps[-1]["done_at"] = each["at"]
                case "values" if steps and steps[-1]["process"] == number:
                    steps[-1]["values"] += each["values"]
                case "line":
                    lines.setdefault(each["what"], each["where"])
                case "wrote":
                    wrote[each["path"], each["where"], each["appends"]] = None
                case "final":
                    final = each["weights"]
                case "problem":
                    problem = each["text"]
    made = tuple(RecordedStep(**each) for each in steps)
    began, ended = (min(times), max(times)) if times else (0.0, 0.0)
    files = (tuple(wrote), problem, began, ended, number + 1, tuple(begun_from))
    return Track(made, final, lines, *files)


# --- which step it is ------------------------------------------------------------------------------


def aligned(reference: Track, played: Track) -> list[int | None]:
    """For each step of `played` its place in `reference`, from 0; None: its process began with weights of no step."""
    places: dict[str, list[int]] = {}
    for at, step in enumerate(reference.steps):
        places.setdefault(step.weights, []).append(at)
    found: list[int | None] = []
    for at, step in enumerate(played.steps):
        same_process = at > 0 and played.steps[at - 1].process == step.process
        before = found[-1] if found else None
        last = before if same_process else max((each for each in found if each is not None), default=-1)
        follows = None if not same_process or before is None else before + played.steps[at - 1].is_done
        known = places.get(step.weights, ())
        if follows is not None and (follows in known or not known):
            found.append(follows)
        elif known and last is not None:
            earlier = [each for each in known if each <= last + 1]
            found.append(earlier[-1] if earlier else known[0])
        else:
            found.append(known[0] if known else None)
    return found


@dataclass(frozen=True, slots=True)
class Return:
    """Where the ranks went on after a failure. Steps are numbered from 1."""

    finished: int  # steps that all ranks had finished before
    at: int | None  # the first step after it; None: unknown weights
    stood_s: float  # from the last finished step before it to the first one after it

    @property
    def lost(self) -> int | None:
        return None if self.at is None else max(0, self.finished - (self.at - 1))


def returns(reference: Sequence[Track], played: Sequence[Track]) -> list[Return]:
    """Each place where the run went back, or processes were replaced."""
    by_rank = [(each, aligned(ref, each)) for ref, each in zip(reference, played, strict=False)]
    most = max((each.processes for each in played), default=1)
    return [found for number in range(1, most) if (found := _return(by_rank, number)) is not None]


def _return(by_rank: Sequence[tuple[Track, Sequence[int | None]]], number: int) -> Return | None:
    """That of the ranks which have so many processes before it."""
    finished, first, stood = [], [], 0.0
    for each, places in by_rank:
        steps = list(zip(places, each.steps, strict=True))
        before = [(place, step) for place, step in steps if step.process < number]
        after = [(place, step) for place, step in steps if step.process == number]
        if not after:
            continue
        finished.append(max((place + step.is_done for place, step in before if place is not None), default=0))
        first.append(after[0][0])
        ends = [step.done_at for _place, step in before if step.done_at is not None]
        again = [step.done_at for _place, step in after if step.done_at is not None]
        stood = max(stood, again[0] - ends[-1] if ends and again else 0.0)
    if not first:
        return None
    known = [each for each in first if each is not None]
    return Return(min(finished), min(known) + 1 if len(known) == len(first) else None, stood)


# --- what differs ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepDifference:
    rank: int
    step: int  # from 1
    # "weights", "optimizer", "rates", "torch", "python", "numpy", "cuda", "inputs", "values"
    what: tuple[str, ...]
    again: Mapping[str, int]  # what is equal to that of another step, from 1
    is_new_process: bool


def first_difference(reference: Sequence[Track], played: Sequence[Track]) -> StepDifference | None:
    """The earliest step in which anything differs, on the lowest rank."""
    found = (_first_of(rank, *pair) for rank, pair in enumerate(zip(reference, played, strict=False)))
    return min(filter(None, found), key=lambda each: (each.step, each.rank), default=None)


def used_generators(track: Track) -> set[str]:
    """Those that draw numbers while it trains. A generator that nothing uses says nothing."""
    pairs = [pair for pair in pairwise(track.steps) if pair[0].process == pair[1].process]
    return {name for a, b in pairs for name in a.generators if a.generators[name] != b.generators.get(name)}


def _first_of(rank: int, reference: Track, played: Track) -> StepDifference | None:
    used = used_generators(reference) | used_generators(played)
    before = 0
    for step, place in zip(played.steps, aligned(reference, played), strict=True):
        is_new, before = step.process > before, step.process
        if place is None:
            return StepDifference(rank, 0, ("weights",), {}, is_new)
        if place >= len(reference.steps):
            return StepDifference(rank, place + 1, ("steps",), {}, is_new)
        what = tuple(_different(reference.steps[place], step, used))
        if what:
            again = {name: at for name in what if (at := _equal_step(reference, name, step)) is not None}
            return StepDifference(rank, place + 1, what, again, is_new)
    return None


def _of(step: RecordedStep, name: str) -> Any:
    return getattr(step, name) if name in _FIELDS else step.generators.get(name)


def _different(reference: RecordedStep, step: RecordedStep, used: set[str]) -> Iterator[str]:
    """What the step began with; else what it logged, which follows from that."""
    names = ("weights", "optimizer", "rates", *sorted(used), "inputs")
    found = [name for name in names if _of(reference, name) != _of(step, name)]
    expected, logged = _last_values(reference), _last_values(step)
    if not found and any(expected[name] != logged[name] for name in expected.keys() & logged.keys()):
        found = ["values"]
    yield from found


def _equal_step(reference: Track, name: str, step: RecordedStep) -> int | None:
    """The step of the undisturbed run that had this."""
    if name in ("values", "weights", "optimizer"):
        return None
    same = (at for at, each in enumerate(reference.steps, 1) if _of(each, name) == _of(step, name))
    return next(same, None)


def _last_values(step: RecordedStep) -> dict[str, str]:
    return {name: repr(value) for each in step.values for name, value in each.items()}


# --- the curve, and the end ------------------------------------------------------------------------


def curves(reference: Track, played: Track) -> dict[str, dict[int, float]]:
    """The values by name and step, from 1. Of a step that was repeated, the last ones."""
    found: dict[str, dict[int, float]] = {}
    for step, place in zip(played.steps, aligned(reference, played), strict=True):
        for each in step.values if place is not None else ():
            for name, value in each.items():
                found.setdefault(name, {})[(place or 0) + 1] = value
    return found


def logging_rank(tracks: Sequence[Track]) -> int | None:
    return next((at for at, each in enumerate(tracks) if any(step.values for step in each.steps)), None)


def logged_again(reference: Sequence[Track], played: Sequence[Track]) -> list[int]:
    """The steps, from 1, whose values were given more than once, because they were repeated."""
    rank = logging_rank(reference)
    if rank is None or rank >= len(played):
        return []
    places = zip(played[rank].steps, aligned(reference[rank], played[rank]), strict=True)
    counts = Counter(place + 1 for step, place in places if step.values and place is not None)
    return sorted(step for step, count in counts.items() if count > 1)


@dataclass(frozen=True, slots=True)
class LoggedCurve:
    """How one logged value compares with that of the undisturbed run."""

    name: str
    steps: int
    differs_from: int | None  # the first step that has another value
    most: float  # the largest difference
    last: tuple[float, float]
    missing: int  # steps without this value


def compared_curves(reference: Sequence[Track], played: Sequence[Track]) -> list[LoggedCurve]:
    rank = logging_rank(reference)
    if rank is None or rank >= len(played):
        return []
    expected, found = curves(reference[rank], reference[rank]), curves(reference[rank], played[rank])
    made = []
    for name, values in expected.items():
        others = found.get(name, {})
        both = [(at, value, others[at]) for at, value in values.items() if at in others]
        different = [
            (at, abs(a - b)) for at, a, b in both if a != b and not (math.isnan(a) and math.isnan(b))
        ]
        most = max(
            (by for _, by in different), default=0.0, key=lambda by: math.inf if math.isnan(by) else by
        )
        last = both[-1][1:] if both else (math.nan, math.nan)
        first = different[0][0] if different else None
        made.append(LoggedCurve(name, len(values), first, most, last, len(values) - len(both)))
    return made


def differing_weights(reference: Sequence[Track], played: Sequence[Track]) -> list[str] | None:
    """Names of parameters and buffers whose final values differ on any rank; None: they are not known."""
    pairs = [(a.final, b.final) for a, b in zip(reference, played, strict=False)]
    if not pairs or not all(a and b for a, b in pairs):
        return None
    names = {name: None for a, b in pairs for name in a if a[name] != b.get(name)}
    return list(names)


# --- files -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileDifference:
    path: str
    words: str
    repeated: int = 0  # lines that appear more often than in the undisturbed run
    line: str = ""  # one of them


def compared_files(
    reference: Mapping[str, str | bytes], played: Mapping[str, str | bytes]
) -> list[FileDifference]:
    """By relative path: the text of a text file, or the digest of another one."""
    found = []
    for path in sorted(reference.keys() | played.keys()):
        if path not in played:
            found.append(FileDifference(path, "is missing"))
        elif path not in reference:
            found.append(FileDifference(path, "exists, and does not in the undisturbed run"))
        elif reference[path] != played[path]:
            found.append(_compared_file(path, reference[path], played[path]))
    return found


def _compared_file(path: str, reference: str | bytes, played: str | bytes) -> FileDifference:
    if isinstance(reference, bytes) or isinstance(played, bytes):
        return FileDifference(path, "has other content")
    before, after = (Counter(map(_key, each.splitlines())) for each in (reference, played))
    more = {key: after[key] - before[key] for key in after if 0 < before[key] < after[key]}
    lost = sum((before - after).values())
    parts = []
    if more:
        count = sum(more.values())
        parts.append(f"has {count} row{'s' * (count != 1)} more than once")
    if lost:
        parts.append(f"lacks {lost} of {before.total()} rows")
    changed = sum((Counter(reference.splitlines()) - Counter(played.splitlines())).values()) - lost
    if changed > 0:
        parts.append(f"has other numbers in {changed} of {before.total()} rows")
    words = " and ".join(parts) or "has other rows"
    return FileDifference(path, words, sum(more.values()), next(iter(more), ""))


def _key(line: str) -> str:
    """What a row begins with: its step, often."""
    for separator in (",", "\t", ";", " "):
        if separator in line:
            return line.partition(separator)[0]
    return line
