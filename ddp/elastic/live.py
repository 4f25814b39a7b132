"""The state of the last commit() call, while the objects themselves still hold most of it.

A copy of parameters and optimizer at every step costs time. Between two commits that are copied (`every`), a *mark* is
enough: until the next optimizer step, parameters and optimizer still are the state of the last commit() call. The mark
holds the rest: generators, fields, buffers, schedulers, samplers. After a failure, a survivor whose optimizer has not
stepped since its mark writes its state as a commit, and all ranks resume from it (`ddp.elastic.resume`).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from ddp.elastic import generators
from ddp.elastic.own import PerRank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddp.elastic.own import HookErrors


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


class Mark:
    """What the objects do not hold any more in the next step."""

    def __init__(
        self, number: int, objects: Mapping[str, Any], fields: Mapping[str, Any], own: Mapping[str, Any]
    ) -> None:
        self.number = number
        self.restore_generators = generators.hold()
        self._fields = _copied(fields)
        self._own = [
            (each, copy.deepcopy(each.state())) for each in own.values() if isinstance(each, PerRank)
        ]
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._settings: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._others: list[tuple[Any, Any]] = []
        for each in objects.values():
            self._keep(each)

    def _keep(self, each: Any) -> None:
        if isinstance(each, torch.nn.Module):
            self._buffers += [(buffer, buffer.detach().clone()) for buffer in _buffers_of(each)]
        elif isinstance(each, torch.optim.Optimizer):
            for group in each.param_groups:
                settings = group.copy()
                del settings["params"]
                self._settings.append((group, _copied(settings)))
        else:
            self._others.append((each, copy.deepcopy(each.state_dict())))

    def restore(self, fields: dict[str, Any]) -> None:
        """Bring the objects back to the mark. Only valid if no optimizer has stepped since."""
        with torch.no_grad():
            for buffer, kept in self._buffers:
                buffer.copy_(kept)
        for group, settings in self._settings:
            group.update(_copied(settings))
        for each, kept in self._others:
            each.load_state_dict(copy.deepcopy(kept))
        fields.update(_copied(self._fields))
        self.restore_own()

    def restore_own(self) -> None:
        for own, kept in self._own:
            own.load(copy.deepcopy(kept))
        self.restore_generators()


class Live:
    """The marks of one State, and whether an optimizer has stepped since the last one."""

    def __init__(
        self,
        objects: Mapping[str, Any],
        fields: dict[str, Any],
        own: Mapping[str, PerRank | HookErrors] | None = None,
    ) -> None:
        self._objects, self._fields, self._own = objects, fields, own or {}
        self._mark: Mark | None = None
        self._is_unchanged = False
        self._hooks = [
            each.register_step_pre_hook(self._changes)
            for each in objects.values()
            if isinstance(each, torch.optim.Optimizer)
        ]

    def _changes(self, *_step: object) -> None:
        self._is_unchanged = False

    def mark(self, number: int) -> None:
        self._mark, self._is_unchanged = Mark(number, self._objects, self._fields, self._own), True

    @property
    def number(self) -> int | None:
        """The commit() call whose state the objects still hold; None if they do not."""
        return self._mark.number if self._mark is not None and self._is_unchanged else None

    def restore(self) -> None:
        assert self._mark is not None
        self._mark.restore(self._fields)

    def restore_own(self) -> None:
        """Bring back what belongs to this rank, but the errors of communication hooks."""
        assert self._mark is not None
        self._mark.restore_own()

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._mark = [], None


def _buffers_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """The buffers of a module and of all modules below it, as `Module.buffers()` finds them in several times this time.

    They are found anew for each mark: a script may exchange modules and buffers between two steps.
    """
    found: list[torch.Tensor] = []
    seen, waiting = {module}, [module]
    while waiting:
        each = waiting.pop()
        if buffers := each._buffers:
            found += [buffer for buffer in buffers.values() if buffer is not None]
        for child in each._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return found


def drop_gradients(objects: Mapping[str, Any]) -> None:
    """The repeated step computes them again, from its first microbatch."""
    for each in objects.values():
        if isinstance(each, torch.nn.Module):
            each.zero_grad(set_to_none=True)
