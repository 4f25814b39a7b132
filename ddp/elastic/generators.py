"""The states of the random number generators of a rank: torch's (CPU and accelerator), Python's and NumPy's.

Each rank saves its own, so that dropout, `random.random()` and `numpy.random.rand()` continue their sequences. NumPy is
optional: its global generator is saved if the process has imported `numpy.random`. Generators that the script creates,
such as a `torch.Generator`, are its own.

A state is a tree of plain values and tensors, because reading a commit must not execute code.
"""

from __future__ import annotations

import array
import ctypes
import random
import struct
import sys
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from ddp.elastic import commits, sampler
from ddp.elastic.images import leaves
from ddp.groups import accelerator
from ddp.telemetry.coded import WrongValue

if TYPE_CHECKING:
    from ddp.elastic.resume import LocalImages
    from ddp.elastic.team import Team

# --- the memory of generators ----------------------------------------------------------------------
# Holds the states of Python's and NumPy's random generators, at a fraction of the time that these take to return
# them.
#
# Both are Mersenne Twisters. The libraries return the state of 624 words as numbers that they make one by one:
# Python in 10 us, NumPy in 100 us. Both objects keep the words in one block of memory, which is copied in less than
# 1 us. Where the block is depends on the release, so it is accepted only if it has the same contents as the state
# that the library returns. Otherwise, and for other kinds of generators, the library is asked each time.

_WORDS = 624
_PYTHONS = struct.Struct(f"=i{_WORDS}I")  # the index, then the words
_POSITION = struct.Struct("=i")  # NumPy's, after the words


class PythonGenerator:
    """The generator behind the functions of the module `random`."""

    def __init__(self) -> None:
        self._source: Any = None
        self._block: Any = None  # the memory

    def state(self) -> Any:
        """What `set` brings back."""
        source: Any = getattr(random.getstate, "__self__", None)
        if source is not self._source:
            self._source, self._block = source, _block_of(source)
        return random.getstate() if self._block is None else (source, self._block.raw, source.gauss_next)

    def set(self, state: Any) -> None:
        source, block, gauss = state
        if not isinstance(source, random.Random):
            random.setstate(state)
            return
        index, *words = _PYTHONS.unpack(block)
        source.setstate((source.VERSION, (*words, index), gauss))


def _block_of(source: Any) -> Any:
    """The memory of the block; None if it is not known."""
    if type(source) is not random.Random or sys.implementation.name != "cpython":
        return None
    numbers = source.getstate()[1]
    block = _PYTHONS.pack(numbers[_WORDS], *numbers[:_WORDS])
    at = ctypes.string_at(id(source), type(source).__basicsize__).find(block)
    return _memory(id(source) + at, _PYTHONS.size) if at >= 0 else None


def _memory(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)


class NumpyGenerator:
    """NumPy's global generator. The library is asked again only if numbers were drawn since.

    The block does not contain the second number of a pair of normal ones that is still to be returned. If there is one,
    the library is asked each time. If there is none, to get one changes the block.
    """

    def __init__(self) -> None:
        self._source: Any = None
        self._block: Any = None  # the memory
        self._bytes = b""
        self._state: Any = None

    def state(self, numpy: Any) -> Any:
        """The state that `numpy.random.get_state(legacy=False)` returns; not to be changed."""
        source: Any = getattr(numpy, "get_bit_generator", _nothing)()
        if source is not None and source is self._source and self._block.raw == self._bytes:
            return self._state
        state = numpy.get_state(legacy=False)
        self._source = None
        if type(source).__name__ == "MT19937" and not state["has_gauss"]:
            inner = state["state"]
            self._bytes = inner["key"].tobytes() + _POSITION.pack(inner["pos"])
            self._block = _memory(source.ctypes.state_address, len(self._bytes))
            if self._block.raw == self._bytes:
                self._source, self._state = source, state
        return state


def _nothing() -> None:
    """An old NumPy has no such function."""


# --- generators ------------------------------------------------------------------------------------

_NUMPY = "numpy.random"
Held = tuple[torch.Tensor, dict[str, torch.Tensor], Any, Any]


