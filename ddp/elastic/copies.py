"""Copies of restored tensors, for objects that keep the tensors they are given: optimizers, above all.

What is restored lies in an image, which is not memory of the script. A module copies it into its own parameters. An
optimizer keeps what it is given, so it needs a copy. If it has a tensor of this kind already, as in a process that
goes on after a failure, the copy is made there: the kernel gives no pages, a device needs no second state, and a graph
that was captured finds the tensors where they were. Otherwise the copy is new memory in large pages.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from ddp.elastic import bulk_copy, leaves, paging

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddp.elastic.leaves import Leaf

_MANY_PAGES = 4 << 20  # bytes


def homes(objects: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that optimizers have now, by their paths in a commit."""
    found: dict[str, torch.Tensor] = {}
    for name, each in objects.items():
        if _keeps_tensors(each):
            _skeleton, tensors, paths = leaves.disassemble(each.state_dict())
            times = Counter(paths)
            pairs = zip(paths, tensors, strict=True)
            found |= {f"objects.{name}.{path}": tensor for path, tensor in pairs if times[path] == 1}
    return found


def _keeps_tensors(value: Any) -> bool:
    """Whether it is an optimizer that takes its state as torch's do: one with methods of its own may do anything."""
    own, kind = torch.optim.Optimizer, type(value)
    return isinstance(value, own) and (kind.state_dict, kind.load_state_dict) == (
        own.state_dict,
        own.load_state_dict,
    )


def fits(home: torch.Tensor, leaf: Leaf, template: torch.Tensor | None) -> bool:
    """Whether a tensor can take this leaf, and nobody can tell it from a new one."""
    if leaves.is_dtensor(home):
        if not leaves.is_dtensor(template) or home.shape != template.shape:
            return False
        if (home.device_mesh, home.placements) != (template.device_mesh, template.placements):
            return False
    elif leaves.is_dtensor(template):
        return False
    mine = leaves.local(home)
    return (
        (tuple(mine.shape), mine.stride(), mine.dtype) == (leaf.local_shape, leaf.stride, leaf.dtype)
        and leaves.is_dense(leaf)
        and not mine.is_inference()
    )


def owned(tree: Any, home_of: Callable[[torch.Tensor], torch.Tensor | None] = lambda _tensor: None) -> Any:
    """The tree with copies of its tensors: each in its home, or in new memory."""
    skeleton, tensors, _paths = leaves.disassemble(tree)
    copies, into, out_of = [], [], []
    for tensor in tensors:
        home = home_of(tensor)
        copies.append(_new(tensor) if home is None else home)
        into.append(leaves.local(copies[-1]))
        out_of.append(leaves.local(tensor))
    with torch.no_grad():
        if into:
            bulk_copy.copy_all(into, out_of)
    return leaves.assemble(skeleton, copies.__getitem__)


def _new(tensor: torch.Tensor) -> torch.Tensor:
    mine = leaves.local(tensor)
    made = torch.empty_like(mine)
    if made.device.type == "cpu" and made.nbytes >= _MANY_PAGES:
        paging.ask_for_large_pages(made.data_ptr(), made.nbytes)
    return leaves.with_sharding(made, tensor)
