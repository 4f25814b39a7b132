"""Parse the hosts of a job from `--hosts` or a hostfile. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from launcher.settings.values import BadValue, nearest, parse_int, quote
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Host:
    name: str  # host or user@host, as ssh accepts it
    slots: int | None = None  # number of ranks; None: use --nproc-per-node

    @property
    def bare(self) -> str:
        return self.name.rpartition("@")[2]


def hosts(text: str) -> tuple[Host, ...]:
    """Parse `a,b:4,user@c`: host names, each with an optional number of ranks."""
    found = tuple(_host(part.strip()) for part in text.split(","))
    _reject_duplicates(found)
    return found


def _host(text: str) -> Host:
    bracketed = re.fullmatch(r"((?:[^@]+@)?)\[([^\]]+)\](?::(\d+))?", text)
    if bracketed:
        return Host(_check_name(bracketed[1] + bracketed[2]), _slots(bracketed[3]))
    name, colon, slots = text.rpartition(":")
    if not colon or ":" in name:  # no number, or an IPv6 address without brackets
        return Host(_check_name(text))
    return Host(_check_name(name), _slots(slots))


def _check_name(name: str) -> str:
    if not name or name.startswith("-") or not re.fullmatch(r"[\w.@:%+-]+", name):
        raise BadValue(f"invalid host name {quote(name)}", "HOST[:RANKS][,...]", "node1,node2:4")
    return name


def _slots(text: str | None) -> int | None:
    if text is None:
        return None
    number = parse_int(text)
    if number is None or not 0 < number <= 4096:
        raise BadValue(
            f"the number of ranks must be from 1 to 4096, not {quote(text)}",
            "HOST[:RANKS][,...]",
            "node1,node2:4",
        )
    return number


def _reject_duplicates(found: Sequence[Host]) -> None:
    names = [host.bare for host in found]
    for name in names:
        if names.count(name) > 1:
            raise BadValue(
                f"{name} is listed twice; one agent runs all ranks of a host",
                "each host once, with its number of ranks",
                f"{name}:2",
            )


def read_hostfile(text: str) -> tuple[Host, ...]:
    """Parse one host per line, `name` or `name slots=N`, as in MPI and DeepSpeed; # starts a comment."""
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
        raise BadValue("the file is empty; write one host per line")
    _reject_duplicates(found)
    return tuple(found)


def _host_line(words: list[str]) -> Host:
    host = _host(words[0])
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key not in ("slots", "max_slots") or not equals:
            close = nearest(key, ["slots"])
            raise BadValue(
                f"unexpected {quote(word)}; " + ("write slots=N" if close else "write one host per line")
            )
        if key == "slots":
            host = Host(host.name, _slots(value))
    return host
