"""The state of a training job that survives its processes. docs/elastic.md describes its use.

Each rank makes its commits without communication. The collectives of the training synchronize the ranks between two
commits, so ranks are never more than one commit apart, and each rank keeps its last two; with commits that are copied
beside the training (`overlap`), it is one more of both. When a new generation resumes, its ranks agree on a commit
(`ddp.elastic.resume`).
"""

from __future__ import annotations

import os
import re
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import torch.distributed as dist

from ddp.elastic import commits, forgotten, generators, own, rejected, request, resume
from ddp.elastic.contents import Contents, load_foreign
from ddp.elastic.files import lease
from ddp.elastic.files.checkpoint import Checkpoint
from ddp.elastic.files.folders import open_folder
from ddp.elastic.files.writer import CommitError, Writer
from ddp.elastic.forgotten import FirstLooks
from ddp.elastic.images import image, kept_images, leaves
from ddp.elastic.keeper import CommitShield, Keeper, Signature, asked_shield
from ddp.elastic.resume import LocalImages, Resumed
from ddp.elastic.sampler import ElasticSampler
from ddp.elastic.survivor import Live, Survivor, save_live
from ddp.elastic.team import Team
from ddp.groups import joining, reform
from ddp.telemetry import blocked_thread, guard, status_page
from ddp.telemetry.coded import WrongType, WrongUse, WrongValue
from ddp.telemetry.comm_words import is_communication_error, is_fault_of_this_rank
from ddp.telemetry.contracts import GENERATION, SCRATCH
from ddp.telemetry.sections import checkpointing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# The function of a State that runs once for each finished step: `State(on_step=write_row)`, `commit(metrics=...)`.
#
# A commit contains how many steps there were, and the metrics of the last one. The first rank calls the function after
# the commit, and notes the number in the folder of its job. After a failure it skips the steps up to this number when
# they are repeated. If it died between the commit and the call, the rank in its place makes the call, with the metrics
# of the commit.

FIELD = "_steps_done"  # of the State


class StepsDone:
    def __init__(
        self, call: Callable[[int, dict[str, Any]], object], fields: dict[str, Any], scope: str
    ) -> None:
        self._call, self._fields, self._scope = call, fields, scope
        fields[FIELD] = {"steps": 0, "metrics": {}}
        self._called = 0  # up to this step
        self._calls = False  # this is the rank that does

    def count(self, metrics: Mapping[str, Any] | None) -> None:
        """Before the commit of a step."""
        self._fields[FIELD] = {"steps": self._fields[FIELD]["steps"] + 1, "metrics": dict(metrics or {})}

    def resumed(self, is_first: bool) -> None:
        steps = self._fields[FIELD]["steps"]
        self._calls = is_first
        self._called = self._noted(steps)
        self.run()

    def run(self) -> None:
        """Call the function if this step is a new one."""
        steps, metrics = self._fields[FIELD]["steps"], self._fields[FIELD]["metrics"]
        if self._calls and steps > self._called:
            self._call(steps, dict(metrics))
            self._called = steps
            self._note()

    def _file(self) -> str:
        folder = os.environ.get(SCRATCH, "")
        return f"{folder}/steps-done{self._scope and '-'}{self._scope}" if folder else ""

    def _noted(self, steps: int) -> int:
        """Without a note, another job or a node that is lost has made the calls."""
        with suppress(OSError, ValueError), open(self._file(), "rb") as file:
            return int(file.read())
        return max(steps, self._called)

    def _note(self) -> None:
        if file := self._file():
            with suppress(OSError):
                fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    os.pwrite(fd, f"{self._called:020d}".encode(), 0)
                finally:
                    os.close(fd)