@runtime_checkable
class _Array(Protocol):
    """A NumPy array: NumPy itself is not imported here."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    def tobytes(self) -> bytes: ...


def get() -> dict[str, Any]:
    states = {"cpu": torch.get_rng_state(), "seed": torch.initial_seed()} | accelerator.rng_state()
    version, numbers, gauss = random.getstate()
    states["python"] = [version, _packed(numbers), gauss]
    if (numpy := sys.modules.get(_NUMPY)) is not None:
        states["numpy"] = _plain(numpy.get_state(legacy=False))
    return states


def set(states: dict[str, Any]) -> None:
    """Set what `get` returned; leave generators alone whose state is missing, as in a commit of an earlier version."""
    torch.set_rng_state(states["cpu"])
    accelerator.set_rng_state(states)
    if "python" in states:
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(array.array("I", bytes(numbers.tolist()))), gauss))
    if "numpy" in states and (numpy := load_numpy()) is not None:
        _set_numpy(numpy, states["numpy"])


class GeneratorHolder:
    """Holds the states of all of them at each step, which must cost little: nothing is packed."""

    def __init__(self) -> None:
        self._has_accelerator = accelerator.current() is not None
        self._python, self._numpy = PythonGenerator(), NumpyGenerator()

    def hold(self) -> Held:
        numpy = sys.modules.get(_NUMPY)
        return (
            torch.default_generator.get_state(),
            accelerator.rng_state() if self._has_accelerator else {},
            self._python.state(),
            None if numpy is None else self._numpy.state(numpy),
        )

    def set_back(self, held: Held) -> None:
        cpu, others, python, of_numpy = held
        torch.set_rng_state(cpu)
        accelerator.set_rng_state(others)
        self._python.set(python)
        if of_numpy is not None:
            _set_numpy(sys.modules[_NUMPY], of_numpy)


def seed(number: int) -> None:
    """Seed all of them with a number of 64 bits."""
    torch.default_generator.manual_seed(
        number
    )  # torch.manual_seed() asks for each kind of device, which takes longer
    accelerator.seed(number)
    random.seed(number)
    if (numpy := sys.modules.get(_NUMPY)) is not None:
        numpy.seed([number & 0xFFFFFFFF, number >> 32])


def _packed(numbers: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(array.array("I", numbers).tobytes()), dtype=torch.uint8)


def load_numpy() -> Any:
    """Return `numpy.random`, which NumPy imports when it is first used; None if NumPy is not there."""
    return getattr(sys.modules.get("numpy"), "random", None)  # torch has imported NumPy, if it is installed


def _set_numpy(numpy: Any, state: Any) -> None:
    kind = state["bit_generator"]
    if kind != numpy.get_state(legacy=False)["bit_generator"]:
        algorithm = getattr(numpy, str(kind), None)
        if not (isinstance(algorithm, type) and issubclass(algorithm, numpy.BitGenerator)):
            raise WrongValue(
                f"cannot resume NumPy's generator: the commit has the state of a {kind}, which this NumPy lacks. "
                "Call numpy.random.set_bit_generator() with the same kind of generator as before, or use the same NumPy"
            )
        numpy.set_bit_generator(algorithm())
    numpy.set_state(_as_numpy(state))


def _plain(value: Any) -> Any:
    """Convert the state of a NumPy generator: dictionaries, arrays of integers, and numbers."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, _Array) and value.shape:
        return [str(value.dtype), torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)]
    return value.item() if hasattr(value, "item") else value


def _as_numpy(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_numpy(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return value[1].numpy().view(value[0])
    return value  # also the arrays of a state that was not packed


# --- after a restart -----------------------------------------------------------------------------------


def resume(team: Team, local: LocalImages, choice: commits.CommitChoice) -> dict[str, Any] | None:
    """Give each rank the generators that the rank of the same number saved; seed those of a new rank. Collective.

    If this rank's image is in the memory of another node, that node sends the state. Return all that belongs to this
    rank; None if it is lost, or the rank is new.
    """
    held = {
        each.head.rank: each
        for each in local.images.values()
        if commits.CommitName(each.head.number, each.head.lineage) == choice.commit
    }
    readers = team.gather(tuple(held))
    senders = {rank: reader for reader in reversed(range(team.size)) for rank in readers[reader]}
    first = min(senders)  # every image has the generators of its rank, and a chosen commit has an image
    lacking = [rank for rank in range(team.size) if rank not in readers[rank]]
    wanted = {*lacking, first} & senders.keys() if lacking else ()
    mine: dict[int, Any] = {rank: held[rank].private() for rank in wanted if senders[rank] == team.rank}
    if first in mine and first not in lacking:
        mine[first].pop(leaves.OWN, None)  # only its seed is asked for
    received: dict[int, Any] = {}
    for each in team.gather(mine) if wanted else ():
        received |= each
    found: dict[str, Any] | None = (
        held[team.rank].private()
        if team.rank in held
        else received.get(team.rank if team.rank in lacking else -1)
    )
    if found is None:
        seed(sampler.seed_of_new_rank(received[first].get("seed", 0), choice.commit.number, team.rank))
    else:
        set(found)
    return found
