"""One backward, as the reducer sees it while it lasts, and what is learned from it for the next.

Chunks are neighbours in a bucket that are gathered together. With every parameter watched, a chunk is complete when
each of its gradients has arrived as often as is expected; with sentinels, when its sentinel has and the others turn
out to be there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import repeat
from operator import is_not
from typing import TYPE_CHECKING, Any

from ddp.reducer.launch_order import begin
from ddp.reducer.plan import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ddp.reducer.launch_order import Readiness
    from ddp.reducer.plan import BucketPlan, ParameterFacts

# Smaller pieces are not worth a hook and two calls.
CHUNK_BYTES = 128 * 1024


class Mode(Enum):
    OBSERVE = "every parameter is watched, all is sent at the end"
    COUNT = "every parameter is watched, buckets are sent when they are full"
    SENTINEL = "one parameter of each chunk is watched"


@dataclass(frozen=True)
class Chunk:
    bucket: int
    start: int
    end: int
    members: tuple[int, ...]


def cut(plan: BucketPlan, parameters: Sequence[ParameterFacts]) -> list[Chunk]:
    chunks = []
    for number, bucket in enumerate(plan.buckets):
        start, filled = 0, 0
        for i, member in enumerate(bucket.members):
            filled += parameters[member].nbytes
            last = i + 1 == len(bucket.members)
            if last or (filled >= CHUNK_BYTES and bucket.kind is Kind.FLAT):
                chunks.append(Chunk(number, start, i + 1, bucket.members[start : i + 1]))
                start, filled = i + 1, 0
    return chunks


@dataclass
class Baseline:
    """What `.grad` was when the backward began. `grads` is None when there were no gradients at all.

    Gradients that are views of one bucket count their versions together: it cannot be told which of them has been
    added to. Then `exact` is false, and only a hook can tell what has arrived.
    """

    grads: list[Any] | None
    versions: list[int]
    exact: bool = True

    def arrived(self, index: int, grad: torch.Tensor | None) -> bool:
        if grad is None:
            return False
        if self.grads is None:
            return True
        return grad is not self.grads[index] or grad._version != self.versions[index]

    def all_arrived(self, members: Sequence[int], grads: Sequence[torch.Tensor | None]) -> bool:
        if self.grads is None:
            return all(map(is_not, grads, repeat(None)))
        return all(map(self.arrived, members, grads))

    def held(self, index: int) -> bool:
        """It may be a gradient of an earlier backward, or of this one, from before an output was reached."""
        return self.grads is not None and self.grads[index] is not None

    def of(self, members: Sequence[int]) -> list[Any] | None:
        return None if self.grads is None else [self.grads[i] for i in members]


def baseline(parameters: Sequence[torch.Tensor], *, exact: bool) -> Baseline:
    grads = [parameter.grad for parameter in parameters]
    if not any(map(is_not, grads, repeat(None))):
        return Baseline(None, [])
    return Baseline(list(grads), [-1 if grad is None else grad._version for grad in grads], exact)


@dataclass
class Round:
    """From the first gradient of a backward until all are averaged."""

    readiness: Readiness
    waiting: list[int]  # of each chunk: for how many gradients
    counts: list[int]  # of each parameter: how often its gradient has arrived
    gathered: list[bool]  # of each chunk
    unused: frozenset[int] = frozenset()  # the graph of the forward does not lead to them
    searched: bool = False
    settled: set[int] = field(default_factory=set)  # no gradient is waited for
    order: list[int] = field(default_factory=list)
    tasks: set[int] = field(default_factory=set)  # the engine's graph tasks that gradients came in
    works: list[Any] = field(default_factory=list)
    reduced: int = 0  # how many buckets were sent: those without a used parameter may be skipped
    before: Baseline | None = None
    begun: bool = False
    # The end of the outermost backward will be told; it has been.
    end_known: bool = False
    ended: bool = False
    # Gradients arrived before the backward reached an output: of a layer that was applied after the forward.
    early: bool = False
    # That of torch.distributed.autograd in which the forward ran; whether the gradients go there instead of `.grad`.
    context: int | None = None
    in_context: bool = False
    # Chunks whose sentinel arrived, and some of whose other gradients did not seem to be there.
    disordered: set[int] = field(default_factory=set)
    finishing: bool = False
    # Of each parameter: whether this rank, then whether any rank, gave it a gradient; None: nobody asks.
    used: list[int] | None = None
    used_anywhere: Any = None
    used_work: Any = None

    def changed_order(self, before: Round | None) -> bool:
        """Whether gradients arrived in another order than in the backward before, as far as can be told."""
        if before is None:
            return False
        return bool(self.disordered or (before.order and self.order and before.order != self.order))


def new_round(
    plan: BucketPlan, chunks: Sequence[Chunk], parameters: int, unused: frozenset[int] = frozenset()
) -> Round:
    return Round(
        readiness=begin([len(bucket.members) for bucket in plan.buckets]),
        waiting=[len(chunk.members) for chunk in chunks],
        counts=[0] * parameters,
        gathered=[False] * len(chunks),
        unused=unused,
    )


def absent(seen: Round, mode: Mode, chunks: Sequence[Chunk], parameters: Sequence[torch.Tensor]) -> list[int]:
    """Parameters of which nothing has arrived in this backward, as far as can be told."""
    if mode is not Mode.SENTINEL:
        return [i for i, count in enumerate(seen.counts) if not count and i not in seen.settled]
    if seen.in_context:
        return [i for i, parameter in enumerate(parameters) if parameter.grad is None]
    before = seen.before
    assert before is not None
    if not before.exact:
        return []
    return [
        i
        for n, chunk in enumerate(chunks)
        if not seen.gathered[n]
        for i in chunk.members
        if not before.arrived(i, parameters[i].grad) and not (n in seen.disordered and before.held(i))
    ]


@dataclass(frozen=True)
class Lesson:
    """What a backward has taught: how the next one should be watched, and what to expect of it."""

    mode: Mode
    order: tuple[int, ...]
    expected: tuple[int, ...]


def lesson(seen: Round, end_task: int, *, dynamic: bool, lacking: Sequence[int]) -> Lesson:
    """`dynamic`: the set of used parameters may change with every step."""
    simple = all(count == 1 for count in seen.counts) and seen.tasks == {end_task}
    in_order = simple and seen.end_known and not seen.early and not seen.in_context
    mode = Mode.SENTINEL if in_order and not dynamic and not lacking else Mode.COUNT
    arrived = set(seen.order)
    rest = [i for i in range(len(seen.counts)) if i not in arrived]
    return Lesson(mode, (*seen.order, *rest), tuple(seen.counts))