# --- the loop, begun again in the same process -----------------------------------------------------
#
# Begin the loop of a script again in the same process, after another rank has failed.
#
# Theory of operation
# -------------------
# A failed rank breaks the collectives of all others, or the launcher aborts them. The error unwinds the script's
# loop up to `run`, which is outside of all collectives. There the process *parks*: it waits for the launcher, which
# stops the generation everywhere and starts the next one. The launcher sends the environment of the next generation
# instead of starting a new process. Then the process groups are formed again, the state is resumed, and the loop is
# called again.
#
# An error parks the process in two cases: the launcher has already paused it, or the error is one of communication
# and the launcher pauses it within `PAUSE_WITHIN_S`. Any other error is an error of the script, which ends the
# rank. If the launcher has paused the process, an error of the script at the same moment is raised again in the
# repeated step.
#
# A process that cannot go on (`CannotReform`) ends, and the launcher restarts all ranks. The script has no error
# then. So the process says why in one line, and ends as by `sys.exit`. A traceback would show only frames of this
# library, once per rank.

T = TypeVar("T")

# Longer than the lease of an agent: a node that falls silent is noticed only when its lease expires.
PAUSE_WITHIN_S = 15.0


def _nothing() -> None:
    pass


def run_healing(attempt: Callable[[], T], meanwhile: Callable[[], None] = _nothing) -> T:
    """Call `attempt` until it returns: again in each generation in which this process goes on.

    `meanwhile` is called before that, outside of all groups: other processes are just being started.
    """
    watcher = guard.start()
    blocked_thread.show_waits()
    watcher.heals(True)
    is_first = True
    try:
        while True:
            try:
                if not is_first:
                    meanwhile()
                    reform.reform()
                return attempt()
            except reform.CannotReform as error:
                watcher.cannot_heal(str(error))
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                raise SystemExit(1) from error
            except Exception as error:
                if not _is_paused_after(error, watcher):
                    raise
                # Free what the frames of the interrupted loop hold: batches, activations, workers of data loaders.
                for each in _chain(error):
                    traceback.clear_frames(each.__traceback__)
            order = watcher.park()
            _start_anew()
            os.environ.update(order.environment)
            watcher.go_on()
            is_first = False
    finally:
        watcher.heals(False)


def _start_anew() -> None:
    """On the status page: until the first part of the repeated step, this process starts as the new ranks do.

    It waits for them most of that time, and repeats nothing.
    """
    page = status_page.page()
    page.phase(status_page.STARTING)
    page.phase(status_page.IDLE)


def _is_paused_after(error: Exception, watcher: guard.Guard) -> bool:
    return watcher.will_pause(PAUSE_WITHIN_S if _is_about_communication(error) else 0.0)


def _is_about_communication(error: BaseException) -> bool:
    """Whether the error, or one that led to it, is a collective that failed because of another rank."""
    chain = list(_chain(error))
    return any(map(is_communication_error, chain)) and not any(map(is_fault_of_this_rank, chain))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


# --- open States -----------------------------------------------------------------------------------
#
# The States that are open in this process, and what becomes of their memory when they are left.

_open: weakref.WeakSet[State] = weakref.WeakSet()
_scopes: weakref.WeakKeyDictionary[State, str] = weakref.WeakKeyDictionary()
_answered: weakref.WeakSet[State] = weakref.WeakSet()


def check_options(every: int, disk_every: int, folder: str | os.PathLike[str] | None, keep: int) -> None:
    for option, value, least in (("every", every, 0), ("disk_every", disk_every, 0), ("keep", keep, 1)):
        if isinstance(value, bool) or not hasattr(type(value), "__index__"):
            raise WrongType(
                f"invalid {option}={value!r}: it is a number of commits. Use an int of {least} or more"
            )
        if value < least:
            raise WrongValue(
                f"invalid {option}={value}. Use {least} or more{'' if least else ', where 0 means never'}"
            )
    if disk_every and folder is None:
        raise WrongValue("disk_every has no effect without a folder. Use State(folder=..., disk_every=...)")
    if folder is not None:
        _check_folder(folder)


