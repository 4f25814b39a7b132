"""What differs between ranks by design, and how a State keeps it.

- Objects in `PerRank`, and torchdata's StatefulDataLoader: each rank keeps its own state, beside its random generators.
- Communication hooks with a memory: the compression errors belong to a rank. The step and the factors of PowerSGD are
  the same on all ranks, so they are part of the state that all share.
- Models that ranks train alone (LocalSGD, DiLoCo): each rank keeps an image of everything, and goes on from its own.
  Without collectives, ranks may be many steps apart. So a commit is made only after a synchronization.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from ddp.comm_hooks.gossip import Gossip
from ddp.comm_hooks.resumable import Resumable
from ddp.elastic.images import copies
from ddp.telemetry.coded import WrongType

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger("ddp.elastic")
_ERRORS = "errors"


class PerRank:
    """`State(loader=PerRank(loader))`: each rank keeps its own state of this object.

    It returns only to the same rank in a world of the same size. Otherwise the object stays as it is.
    """

    def __init__(self, value: Any) -> None:
        if not is_stateful(value):
            raise WrongType(
                f"invalid PerRank({type(value).__name__}): it has no state_dict() and load_state_dict(). Use an object "
                "that has them"
            )
        self.value = value

    def state(self) -> Any:
        return self.value.state_dict()

    def load(self, state: Any) -> None:
        self.value.load_state_dict(state)


class HookErrors:
    """The compression errors of a communication hook on this rank."""

    def __init__(self, hook: Resumable, module: torch.nn.Module) -> None:
        self._hook, self._module = hook, module

    def state(self) -> dict[str, torch.Tensor]:
        return self._hook.errors.state_dict(self._module)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self._hook.errors.load_state_dict(self._module, state)

    def forget(self) -> None:
        self._hook.errors.clear()


class HookSteps:
    """What a communication hook has on all ranks alike: its step, and the factors of PowerSGD."""

    def __init__(self, hook: Resumable, module: torch.nn.Module) -> None:
        self._hook, self._module = hook, module

    def state_dict(self) -> dict[str, Any]:
        memories = self._hook.memories().items()
        saved = {name: memory.state_dict(self._module) for name, memory in memories if name != _ERRORS}
        return {"step": self._hook.step, **saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, memory in self._hook.memories().items():
            if name != _ERRORS:
                memory.load_state_dict(self._module, state[name])
        self._hook.step = state["step"]


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def sort_out(named: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, PerRank | HookErrors]]:
    """Divide what a State was given: what ranks share, and what belongs to this rank."""
    shared: dict[str, Any] = {}
    own: dict[str, PerRank | HookErrors] = {}
    for name, value in named.items():
        if isinstance(value, PerRank):
            own[name] = value
        elif _is_stateful_loader(value):
            own[name] = PerRank(value)
        elif isinstance(value, Resumable):
            module = _module_of(name, value, named)
            shared[name] = HookSteps(value, module)
            own[name] = HookErrors(value, module)
        else:
            _refuse_foreign_hook(name, value)
            shared[name] = value
    return shared, own


def _is_stateful_loader(value: Any) -> bool:
    names = {f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in type(value).__mro__}
    return "torchdata.StatefulDataLoader" in names


def _module_of(name: str, hook: Resumable, named: Mapping[str, Any]) -> torch.nn.Module:
    """The model whose gradients go through the hook: its memory has the names of its parameters."""
    if isinstance(hook, Gossip):
        raise WrongType(
            f"cannot commit {name}: under gossip_grad the ranks have different models, and they may be several steps "
            "apart, so there is no state of the job. Use LocalSGD of ddp.averaging. Or average the parameters now and "
            "then, and save them with torch.save()"
        )
    modules = [each for each in named.values() if isinstance(each, torch.nn.Module)]
    registered = [
        each for each in modules if any(state is hook for _hook, state in vars(each).get("_comm_hooks", ()))
    ]
    found = registered or modules
    if len(found) != 1:
        raise WrongType(
            f"cannot commit {name}: the memory of a communication hook has the names of a model's parameters, but this "
            f"State has {len(modules)} models. Pass the wrapped model of the hook to the same State, and call its "
            "register_comm_hook() before"
        )
    return found[0]


def _refuse_foreign_hook(name: str, value: Any) -> None:
    if type(value).__module__.startswith("torch.distributed.algorithms.ddp_comm_hooks."):
        raise WrongType(
            f"cannot commit {name}: torch's {type(value).__name__} has no state_dict(). Use the hook of "
            "ddp.comm_hooks, which works with torch's DistributedDataParallel too"
        )


def load(own: Mapping[str, PerRank | HookErrors], found: Mapping[str, Any] | None, same_size: bool) -> None:
    """Restore this rank's own states from an image; `found`: None if they are lost, or the rank is new."""
    found = None if found is None else copies.owned(found)
    for name, each in own.items():
        state = None if found is None else found.get(name)
        if isinstance(each, HookErrors):
            if state is None:
                each.forget()
            else:
                each.load(state)
        elif state is not None and same_size:
            each.load(state)
        else:
            log.warning(
                "ddp.elastic: %s begins again on this rank: %s",
                name,
                "its state is lost, or the rank is new" if state is None else "the world has another size",
            )


def forget_errors(own: Mapping[str, PerRank | HookErrors]) -> None:
    for each in own.values():
        if isinstance(each, HookErrors):
            each.forget()


# --- models that ranks train alone ---------------------------------------------------------------------


def averagers(named: Mapping[str, Any]) -> list[Any]:
    """The objects that average models which ranks train alone."""
    return [each for each in named.values() if getattr(each, "trains_alone", False)]


def is_synchronized(found: list[Any]) -> bool:
    """Whether all ranks have the same parameters at this step."""
    return not found or all(each.is_synchronized for each in found)
