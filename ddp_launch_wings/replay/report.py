"""What `ddpctl replay` prints: it runs the state machine of a journal again, step by step, or with other settings."""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from ddp_launch_wings.replay.player import Line, Step, answers, event_words, play
from ddp_launch_wings.replay.what_if import BadChange, Choice, Parting, compare, parse
from launcher import replaying
from rendezvous.control.ctl_text import printable_lines
from rendezvous.control.formats import is_for_programs, show, warn
from rendezvous.replay.journal import service_machine
from rendezvous.replay.records import (
    FAMILY,
    MAGIC,
    Do,
    Header,
    Load,
    Machine,
    Record,
    RecordUnreadable,
    Start,
    read_header,
    records,
)
from rendezvous.values.contracts import VERSION
from rendezvous.values.error_codes import Code, Coded
from rendezvous.values.late_dataclass import dataclass

# Reads the lines of a journal, as far as it is whole: a job that still runs, or was killed, has no end in its file.

_CHUNK = 4096
_UNPACKED = 1 << 20  # bytes at a time; a hostile file must not take all memory
_LONGEST = 256 << 20  # line


class JournalUnreadable(Coded, ValueError):
    """This file is not a journal, or one of another release. The message is for a user."""

    code = Code.JOURNAL_UNREADABLE


class JournalFile:
    """`damage`: why the rest of the file is not readable, known when `lines` has ended; "" if there is none."""

    def __init__(self, path: str) -> None:
        self.path, self.damage = path, ""
        self.is_complete = False
        with open(path, "rb") as file:
            self._check_magic(file.read(len(MAGIC) + 16))
        try:
            self.header: Header = read_header(next(self._all_lines()))
        except StopIteration:
            raise JournalUnreadable(f"{path} has no header: {self.damage or 'it is empty'}") from None
        except RecordUnreadable as error:
            raise JournalUnreadable(f"{path} is damaged: {error}") from None

    def _check_magic(self, begin: bytes) -> None:
        if begin.startswith(MAGIC):
            return
        if begin.startswith(FAMILY):
            number = begin[len(FAMILY) :].split(b"\n")[0][:8].decode("ascii", "replace")
            own = MAGIC[len(FAMILY) :].strip().decode()
            raise JournalUnreadable(
                f"{self.path} has format {number}, and this release reads format {own}. Use the release that wrote it, "
                "or a later one"
            )
        raise JournalUnreadable(
            f"{self.path} is not a journal: it begins with {begin[:12]!r}. Journals have names that end in .ddpj"
        )

    def lines(self) -> Iterator[bytes]:
        """Of the records, without the header."""
        lines = self._all_lines()
        next(lines)
        return lines

    def _all_lines(self) -> Iterator[bytes]:
        self.damage, rest = "", b""
        try:
            for part in self._unpacked():
                *whole, rest = (rest + part).split(b"\n")
                yield from whole
                if len(rest) > _LONGEST:
                    self.damage = f"a line is longer than {_LONGEST >> 20} MiB"
                    return
        except zlib.error as error:
            self.damage = f"its compressed data is damaged ({error})"

    def _unpacked(self) -> Iterator[bytes]:
        unpacker = zlib.decompressobj()
        with open(self.path, "rb") as file:
            file.seek(len(MAGIC))
            while not unpacker.eof and (packed := file.read(_CHUNK)):
                before = unpacker.copy()
                try:
                    parts = list(_parts(unpacker, packed))
                except zlib.error:  # what comes before the damage in this chunk is lost with it
                    for at in range(len(packed)):
                        yield from _parts(before, packed[at : at + 1])
                    raise
                yield from parts
            self.is_complete = unpacker.eof


def _parts(unpacker: Any, packed: bytes) -> Iterator[bytes]:
    while packed:
        part = unpacker.decompress(packed, _UNPACKED)
        packed = unpacker.unconsumed_tail
        if part:
            yield part


_DIFFER, _UNREADABLE = 1, 2


class CannotReplay(Coded, ValueError):
    """The arguments do not fit. The message is for a user."""

    code = Code.INVALID_VALUE


def run(arguments: argparse.Namespace) -> int:
    """Raise `OSError`, and `JournalUnreadable` or `CannotReplay`, which are for a user."""
    file = JournalFile(arguments.file)
    machine = _machine(file)
    found = _Records(file, machine)
    if arguments.what_if:
        return _what_if(file, found, arguments)
    return _replay(file, machine, found, arguments)


def _machine(file: JournalFile) -> Machine:
    name = file.header.machine
    if name == "service":
        return service_machine()
    if name == "agent":
        return replaying.machine()
    raise JournalUnreadable(
        f"{file.path} is the journal of a machine named {name[:40]!r}, which is not known here. Replay it in the "
        "release that wrote it or a later one"
    )


class _Records:
    """`damage`: why the rest is not readable, known at the end."""

    def __init__(self, file: JournalFile, machine: Machine) -> None:
        self._file, self._machine = file, machine
        self.damage = ""

    def steps(self) -> Iterator[Step]:
        try:
            yield from play(self._machine, self)
        except RecordUnreadable as error:
            self._note(error)

    def __iter__(self) -> Iterator[Record]:
        try:
            yield from records(self._machine, self._file.header, self._file.lines())
        except RecordUnreadable as error:
            self._note(error)
        self.damage = self.damage or self._file.damage

    def _note(self, error: RecordUnreadable) -> None:
        release = self._file.header.release
        other = f" (written by release {release[:40]}, this is {VERSION})" if release != VERSION else ""
        self.damage = f"{error}{other}"

    @property
    def is_cut(self) -> bool:
        return not self._file.is_complete


# --- the same again ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShownStep:
    number: int
    at_s: float  # since the first step
    event: str
    answers: tuple[Line, ...]
    same: bool