def _check_folder(folder: object) -> None:
    if not isinstance(folder, (str, os.PathLike)):
        raise WrongType(f"invalid folder={folder!r}: use a path, or a URL such as s3://bucket/run")
    path = os.fspath(folder)
    if not path:
        raise WrongValue("invalid folder='': it is empty. Use the path of a folder for commits, or a URL")
    if os.path.exists(path) and not os.path.isdir(path):
        raise WrongValue(
            f"invalid folder={path!r}: it is a file. Use the path of a folder, which is made if needed"
        )


def check_names(named: Mapping[str, object], kind: type[State]) -> None:
    for name in named:
        if hasattr(kind, name) or name.startswith("_"):
            raise WrongValue(
                f"invalid name {name!r} in State(): reserved. Use a name that does not start with _ and is not a method"
            )


def check_scope(scope: str, group: ProcessGroup | None) -> None:
    if scope and not re.fullmatch(r"[a-z0-9_]{1,40}", scope):
        raise WrongValue(
            f"invalid scope={scope!r}: it is part of file names. Use up to 40 small letters, digits and underscores"
        )
    if group is not None and dist.get_rank(group) < 0:
        raise WrongValue(
            f"rank {dist.get_rank()} is not in the group of State(group=...). Create this State only on the ranks of "
            "the group"
        )
    if group is not None and not scope and group.size() < dist.get_world_size():
        raise WrongValue(
            "State(group=...) over a part of the ranks needs a scope: a State over other ranks would overwrite its "
            'commits. Give the States of each group a name of their own, for example scope="stage0"'
        )


def enter_open_states(state: State, scope: str) -> None:
    """Raise if this process has another open State of this scope: they would overwrite each other's commits."""
    for other in list(_open):
        if other is not state and other.is_open and _scopes[other] == scope:
            raise WrongUse(
                f"this process already has a State with scope={scope!r}. Put all objects into one State, close() the "
                "other one first, or give each State a scope of its own"
            )
    _open.add(state)
    _scopes[state] = scope


def obstacle_of_states(state: State) -> str:
    """Say why this process cannot go on after a failure: `state.run` resumes only its own State."""
    scopes = sorted(_scopes[other] for other in list(_open) if other is not state and other.is_open)
    if not scopes:
        return ""
    return (
        f"the script resumes another State (scope={scopes[0]!r}) before state.run, which resumes only its own. Resume "
        "it in the function that state.run calls"
    )


def has_answered(state: State) -> bool:
    """Note that this State has written a checkpoint; return whether all States of this process have, as requested."""
    if not request.checkpoint_requested():
        return True
    _answered.add(state)
    if any(each.is_open and each.has_folder and each not in _answered for each in list(_open)):
        return False
    _answered.clear()
    return True


def leave_open_states(keeper: Keeper, pid: int) -> None:
    """Keep memory for the next generation if a launcher can start one, else remove it. Forked children do nothing."""
    if os.getpid() != pid:
        return
    try:
        keeper.leave()
    finally:
        if not kept_images.is_launched(os.environ):
            keeper.remove()


# --- State -----------------------------------------------------------------------------------------

P = ParamSpec("P")
_NO_FIELD = "State does not have the field {name!r}. Pass it when you create the State: State({name}=...)"


