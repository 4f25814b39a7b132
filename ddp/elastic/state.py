"""The state of a training that outlives its processes. How it is used is in docs/elastic.md.

A commit is made by each rank for itself, without a word to the others: between two commits ranks meet in
the collectives of the training anyway, so no two of them are ever more than one commit apart, and each
keeps the last two. Which commit a new generation goes on from is agreed on when it resumes
(`ddp.elastic.resume`).
"""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp.elastic import commits, generators, request, resume, scratch
from ddp.elastic.contents import Contents
from ddp.elastic.keeper import Keeper, Signature
from ddp.elastic.resume import Resumed
from ddp.elastic.sampler import ElasticSampler
from ddp.elastic.team import Team
from ddp.elastic.writer import CommitError, Writer
from ddp.telemetry.sections import checkpointing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import ProcessGroup

    from ddp.elastic import image


class State:
    """Keeps what it is given under the names it is given: State(model=model, optimizer=optimizer, step=0, ...).

    Objects with state_dict and load_state_dict are kept by these; other values are fields, `state.step += 1`. They
    must be the same on all ranks. `every`: a commit to memory each so many calls of commit(); `disk_every`: one to
    `folder` each so many; `keep`: how many of those stay.
    """

    def __init__(
        self,
        *,
        every: int = 1,
        disk_every: int = 0,
        folder: str | os.PathLike[str] | None = None,
        keep: int = 2,
        group: ProcessGroup | None = None,
        **named: Any,
    ) -> None:
        _check(every, disk_every, folder, keep, named)
        self._contents = Contents(named)
        self._samplers = [value for value in named.values() if isinstance(value, ElasticSampler)]
        self._every, self._disk_every, self._keep = every, disk_every, keep
        self._folder = None if folder is None else Path(folder).absolute()
        self._group = group
        self._number = 0
        self._team: Team | None = None
        self._keeper: Keeper | None = None
        self._leaving: weakref.finalize[[Keeper, int], State] | None = None

    def __getattr__(self, name: str) -> Any:
        with contextlib.suppress(KeyError):
            return self.__dict__["_contents"].fields[name]
        raise AttributeError(
            f"State has no field {name!r}; name it when the State is made: State({name}=...)"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif name in self._contents.fields:
            self._contents.fields[name] = value
        else:
            raise AttributeError(
                f"State has no field {name!r}; name it when the State is made: State({name}=...)"
            )

    # --- resuming ----------------------------------------------------------------------------------

    def resume(self) -> Resumed | None:
        """Goes on from the newest commit that the members have; None: there is none, the job begins."""
        _only_one(self)
        team = Team(self._group)
        places = scratch.folders(os.environ)
        for place in places:
            scratch.sweep(place.parent)
        (part, parts), regions = self._contents.footing()
        members = team.gather(commits.Member(resume.node_name(places), part, parts))
        role = commits.roles(tuple(members))[team.rank]
        sight = resume.look(places, self._folder)
        choice = resume.choose(team, sight)
        found = None
        if choice is not None:
            images = resume.parts(team, sight, choice, part, regions)
            found = self._restore(images, choice, resume.private(sight, choice, team.rank, team.size))
        writes = self._folder is not None and role.writes_disk
        slots = scratch.Slots(places, role.local_index, 3 if writes else 2, resume.slots_of(sight, choice))
        lineage = resume.new_lineage(team)  # all have read what they need when this returns
        writer = None
        if self._folder is not None and writes:
            since = choice.commit if choice is not None else commits.CommitName(0, "")
            writer = Writer(self._folder, self._keep, team.rank == 0, lineage, since)
        self._begin(team, Keeper(slots, writer, Signature(lineage, role, team.rank, team.size, regions)))
        return found

    def _begin(self, team: Team, keeper: Keeper) -> None:
        self._forget_leaving()
        self._team, self._keeper = team, keeper
        # Whether the script lets go of this State or the process ends: what comes first.
        self._leaving = weakref.finalize(self, _leave, keeper, os.getpid())

    def _forget_leaving(self) -> None:
        if self._leaving is not None:
            self._leaving.detach()

    def _restore(
        self, images: Iterator[image.Image], choice: commits.Choice, own: image.Image | None
    ) -> Resumed:
        world_size = self._contents.restore(images)
        if own is not None:
            generators.set(own.private())
        self._number = choice.commit.number
        return Resumed(self._number, choice.in_memory, world_size)

    # --- committing --------------------------------------------------------------------------------

    def commit(self, samples: int | None = None) -> None:
        """After each optimizer step. `samples`: what this rank trained on since the last; the sampler needs it."""
        _team, keeper = self._resumed()
        if self._samplers and samples is None:
            raise TypeError(
                "commit(samples=...): say how many samples this rank trained on, the sampler moves on by them"
            )
        for sampler in self._samplers:
            sampler.advance(samples or 0)
        self._number += 1
        to_disk = commits.is_due(self._number, self._disk_every)
        if to_disk or commits.is_due(self._number, self._every):
            with checkpointing():
                keeper.keep(self._contents.capture(), self._number, to_disk)
        # Last, so that who catches it is in step with the ranks that had nothing to catch.
        keeper.raise_error(before=self._number)

    def checkpoint(self) -> None:
        """A commit to disk, now, and all of it there when this returns. Collective; answers a request for one."""
        team, keeper = self._resumed()
        if self._folder is None:
            raise ValueError("checkpoint() needs State(folder=...): without it there is no disk to commit to")
        self._number += 1
        with checkpointing():
            error = self._written(keeper)
            told = team.gather(None if error is None else str(error) or repr(error))
            failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text]
            if error is not None and not isinstance(error, OSError):
                raise error
            if failed:
                raise CommitError(f"the checkpoint is not whole; {'; '.join(failed)}") from error
            request.checkpoint_done()
        keeper.raise_error()

    def _written(self, keeper: Keeper) -> Exception | None:
        """What went wrong with this rank's part of a checkpoint."""
        try:
            keeper.keep(self._contents.capture(), self._number, to_disk=True)
            keeper.flush(first=self._number)
        except Exception as error:
            return error
        return None

    def should_checkpoint(self) -> bool:
        """Whether a checkpoint is asked for on any node: the same answer on all ranks. One tiny collective."""
        team, _keeper = self._resumed()
        return team.any(request.checkpoint_requested())

    def flush(self) -> None:
        """Waits until what was committed to disk is there."""
        if self._keeper is not None:
            self._keeper.flush()

    def close(self) -> None:
        """The training is over: what was kept in memory goes. Files on disk stay."""
        if self._keeper is not None:
            self._keeper.flush()
            self._keeper.remove()
            self._keeper = None
            self._forget_leaving()

    def _resumed(self) -> tuple[Team, Keeper]:
        if self._team is None:
            raise RuntimeError("state.resume() comes first: once, on every rank, after the State was made")
        if self._keeper is None:
            raise RuntimeError("this State is closed; make a new one")
        return self._team, self._keeper


def _check(
    every: int, disk_every: int, folder: str | os.PathLike[str] | None, keep: int, named: dict[str, Any]
) -> None:
    if every < 0 or disk_every < 0 or keep < 1:
        raise ValueError(
            f"every={every}, disk_every={disk_every}: not negative, and 0 is never; keep={keep}: from 1"
        )
    if disk_every and folder is None:
        raise ValueError("disk_every without folder: say where, State(folder=...)")
    for name in named:
        if hasattr(State, name) or name.startswith("_"):
            raise ValueError(f"{name!r} cannot be the name of a part of the state; take another")


_open: weakref.ref[State] | None = None


def _only_one(state: State) -> None:
    """Two would take each other's commits for their own."""
    global _open
    other = None if _open is None else _open()
    if other is not None and other is not state and other._keeper is not None:
        raise RuntimeError(
            "this process has a State already: give it all there is to keep, or close() it first"
        )
    _open = weakref.ref(state)


def _leave(keeper: Keeper, pid: int) -> None:
    """Memory is left for the next generation, if somebody is there to start one. A forked child has no part in it."""
    if os.getpid() != pid:
        return
    try:
        keeper.flush()
    finally:
        if not scratch.is_launched(os.environ):
            keeper.remove()
