"""Xid errors of the NVIDIA driver: what each number means, whose fault it is, and what the GPU needs then.

This is the only table of Xid numbers. It is used for lines of the kernel log, events of NVML, metrics of the DCGM
exporter, and messages that quote an Xid.

The driver writes such a line to the kernel log, and NVML delivers its number as an event:

    NVRM: Xid (PCI:0000:cb:00): 13, pid=4711, name=python3, Graphics SM Warp Exception on (GPC 7, TPC 7, SM 0)

Some errors have no number: a GPU that leaves the bus while the driver starts is reported as text. It counts as Xid 79.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import StrEnum

from rendezvous.values.late_dataclass import dataclass


class XidOrigin(StrEnum):
    """What usually causes an error with this number."""

    PROGRAM = "program"  # the program that ran on the GPU; another program may run there
    DEVICE = "device"
    EITHER = "either"  # it does not show which of the two
    LINK = "link"  # NVLink: the other end may be the cause


class Need(StrEnum):
    """What has to happen before ranks can use the GPU again."""

    NOTHING = "nothing"
    WATCH = "watch"  # usable now; reset or examine it when it is free
    RESET = "reset"
    REBOOT = "reboot"
    REPLACE = "replace"


@dataclass(frozen=True, slots=True)
class Meaning:
    text: str
    origin: XidOrigin
    need: Need

    @property
    def is_unfit(self) -> bool:
        return self.need in (Need.RESET, Need.REBOOT, Need.REPLACE)


def _program(text: str) -> Meaning:
    return Meaning(f"{text} (usually caused by the script)", XidOrigin.PROGRAM, Need.NOTHING)


def _device(text: str, need: Need) -> Meaning:
    return Meaning(text, XidOrigin.DEVICE, need)


def _link(text: str, need: Need = Need.WATCH) -> Meaning:
    return Meaning(text, XidOrigin.LINK, need)


XIDS: dict[int, Meaning] = {
    13: _program("an illegal instruction or access by a CUDA kernel"),
    31: _program("a CUDA kernel accessed memory that is not mapped"),
    32: Meaning("commands to the GPU were damaged on the way", XidOrigin.EITHER, Need.WATCH),
    38: _device("the driver's firmware reported an error", Need.WATCH),
    43: _program("the GPU stopped processing"),
    45: Meaning("the process was terminated while it had work on the GPU", XidOrigin.PROGRAM, Need.NOTHING),
    48: _device("an uncorrectable memory error (ECC)", Need.WATCH),
    54: _device("the GPU's power cable is not connected", Need.REPLACE),
    61: _device("the GPU's microcontroller failed", Need.WATCH),
    62: _device("the GPU's microcontroller halted", Need.RESET),
    63: _device("a memory page or row is being retired", Need.WATCH),
    64: _device("a memory page or row could not be retired", Need.RESET),
    68: _program("an error of the video decoder"),
    69: _program("an error of a CUDA kernel in the graphics engine"),
    74: _link("an NVLink error"),
    79: _device("the GPU has fallen off the bus", Need.REBOOT),
    92: _device("many correctable memory errors", Need.WATCH),
    94: _device("a contained uncorrectable memory error", Need.WATCH),
    95: _device("an uncontained uncorrectable memory error", Need.RESET),
    109: Meaning("the GPU could not switch between programs in time", XidOrigin.EITHER, Need.WATCH),
    110: _device("a security fault", Need.RESET),
    119: _device("the GPU's system processor (GSP) does not respond", Need.RESET),
    120: _device("the GPU's system processor (GSP) failed", Need.RESET),
    121: _link("an error of the link between CPU and GPU (C2C)"),
    136: _link("an NVLink failed its training"),
    137: _program("a CUDA kernel accessed memory of another GPU without permission"),
    140: _device("an unrecovered memory error", Need.RESET),
    143: _device("the GPU could not be initialized", Need.RESET),
    **{number: _link("an NVLink error") for number in range(144, 151)},
    154: _device("the driver recommends an action for the GPU", Need.WATCH),
    155: _link("an NVLink software error"),
    156: _device("a part of the GPU's memory or cache is being retired", Need.WATCH),
    157: _device("a part of the GPU's memory or cache could not be retired", Need.RESET),
    158: _device("the GPU did not finish an operation in time", Need.RESET),
}
UNKNOWN = Meaning("see NVIDIA's list of Xid errors", XidOrigin.EITHER, Need.WATCH)
ADVICE = {
    Need.NOTHING: "look for the error in the script: compute-sanitizer finds illegal accesses",
    Need.WATCH: "reset the GPU when it is free (nvidia-smi --gpu-reset); replace it if the error occurs again",
    Need.RESET: "end the programs on the GPU, then reset it (nvidia-smi --gpu-reset) or reboot the machine",
    Need.REBOOT: "reboot the machine; if it occurs again, check power and seating of the GPU, or replace it",
    Need.REPLACE: "check the GPU's power cable and seating, or replace the GPU",
}
LINK_ADVICE = "run nvidia-smi nvlink -s and -e; check the fabric manager, and the GPU at the other end"


@dataclass(frozen=True, slots=True)
class Xid:
    """One error as the kernel log or NVML reports it."""

    bus: str  # "0000:cb:00": domain, bus and slot
    code: int
    at_s: float = 0.0  # seconds after the machine has started
    pid: int = 0
    program: str = ""
    text: str = ""  # what follows in the line

    @property
    def meaning(self) -> Meaning:
        return _refined(XIDS.get(self.code, UNKNOWN), self)

    @property
    def is_of_program(self) -> bool:
        return self.meaning.origin is XidOrigin.PROGRAM

    @property
    def advice(self) -> str:
        meaning = self.meaning
        watched = meaning.origin is XidOrigin.LINK and meaning.need is Need.WATCH
        return LINK_ADVICE if watched else ADVICE[meaning.need]

    def __str__(self) -> str:
        by = f", in {self.program} (pid {self.pid})" if self.program and self.pid else ""
        return f"Xid {self.code}: {self.meaning.text}{by}"


# The driver's recommendations: each with the word by which Xid 154 mentions it.
_ACTIONS = (("drain p2p", Need.WATCH), ("reset", Need.RESET), ("reboot", Need.REBOOT), ("none", Need.NOTHING))
_CHANGED = re.compile(r"action changed from .* to 0x[0-9a-f]+ \(([^)]*)\)", re.IGNORECASE)
_SEVERITY = re.compile(r"\b(non-?fatal|fatal)\b", re.IGNORECASE)


def _refined(meaning: Meaning, xid: Xid) -> Meaning:
    """Some lines say more than their number."""
    if xid.code == 154 and (found := _CHANGED.search(xid.text)):
        action = found[1].lower()
        need = next((need for word, need in _ACTIONS if word in action), Need.WATCH)
        return replace(meaning, text=f"the driver recommends for the GPU: {found[1]}", need=need)
    if 144 <= xid.code <= 150 and (severity := _SEVERITY.search(xid.text)):
        fatal = severity[1].lower() == "fatal"
        return replace(meaning, text="a fatal NVLink error", need=Need.RESET) if fatal else meaning
    return meaning


# --- lines -----------------------------------------------------------------------------------------------

_BUS = r"(?P<bus>(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-9a-fA-F])?"
_XID = re.compile(rf"NVRM: Xid \((?:PCI:)?{_BUS}\): (?P<code>\d+)(?:, (?P<rest>.*))?", re.DOTALL)
_PROCESS = re.compile(r"^pid='?(?P<pid>\d+|<unknown>)'?(?:, name='?(?P<name>[^,']*)'?)?(?:, )?")
_NAMED = re.compile(rf"NVRM: (?:The NVIDIA )?GPU {_BUS}")
_FALLEN = "fallen off the bus"
_FALLEN_CODE = 79


def short_bus(address: str) -> str:
    """ "00000000:CB:00.0", "0000:cb:00.0" and "cb:00" become "0000:cb:00", as in the kernel log."""
    *domain, bus, slot = address.lower().partition(".")[0].split(":")
    return f"{int(domain[0], 16) if domain else 0:04x}:{bus}:{slot}"


def read_lines(lines: Iterable[tuple[float, str]]) -> tuple[Xid, ...]:
    """The errors in lines of the kernel log. `lines`: seconds after the start of the machine, and the text.

    A GPU that leaves the bus without a number is reported in several lines, the first of which names it.
    """
    return tuple(_read(lines))


def _read(lines: Iterable[tuple[float, str]]) -> Iterator[Xid]:
    named = ""
    numbered: set[str] = set()
    for at_s, text in lines:
        if found := _XID.search(text):
            xid = _of_match(found, at_s)
            if xid.code == _FALLEN_CODE:
                numbered.add(xid.bus)
            yield xid
            continue
        if found := _NAMED.search(text):
            named = short_bus(found["bus"])
        if _FALLEN in text and named and named not in numbered:
            numbered.add(named)  # the driver repeats these words
            yield Xid(named, _FALLEN_CODE, at_s, text="GPU has fallen off the bus")


def _of_match(found: re.Match[str], at_s: float) -> Xid:
    rest = (found["rest"] or "").strip()
    pid, program = 0, ""
    if by := _PROCESS.match(rest):
        pid = int(by["pid"]) if by["pid"].isdecimal() else 0
        program = (by["name"] or "").strip()
        program = "" if program == "<unknown>" else program
        rest = rest[by.end() :]
    return Xid(short_bus(found["bus"]), int(found["code"]), at_s, pid, program, rest.strip())


def read_kmsg(records: Iterable[str]) -> tuple[Xid, ...]:
    """Records of /dev/kmsg: "level,sequence,microseconds since boot,...;text"."""
    return read_lines(_dated(records))


def _dated(records: Iterable[str]) -> Iterator[tuple[float, str]]:
    for record in records:
        head, _, text = record.partition(";")
        stamp = head.split(",")[2:3]
        if stamp and stamp[0].isdecimal():
            yield int(stamp[0]) / 1e6, text.replace("\\x0a", "\n")


_QUOTED = re.compile(r"\bxid\s*(?:\([^)]*\))?\s*:?\s*(\d{1,3})\b", re.IGNORECASE)


def xid_in(text: str) -> int | None:
    """The number of the Xid that a message quotes."""
    found = _QUOTED.search(text)
    return int(found[1]) if found else None
