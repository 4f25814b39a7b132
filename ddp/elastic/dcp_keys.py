"""The names of a State's tensors and values in a checkpoint of torch.distributed.checkpoint (DCP).

DCP names each leaf of a tree by its path. `State(model=..., optimizer=..., step=0)` becomes `model.0.weight`,
`optimizer.state.0.weight.exp_avg`, `optimizer.param_groups.0.lr` and `step`. In the state of an optimizer, parameters
have the names that they have in the model, as in `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp.elastic import leaves
from ddp.elastic.dcp_metadata import key_of

if TYPE_CHECKING:
    from ddp.elastic.dcp_metadata import Path

Names = dict[str, tuple[str, ...]]  # of each optimizer: the names of its parameters, in its order

_WRAPPERS = (
    "_orig_mod.",
    "_checkpoint_wrapped_module.",
)  # torch.compile and activation checkpointing add them


@dataclass(frozen=True, slots=True)
class Keys:
    tensors: dict[int, Path]  # by the number in the skeleton
    values: list[tuple[Path, Any]]


def bare(name: str) -> str:
    """A name in a module, without the wrappers around its parts."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def of(skeleton: dict[str, Any], names: Names) -> Keys:
    """The paths of all tensors, and all other values with their paths."""
    tree = skeleton["fields"] | {
        name: _by_name(each, names[name]) if name in names else each
        for name, each in skeleton["objects"].items()
    }
    found = Keys({}, [])
    taken: set[str] = set()

    def unique(path: Path) -> Path:
        while (key := key_of(path)) in taken:  # {"a.b": 1, "a": {"b": 2}}
            path = (*path[:-1], f"{path[-1]}~")
        taken.add(key)
        return path

    def visit(value: Any, path: Path) -> None:
        if (number := leaves.marked(value)) is not None:
            found.tensors[number] = unique(path)
        elif isinstance(value, dict):
            for key, inner in value.items():
                visit(inner, (*path, bare(str(key))))
        elif _is_opened(value):
            for number, inner in enumerate(value):
                visit(inner, (*path, number))
        else:
            found.values.append((unique(path), value))

    for name, each in tree.items():
        visit(each, (name,))
    return found


def _by_name(state: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    def name_of(number: Any) -> Any:
        return names[number] if isinstance(number, int) and number < len(names) else number

    return state | {
        "state": {name_of(number): each for number, each in state["state"].items()},
        "param_groups": [
            group | {"params": [name_of(number) for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def _is_opened(value: Any) -> bool:
    """Whether a list has keys for its elements: DCP opens lists with tensors or dictionaries."""
    if isinstance(value, list):
        return any(
            isinstance(each, dict) or leaves.marked(each) is not None or _is_opened(each) for each in value
        )
    return isinstance(value, tuple) and any(
        leaves.marked(each) is not None or _is_opened(each) for each in value
    )
