"""Break one line of a module and load it afresh with the simulator. The sound modules come back afterwards.

    python tests/sim/mutation.py    # which seed of the simulator finds each mutant of mutants.txt

In mutants.txt, `#` names a mutant and `@` its module; the lines with `-` become those with `+`. `seed` is the first one
that has found it, and is tried first.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import re
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


_TABLE = Path(__file__).with_name("mutants.txt")
_ENTRY = re.compile(
    r"^# (?P<name>.+)\n@ (?P<module>\S+)(?: seed (?P<seed>\d+))?\n(?P<lines>(?:[-+].*\n)+)", re.MULTILINE
)


class Mutant(NamedTuple):
    name: str
    module: str
    old: str
    new: str
    seed: int = 0


def mutants() -> list[Mutant]:
    return [
        Mutant(
            each["name"], each["module"], *(_side(each["lines"], of) for of in "-+"), int(each["seed"] or 0)
        )
        for each in _ENTRY.finditer(_TABLE.read_text())
    ]


def _side(lines: str, of: str) -> str:
    return "\n".join(line[2:] for line in lines.splitlines() if line[0] == of)


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


def seed_that_fails(sim: ModuleType, first: int = 0, seeds: int = 2000) -> int | None:
    for seed in (first, *range(seeds)):
        try:
            sim.simulate(seed)
        except Exception:  # a broken invariant, or a machine that falls over: caught either way
            return seed
    return None


if __name__ == "__main__":
    sys.path[:0] = [str(_ROOT), str(_TABLE.parent)]
    for each in mutants():
        with broken_by(each) as simulator:
            print(f"{seed_that_fails(simulator)!s:>6}  {each.module:<32} {each.name}", flush=True)