class State:
    """Keep objects and values under the given names: State(model=model, optimizer=optimizer, step=0, ...).

    Objects with state_dict() and load_state_dict() are saved through them. Other values become fields, for example
    `state.step += 1`, and must be the same on all ranks. `every`: commit to memory at every n-th call of commit();
    `disk_every`: commit to `folder` at every n-th call; `keep`: the number of commits to keep there. `start_from`: a
    checkpoint of torch.distributed.checkpoint to begin with if there is no commit. `redundancy`: what other nodes
    keep of shards in memory ("copies:1", "code:6+2", "auto" or "none"); default: `ddp-launch --redundancy`, or none.
    `overlap`: copy state on an accelerator to the host while the training goes on, which takes memory of the device.
    `scope`: a name that tells several States of a job apart; a State over a part of the ranks (`group`) needs one.
    `on_step`: called once for each finished step, on the first rank, with its number and `commit(metrics=...)`.
    `shares_folder`: another job may use the same folder on disk at the same time.
    """

    def __init__(
        self,
        *,
        every: int = 1,
        disk_every: int = 0,
        folder: str | os.PathLike[str] | None = None,
        keep: int = 2,
        start_from: str | os.PathLike[str] | None = None,
        redundancy: str | None = None,
        overlap: bool = True,
        scope: str = "",
        group: ProcessGroup | None = None,
        on_step: Callable[[int, dict[str, Any]], object] | None = None,
        shares_folder: bool = False,
        **named: Any,
    ) -> None:
        check_options(every, disk_every, folder, keep)
        check_names(named, State)
        self._contents = Contents(named)
        self._named = tuple(named.values())
        self._steps = None if on_step is None else StepsDone(on_step, self._contents.fields, scope)
        forgotten.sources()  # a file may be edited while the script reads its data
        self._looks: FirstLooks | None = FirstLooks()
        self._samplers = [value for value in named.values() if isinstance(value, ElasticSampler)]
        self._every, self._disk_every, self._keep, self._overlap = every, disk_every, keep, overlap
        check_scope(scope, group)
        self._scope = scope
        path = folder if folder is None or not scope else f"{os.fspath(folder)}/{scope}"
        self._folder = None if path is None else open_folder(path)
        self._leases = self._folder is not None and not self._folder.is_remote and not shares_folder
        self._lease: lease.FolderLease | None = None
        self._start_from = start_from
        self._redundancy = asked_shield(redundancy, os.environ)
        self._group = group
        self._number = 0
        self._late = self._late_for_disk = False
        self._team: Team | None = None
        self._keeper: Keeper | None = None
        self._leaving: weakref.finalize[[Keeper, int], State] | None = None
        self._live: Live | None = None
        self._survivor: Survivor | None = None
        self._resumed_in: str | None = None  # the generation
        self._since = commits.CommitName(0, "")  # from which it has resumed; number 0: from none

    def __getattr__(self, name: str) -> Any:
        contents = self.__dict__.get("_contents")
        if contents is not None and name in contents.fields:
            return contents.fields[name]
        raise AttributeError(_NO_FIELD.format(name=name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif name in self._contents.fields:
            self._contents.fields[name] = value
        else:
            raise AttributeError(_NO_FIELD.format(name=name))

    # --- running -----------------------------------------------------------------------------------

    def run(self, train: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Resume, call `train(*args, **kwargs)`, and return its result.

        If another rank fails, this process may go on in the next generation: then the state is resumed and `train` is
        called again. So `train` begins where the state is, and keeps nothing that it needs outside of the state.
        """

        def attempt() -> T:
            self._begin_run()
            return train(*args, **kwargs)

        return run_healing(attempt, self._copy_ahead)

    def _begin_run(self) -> None:
        if self._resumed_in != _generation():
            self._resume()
        joining.trains(obstacle_of_states(self))
        _team, keeper = self._resumed()
        self._live = self._live or Live(self._contents.objects, self._contents.fields, self._contents.own)
        if self._every and keeper.newest != self._number:  # a rank may die before the next commit
            keeper.keep(self._contents.capture(), self._number, to_disk=False)
        self._live.mark(self._number)

    def _copy_ahead(self) -> None:
        """Begin to write what survives in this process, while other processes start (`ddp.elastic.survivor`)."""
        self._survivor = self._as_survivor()
        if self._survivor is not None and not self._contents.averagers:
            with suppress(Exception):  # it is tried again when all have said where they are, and raises then
                self._survivor.copy_ahead()

    def _as_survivor(self) -> Survivor | None:
        if self._live is None or self._keeper is None:
            return None
        return Survivor(self._contents, self._live, self._keeper, self._number)

    # --- resuming ----------------------------------------------------------------------------------

    def resume(self) -> Resumed | None:
        """Resume from the newest commit that the ranks can read; return None if there is no commit."""
        found = self._resume()
        self._resumed()[1].begin()  # now that the images which were read are unmapped; run() commits at once
        joining.resumed()
        return found

    def _resume(self) -> Resumed | None:
        enter_open_states(self, self._scope)
        places = kept_images.folders(os.environ, self._scope)
        if self._live is None and not joining.is_joining():  # else others wait, and it was done before
            kept_images.sweep(places)
        joining.joined()
        if self._keeper is not None:
            self._keeper.settle()
        team = Team(self._group)
        for sampler in self._samplers:
            sampler.move(team.rank, team.size)
        node = resume.node_name(places)
        (part, parts), regions = self._contents.partition(team.rank, team.size)
        is_whole = parts == 1 and not self._contents.averagers
        survivor, self._survivor = self._survivor or self._as_survivor(), None
        position = survivor.position(node, is_whole) if survivor is not None else None
        sources, problem = forgotten.sources(), self._take_lease(team)
        told = team.gather((position, commits.TeamMember(node, part, parts), sources, problem))
        positions, members, all_sources, problems = tuple(zip(*told, strict=True))
        if problem := next(filter(None, problems), ""):
            raise WrongUse(problem)
        forgotten.tell_of_sources(team.rank, all_sources)
        save_live(survivor, team, positions)
        role = commits.roles(members, bool(self._contents.averagers))[team.rank]
        local = resume.find_images(team, places, self._folder)
        shield = self._shield(team, node, places, team.size if self._contents.averagers else parts)
        if shield is not None:
            shield.rebuild(local)
        choice = resume.choose(team, local, rejected.read(self._places_of_marks()))
        resume.check_survivors(positions, choice, team.rank, in_shards=parts > 1)
        found = None
        if choice is not None:
            alone = bool(self._contents.averagers)
            images = resume.parts(team, local, choice, part, regions, prefers_own=alone)
            found = self._restore(images, choice)
            self._restore_own(team, local, choice, found.world_size == team.size)
        elif self._start_from is not None:
            contents = self._contents
            load_foreign(Checkpoint(self._start_from), contents.objects, contents.fields, contents.names())
        since = self._since = choice.commit if choice is not None else commits.CommitName(0, "")
        spared = resume.slots_of(local, choice)
        keeper = self._new_keeper(team, places, role, regions, since, spared, shield)
        self._begin(team, keeper)
        if shield is not None and shield.is_active and choice is not None:
            # The other nodes begin to protect this generation now, and not only at its first commit.
            keeper.keep(self._contents.capture(), self._number, to_disk=False)
        self._resumed_in = _generation()
        if self._steps is not None:
            self._steps.resumed(team.rank == 0)
        return found

    def reject(self, reason: str) -> NoReturn:
        """End this rank because the commit from which it has resumed is bad, for example if the loss is NaN at once.

        The next generation skips this commit, and those made since, if it can read an older one. One commit is
        skipped: afterwards, the error is like any other.
        """
        _team, keeper = self._resumed()
        if not self._since.number:
            raise rejected.CommitRejected(
                f"{reason}. Training has not resumed from a commit, so none is skipped"
            )
        lineages = (self._since.lineage, keeper.lineage)
        mark = rejected.Rejected(self._since.number, lineages, " ".join(reason.split()))
        known = rejected.mark(self._places_of_marks(), mark)
        if known is not None:
            raise rejected.CommitRejected(
                f"{reason}. No commit is skipped, because commit {known.number} was skipped before: {known.reason}"
            )
        raise rejected.CommitRejected(f"{reason}. The next start skips commit {self._since.number}")

    def _places_of_marks(self) -> list[Path]:
        on_disk = [Path(self._folder.name)] if self._folder is not None and not self._folder.is_remote else []
        return [kept_images.folders(os.environ, self._scope)[0], *on_disk]

    def _take_lease(self, team: Team) -> str:
        """Return why this job must not use the folder, or ""."""
        if not self._leases or team.rank != 0 or self._lease is not None or self._folder is None:
            return ""
        try:
            self._lease = lease.take(Path(self._folder.name), lease.this_process())
        except WrongUse as error:
            return str(error.args[0])
        return ""

    def _shield(self, team: Team, node: str, places: list[Path], parts: int) -> CommitShield | None:
        if self._keeper is not None:
            self._keeper.end()
        if self._redundancy is None:
            return None
        return self._redundancy(team, node, places, parts)

    def _new_keeper(
        self,
        team: Team,
        places: list[Path],
        role: commits.CommitRole,
        regions: int,
        since: commits.CommitName,
        spared: set[str],
        shield: CommitShield | None,
    ) -> Keeper:
        writes = self._folder is not None and role.writes_disk
        overlaps = self._overlap and self._contents.is_on_device()
        n_whole = 2 if overlaps else 1  # the slowest rank may lack the last one
        count = n_whole + (2 if writes else 1) + (shield.more_slots if shield is not None else 0)
        slots = kept_images.Slots(places, role.local_index, count, spared, n_whole=n_whole)
        lineage = resume.new_lineage(team)  # a collective: after it, all ranks have read their parts
        writer = None
        if self._folder is not None and writes:
            writer = Writer(self._folder, self._keep, team.rank == 0, lineage, since)
        if shield is not None:
            shield.begin(slots, lineage, spared)
        signature = Signature(lineage, role, team.rank, team.size, regions)
        return Keeper(slots, writer, signature, shield, overlaps)

    def _begin(self, team: Team, keeper: Keeper) -> None:
        self._forget_leaving()
        self._team, self._keeper = team, keeper
        # Runs when this State is deleted or the process exits, whichever happens first.
        self._leaving = weakref.finalize(self, leave_open_states, keeper, os.getpid())

    def _forget_leaving(self) -> None:
        if self._leaving is not None:
            self._leaving.detach()

    def _restore_own(
        self, team: Team, local: LocalImages, choice: commits.CommitChoice, same_size: bool
    ) -> None:
        """Restore what belongs to this rank: generators, and objects in `PerRank`."""
        private = generators.resume(team, local, choice)
        if self._live is not None and self._live.number == choice.commit.number:
            self._live.restore_own()
        else:
            own.load(self._contents.own, None if private is None else private.get(leaves.OWN, {}), same_size)

    def _restore(self, images: Iterator[image.Image], choice: commits.CommitChoice) -> Resumed:
        try:
            world_size = self._contents.restore(images)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            if is_communication_error(error):
                raise
            place = "the memory of the node" if self._folder is None else self._folder.name
            raise WrongValue(
                f"commit {choice.commit.number} of {place} does not fit this State. If the model has changed on "
                "purpose, begin anew: use another folder, or remove the commits there. The first problem: "
                f"{error.args[0] if error.args else error!r}"
            ) from error
        self._number = choice.commit.number
        return Resumed(self._number, choice.in_memory, world_size)

    # --- committing --------------------------------------------------------------------------------

    def commit(self, samples: int | None = None, metrics: Mapping[str, Any] | None = None) -> None:
        """Commit the state. Call it after each optimizer step.

        `samples`: the number of samples that this rank has trained on since the last commit. `metrics`: what `on_step`
        gets of this step.
        """
        team, keeper = self._resumed()
        if metrics is not None and self._steps is None:
            raise WrongType("commit(metrics=...) needs State(on_step=...): the function that gets them")
        if self._samplers and samples is None:
            raise WrongType(
                "commit() needs samples=... with an ElasticSampler: how many samples this rank trained on since the "
                "last commit"
            )
        for sampler in self._samplers:
            sampler.advance(samples or 0)
        self._number += 1
        if self._steps is not None:
            self._steps.count(metrics)
        self._keep_if_due(keeper)
        if self._live is not None and self._every != 1:
            self._live.mark(self._number)
        if self._steps is not None:
            self._steps.run()
        if self._looks is not None:
            kept = [value for each in list(_open) for value in each._named]
            frame = sys._getframe(1)
            self._looks = self._looks.at_commit(frame, kept, self._contents.fields, team.rank == 0)
        # Raise last, so that a rank that catches the error has made the same commit as the other ranks.
        keeper.raise_error(before=self._number)

    def _keep_if_due(self, keeper: Keeper) -> None:
        """Keep a commit if one is due. One that was due while ranks trained alone follows their synchronization."""
        disk = self._late_for_disk or commits.is_due(self._number, self._disk_every)
        memory = self._late or commits.is_due(self._number, self._every)
        if not own.is_synchronized(self._contents.averagers):
            self._late, self._late_for_disk = memory, disk
            return
        if memory or disk:
            self._late = self._late_for_disk = False
        to_disk = disk and keeper.takes(self._number, self._disk_every)
        if to_disk or memory:
            with checkpointing():
                keeper.keep(self._contents.capture(), self._number, to_disk)

    def checkpoint(self) -> None:
        """Commit to disk and return when the files of all ranks are complete. Collective; answers a pending request."""
        team, keeper = self._resumed()
        if self._folder is None:
            raise WrongValue(
                "checkpoint() needs State(folder=...): without a folder there are no commits to disk"
            )
        if not own.is_synchronized(self._contents.averagers):
            raise WrongUse(
                "checkpoint() between two synchronizations: the ranks have different models. Call it if "
                "should_checkpoint() returns True, or directly after a synchronization"
            )
        self._number += 1
        with checkpointing():
            error = self._write_checkpoint(keeper)
            errors = team.gather(None if error is None else str(error) or repr(error))
            failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
            if error is not None and not isinstance(error, OSError):
                raise error
            if failed:
                raise CommitError(
                    f"the checkpoint is incomplete: {'; '.join(failed)}. Earlier commits are still valid, and training "
                    "can continue. Fix the cause, then call checkpoint() again"
                ) from error
            if has_answered(self):
                request.checkpoint_done()
        keeper.raise_error()

    def _write_checkpoint(self, keeper: Keeper) -> Exception | None:
        """Write this rank's part of a checkpoint; return the error or None."""
        try:
            keeper.keep(self._contents.capture(), self._number, to_disk=True)
            keeper.flush(first=self._number)
        except Exception as error:
            return error
        return None

    def should_checkpoint(self) -> bool:
        """Whether any node has a request for a checkpoint.

        Collective: all ranks must call it, and get the same result. Where ranks train alone (LocalSGD, DiLoCo), the
        result is False between two synchronizations, without communication.
        """
        team, _keeper = self._resumed()
        if not own.is_synchronized(self._contents.averagers):
            return False
        return team.any(request.checkpoint_requested())

    @property
    def protected_commit(self) -> int | None:
        """With `redundancy`: the number of the last commit that survives the loss of nodes, as this rank knows it."""
        return None if self._keeper is None else self._keeper.protected

    def flush(self) -> None:
        """Wait until all commits are complete, in memory and on disk."""
        if self._keeper is not None:
            self._keeper.flush()

    def close(self) -> None:
        """End the training: remove the commits in memory. Files on disk stay."""
        if self._live is not None:
            self._live.end()
            self._live = None
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        if self._keeper is not None:
            self._keeper.flush()
            self._keeper.remove()
            self._keeper = None
            self._forget_leaving()

    @property
    def is_open(self) -> bool:
        """Whether this State was resumed and is not closed."""
        return self._keeper is not None

    @property
    def has_folder(self) -> bool:
        """Whether commits go to disk or to a store."""
        return self._folder is not None

    def _resumed(self) -> tuple[Team, Keeper]:
        if self._team is None:
            raise WrongUse("state.resume() was not called. Call it once on every rank, before commit()")
        if self._keeper is None:
            raise WrongUse("this State is closed. Create a new one")
        return self._team, self._keeper


def _generation() -> str:
    return os.environ.get(GENERATION, "")
