"""The zygote imports torch._dynamo and our library as soon as its ranks have begun to.

Theory of operation
-------------------
`import torch` leaves out torch._dynamo, which has 800 modules. The first optimizer imports it. After a restart this
would be most of the time until the first step. Only torch._dynamo, with what it imports, and `ddp` are imported here.
Their import depends on their files, on variables and on the working directory, and each fork can inherit it: a test
holds this for each release of torch. Other modules may keep what the script had changed before, or what each rank needs
for itself; `--preload` imports them, because the user knows them.

Each rank notes which of them it begins to import, under which changed variables and in which folder, in memory that it
shares with the zygote, and wakes the zygote. When all ranks have noted the same, the zygote imports it under the same
variables. What the import leaves behind besides its modules is taken back. A zygote in another folder than its ranks
does not import it, because torch._dynamo keeps the name of the folder.

A node that stands by has no ranks. Its zygote imports what the ranks of other nodes have imported, if they have done so
without changed variables in the folder where they started. The launcher passes it on.

During an import, which takes a second, a request to the zygote waits.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import mmap
import os
import random
import signal
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from json import dumps, loads  # as they are now: a script may replace them
from typing import Any, NamedTuple

from . import cgroup, forking

_DYNAMO = "torch._dynamo"
_OURS = "ddp"
_PASSED_ON = (_DYNAMO, _OURS, "ddp.elastic")  # to nodes that stand by: with these come all others
_NOTE_BYTES = 1 << 16
_SPARE_BYTES = 2 << 30  # imports take memory that the ranks may need

# Those of modules that this process has learned, with random seeds: each rank needs its own.
_generators: list[random.Random] = []


def is_known(name: str) -> bool:
    return name in (_DYNAMO, _OURS) or name.startswith(f"{_OURS}.")


class Noted(NamedTuple):
    """The import of a module, as one rank has begun it."""

    name: str
    changed: dict[str, str | None]  # variables, since the rank was started; None: removed
    folder: str


class Notes:
    """What one rank tells the zygote: a JSON list per line, in memory that both share. Complete if it is killed."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, _NOTE_BYTES)
        self._zygote = os.getpid()

    def read(self) -> dict[str, Noted]:
        """Nothing, if the script has changed what writes it."""
        text = self._shared[: self._shared.find(b"\0")]
        lines = text[: text.rfind(b"\n") + 1].splitlines()
        with contextlib.suppress(ValueError, TypeError):
            return {name: Noted(name, changed, folder) for name, changed, folder in map(loads, lines)}
        return {}

    # --- in the rank ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Watch for the imports. A finder of our own would be visible to the script, in `sys.meta_path`."""
        for generator in _generators:
            generator.seed()
        self._pid, self._end = os.getpid(), 0
        self._first = dict(os.environ)
        find = vars(PathFinder)["find_spec"]

        @functools.wraps(find.__func__)
        def find_spec(finder: Any, fullname: str, path: Any = None, target: Any = None) -> Any:
            if is_known(fullname):
                with contextlib.suppress(Exception):  # it must not become an error of the import
                    self._note(fullname)
            return find.__func__(finder, fullname, path, target)

        PathFinder.find_spec = classmethod(find_spec)  # type: ignore[method-assign, assignment]

    def _note(self, name: str) -> None:
        if os.getpid() != self._pid:  # a process that the rank has forked
            return
        now = dict(os.environ)
        names = sorted(self._first.keys() | now.keys())
        changed = {each: now.get(each) for each in names if now.get(each) != self._first.get(each)}
        line = dumps(Noted(name, changed, os.getcwd())).encode() + b"\n"
        if self._end + len(line) < _NOTE_BYTES:
            self._shared[self._end : self._end + len(line)] = line
            self._end += len(line)
            os.kill(self._zygote, signal.SIGCHLD)  # it waits for the ends of its children


class Learner:
    def __init__(self) -> None:
        self._notes: dict[int, Notes] = {}
        self._given_up: set[str] = set()
        self._passed_on: set[str] = set()

    def rank_starts(self, local_rank: int) -> Notes:
        """Return what the rank notes in. The notes of ranks that continue stay."""
        self._notes[local_rank] = Notes()
        return self._notes[local_rank]

    def learn_beforehand(self, names: Iterable[str]) -> None:
        """As ranks on other nodes have. Once ranks have started here, they decide."""
        for name in names if not self._notes else ():
            noted = Noted(name, {}, os.getcwd())
            if is_known(name) and name not in sys.modules and _is_possible(noted):
                self._learn(noted)

    def turn(self) -> tuple[str, ...]:
        """Import what all ranks have begun to import in the same way. Return what other nodes may import, once."""
        noted = [each.read() for each in self._notes.values()]
        for name in noted[0] if noted else ():
            if name in sys.modules or name in self._given_up or not all(name in each for each in noted):
                continue
            first = noted[0][name]
            if all(each[name] == first for each in noted) and _is_possible(first):
                self._learn(first)
            else:
                self._given_up.add(name)
        given = (name for name in _PASSED_ON if name in sys.modules and name not in self._passed_on)
        found = tuple(name for name in given if noted and all(_is_plain(each.get(name)) for each in noted))
        self._passed_on.update(found)
        return found

    def _learn(self, noted: Noted) -> None:
        forking.arrange()  # the libraries that are loaded from now on belong to the script
        with _without_traces(noted.changed), _noting_generators(), _without_gc():
            try:
                __import__(noted.name)
            except Exception:  # the script may handle it
                self._given_up.add(noted.name)
        forking.freeze_garbage()


def _is_plain(noted: Noted | None) -> bool:
    return noted is not None and not noted.changed and noted.folder == os.getcwd()


def _is_possible(noted: Noted) -> bool:
    return noted.folder == os.getcwd() and cgroup.free_bytes() >= _SPARE_BYTES


@contextlib.contextmanager
def _without_traces(changed: dict[str, str | None]) -> Iterator[None]:
    """Import under these variables. torch._inductor sets one itself, and computes the folder of temporary files."""
    import tempfile

    variables, folder = dict(os.environ), tempfile.tempdir
    for name, value in changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        yield
    finally:
        tempfile.tempdir = folder
        os.environ.clear()
        os.environ.update(variables)


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Import without garbage collections, which take time and free nothing."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


@contextlib.contextmanager
def _noting_generators() -> Iterator[None]:
    """Note the generators that get a random seed: forks of one process would draw the same numbers."""
    original = random.Random.seed

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        original(self, a, version)
        if a is None:
            _generators.append(self)

    random.Random.seed = seed  # type: ignore[method-assign]
    try:
        yield
    finally:
        random.Random.seed = original  # type: ignore[method-assign]
