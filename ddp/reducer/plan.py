"""Which gradients travel together, and in which order: parameters and limits -> BucketPlan.

A bucket is a set of gradients that are averaged by one collective. Buckets are launched in the order of the plan,
the same on every rank, so the plan is a pure function of things that all ranks agree on.

The first plan knows nothing of the backward: parameters in the order of registration, the buckets in reverse, for
gradients arrive roughly last layer first. It holds one bucket per device and dtype, unless unused parameters are
looked for: a model whose backward has collectives of its own must not be interrupted by ours in an order that nobody
has checked yet. The rebuilt plan follows the order in which the gradients of rank 0 really arrived, with a small
first bucket, so that communication starts early.

A bucket is FLAT when its gradients are copied side by side into one tensor; LOOSE when they are averaged where they
lie, which saves the copy and the memory; SPARSE when its one gradient is a sparse tensor.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    # A tensor that rank 0 sends at first: name, sizes, dtype.
    Entry = tuple[str, Sequence[int], str]

MIB = 1024 * 1024
# Below this a copy costs less than a collective of its own.
LEAST_LOOSE_BYTES = MIB
# From here on it is the other way round, however large the buckets are, where a bucket is of no help to the group.
SURELY_LOOSE_BYTES = 8 * MIB
# A model of this size needs no bucket where the group takes lists; a larger one gains from copying while it is hot.
SMALL_MODEL_BYTES = 6 * MIB
_NO_LIMIT = 2**63 - 1


class Kind(Enum):
    FLAT = "flat"
    LOOSE = "loose"
    SPARSE = "sparse"


@dataclass(frozen=True)
class ParameterFacts:
    """What a plan must know of a parameter. `strides` is the layout of its gradient."""

    name: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    itemsize: int
    sparse: bool = False

    @property
    def numel(self) -> int:
        count = 1
        for size in self.sizes:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Limits:
    """How many bytes close a bucket: the first bucket of a dtype and device by the first number, and so on; the
    last number holds for all that follow."""

    first: tuple[int, ...]
    rebuilt: tuple[int, ...]

    @property
    def largest(self) -> int:
        return max(self.rebuilt)


@dataclass(frozen=True)
class Transport:
    """What the group that averages can do. `lists`: it takes many tensors in one call, without a copy.
    `loose`: whether gradients may be averaged where they lie at all. A communication hook wants one flat buffer, and
    so does who asked for gradients that are views of one."""

    lists: bool = False
    loose: bool = True


@dataclass(frozen=True)
class Bucket:
    members: tuple[int, ...]  # indices of parameters, in the order in which they lie in the bucket
    kind: Kind


@dataclass(frozen=True)
class BucketPlan:
    buckets: tuple[Bucket, ...]

    @property
    def bucket_of(self) -> dict[int, int]:
        return {member: i for i, bucket in enumerate(self.buckets) for member in bucket.members}


def limits(cap_bytes: int, first_bytes: int, per_bucket: Sequence[int], *, whole_at_first: bool) -> Limits:
    """`whole_at_first`: the first plan holds one bucket per device and dtype."""
    if per_bucket:
        return Limits(tuple(per_bucket), tuple(per_bucket))
    stepped = (first_bytes, cap_bytes) if first_bytes < cap_bytes else (cap_bytes,)
    return Limits((_NO_LIMIT,) if whole_at_first else stepped, (first_bytes, cap_bytes))


def first_plan(parameters: Sequence[ParameterFacts], limit: Limits, transport: Transport) -> BucketPlan:
    groups = _separated(parameters, range(len(parameters)), limit, transport, limit.first)
    groups.sort(key=min)
    return BucketPlan(tuple(_bucket(parameters, group, limit, transport) for group in reversed(groups)))


def rebuilt_plan(
    parameters: Sequence[ParameterFacts], arrival: Sequence[int], limit: Limits, transport: Transport
) -> BucketPlan:
    """`arrival`: every parameter once, in the order in which the gradients arrived."""
    if sorted(arrival) != list(range(len(parameters))):
        raise ValueError("the order of arrival must name every parameter once")
    place = {member: i for i, member in enumerate(arrival)}
    groups = _separated(parameters, arrival, limit, transport, limit.rebuilt)
    # A bucket is complete with its last member: one that is complete later must not hold up one that is earlier.
    groups.sort(key=lambda group: max(place[i] for i in group))
    return BucketPlan(tuple(_bucket(parameters, group, limit, transport) for group in groups))


def _separated(
    parameters: Sequence[ParameterFacts],
    order: Sequence[int],
    limit: Limits,
    transport: Transport,
    sizes: Sequence[int],
) -> list[list[int]]:
    """The large ones each by itself, the others in groups."""
    large = [i for i in order if _loose_alone(parameters[i], limit, transport)]
    apart = set(large)
    return [*([i] for i in large), *_grouped(parameters, [i for i in order if i not in apart], sizes)]


def _loose_alone(facts: ParameterFacts, limit: Limits, transport: Transport) -> bool:
    enough = max(limit.largest, LEAST_LOOSE_BYTES)
    if not transport.lists:
        enough = min(enough, SURELY_LOOSE_BYTES)
    return transport.loose and not facts.sparse and facts.nbytes >= enough


def _grouped(
    parameters: Sequence[ParameterFacts], order: Iterable[int], sizes: Sequence[int]
) -> list[list[int]]:
    closed: list[list[int]] = []
    open_: dict[tuple[str, str], list[int]] = {}
    filled: dict[tuple[str, str], int] = {}
    step: dict[tuple[str, str], int] = {}
    for i in order:
        facts = parameters[i]
        if facts.sparse:
            closed.append([i])
            continue
        key = (facts.dtype, facts.device)
        open_.setdefault(key, []).append(i)
        filled[key] = filled.get(key, 0) + facts.nbytes
        if filled[key] >= sizes[min(step.get(key, 0), len(sizes) - 1)]:
            closed.append(open_.pop(key))
            filled[key] = 0
            step[key] = step.get(key, 0) + 1
    return closed + list(open_.values())


def _bucket(
    parameters: Sequence[ParameterFacts], members: Sequence[int], limit: Limits, transport: Transport
) -> Bucket:
    if parameters[members[0]].sparse:
        return Bucket(tuple(members), Kind.SPARSE)
    alone = len(members) == 1 and _loose_alone(parameters[members[0]], limit, transport)
    small = transport.lists and sum(facts.nbytes for facts in parameters) <= SMALL_MODEL_BYTES
    loose = alone or (small and transport.loose)
    return Bucket(tuple(members), Kind.LOOSE if loose else Kind.FLAT)


# --- do all ranks mean the same? -------------------------------------------------------------------


def fingerprint(*things: object) -> int:
    """A number that differs, in all likelihood, when the things differ; the same in every process."""
    return zlib.crc32(repr(things).encode())


def model_fingerprint(parameters: Sequence[ParameterFacts], options: Sequence[tuple[str, object]]) -> int:
    """On which device of its kind a parameter lies may well differ from rank to rank."""
    shapes = [(p.name, p.sizes, p.strides, p.dtype, kind_of_device(p), p.sparse) for p in parameters]
    return fingerprint(shapes, tuple(options))


def kind_of_device(facts: ParameterFacts) -> str:
    return facts.device.partition(":")[0]


def plan_fingerprint(plan: BucketPlan) -> int:
    return fingerprint([(bucket.members, bucket.kind.value) for bucket in plan.buckets])


def disagreement(
    described: Sequence[Sequence[ParameterFacts]], options: Sequence[Sequence[tuple[str, object]]]
) -> str:
    """What is the first difference between the models of the ranks, in words? Empty: none."""
    ours, settings = described[0], options[0]
    for rank, theirs in enumerate(described):
        if len(theirs) != len(ours):
            return (
                f"DDP expects same model across all ranks, but Rank 0 has {len(ours)} params, "
                f"while rank {rank} has inconsistent {len(theirs)} params."
            )
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if difference := _difference(a, b):
                return (
                    f"DDP verifies model across all ranks: parameter {b.name!r} (params[{i}]) of rank {rank} "
                    f"with {difference[1]} appears not to match {difference[0]} of the same param in process 0, "
                    f"{a.name!r} with {difference[2]}."
                )
        if elsewhere := _other_order([p.name for p in ours], [p.name for p in theirs], rank):
            return elsewhere
        for (option, a_value), (_, b_value) in zip(settings, options[rank], strict=True):
            if a_value != b_value:
                return f"DDP was given {option}={a_value} on rank 0, but {option}={b_value} on rank {rank}."
    return ""


def _other_order(ours: Sequence[str], theirs: Sequence[str], rank: int) -> str:
    """Other names are a rank's own business; the same ones elsewhere would average unlike with unlike."""
    if ours == theirs or sorted(ours) != sorted(theirs):
        return ""
    i = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    return (
        f"DDP verifies model across all ranks: parameter {theirs[i]!r} (params[{i}]) of rank {rank} stands where "
        f"process 0 has {ours[i]!r}. Make the layers in the same order on all ranks (the order of a set differs)."
    )


