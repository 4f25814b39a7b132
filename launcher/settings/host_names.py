"""The names of a job's hosts, as `--hosts` and a hostfile give them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.settings.values import BadValue, nearest, shown, whole

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Host:
    name: str  # as ssh takes it: host or user@host
    slots: int | None = None  # ranks on it; None: as --nproc-per-node says

    @property
    def bare(self) -> str:
        return self.name.rpartition("@")[2]


def hosts(text: str) -> tuple[Host, ...]:
    """`a,b:4,user@c`: names, each with a number of ranks if it has one of its own."""
    found = tuple(_host(part.strip()) for part in text.split(","))
    _refuse_doubles(found)
    return found


def _host(text: str) -> Host:
    bracketed = re.fullmatch(r"((?:[^@]+@)?)\[([^\]]+)\](?::(\d+))?", text)
    if bracketed:
        return Host(_checked(bracketed[1] + bracketed[2]), _slots(bracketed[3]))
    name, colon, slots = text.rpartition(":")
    if not colon or ":" in name:  # no number, or an IPv6 address without brackets
        return Host(_checked(text))
    return Host(_checked(name), _slots(slots))


def _checked(name: str) -> str:
    if not name or name.startswith("-") or not re.fullmatch(r"[\w.@:%+-]+", name):
        raise BadValue(f"{shown(name)} is not a host", "HOST[:RANKS][,...]", "node1,node2:4")
    return name


def _slots(text: str | None) -> int | None:
    if text is None:
        return None
    number = whole(text)
    if number is None or not 0 < number <= 4096:
        raise BadValue(f"{shown(text)} is not a number of ranks", "HOST[:RANKS][,...]", "node1,node2:4")
    return number


def _refuse_doubles(found: Sequence[Host]) -> None:
    names = [host.bare for host in found]
    for name in names:
        if names.count(name) > 1:
            raise BadValue(
                f"{name} is given twice; one agent runs all ranks of a host", "HOST[:RANKS]", f"{name}:2"
            )


def read_hostfile(text: str) -> tuple[Host, ...]:
    """One host a line, `name` or `name slots=N`, as MPI and DeepSpeed write it; # begins a comment."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            found.append(_host_line(words))
        except BadValue as bad:
            raise BadValue(f"line {number}: {bad.problem}") from None
    if not found:
        raise BadValue("names no host; write one host a line")
    _refuse_doubles(found)
    return tuple(found)


def _host_line(words: list[str]) -> Host:
    host = _host(words[0])
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key not in ("slots", "max_slots") or not equals:
            close = nearest(key, ["slots"])
            raise BadValue(
                f"{shown(word)} is not understood; " + ("write slots=N" if close else "a host a line")
            )
        if key == "slots":
            host = Host(host.name, _slots(value))
    return host
