"""Commits in memory that survive the loss of nodes: what a State does with them, from one resume to the next."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp.elastic import rebuilding, redundancy, stripes
from ddp.elastic.parity_store import ParityStore
from ddp.elastic.peer_links import Links
from ddp.elastic.protection_rounds import Leader
from ddp.elastic.protector import Protector
from ddp.telemetry.coded import WrongType

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ddp.elastic.resume import LocalImages
    from ddp.elastic.scratch import Slot, Slots
    from ddp.elastic.team import Team

log = logging.getLogger("ddp.elastic")
VARIABLE = "DDP_REDUNDANCY"
TOPOLOGY = "DDP_TOPOLOGY"
MORE_SLOTS = 2  # one for the protected commit, one for the next
_WEAK = (
    "ddp.elastic: with redundancy %s, a loss of all nodes in %s at once cannot be repaired from memory, because too "
    "many nodes of the job are there. Use a code with a larger M, or spread the job over more units"
)


def asked(option: str | None, environ: Mapping[str, str]) -> redundancy.Redundancy | None:
    """What the script asks for, otherwise the launcher."""
    _check_is_text(option)
    return redundancy.parse(environ.get(VARIABLE, "") if option is None else option)


def _check_is_text(option: object) -> None:
    if not isinstance(option, (str, type(None))):
        raise WrongType(f"invalid redundancy={option!r}: use a text such as 'copies:1', 'code:6+2' or 'auto'")


@dataclass(slots=True)
class Protection:
    """The redundancy of one generation."""

    team: Team
    places: list[Path]
    stripes: tuple[stripes.Stripe, ...]
    links: Links
    protector: Protector | None = None
    store: ParityStore | None = None

    @classmethod
    def open(
        cls,
        wanted: redundancy.Redundancy,
        team: Team,
        node: str,
        places: list[Path],
        parts: int,
        environ: Mapping[str, str],
    ) -> Protection:
        """Collective. `parts`: of the state. If there is one, each node has a copy anyway."""
        path = environ.get(TOPOLOGY, "")
        mine = stripes.Place(node, (*filter(None, path.split("/")), socket.gethostname()))
        where = team.gather(mine)
        n_nodes = len({each.node for each in where})
        code, message = redundancy.fitting(wanted, n_nodes) if parts > 1 else (None, "")
        found = () if code is None else stripes.layout(where, code)
        if team.rank == 0:
            if message:
                log.warning("ddp.elastic: %s", message)
            if code is not None:
                for unit in stripes.weak_domains(where, found, code.m):
                    log.warning(_WEAK, code, "/".join(unit))
        return cls(team, places, found, Links.open(team))

    def rebuild(self, local: LocalImages) -> None:
        rebuilding.rebuild(self.team, local, self.places, self.links)

    @property
    def more_slots(self) -> int:
        return MORE_SLOTS if self.stripes else 0

    def begin(self, slots: Slots, lineage: str, spared: set[str]) -> None:
        """Begin to protect new commits. Collective. `spared`: slots with the commit that is protected so far."""
        self.links.stop()
        if not self.stripes:
            return
        slots.held = set(spared)
        links = Links.open(self.team)
        self.store = ParityStore(self.places, lineage)
        self.protector = Protector(links, self.stripes, slots, self.store, lineage)
        self.protector.start()
        if self.team.rank == 0:
            Leader(self.protector).start()

    def committed(self, number: int, slot: Slot) -> None:
        if self.protector is not None:
            self.protector.committed(number, slot)

    def stop(self) -> None:
        if self.protector is not None:
            self.protector.stop()

    def remove(self) -> None:
        """Forget everything that this rank keeps for others."""
        self.stop()
        if self.store is not None:
            self.store.remove()
