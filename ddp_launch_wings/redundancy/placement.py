"""What other nodes keep of commits: the option, the ranks that keep it, and how lost images are computed from it.

    none        nothing: the parts of a lost node are read from disk
    copies:N    N other nodes have a copy of each part; N nodes can be lost at once
    code:K+M    a code over groups of K + M nodes or more; M nodes of each group can be lost at once
    auto        what fits the number of nodes: a copy, or a code that needs less memory

Copies are the code with K = 1.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ddp.elastic.commits import CommitChoice, CommitName, Holdings, ReadableImage, folder_name, newest
from ddp.telemetry.coded import WrongValue

# A Reed-Solomon code over the field of 256 elements: k data chunks and m parity chunks, of which any k give all.
#
# Parity chunk r is the sum of c[r][j] * d[j] over the data chunks j. The chunks that are left are then linear equations
# for the data. They have one solution if every square submatrix of c is invertible. A Cauchy matrix has this property:
#
#     c[r][j] = 1 / (x[r] + y[j])       all x and y different
#
# Multiplying rows and columns by constants other than 0 keeps the property. So row 0 and column 0 are made 1: the code
# with m = 1 is a plain exclusive or, and the code with k = 1 consists of copies.

Row = tuple[int, ...]
_REDUCED = 0x11D  # x^8 + x^4 + x^3 + x^2 + 1; x generates all elements other than 0
MOST = 256  # chunks in a stripe: there are no more elements


@functools.cache
def _powers() -> tuple[Row, Row]:
    """The powers of x, and the exponent of each element."""
    powers, exponents, element = [], [0] * 256, 1
    for exponent in range(255):
        powers.append(element)
        exponents[element] = exponent
        element <<= 1
        if element & 0x100:
            element ^= _REDUCED
    return tuple(powers), tuple(exponents)


def product(a: int, b: int) -> int:
    powers, exponents = _powers()
    return powers[(exponents[a] + exponents[b]) % 255] if a and b else 0


def inverse(a: int) -> int:
    if not a:
        raise ZeroDivisionError("0 has no inverse")
    powers, exponents = _powers()
    return powers[-exponents[a] % 255]


@functools.cache
def parity_rows(k: int, m: int) -> tuple[Row, ...]:
    """The coefficients of each parity chunk."""
    if k < 1 or m < 0 or k + m > MOST:
        raise WrongValue(f"invalid code {k}+{m}: use at least 1 data chunk, and at most {MOST} chunks in all")
    cauchy = [[inverse((k + r) ^ j) for j in range(k)] for r in range(m)]
    found = []
    for row in cauchy:
        # The columns are divided by row 0, then each row by its first element.
        even = [product(c, inverse(first)) for c, first in zip(row, cauchy[0], strict=True)]
        found.append(tuple(product(c, inverse(even[0])) for c in even))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Solution:
    """How lost data chunks follow from others: each row has a coefficient for each source."""

    sources: tuple[int, ...]  # numbers of chunks: 0 to k - 1 are data, the rest is parity
    rows: tuple[Row, ...]  # one for each lost chunk


def solve(k: int, m: int, there: Sequence[int], lost: Sequence[int]) -> Solution | None:
    """Return how the lost data chunks are computed from k of the chunks that are there; None if these are too few."""
    usable = [chunk for chunk in sorted(set(there)) if chunk not in lost]
    if len(usable) < k:
        return None
    sources = tuple(usable[:k])  # data chunks come first: they need no arithmetic
    equations = [_row_of(k, m, chunk) for chunk in sources]
    inverted = _inverted(equations)
    return Solution(sources, tuple(inverted[chunk] for chunk in lost))


def _row_of(k: int, m: int, chunk: int) -> Row:
    """A chunk as a combination of the data."""
    return tuple(int(j == chunk) for j in range(k)) if chunk < k else parity_rows(k, m)[chunk - k]


def _inverted(matrix: Sequence[Row]) -> list[Row]:
    """The inverse of a matrix, by Gauss-Jordan elimination. Every matrix of a code that is asked for has one."""
    size = len(matrix)
    rows = [[*row, *(int(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = next(i for i in range(column, size) if rows[i][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        factor = inverse(rows[column][column])
        rows[column] = [product(factor, each) for each in rows[column]]
        for i in range(size):
            if i != column and (times := rows[i][column]):
                pairs = zip(rows[i], rows[column], strict=True)
                rows[i] = [each ^ product(times, other) for each, other in pairs]
    return [tuple(row[size:]) for row in rows]


# --- the option, and what fits the number of nodes -------------------------------------------------

_FORM = re.compile(r"copies:(\d+)|code:(\d+)\+(\d+)")
_USE = "use none, auto, copies:N (for example copies:1) or code:K+M (for example code:6+2)"
_WIDE = 8  # nodes in a group, with auto


@dataclass(frozen=True, slots=True)
class Code:
    k: int
    m: int

    @property
    def n_nodes(self) -> int:
        return self.k + self.m

    def __str__(self) -> str:
        return f"copies:{self.m}" if self.k == 1 else f"code:{self.k}+{self.m}"


@dataclass(frozen=True, slots=True)
class Redundancy:
    """What was asked for. `code` is None if it depends on the number of nodes."""

    code: Code | None


def parse(text: str) -> Redundancy | None:
    """None: no redundancy. Raise ValueError if the text has no meaning."""
    if text in ("", "none"):
        return None
    if text == "auto":
        return Redundancy(None)
    found = _FORM.fullmatch(text)
    if found is None:
        raise WrongValue(f"invalid redundancy {text!r}: {_USE}")
    copies, k, m = (int(each) if each else 0 for each in found.groups())
    code = Code(1, copies) if found[1] else Code(k, m)
    if code.k < 1 or code.m < 1:
        raise WrongValue(f"invalid redundancy {text!r}: numbers begin at 1; {_USE}")
    if code.n_nodes > MOST:
        raise WrongValue(f"invalid redundancy {text!r}: a group has at most {MOST} nodes")
    return Redundancy(code)


def fitting(asked: Redundancy, n_nodes: int) -> tuple[Code | None, str]:
    """Return the code for a job on so many nodes, and what to tell the user if it is not the one that was asked for."""
    if n_nodes < 2:
        return None, (
            "all ranks of a State are on one node, so no other node can keep parts of its commits. If the node is "
            "lost, the State resumes from disk. Use State(folder=...), or more nodes"
        )
    code = asked.code or _automatic(n_nodes)
    if code.n_nodes <= n_nodes:
        return code, ""
    m = min(code.m, n_nodes - 1)
    less = Code(n_nodes - m, m)
    return less, (
        f"{code} needs {code.n_nodes} nodes, and the ranks of a State are on {n_nodes}: commits are kept with {less}, "
        f"which survives the loss of {_nodes(m)} and needs {1 + m / less.k:.2f} times the memory. Use --redundancy "
        f"{less} to silence this, or start at least {code.n_nodes} nodes"
    )


def _automatic(n_nodes: int) -> Code:
    if n_nodes >= _WIDE:
        return Code(_WIDE - 2, 2)
    return Code(max(1, n_nodes - 1), 1) if n_nodes > 3 else Code(1, 1)


def _nodes(n: int) -> str:
    return "1 node" if n == 1 else f"{n} nodes"


# --- stripes ---------------------------------------------------------------------------------------
#
# Which rank keeps what for others: stripes of k data chunks and m parity chunks, each on another node.
#
# A *rail* has one rank of each node: the ranks with local index 0 form a rail, those with local index 1 the next
# one. On a node with fewer ranks, one of them is in several rails; there it only keeps parity. In a rail, the nodes
# are divided into groups of at least k + m. Each member of a group cuts its image into k chunks. A stripe has m
# parity chunks, on the members j, j + 1, ..., and a data chunk of each of the next k members, in a circle. So each
# member has k chunks in as many stripes, and parity of m others: memory and work are equal on all nodes.
#
#                  member 0   member 1   member 2   member 3         k = 3, m = 1
#     stripe 0     parity     chunk 0    chunk 1    chunk 2
#     stripe 1     chunk 2    parity     chunk 0    chunk 1
#     ...
#
# The nodes of one failure domain (a host, a rack, a unit of --topology) are dealt to different groups, as far as
# possible.

_ALIGN = 64

Domain = tuple[str, ...]  # from the largest unit to the smallest


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is."""

    node: str
    domain: Domain = ()


