"""Break one line of a module and load it afresh with the simulator. The sound modules come back afterwards."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_ROOT = Path(__file__).parents[2]
_RELOADED = ("launcher", "rendezvous", "sim_")


class Mutant(NamedTuple):
    name: str
    module: str
    old: str
    new: str


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._path = _ROOT / f"{mutant.module.replace('.', '/')}.py"

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if name != self._mutant.module:
            return None
        return importlib.util.spec_from_loader(name, self)

    def exec_module(self, module: ModuleType) -> None:
        source = self._path.read_text()
        assert source.count(self._mutant.old) == 1, f"{self._mutant.name}: the line to break is not there"
        exec(
            compile(source.replace(self._mutant.old, self._mutant.new), str(self._path), "exec"),
            module.__dict__,
        )


@contextmanager
def broken_by(mutant: Mutant) -> Iterator[ModuleType]:
    """The simulator, over a machine with this mutation."""
    sound = {n: m for n, m in sys.modules.items() if n.startswith(_RELOADED)}
    loader = _Loader(mutant)
    for name in sound:
        del sys.modules[name]
    sys.meta_path.insert(0, loader)
    try:
        yield importlib.import_module("sim_world")
    finally:
        sys.meta_path.remove(loader)
        for name in [n for n in sys.modules if n.startswith(_RELOADED)]:
            del sys.modules[name]
        sys.modules.update(sound)


def first_seed_that_fails(sim: ModuleType, seeds: int = 2000) -> int | None:
    for seed in range(seeds):
        try:
            sim.simulate(seed)
        except Exception:  # a broken invariant, or a machine that falls over: caught either way
            return seed
    return None
