"""Find the parameters that a backward from given outputs cannot reach, and those that any rank used.

With `find_unused_parameters`, and in the first step of a static graph, the ranks exchange which parameters they used
(`Usage`). Otherwise every parameter counts as used.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import record_function

from ddp.reducer.collectives import GROUP_TIMEOUT, start_sum
from ddp.reducer.host_copy import HostCopy, to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

_log = logging.getLogger("ddp")


class GraphSearch:
    """Searches the graph of each forward for parameters that its backward cannot reach."""

    def __init__(self, accumulators: Sequence[Any]) -> None:
        self._accumulators = accumulators
        self._warned = False

    def unused(self, outputs: Sequence[torch.Tensor]) -> frozenset[int]:
        with record_function("torch.distributed.ddp.reducer::search_unused_parameters"):
            unused = unreachable(outputs, self._accumulators)
        if not unused and not self._warned:
            self._warned = True
            _log.warning(
                "find_unused_parameters=True is set, but this forward used all parameters. The search for unused "
                "parameters costs time in each step. If every forward uses all parameters, remove it."
            )
        return unused


def unreachable(outputs: Sequence[torch.Tensor], accumulators: Sequence[Any]) -> frozenset[int]:
    """Return the indices of the accumulators that the autograd graph does not reach from the outputs."""
    sought = {accumulator: i for i, accumulator in enumerate(accumulators)}
    missing = set(range(len(accumulators)))
    stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(stack)
    while stack and missing:
        node = stack.pop()
        index = sought.get(node)
        if index is not None:
            missing.discard(index)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
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

    @property
    def unused_here(self) -> frozenset[int]:
        return frozenset(i for i, used in enumerate(self._used_here) if not used)

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

    def __init__(self, members: Sequence[int], usage: Usage | None, *, sent: bool) -> None:
        """`members`: the parameter indices of the bucket. `sent`: whether the ranks averaged the bucket."""
        self._members, self._usage, self._sent = members, usage, sent

    def __call__(self, member: int, average: torch.Tensor) -> bool:
        return self._sent and (self._usage is None or self._usage[self._members[member]])

    def includes_all(self, members: Sequence[int]) -> bool:
        usage = self._usage
        return self._sent and (
            usage is None or all(usage.was_used_here(self._members[member]) for member in members)
        )