@dataclass(frozen=True, slots=True)
class Stripe:
    number: int
    data: tuple[
        int | None, ...
    ]  # the ranks of the data chunks: chunk i of the image is at place i. None: empty
    parity: tuple[int, ...]  # ranks; the first one computes all parity chunks


def chunk_bytes(n_bytes: int, k: int) -> int:
    """The size of each chunk of an image; the last ones may have less, or nothing."""
    return -(-n_bytes // (k * _ALIGN)) * _ALIGN


def chunk_range(n_bytes: int, k: int, chunk: int) -> tuple[int, int]:
    """Where a chunk begins and ends in an image of this size."""
    size = chunk_bytes(n_bytes, k)
    return min(chunk * size, n_bytes), min((chunk + 1) * size, n_bytes)


def layout(places: Sequence[Place], code: Code) -> tuple[Stripe, ...]:
    """The stripes of a job with at least k + m nodes. `places`: of all ranks."""
    ranks_of: dict[str, list[int]] = {}
    domains: dict[str, Domain] = {}
    for rank, place in enumerate(places):
        ranks_of.setdefault(place.node, []).append(rank)
        domains.setdefault(place.node, place.domain)
    found: list[Stripe] = []
    groups = _groups(domains, code.n_nodes)
    for rail in range(max(map(len, ranks_of.values()))):
        for group in groups:
            members = [_member(ranks_of[node], rail) for node in group]
            if any(has_data for _rank, has_data in members):
                found += _circle(members, code, len(found))
    return tuple(found)


def _member(ranks: list[int], rail: int) -> tuple[int, bool]:
    """The rank of a node in a rail, and whether its image is protected there."""
    return ranks[rail % len(ranks)], rail < len(ranks)


def _groups(domains: dict[str, Domain], least: int) -> list[list[str]]:
    """Deal the nodes to groups. Nodes of one domain are neighbours in the sorted list, so they get different groups."""
    nodes = sorted(domains, key=lambda node: domains[node])
    n_groups = len(nodes) // least
    return [_spread(nodes[number::n_groups], domains) for number in range(n_groups)]


def _spread(nodes: list[str], domains: dict[str, Domain]) -> list[str]:
    """Order the nodes of a group so that those of one domain are far from each other in the circle."""
    met: dict[Domain, int] = {}
    keys = {}
    for position, node in enumerate(nodes):
        turn = met[domains[node]] = met.get(domains[node], -1) + 1
        keys[node] = (turn, position)
    return sorted(nodes, key=keys.__getitem__)


def _circle(members: list[tuple[int, bool]], code: Code, first: int) -> list[Stripe]:
    found: list[Stripe] = []
    size = len(members)
    for j in range(size):
        parity = tuple(members[(j + i) % size][0] for i in range(code.m))
        data = [members[(j + code.m + i) % size] for i in range(code.k)]
        if any(has_data for _rank, has_data in data):
            kept = tuple(rank if has_data else None for rank, has_data in data)
            found.append(Stripe(first + len(found), kept, parity))
    return found


def weak_domains(places: Sequence[Place], stripes: Sequence[Stripe], m: int) -> tuple[Domain, ...]:
    """The largest domains with so many nodes in one stripe that their loss cannot be repaired.

    A domain that all nodes share is left out: nothing else can be done there.
    """
    units = {place.domain[:depth] for place in places for depth in range(1, len(place.domain) + 1)}
    weak: list[Domain] = []
    for unit in sorted(units, key=lambda unit: (len(unit), unit)):
        inside = {rank for rank, place in enumerate(places) if place.domain[: len(unit)] == unit}
        if len(inside) == len(places) or any(unit[: len(known)] == known for known in weak):
            continue
        if len({places[rank].node for rank in inside}) > 1 and any(
            sum(rank in inside for rank in (*stripe.data, *stripe.parity)) > m for stripe in stripes
        ):
            weak.append(unit)
    return tuple(weak)


# --- recovery: from which chunks, and by which rank ------------------------------------------------
#
# How the images of lost ranks are computed from what other nodes keep.
#
# Every rank lists the images and the parity chunks on its node, and the ranks exchange the lists. So all of them
# make the same plan: from which commit the job can resume, which images are missing there, who computes each of
# them, and from which chunks. Damaged chunks are excluded, and the plan is made again.


@dataclass(frozen=True, slots=True)
class Protected:
    """An image that has a chunk in a stripe."""

    rank: int  # that wrote it
    part: int | None
    parts: int
    world_size: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class StripeFacts:
    """What each parity chunk of a stripe says about the whole stripe."""

    commit: CommitName
    number: int
    m: int
    data: tuple[Protected | None, ...]
    sums: tuple[int, ...]  # checksums of the k data chunks and the m parity chunks

    @property
    def k(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class HeldParity:
    """A complete parity chunk that a rank can read."""

    key: str
    stripe: StripeFacts
    row: int


@dataclass(frozen=True, slots=True)
class Source:
    key: str  # of an image or a parity chunk
    rank: int  # that can read it
    begin: int
    end: int
    checksum: int
    chunk: str  # a name of the chunk, for the exclusion of damaged ones


@dataclass(frozen=True, slots=True)
class Solved:
    """One chunk of a lost image: the combination of the sources with these coefficients."""

    begin: int
    end: int
    checksum: int
    sources: tuple[Source, ...]
    row: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """An image that a rank computes."""

    image: Protected
    builder: int
    chunks: tuple[Solved, ...]
    replaces: str | None  # the key of a damaged image


@dataclass(frozen=True, slots=True)
class Plan:
    commit: CommitName
    images: tuple[Rebuilt, ...]


K = TypeVar("K")
Parities = tuple[tuple[HeldParity, ...], ...]  # by rank


def image_key(commit: CommitName, rank: int) -> str:
    return f"rebuilt/{folder_name(commit)}/rank{rank}"


def plan(holdings: Holdings, parities: Parities, bad: frozenset[str] = frozenset()) -> Plan | None:
    """Return how to compute missing images of the newest commit; None if what is there already gives the best one.

    `bad`: names of damaged chunks.
    """
    best = newest(holdings)
    names = {each.stripe.commit for held in parities for each in held}
    for commit in sorted(names, reverse=True):
        if best is not None and not _is_better(commit, best, holdings):
            return None
        found = _rebuild(commit, holdings, parities, bad)
        if found and (choice := newest(with_rebuilt(holdings, commit, found))) is not None:
            if choice.commit == commit and choice.in_memory:
                return Plan(commit, found)
    return None


def _is_better(commit: CommitName, best: CommitChoice, holdings: Holdings) -> bool:
    if commit != best.commit:
        return commit.number > best.commit.number
    if not best.in_memory:
        return True
    held = [(reader, each) for reader, images in enumerate(holdings) for each in images]
    of_ranks = {each.rank for _reader, each in held if each.commit == commit and each.in_memory}
    return len(of_ranks) < len(holdings)  # the state of random generators is missing


def with_rebuilt(holdings: Holdings, commit: CommitName, images: Sequence[Rebuilt]) -> Holdings:
    """What the ranks can read when the images are there, and damaged ones are not used."""
    added: dict[int, list[ReadableImage]] = {}
    for each in images:
        added.setdefault(each.builder, []).append(readable(commit, each.image))
    replaced = {each.replaces for each in images}
    return tuple(
        (*(each for each in held if each.image not in replaced), *added.get(rank, ()))
        for rank, held in enumerate(holdings)
    )


def readable(commit: CommitName, image: Protected) -> ReadableImage:
    return ReadableImage(
        *(commit, image.part, image.parts, image.rank, image.world_size, image_key(commit, image.rank)),
        in_memory=True,
    )


def _rebuild(
    commit: CommitName, holdings: Holdings, parities: Parities, bad: frozenset[str]
) -> tuple[Rebuilt, ...]:
    """How the missing images of a commit are computed; nothing if one of them cannot be."""
    there = _There.of(commit, holdings, parities, bad)
    members = {each.rank: each for stripe in there.stripes.values() for each in stripe.data if each}
    found = []
    for rank, image in sorted(members.items()):
        if there.is_whole(image):
            continue
        chunks = [there.solve(image, chunk) for chunk in range(there.k)]
        solved = [each for each in chunks if each is not None]
        if len(solved) < len(chunks):
            return ()
        damaged = there.images[rank][0] if rank in there.images else None
        found.append(Rebuilt(image, rank % len(holdings), tuple(solved), damaged))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _There:
    """The chunks of one commit that some rank can read."""

    commit: CommitName
    stripes: dict[int, StripeFacts]
    images: dict[int, tuple[str, list[int]]]  # key and readers, by the rank that wrote it
    rows: dict[tuple[int, int], tuple[str, list[int]]]  # the same of parity chunks, by stripe and row
    bad: frozenset[str]

    @classmethod
    def of(cls, commit: CommitName, holdings: Holdings, parities: Parities, bad: frozenset[str]) -> _There:
        stripes: dict[int, StripeFacts] = {}
        images: dict[int, tuple[str, list[int]]] = {}
        rows: dict[tuple[int, int], tuple[str, list[int]]] = {}
        for reader, held in enumerate(parities):
            for each in held:
                if each.stripe.commit == commit:
                    stripes.setdefault(each.stripe.number, each.stripe)
                    _add(rows, (each.stripe.number, each.row), each.key, reader)
        for reader, readable_images in enumerate(holdings):
            for image in readable_images:
                if image.commit == commit and image.in_memory:
                    _add(images, image.rank, image.image, reader)
        return cls(commit, stripes, images, rows, bad)

    @property
    def k(self) -> int:
        return next(iter(self.stripes.values())).k

    def is_whole(self, image: Protected) -> bool:
        names = (_name(stripe, stripe.data.index(image)) for stripe in self._of(image))
        return image.rank in self.images and not any(name in self.bad for name in names)

    def _of(self, image: Protected) -> list[StripeFacts]:
        return [stripe for stripe in self.stripes.values() if image in stripe.data]

    def solve(self, image: Protected, chunk: int) -> Solved | None:
        stripe = next((each for each in self._of(image) if each.data[chunk] == image), None)
        begin, end = chunk_range(image.n_bytes, self.k, chunk)
        if stripe is None:
            return None
        sources = {
            number: source
            for number in range(stripe.k + stripe.m)
            if (source := self._source(stripe, number))
        }
        empty = [number for number, member in enumerate(stripe.data) if member is None]
        there = [*sources, *empty]
        if chunk in sources:  # this part of the image is there: another part is damaged
            return Solved(begin, end, stripe.sums[chunk], (sources[chunk],), (1,))
        solution = solve(stripe.k, stripe.m, there, [chunk])
        if solution is None:
            return None
        pairs = zip(solution.sources, solution.rows[0], strict=True)
        used = [(sources[number], c) for number, c in pairs if c and number in sources]
        return Solved(
            begin, end, stripe.sums[chunk], tuple(each for each, _c in used), tuple(c for _each, c in used)
        )

    def _source(self, stripe: StripeFacts, number: int) -> Source | None:
        name = _name(stripe, number)
        if name in self.bad:
            return None
        if number >= stripe.k:
            found = self.rows.get((stripe.number, number - stripe.k))
            begin, end = 0, parity_bytes(stripe)
        else:
            image = stripe.data[number]
            found = self.images.get(image.rank) if image is not None else None
            begin, end = chunk_range(image.n_bytes, stripe.k, number) if image is not None else (0, 0)
        if found is None:
            return None
        key, readers = found
        return Source(key, readers[stripe.number % len(readers)], begin, end, stripe.sums[number], name)


def _add(table: dict[K, tuple[str, list[int]]], at: K, key: str, reader: int) -> None:
    known = table.setdefault(at, (key, []))
    if known[0] == key:
        known[1].append(reader)


def _name(stripe: StripeFacts, number: int) -> str:
    return f"{folder_name(stripe.commit)}/stripe{stripe.number}/chunk{number}"


def parity_bytes(stripe: StripeFacts) -> int:
    """The size of the parity chunks: that of the largest data chunk."""
    return max(chunk_bytes(each.n_bytes, stripe.k) for each in stripe.data if each)
