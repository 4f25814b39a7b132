"""The value of `--debug`: the rank that a person debugs, at the terminal or from an editor."""

from __future__ import annotations

from launcher.settings.values import BadValue, parse_int, text
from rendezvous.values.late_dataclass import dataclass

VARIABLE = "DDP_DEBUG"  # in every rank: what it does while one of them is debugged
TERMINAL, OTHER = "terminal", "other"
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Debug:
    rank: int
    address: str = ""  # HOST:PORT where it waits for an editor; empty: it uses the terminal

    def of(self, rank: int) -> str:
        """What this rank finds in the variable."""
        return (self.address or TERMINAL) if rank == self.rank else OTHER


def debug(value: str) -> Debug:
    text(value)
    rank_text, colon, place = value.partition(":")
    host, _, port_text = place.rpartition(":")
    rank, port = parse_int(rank_text), parse_int(port_text)
    if rank is None or not 0 <= rank < 1 << 24 or (colon and (port is None or not 0 < port < 65536)):
        raise BadValue("not a rank", "a global rank, or RANK:PORT for an editor", "1:5678")
    return Debug(rank, f"{host or _LOOPBACK}:{port}" if colon else "")