def _replay(file: JournalFile, machine: Machine, found: _Records, arguments: argparse.Namespace) -> int:
    began, shown, number, first, last = time.process_time(), [], 0, None, 0.0
    different: list[int] = []
    for number, step in enumerate(found.steps(), 1):
        first, last = step.now if first is None else first, step.now
        lines = answers(machine, step.effects)
        if not step.same:
            different.append(number)
        if lines or not step.same or arguments.all:
            shown.append(ShownStep(number, step.now - first, event_words(step.event), lines, step.same))
    took_s = time.process_time() - began
    span_s = last - (first or 0.0)
    if is_for_programs(arguments.output):
        show(_as_dict(file, found, number, span_s, shown, different), arguments.output)
    else:
        words = [_title(file), *map(_line, shown), *_verdict(number, different, span_s, took_s)]
        show(printable_lines("\n".join(words)), arguments.output)
    return _ending(found, number, different)


def _title(file: JournalFile) -> str:
    header = file.header
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(min(max(header.began, 0.0), 4e9)))
    return f"journal of the {header.machine}, release {header.release}, begun {began} UTC"


def _line(step: ShownStep) -> str:
    mark = "" if step.same else "  DIFFERENT: recorded was another answer"
    then = "; ".join(map(str, step.answers)) or "-"
    return f"{step.number:>6} {step.at_s:>10.3f} s  {step.event} | {then}{mark}"


def _verdict(number: int, different: Sequence[int], span_s: float, took_s: float) -> Iterator[str]:
    yield f"same decisions: {number - len(different)} of {number}"
    if different:
        yield f"first difference: step {different[0]}"
    speed = f", {span_s / took_s:,.0f} times as fast" if took_s > 0 and span_s > 0 else ""
    yield f"{span_s:.1f} s replayed in {took_s:.3f} s of processor time{speed}"


def _ending(found: _Records, number: int, different: Sequence[int]) -> int:
    if found.damage:
        warn(
            f"the journal is readable up to step {number}, and not after it: {found.damage}",
            Code.JOURNAL_UNREADABLE,
        )
        return (
            _UNREADABLE  # also if decisions differ: the last steps before the damage may be damaged as well
        )
    if found.is_cut:
        warn("the journal has no end: its process still runs, or was killed; the last second may be missing")
    if different:
        warn(
            f"{len(different)} of {number} decisions differ from the recorded ones, first at step {different[0]}. "
            "Replay the journal with the release that wrote it",
            Code.DECISIONS_DIFFER,
        )
        return _DIFFER
    return 0


def _as_dict(
    file: JournalFile,
    found: _Records,
    number: int,
    span_s: float,
    shown: Sequence[ShownStep],
    different: Sequence[int],
) -> dict[str, Any]:
    return {
        "machine": file.header.machine,
        "release": file.header.release,
        "began": file.header.began,
        "steps": number,
        "same": number - len(different),
        "first_difference": different[0] if different else None,
        "seconds": round(span_s, 6),
        "complete": not (found.damage or found.is_cut),
        "damage": found.damage,
        "decisions": [
            {
                "step": each.number,
                "at_s": round(each.at_s, 6),
                "event": each.event,
                "answers": list(map(_line_dict, each.answers)),
                "same": each.same,
            }
            for each in shown
        ],
    }


def _line_dict(line: Line) -> dict[str, Any]:
    return {"what": line.what, "nodes": list(line.nodes), "reason": line.reason}


# --- with other settings -------------------------------------------------------------------------------


def _what_if(file: JournalFile, found: _Records, arguments: argparse.Namespace) -> int:
    if file.header.machine != "service":
        raise CannotReplay(
            f"--what-if: {file.path} is the journal of an agent, which decides nothing about the job. Use the journal "
            "of the service"
        )
    try:
        changes = parse(arguments.what_if)
    except BadChange as error:
        raise CannotReplay(str(error)) from None

    known = list(found)
    began = next((each.now for each in known if isinstance(each, Start | Load | Do)), 0.0)
    try:
        equal, parting = compare(known, changes)
    except Exception as error:
        raise JournalUnreadable(f"{file.path}: the state machine cannot run over it: {error!r}") from None
    if is_for_programs(arguments.output):
        show(_parting_dict(equal, parting, began), arguments.output)
    else:
        show(printable_lines("\n".join(_parting_lines(arguments.what_if, equal, parting, began))), "text")
    return _ending(found, len(known), ())


def _parting_lines(
    what_if: Sequence[str], equal: int, parting: Parting | None, began: float
) -> Iterator[str]:
    yield f"what if: {', '.join(what_if)}"
    if parting is None:
        yield f"same decisions: {equal} of {equal}"
        return
    yield f"same decisions: {equal}, then they part"
    yield f"  recorded: {_choice(parting.recorded, began)}"
    yield f"  what if:  {_choice(parting.changed, began)}"
    yield "What would have followed is not known: the agents have acted on the recorded decision."


def _choice(choice: Choice | None, began: float) -> str:
    if choice is None:
        return "no further decision"
    lines = "; ".join(map(str, choice.lines))
    return f"{choice.now - began:.3f} s  {choice.event} | {lines}"


def _parting_dict(equal: int, parting: Parting | None, began: float) -> dict[str, Any]:
    def of(choice: Choice | None) -> dict[str, Any] | None:
        if choice is None:
            return None
        at_s = round(choice.now - began, 6)
        return {"at_s": at_s, "event": choice.event, "decisions": list(map(_line_dict, choice.lines))}

    return {
        "equal": equal,
        "parts": parting is not None,
        "recorded": of(parting.recorded) if parting else None,
        "what_if": of(parting.changed) if parting else None,
    }
