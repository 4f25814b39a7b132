"""Record on the status page which process groups a script creates, and how long it lets them wait."""

from __future__ import annotations

import os
import sys
import zlib
from typing import TYPE_CHECKING, Any

from . import status_page, torch_api, torch_names
from .collective_facts import format_ranks, given_timeout_s
from .observing import Observer
from .page_layout import LONGEST_NAME
from .status_page import COMMUNICATE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .status_page import Page

_OUR_BACKENDS = ("shm", "hier")
_FORMING = "init_process_group"


def mark_group_creation(page: Page) -> None:
    """Record the creation of groups as a collective of their ranks, since ranks may wait there for one that is missing.

    The timeout that the script gives the group is recorded before the group is created, because a rank may wait up to
    this timeout for the others.
    """

    status_page.keep("forming", {})

    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Creation:
        page.group_timeout(given_timeout_s(kwargs.get("timeout")))
        op, ranks = _creation(*args) if status_page.traces_collectives() else ("", [])
        creation = _Creation(args[3] if len(args) > 3 else "")
        if len(ranks) >= 2:
            creation.phase = page.mark(COMMUNICATE)
            creation.ticket = page.enter(_creators(page, op, ranks), op, "", 0, 0, -1, False, 0)
        return creation

    def after(creation: _Creation) -> None:
        if creation.phase is not None:
            page.phase(creation.phase)  # a script that starts is still starting after this
        if creation.ticket:  # not after an error: the page keeps showing where the rank was
            page.leave(creation.ticket)

    def wrap(make: Callable[..., Any]) -> Callable[..., Any]:
        return Observer("the record of new groups").around(make, before, after, _explain_backend)

    torch_api.patch(torch_names.NEW_GROUP, wrap)


class _Creation:
    __slots__ = ("backend", "phase", "ticket")

    def __init__(self, backend: object) -> None:
        self.backend = str.__str__(backend) if isinstance(backend, str) else ""
        self.phase: int | None = None  # before it
        self.ticket = 0


def _explain_backend(error: Exception, creation: _Creation) -> None:
    """torch says "Unknown backend type shm", and nothing about the import that registers it."""
    creation.ticket = 0
    if creation.backend in _OUR_BACKENDS and "ddp.shm" not in sys.modules:
        error.add_note(
            f'"{creation.backend}" is a backend of ddp-launch. Add `import ddp.shm` before this call.'
        )


def _creation(
    size: int = -1, rank: int | None = -1, ranks_in_group: Sequence[int] | None = None, *_more: object
) -> tuple[str, list[int]]:
    """Return the function and the ranks in the launcher's numbering.

    The list is empty if the ranks are unknown or this rank is not a member.
    """
    from torch.distributed import get_rank, get_world_size, is_initialized

    ours = os.environ.get("WORLD_SIZE"), os.environ.get("RANK")
    if ranks_in_group == []:
        return _FORMING, list(range(size)) if (str(size), str(rank)) == ours else []
    known = is_initialized() and (str(get_world_size()), str(get_rank())) == ours
    return "new_group", sorted(ranks_in_group or ()) if known and rank is not None else []


def _creators(page: Page, op: str, ranks: list[int]) -> int:
    """Return the group number on the status page:

    the same for the same ranks, so that the next creation continues its count.
    """
    members = format_ranks(ranks)
    name = op if op == _FORMING else f"({members})"
    if len(name) > LONGEST_NAME:
        name = f"({members[:24]}... {zlib.crc32(members.encode()):08x})"
    known: dict[str, int] = status_page.kept("forming")
    number = known.get(name)
    return known.setdefault(name, page.group(name, len(ranks), members)) if number is None else number
