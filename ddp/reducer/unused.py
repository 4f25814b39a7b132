"""Find the parameters that a backward from given outputs cannot reach, and those that any rank used.

With `find_unused_parameters`, the ranks exchange which parameters they used (`Usage`). Without it they exchange
nothing more, because nearly every step uses everything. A rank without a gradient then sends -0.0 in its place. The
sum of -0.0 is -0.0 if every rank sends it, and +0.0 or another number if one rank has a gradient. So a rank that did
not use a parameter sees in the average whether another rank did. If a communication hook loses the sign, the rank
takes a parameter that no rank used for one with a gradient of 0, on all ranks alike.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import record_function

from ddp.reducer.collectives import GROUP_TIMEOUT, start_sum
from ddp.reducer.host_copy import HostCopy, to_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed import ProcessGroup

_log = logging.getLogger("ddp")
# An output may be any object. The search for its tensors stops at this depth.
_DEEPEST = 6
# What a rank without a gradient contributes to the sum.
ABSENT = -0.0
# The names of the graph's nodes that run a backward of their own: the search does not see what that one reaches.
_NESTING = "CheckpointFunctionBackward"
_NOT_OUTPUTS = (str, bytes, int, float, complex, type, torch.nn.Module)


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Return all tensors in an output: in lists, dicts, dataclasses, and attributes of other objects."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    _collect(output, found, seen, 0)
    return found


def _collect(value: Any, found: list[torch.Tensor], seen: set[int], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
        return
    if value is None or isinstance(value, _NOT_OUTPUTS) or depth > _DEEPEST or id(value) in seen:
        return
    seen.add(id(value))
    for part in _parts(value):
        _collect(part, found, seen, depth + 1)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if is_dataclass(value):
        return [getattr(value, field.name, None) for field in fields(value)]
    if callable(value):
        return ()
    slots = getattr(type(value), "__slots__", ())
    named = [slots] if isinstance(slots, str) else slots
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in named)]


class GraphSearch:
    """Searches the graph of each forward for parameters that its backward cannot reach."""

    def __init__(self, accumulators: Sequence[Any]) -> None:
        self._accumulators = accumulators
        self._warned = False

    def unused(self, outputs: Sequence[torch.Tensor]) -> frozenset[int]:
        if not outputs:
            return frozenset()
        with record_function("torch.distributed.ddp.reducer::search_unused_parameters"):
            unused = unreachable(outputs, self._accumulators)
        if unused is None:
            return frozenset()
        if not unused and not self._warned:
            self._warned = True
            _log.warning(
                "find_unused_parameters=True is set, but this forward used all parameters. The search for unused "
                "parameters costs time in each step. If every forward uses all parameters, remove it."
            )
        return unused


def unreachable(outputs: Sequence[torch.Tensor], accumulators: Sequence[Any]) -> frozenset[int] | None:
    """Return the indices of the accumulators that the autograd graph does not reach from the outputs.

    None: unknown, because the graph has reentrant checkpoints. Their layers are not in the graph of the outputs.
    """
    sought = {accumulator: i for i, accumulator in enumerate(accumulators)}
    missing = set(range(len(accumulators)))
    stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
    # An output may be a parameter itself.
    leaves = [output for output in outputs if output.grad_fn is None and output.requires_grad]
    stack += [accumulator(leaf) for leaf in leaves]
    seen, kinds = set(stack), set()
    while stack and missing:
        node = stack.pop()
        kinds.add(type(node))
        index = sought.get(node)
        if index is not None:
            missing.discard(index)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    if missing and any(kind.__name__ == _NESTING for kind in kinds):
        return None
    return frozenset(missing)


def accumulator(parameter: torch.Tensor) -> Any:
    """Return the node of the autograd graph that adds to `.grad`. Each parameter has one."""
    with torch.enable_grad():
        return parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


class Usage:
    """Which parameters any rank used in one backward. Reading that waits for the device, so it is read only if needed.

    A rank knows about the parameters that it used itself. About the others it has to read the sum over all ranks.
    """

    def __init__(self, used_here: Sequence[int], group: ProcessGroup, device: torch.device) -> None:
        self._used_here = used_here
        self.counts = to_device(torch.tensor(used_here, dtype=torch.int32), device)
        self._work: Any = start_sum(group, self.counts)
        self._copy: HostCopy | None = None
        self._used_anywhere: Sequence[int] | None = None

    def wait(self) -> None:
        """Wait for the sum as for a bucket: on an accelerator the device waits, not the host."""
        if self._work is not None:
            self._work.wait(GROUP_TIMEOUT)
            self._work = None
            if not all(self._used_here):
                self._copy = HostCopy(self.counts)

    def was_used_here(self, index: int) -> bool:
        return bool(self._used_here[index])

    def __getitem__(self, index: int) -> bool:
        if self._used_here[index]:
            return True
        if self._used_anywhere is None:
            self.wait()
            assert self._copy is not None
            self._used_anywhere, self._copy = self._copy.read(), None
        return bool(self._used_anywhere[index])


class UsedMembers:
    """The members of one bucket that any rank used. Only their `.grad` receives the average."""

    def __init__(
        self, members: Sequence[int], parameters: Sequence[torch.Tensor], usage: Usage | None, *, sent: bool
    ) -> None:
        """`members`: the parameter indices of the bucket. `sent`: whether the ranks averaged the bucket."""
        self._members, self._parameters, self._usage, self._sent = members, parameters, usage, sent

    def __call__(self, member: int, average: torch.Tensor) -> bool:
        index = self._members[member]
        parameter = self._parameters[index]
        if not self._sent or not parameter.requires_grad:
            return False
        if self._usage is None:
            return parameter.grad is not None or not _is_absent(average)
        return self._usage[index]

    def includes_all(self, members: Sequence[int]) -> bool:
        indices = [self._members[member] for member in members]
        usage = self._usage
        return (
            self._sent
            and all(self._parameters[i].requires_grad for i in indices)
            and (usage is None or all(map(usage.was_used_here, indices)))
        )


def _is_absent(average: torch.Tensor) -> bool:
    """Whether no rank had a gradient, if the ranks did not exchange usage. Reading it waits for the device."""
    if average.is_sparse:
        return average._values().numel() == 0
    number = torch.view_as_real(average)[..., 0] if average.is_complex() else average
    return bool(((number == 0) & torch.signbit(number)).all())