def first_unlike(states: Sequence[Sequence[Entry]]) -> str:
    """What rank 0 would send at first, and another has no place for, in words. Empty: nothing."""
    ours = states[0]
    for rank, theirs in enumerate(states):
        for (name, *here), (other, *there) in zip(ours, theirs, strict=False):
            if here != there:
                return (
                    f"DDP copies the state of rank 0 to all: {name!r} there is {here[1]} {here[0]}, "
                    f"{other!r} in its place on rank {rank} is {there[1]} {there[0]}."
                )
        if len(ours) != len(theirs):
            more, where = (ours, 0) if len(ours) > len(theirs) else (theirs, rank)
            first = more[min(len(ours), len(theirs))][0]
            return (
                f"DDP copies the state of rank 0 to all: {len(ours)} parameters and buffers there, "
                f"{len(theirs)} on rank {rank}; the first that only rank {where} has is {first!r}."
            )
    return ""


def _difference(a: ParameterFacts, b: ParameterFacts) -> tuple[str, str, str] | None:
    pairs: tuple[tuple[str, object, object], ...] = (
        ("sizes", list(a.sizes), list(b.sizes)),
        ("strides", list(a.strides), list(b.strides)),
        ("dtype", a.dtype, b.dtype),
        ("device", kind_of_device(a), kind_of_device(b)),
        ("kind of gradient", "sparse" if a.sparse else "dense", "sparse" if b.sparse else "dense"),
    )
    for what, at_first, here in pairs:
        if at_first != here:
            return what, f"{what} {here}", f"{what} {at_first}"
    return None
