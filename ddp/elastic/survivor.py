"""A survivor: what it needs to go on without a copy, and its state as a commit if no rank has a newer one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import chain
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ddp.elastic import commits, generators

if TYPE_CHECKING:
    from ddp.elastic.contents import Contents
    from ddp.elastic.generators import Held
    from ddp.elastic.keeper import CopiedAhead, Keeper
    from ddp.elastic.own import PerRank
    from ddp.elastic.team import Team

# --- live state ------------------------------------------------------------------------------------
#
# The state of the last commit() call, while the objects themselves still hold most of it.
#
# A copy of parameters and optimizer at every step costs time. Between two commits that are copied (`every`), a
# *mark* is enough: until the next optimizer step, parameters and optimizer still are the state of the last commit()
# call. The mark holds the rest: generators, fields, buffers, schedulers, samplers. After a failure, a survivor
# whose optimizer has not stepped since its mark writes its state as a commit, and all ranks resume from it
# (`ddp.elastic.resume`).

_values = methodcaller("values")
_ATOMIC = frozenset({int, float, bool, str, bytes, complex, type(None)})


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy. Most values are numbers, for which `copy.deepcopy` takes much longer than this look at the types."""
    if _ATOMIC.issuperset(map(type, values.values())):
        return dict(values)
    return {name: _copied_value(value) for name, value in values.items()}


def _copied_value(value: Any) -> Any:
    if type(value) in _ATOMIC:
        return value
    if type(value) is tuple and all(type(each) in _ATOMIC for each in value):
        return value
    return copy.deepcopy(value)


class _Buffers:
    """The buffers of a module and of all modules below it.

    A script may exchange modules and buffers between two steps. `Module.buffers()` looks at them one by one. Here the
    dictionaries are kept in which torch has them, and compared as a whole.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._tables: list[Any] = []  # of the modules directly below each module
        self._children: list[Any] = []
        self._buffers: list[Any] = []
        self._read()

    def _read(self) -> None:
        modules = list(self._module.modules())
        self._tables = [each._modules for each in modules]
        self._buffers = [each._buffers for each in modules]
        self._children = _all_in(self._tables)

    def now(self) -> list[torch.Tensor]:
        if _all_in(self._tables) != self._children:
            self._read()
        return [buffer for buffer in _all_in(self._buffers) if buffer is not None]


def _all_in(tables: list[Any]) -> list[Any]:
    return [*chain.from_iterable(map(_values, tables))]


class _Mark(NamedTuple):  # made at each step: a frozen dataclass takes longer
    """What the objects do not hold any more in the next step."""

    number: int
    generators: Held
    fields: dict[str, Any]
    own: list[tuple[PerRank, Any]]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    settings: list[tuple[dict[str, Any], dict[str, Any]]]  # of the groups of optimizers
    others: list[tuple[Any, Any]]


class Live:
    """The marks of one State, and whether an optimizer has stepped since the last one."""

    def __init__(
        self,
        objects: Mapping[str, Any],
        fields: dict[str, Any],
        own: Mapping[str, PerRank] | None = None,
    ) -> None:
        self._fields = fields
        self._own = list((own or {}).values())
        self._generators = generators.GeneratorHolder()
        self._buffers: list[_Buffers] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._others: list[Any] = []
        for each in objects.values():
            if isinstance(each, torch.nn.Module):
                self._buffers.append(_Buffers(each))
            elif isinstance(each, torch.optim.Optimizer):
                self._optimizers.append(each)
            else:
                self._others.append(each)
        self._mark: _Mark | None = None
        self._is_unchanged = False
        self._hooks = [each.register_step_pre_hook(self._changes) for each in self._optimizers]

    def _changes(self, *_step: object) -> None:
        self._is_unchanged = False

    def mark(self, number: int) -> None:
        self._mark = _Mark(
            number,
            self._generators.hold(),
            _copied(self._fields),
            [(each, copy.deepcopy(each.state())) for each in self._own],
            [(buffer, buffer.detach().clone()) for each in self._buffers for buffer in each.now()],
            [(group, _settings_of(group)) for each in self._optimizers for group in each.param_groups],
            [(each, copy.deepcopy(each.state_dict())) for each in self._others],
        )
        self._is_unchanged = True

    @property
    def number(self) -> int | None:
        """The commit() call whose state the objects still hold; None if they do not."""
        return self._mark.number if self._mark is not None and self._is_unchanged else None

    def restore(self) -> None:
        """Bring the objects back to the mark. Only valid if no optimizer has stepped since."""
        self.restore_shared()
        self.restore_own()

    def restore_shared(self) -> None:
        """Bring back what all ranks have in common."""
        assert self._mark is not None
        with torch.no_grad():
            for buffer, kept in self._mark.buffers:
                buffer.copy_(kept)
        for group, settings in self._mark.settings:
            group.update(_copied(settings))
        for each, kept in self._mark.others:
            each.load_state_dict(copy.deepcopy(kept))
        self._fields.update(_copied(self._mark.fields))

    def restore_own(self) -> None:
        """Bring back what belongs to this rank, but the errors of communication hooks."""
        assert self._mark is not None
        for own, kept in self._mark.own:
            own.load(copy.deepcopy(kept))
        self._generators.set_back(self._mark.generators)

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._mark = [], None


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    settings = group.copy()
    del settings["params"]
    return _copied(settings)


def drop_gradients(objects: Mapping[str, Any]) -> None:
    """The repeated step computes them again, from its first microbatch."""
    for each in objects.values():
        if isinstance(each, torch.nn.Module):
            each.zero_grad(set_to_none=True)


# --- the commit of a survivor ----------------------------------------------------------------------
#
# A survivor writes what its objects hold as a commit, if no other rank has a newer one.
#
# Theory of operation
# -------------------
# Between two commits that are copied, only the objects of the survivors have the newest state
# (`ddp.elastic.survivor`). After a failure all ranks tell where they are, and on each node the first of those that
# are furthest writes its state. All others wait for it.
#
# The copy takes most of that time, and the tensors do not change until then. So a rank that keeps the replicas of
# its node copies them *ahead*: while the replacements start, and before it knows what the others have. The commit
# exists only if it is asked for. A large state is not copied ahead, because the copy may not be needed.

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
