"""Plays one case on real processes: starts the job, does what the case says, and reads what was said of it.

Theory of operation
-------------------
Most of a case is waiting, so several are played at once. What costs CPU is their start; at most two jobs start at a
time, and while the time of a death is taken, a second or less, none does. A verdict is what the agents write on the
terminal, nothing else: the line with which they restart the job.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import needs
import networks
import outside
from fault_case import HANG_TIMEOUT_S, Case, Kind
from launched import Launched, eventually
from ports import free_port
from replayed import replay_problems
from served import Service
from verdicts import Verdict, verdict_of

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

TRAIN = str(Path(__file__).parent / "programs" / "train.py")
PATIENCE_S = 90.0
_LOOK_EVERY_S = 0.005
_STARTS_AT_ONCE = 2
JOBS_AT_ONCE = 4
_ATTEMPTS = 3  # at being in time, on a machine that others use as well
LENIENT = 5.0  # of tests, which share theirs; what a quiet one needs is shown by `make faults`


class _Calm:
    """Who starts shares the machine with one more; who takes a time has it without any start."""

    def __init__(self) -> None:
        self._starts = threading.Semaphore(_STARTS_AT_ONCE)
        self._turn = threading.Lock()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        with self._turn:
            self._starts.acquire()
        try:
            yield
        finally:
            self._starts.release()

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        with self._turn:
            for _ in range(_STARTS_AT_ONCE):
                self._starts.acquire()
        try:
            yield
        finally:
            self._starts.release(_STARTS_AT_ONCE)


_CALM = _Calm()


@dataclass(frozen=True)
class Played:
    """What came of a case: the verdict in the words of the terminal, and when all trained again."""

    case: Case
    verdict: Verdict | None = None
    took_s: float | None = None  # until all ranks had met again
    step_s: float | None = None  # until they had done a step
    problem: str = ""  # why it could not be played to its end
    skipped: str = ""
    in_place: bool = False
    kept: frozenset[int] = frozenset()  # of the ranks of the first generation, those whose process went on
    replay: tuple[str, ...] = ()  # what is wrong with the replay of its journals
    told: str = field(default="", repr=False)

    @property
    def is_right(self) -> bool:
        if self.problem or self.skipped:
            return False
        if self.case.kind is Kind.INNOCENT or self.verdict is None:
            return self.case.kind is Kind.INNOCENT and self.verdict is None
        return self.verdict.is_right_for(self.case)

    @property
    def keeps_survivors(self) -> bool:
        return self.kept >= self.case.survivors

    @property
    def blames_an_innocent(self) -> bool:
        """With certainty."""
        found = self.verdict
        return (
            found is not None and found.certain and bool(set(found.blamed).difference(self.case.blamed or ()))
        )

    @property
    def is_in_time(self) -> bool:
        return self.is_within(self.case.may_take_s)

    def is_within(self, bound_s: float) -> bool:
        return self.case.kind is Kind.INNOCENT or (self.took_s is not None and self.took_s < bound_s)

    def __str__(self) -> str:
        took = "-" if self.took_s is None else f"{self.took_s:.2f} s of {self.case.may_take_s:g} s"
        kept = f", in place; of {sorted(self.case.survivors)} kept {sorted(self.kept)}" * self.in_place
        found = self.problem or str(self.verdict)
        replay = f"\n  replay: {'; '.join(self.replay)}" if self.replay else ""
        return f"{self.case.name}: {self.case.injected}{kept}\n  {found}\n  {took}{replay}\n{self.told}"


def play(case: Case, leniency: float = 1.0, *, preloads: bool = False, in_place: bool = False) -> Played:
    """A right verdict that came late is asked for again: the machine may have been busy with something else.

    The earliest of them is what counts. `leniency`: so many times what a case may take is not yet late. `preloads`:
    torch._dynamo, which DDP needs, is imported once and not by each rank of each generation. `in_place`: the script
    trains inside `State.run`, and the launcher heals.
    """
    if missing := needs.missing(case.needs):
        return Played(case, skipped=missing, in_place=in_place)
    found: list[Played] = []
    for _ in range(_ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix="fault-"))
        try:
            played = Stage(case, folder, preloads, in_place).play()
            if not played.problem:  # only now all of its processes have ended
                played = replace(played, replay=replay_problems(folder))
        except AssertionError as error:
            return Played(case, problem=f"it could not be cleared away: {error}", in_place=in_place)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        found.append(played)
        if not played.is_right or played.is_within(case.may_take_s * leniency):
            return played
    return min(found, key=lambda each: math.inf if each.took_s is None else each.took_s)


class Stage:
    """One job of one case, and what is seen of it."""

    def __init__(self, case: Case, folder: Path, preloads: bool = False, in_place: bool = False) -> None:
        self.case, self.folder, self.in_place = case, folder, in_place
        # A job that has trained for some seconds has learned it by itself; these jobs are too short for that.
        self._preloads = (
            (preloads or in_place) and case.wrap != "plain" and "--no-warm-start" not in case.options
        )
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.nodes: list[Launched | networks.LabNode] = []
        self.network: networks.Network | None = None
        self.service: Service | None = None
        self.place = ""
        self.others: list[subprocess.Popen[bytes]] = []  # processes of ours that take part

    def play(self) -> Played:
        try:
            with contextlib.ExitStack() as measured:
                with _CALM.starting():
                    self._start()
                    if not self.case.is_over_soon:
                        self._reach()
                if self.case.is_over_soon:
                    measured.enter_context(_CALM.measuring())
                    self._reach()
                if self.case.outside:
                    time.sleep(self.case.trains_s)
                    outside.commit(self)
                self._until(self._came_through, "it trains again")
            if self.case.kind is not Kind.NODE:  # of what is gone not all comes to an end
                self._until(self._over, "the job ended")
            return self._outcome()
        except AssertionError as error:
            return replace(self._outcome(), problem=str(error))
        finally:
            self._strike()

    def _strike(self) -> None:
        """Nothing of it is left, however it ended."""
        for process in self.others:
            process.kill()
            process.wait()
        for pid in [pid for node in self.nodes for pid in node.processes()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        outside.tidy(self)
        for node in self.nodes:
            node.clean_up()
        for open_still in (self.service, self.network and self.network.lab):
            if open_still is not None:
                open_still.close()

    # --- what is done ------------------------------------------------------------------------------

    def _start(self) -> None:
        case, words = self.case, self._words()
        env = {"DDP_RENDEZVOUS_INSECURE": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8", **dict(case.env)}
        if case.in_lab:
            self.network = networks.Network(self.folder)
            self.nodes += self.network.start(self.folder, "--rendezvous", self.network.place, *words, env=env)
            return
        if case.nodes > 1:
            self.place = f"127.0.0.1:{free_port()}"
            words = ["--rendezvous", self.place, *words]
        if case.has_service:
            self.start_service()
        for number in range(case.nodes):
            self.nodes.append(Launched(self.folder / f"node{number}", *words, env=env))

    def _words(self) -> list[str]:
        case = self.case
        words = ["--nproc-per-node", str(case.ranks), "--max-restarts", "1", "--shutdown-timeout", "2"]
        words += ["--log-dir", str(self.folder / "logs")]  # the journals lie there
        words += ["--hang-timeout", f"{HANG_TIMEOUT_S:g}"]
        if case.nodes > 1:
            words += ["--nnodes", f"1:{case.nodes}", "--last-call", "60", "--rdzv-id", "fault"]
        words += ["--preload", "torch._dynamo"] * self._preloads
        words += ["--recover", "in-place", "--failure-policy", "user-exception=heal"] * self.in_place
        words += [*case.options, TRAIN, str(self.shared), "--wrap", case.wrap, "--backend", case.backend]
        words += ["--loaders", str(case.loaders), "--device", case.device, *case.script_options]
        words += ["--in-place"] * self.in_place
        if case.fault:
            words += ["--fault", case.fault, "--guilty", *map(str, case.commits)]
        return words + ["--survives"] * (case.kind is Kind.INNOCENT or case.fault.endswith("@end"))

    def start_service(self) -> None:
        """Again, where it was before."""
        store = ("--store", f"file:{self.folder / 'service.db'}")
        journals = ("--journal-dir", str(self.folder / "journals"))
        self.service = Service("--listen", self.place, "--insecure", *store, *journals)
        self.service.await_endpoint()

    def _reach(self) -> None:
        """The moment of the fault; where it is before that of the others, there is nothing to wait for."""
        names = [f"reached-{rank}" for rank in range(self.case.ranks * self.case.nodes)]

        def reached() -> bool:
            if self._injected_at() is not None and not self.case.outside:
                return True
            return all((self.shared / name).exists() for name in names)

        self._until(reached, "all ranks trained")

    # --- what is seen ------------------------------------------------------------------------------

    def pid_of(self, rank: int) -> int:
        return int((self.shared / f"reached-{rank}").read_text())

    def stderr(self) -> str:
        return "\n".join(node.stderr() for node in self.nodes)

    def _injected_at(self) -> float | None:
        times = [float(path.read_text()) for path in self.shared.glob("injected-*")]
        return min(times) if times else None

    def _noted(self, name: str) -> float | None:
        with contextlib.suppress(FileNotFoundError):
            return float((self.shared / name).read_text())
        return None

    def _came_through(self) -> bool:
        return self._noted("again") is not None or self._noted("survived") is not None

    def _over(self) -> bool:
        return all(node.agent.poll() is not None for node in self.nodes)

    def _until(self, condition: Callable[[], object], what: str) -> None:
        eventually(lambda: condition() or self._over(), PATIENCE_S, what)
        assert condition(), f"the job ended before {what}"

    def _outcome(self) -> Played:
        began, took = self._injected_at(), {}
        for name in ("met", "again"):
            at = self._noted(name)
            took[name] = None if began is None or at is None else at - began
        found = verdict_of(node.stderr() for node in self.nodes)
        seen = {"in_place": self.in_place, "kept": self._kept(), "told": self.stderr()[-2000:]}
        return Played(self.case, found, took["met"], took["again"], **seen)

    def _kept(self) -> frozenset[int]:
        """Those that had come to the moment of the fault, and trained again as the same process."""
        again = {path.read_text() for path in self.shared.glob("trains-*")}
        reached = {path.name.rpartition("-")[2]: path.read_text() for path in self.shared.glob("reached-*")}
        return frozenset(int(rank) for rank, pid in reached.items() if pid in again)
