"""Copies of restored tensors, for objects that keep the tensors they are given: optimizers, above all.

What is restored lies in an image, which is not memory of the script. A module copies it into its own parameters. An
optimizer keeps what it is given, so it needs a copy. If it has a tensor of this kind already, as in a process that
goes on after a failure, the copy is made there: the kernel gives no pages, a device needs no second state, and a graph
that was captured finds the tensors where they were. Otherwise the copy is new memory in large pages.
"""

from __future__ import annotations

import functools
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ddp.elastic.images import kept_images, leaves
from ddp.groups import core_loading
from ddp.telemetry import torch_api

if TYPE_CHECKING:
    from types import ModuleType

    from ddp.elastic.images.leaves import Leaf

# --- copies of many tensors ------------------------------------------------------------------------
#
# Copies of many tensors, around the caches of the processor where they are large and something is compiled for it.
#
# torch copies through the caches: it reads the memory that it is about to overwrite, and drives out what the next
# step needs. For a state that is larger than the caches this takes about 1.4 times as long (`_core/bulk_copy.c`).
#
# Only ordinary tensors in the memory of the host whose elements lie in the same order on both sides are copied that
# way. torch copies all others.

_LARGE = 256 << 10  # bytes of a tensor
_IN_CACHE = 16 << 20  # bytes of all of them that caches may hold until a reader needs the copy
_ORDINARY = {torch.Tensor, torch.nn.Parameter}


@functools.cache
def compiled() -> ModuleType | None:
    native = core_loading.part("ddp.elastic._bulk_copy")
    return native if native is not None and native.is_fast() else None


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, which has the same shape. Call it under `torch.no_grad()`."""
    if (native := compiled()) is None:
        torch_api.copy_all(targets, sources)
        return
    around, through = _sorted_out(targets, sources)
    if around:
        rows = array("Q")
        for number in around:
            target, source = targets[number], sources[number]
            rows.extend((target.data_ptr(), source.data_ptr(), source.nbytes))
            torch.autograd.graph.increment_version(target)  # as torch does when it writes
        native.copy(rows)
    if through:
        torch_api.copy_all([targets[number] for number in through], [sources[number] for number in through])


def _sorted_out(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> tuple[list[int], list[int]]:
    """The numbers of the pairs that are copied around the caches, and of those that torch copies."""
    around: list[int] = []
    through: list[int] = []
    n_bytes = 0
    for number, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if source.nbytes >= _LARGE and _is_same_bytes(target, source):
            around.append(number)
            n_bytes += source.nbytes
        else:
            through.append(number)
    return (around, through) if n_bytes >= _IN_CACHE else ([], list(range(len(targets))))


def _is_same_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy of the bytes is a copy of the tensor."""
    return (
        type(target) in _ORDINARY
        and type(source) in _ORDINARY
        and target.dtype == source.dtype
        and target.shape == source.shape
        and _is_plain(target)
        and _is_plain(source)
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.data_ptr() != 0  # torch has tensors of zeros without memory
    )


# --- copies of what is restored --------------------------------------------------------------------

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
    """Whether a tensor can take this leaf, so that it equals a new one."""
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
            copy_all(into, out_of)
    return leaves.assemble(skeleton, copies.__getitem__)


def _new(tensor: torch.Tensor) -> torch.Tensor:
    mine = leaves.local(tensor)
    made = torch.empty_like(mine)
    if made.device.type == "cpu" and made.nbytes >= _MANY_PAGES:
        kept_images.ask_for_large_pages(made.data_ptr(), made.nbytes)
    return leaves.with_sharding(made, tensor)
