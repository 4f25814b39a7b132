"""A survivor writes what its objects hold as a commit, if nobody has a newer one.

Theory of operation
-------------------
Between two commits that are copied, only the objects of the survivors have the newest state (`ddp.elastic.live`). After
a failure all ranks tell where they are, and on each node the first of those that are furthest writes its state. All
others wait for it.

The copy takes most of that time, and the tensors do not change until then. So a rank that keeps the replicas of its
node copies them *ahead*: while the replacements start, and before it knows what the others have. The commit exists only
if it is asked for. A large state is not copied ahead, because the copy may not be needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp.elastic import commits
from ddp.elastic.live import drop_gradients

if TYPE_CHECKING:
    from ddp.elastic.contents import Contents
    from ddp.elastic.keeper import CopiedAhead, Keeper
    from ddp.elastic.live import Live
    from ddp.elastic.team import Team

_MOST_BYTES = 256 << 20  # copied in about the time in which a process starts


class Survivor:
    """A rank whose process goes on in another generation."""

    def __init__(self, contents: Contents, live: Live, keeper: Keeper, number: int) -> None:
        """`number`: of the last commit() call."""
        self._contents, self._live, self._keeper, self._number = contents, live, keeper, number
        self._ahead: CopiedAhead | None = None

    def copy_ahead(self) -> None:
        kept, live = self._keeper.newest, self._live.number
        if live is None or (kept is not None and kept >= live) or not self._keeper.keeps_all:
            return
        self._live.restore_shared()
        self._ahead = self._keeper.copy_live(self._contents.capture(), self._number, _MOST_BYTES)

    def position(self, node: str, is_whole: bool) -> commits.Position:
        """`is_whole`: all of the state is in this rank."""
        drop_gradients(self._contents.objects)
        live = self._live.number if is_whole else None
        return commits.Position(node, self._number, live, self._keeper.newest)

    def save(self) -> None:
        self._live.restore()
        self._keeper.keep_live(self._contents.capture(), self._number, self._ahead)


def save_live(survivor: Survivor | None, team: Team, positions: tuple[commits.Position | None, ...]) -> None:
    """If survivors are further than their newest commit, write their state as a commit. Collective."""
    savers = commits.live_savers(positions)
    if survivor is not None and team.rank in savers:
        survivor.save()
    if savers:
        team.any(False)  # all wait until these commits are complete
