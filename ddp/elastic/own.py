"""What differs between ranks by design, and how a State keeps it.

- Objects in `PerRank`, and torchdata's StatefulDataLoader: each rank keeps its own state, beside its random generators.
- Models that ranks train alone (LocalSGD, DiLoCo): each rank keeps an image of everything, and goes on from its own.
  Without collectives, ranks may be many steps apart. So a commit is made only after a synchronization.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ddp.elastic.images import copies
from ddp.telemetry.coded import WrongType

log = logging.getLogger("ddp.elastic")


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


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def sort_out(named: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, PerRank]]:
    """Divide what a State was given: what ranks share, and what belongs to this rank."""
    shared: dict[str, Any] = {}
    own: dict[str, PerRank] = {}
    for name, value in named.items():
        if isinstance(value, PerRank):
            own[name] = value
        elif _is_stateful_loader(value):
            own[name] = PerRank(value)
        else:
            _refuse_hook(name, value)
            shared[name] = value
    return shared, own


def _is_stateful_loader(value: Any) -> bool:
    names = {f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in type(value).__mro__}
    return "torchdata.StatefulDataLoader" in names


def _refuse_hook(name: str, value: Any) -> None:
    if type(value).__module__.startswith("torch.distributed.algorithms.ddp_comm_hooks."):
        raise WrongType(
            f"cannot commit {name}: torch's {type(value).__name__} has no state_dict(). Leave it out of the State: "
            "its memory begins again after a restart"
        )


def load(own: Mapping[str, PerRank], found: Mapping[str, Any] | None, same_size: bool) -> None:
    """Restore this rank's own states from an image; `found`: None if they are lost, or the rank is new."""
    found = None if found is None else copies.owned(found)
    for name, each in own.items():
        state = None if found is None else found.get(name)
        if state is not None and same_size:
            each.load(state)
        else:
            log.warning(
                "ddp.elastic: %s begins again on this rank: %s",
                name,
                "its state is lost, or the rank is new" if state is None else "the world has another size",
            )


# --- models that ranks train alone ---------------------------------------------------------------------


def averagers(named: Mapping[str, Any]) -> list[Any]:
    """The objects that average models which ranks train alone."""
    return [each for each in named.values() if getattr(each, "trains_alone", False)]


def is_synchronized(found: list[Any]) -> bool:
    """Whether all ranks have the same parameters at this step."""
    return not found or all(each.is_synchronized for each in found)
