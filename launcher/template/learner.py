"""The zygote learns what its ranks import, and imports it before it forks the next ones.

Theory of operation
-------------------
The first step of a rank imports modules that `import torch` does not: torch._dynamo alone has 800. After a restart,
these imports are most of the time until training continues. The zygote could do them while it is idle, but only what
the ranks have really imported, only of torch and ddp, and only if a rank cannot tell the difference. Other modules
are imported beforehand with `--preload`.

1. Each rank records its imports, with the changes that the script has made to the environment (`import_recorder`).
2. When no rank has imported anything for a while, the zygote forks a child that imports the same on trial
   (`trial_import`). It ends at the first module that a fork would not inherit correctly, and another child continues
   after it. To learn costs about as much processor time as the imports have cost a rank. So when all ranks have
   finished a step, the zygote begins as long after the last import as the imports have taken: a job that ends before
   has lost nothing, and one that ends then has lost as much again. Ranks that show no steps have the longest time.
3. The zygote imports what has passed, one module per turn of its loop, under the variables that were set in the ranks.

A rank that ends meanwhile ends the trial, and the next one begins when no rank is missing. What is imported by then
stays: it is correct by itself. While the zygote imports a module it does nothing else, so a request waits for it. Ranks
that start then would have imported the same.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import mmap
import os
import random
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from . import fast_exit, first_step, import_records, memory
from .import_recorder import ImportRecorder
from .import_records import Verdict
from .messages import Learned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .import_records import Candidate, Record, Variables

_QUIET_S = 3.0  # without an import in any rank: the longest time
_LOOK_S = 0.25
_LOOK_AGAIN_S = 1.0  # after a round
_RECORD_BYTES = 1 << 19
_MOST_ROUNDS = 3  # an evaluation or a checkpoint may import more, later
_MOST_TRIALS = 20  # of one round: each ends at a module that must not be imported
_SPARE_BYTES = 2 << 30  # imports take memory that the ranks may need
_STDLIB = os.path.join(os.path.dirname(os.__file__), "")
# torch._dynamo imports numpy, whose seed each rank draws anew.
_PACKAGES = ("torch", "ddp", "numpy")


# Those of modules that this process has learned, with random seeds: each rank needs its own.
_generators: list[random.Random] = []


class Learner:
    """`become_child` is called first in each fork; `tell` sends the report."""

    def __init__(
        self,
        become_child: Callable[[], None],
        tell: Callable[[Learned], None],
    ) -> None:
        self._become_child, self._tell = become_child, tell
        self._started_at = time.monotonic()
        self._shared: dict[int, mmap.mmap] = {}
        self._pages: dict[int, str] = {}
        self._missing: set[int] = set()  # local ranks that have ended, and were not started again
        self._of_each_rank: set[str] = set()
        self._quiet = _Quiet({}, 0.0, 0.0)
        self._rounds = 0
        self._round: _Round | None = None
        self._refused: dict[str, str] = {}
        self._trials: set[int] = set()

    # --- the ranks -----------------------------------------------------------------------------------

    def record_rank(self, local_rank: int, variables: Mapping[str, str]) -> None:
        """Prepare the record of a rank that is about to be forked. The launcher sets `variables` for each rank."""
        self.stop()
        self._missing.discard(local_rank)
        self._shared[local_rank] = mmap.mmap(-1, _RECORD_BYTES)
        self._pages[local_rank] = variables.get(first_step.PAGE_VARIABLE, "")
        self._of_each_rank.update(variables)
        now = self._started_at = time.monotonic()
        self._quiet = _Quiet(dict.fromkeys(self._shared, 0), now, now + _LOOK_S)

    def recorder(self, local_rank: int) -> ImportRecorder:
        """Return the recorder, in the rank itself."""
        for generator in _generators:
            generator.seed()
        return ImportRecorder(self._shared[local_rank])

    def rank_ended(self, local_rank: int) -> None:
        """Learn nothing from a world that is not whole. If it heals, the ranks that continue keep their records."""
        self.stop()
        self._shared.pop(local_rank, None)
        self._missing.add(local_rank)

    def reaped(self, pid: int) -> None:
        """The loop has waited for this child."""
        self._trials.discard(pid)

    def stop(self) -> None:
        """End the trial without waiting for it, and drop what was not imported yet."""
        if self._round is not None:
            self._round.end()
            self._round = None
            now = time.monotonic()
            self._quiet = _Quiet(self._quiet.ends, now, now + _LOOK_S)

    @property
    def n_trials(self) -> int:
        """The trials that were not reaped yet. It takes a while to free the memory of one."""
        return len(self._trials)

    # --- the loop ------------------------------------------------------------------------------------

    @property
    def trial(self) -> int | None:
        """The descriptor on which a trial reports."""
        return self._round.report if self._round is not None else None

    def wait_s(self) -> float | None:
        """Return how long the loop may wait before it calls `turn`; None: as long as it likes."""
        if self._round is not None:
            return None if self._round.report is not None else 0.0
        if not self._shared or self._missing or self._rounds == _MOST_ROUNDS:
            return None
        return max(0.0, self._quiet.look_at - time.monotonic())

    def turn(self) -> None:
        """Do the next step, if it is time for one."""
        if self.wait_s() != 0.0:
            return
        if self._round is None:
            self._begin_if_quiet(time.monotonic())
        elif not self._round.step():
            self._end_round()

    def read_report(self) -> None:
        assert self._round is not None
        self._round.read_report()

    def _begin_if_quiet(self, now: float) -> None:
        ends = {rank: shared.find(b"\0") for rank, shared in self._shared.items()}
        is_quiet = ends == self._quiet.ends and now - self._quiet.since >= self._quiet_s()
        since = self._quiet.since if ends == self._quiet.ends else now
        look_s = _LOOK_S if math.isfinite(since) else _LOOK_AGAIN_S
        self._quiet = _Quiet(ends, since, now + look_s)
        if is_quiet and memory.free_bytes() >= _SPARE_BYTES:
            self._quiet = _Quiet(ends, math.inf, now + look_s)  # until a rank imports something else
            records = [import_records.parse(shared[: ends[rank]]) for rank, shared in self._shared.items()]
            imported = import_records.candidates(records, (*sys.modules, *self._refused), _STDLIB)
            new = [each for each in imported if may_learn(each.name)]
            if new:
                fast_exit.arrange()
                self._round = _Round(
                    new, records, frozenset(self._of_each_rank), self._become_child, self._trials
                )

    def _quiet_s(self) -> float:
        took_s = self._quiet.since - self._started_at
        if took_s < _QUIET_S and all(first_step.is_done(self._pages[rank]) for rank in self._shared):
            return took_s
        return _QUIET_S

    def _end_round(self) -> None:
        assert self._round is not None
        self._rounds += 1  # not those that the end of a rank has broken off
        self._refused |= self._round.refused
        count, took_s = len(sys.modules) - self._round.modules_before, time.monotonic() - self._round.began
        if count:
            self._tell(Learned(count, took_s, tuple(self._round.imported), tuple(self._refused.items())))
        self._round = None


def may_learn(name: str) -> bool:
    """Whether a module is of a package that is known to be the same in each process.

    Another one may keep what the script had changed before its import (the working directory, a default of torch), or
    what each rank needs for itself (a lock).
    """
    return name.partition(".")[0] in _PACKAGES


class _Quiet(NamedTuple):
    ends: dict[int, int]  # of the records
    since: float
    look_at: float


class _Round:
    """Trials and imports until nothing is left to import."""

    def __init__(
        self,
        candidates: list[Candidate],
        records: list[Record],
        of_each_rank: frozenset[str],
        become_child: Callable[[], None],
        trials: set[int],
    ) -> None:
        self._left, self.records, self._of_each_rank = candidates, records, of_each_rank
        self._become_child, self._trials = become_child, trials
        self.report: int | None = None
        self._child = 0
        self._text = b""
        self._passed: list[Candidate] = []
        self.imported: list[str] = []
        self.refused: dict[str, str] = {}
        self.began, self.modules_before = time.monotonic(), len(sys.modules)

    def step(self) -> bool:
        """Import one module, or begin a trial. Return whether anything was left to do."""
        if self._passed:
            self._import(self._passed.pop(0))
            return True
        self._left = [each for each in self._left if each.name not in sys.modules]
        if not self._left or len(self.refused) >= _MOST_TRIALS:
            return False
        return self._begin_trial()

    def _begin_trial(self) -> bool:
        self.report, write = os.pipe2(os.O_CLOEXEC)
        try:
            self._child = os.fork()
        except OSError:  # no process or memory to spare
            os.close(write)
            self.end()
            return False
        if self._child == 0:
            try:
                self._become_child()
                os.close(self.report)
                from .trial_import import Trial

                Trial(self._left, self.records, _STDLIB, self._of_each_rank).run(write)
            except BaseException as error:
                os.write(write, json.dumps(("", f"{type(error).__name__}: {error}")).encode())
            finally:
                os._exit(1)
        os.close(write)
        self._trials.add(self._child)
        return True

    def read_report(self) -> None:
        assert self.report is not None
        data = os.read(self.report, 1 << 16)
        self._text += data
        if not data:
            verdicts = [Verdict(*json.loads(line)) for line in self._text.splitlines()]
            self.end()
            self._passed, refused, self._left = import_records.after_trial(self._left, verdicts)
            self.refused |= refused

    def _import(self, candidate: Candidate) -> None:
        with under(candidate.variables), _noting_generators(_generators), _without_gc():
            if not attempt(candidate.name):
                self.imported.append(candidate.name)

    def end(self) -> None:
        """End the trial, if one runs."""
        self._passed.clear()
        if self.report is not None:
            os.close(self.report)
            self.report, self._text = None, b""
        if self._child in self._trials:
            os.kill(self._child, signal.SIGKILL)  # it was not reaped, so the pid is its own


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Import without garbage collections, which take time and free nothing: requests wait for the import."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


@contextlib.contextmanager
def _noting_generators(found: list[random.Random]) -> Iterator[None]:
    """Note the generators that get a random seed: forks of one process would draw the same numbers."""
    original = random.Random.seed

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        original(self, a, version)
        if a is None:
            found.append(self)

    random.Random.seed = seed  # type: ignore[method-assign]
    try:
        yield
    finally:
        random.Random.seed = original  # type: ignore[method-assign]


def attempt(name: str) -> str:
    """Import a module; return the error."""
    try:
        __import__(name)
    except (Exception, SystemExit) as error:
        return f"its import fails ({type(error).__name__}: {error})"
    return ""


@contextlib.contextmanager
def under(variables: Variables) -> Iterator[None]:
    """Set and remove environment variables for a while. What the code inside sets or removes itself, stays."""
    before = {name: os.environ.get(name) for name in variables}
    _apply(variables)
    try:
        yield
    finally:
        _apply({name: value for name, value in before.items() if os.environ.get(name) == variables[name]})


def _apply(variables: Variables) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
