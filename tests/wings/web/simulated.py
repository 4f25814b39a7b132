"""A job of any size behind the page: ranks that count steps, some of them in trouble. No process, no agent."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ddp_launch_wings.web.server import Behind, Page
from rendezvous.access.auth import Gate
from rendezvous.codec import answer_message, encode, wanted_in
from rendezvous.diagnosing import stragglers
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.rounds.event_log import LoggedEvent, TimePoint
from rendezvous.rounds.view import Failure, JobSummary, JobView, NodeView
from rendezvous.values.job_state import Phase
from rendezvous.values.questions import (
    GpuSeen,
    LoggedPoint,
    LoggedSeen,
    LoggedWanted,
    LogPiece,
    LogPieces,
    LogPlace,
    LogStream,
    LogsWanted,
    RankSeen,
    RanksSeen,
    RanksWanted,
    RestartTimes,
    Stacks,
    StacksWanted,
    StepCall,
    StepPhase,
    StepSeen,
    StepWanted,
)
from rendezvous.values.rank_time import JobTime, RankTime, Slowness, TimeSpent
from rendezvous.values.rank_view import RankPhase
from rendezvous.values.types import Cause, Decision, DecisionKind, FailureClass

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

GIB = 1 << 30
PHASES = (RankPhase.FORWARD, RankPhase.BACKWARD, RankPhase.BACKWARD, RankPhase.COMMUNICATE)


@dataclass
class Simulation:
    """`ranks` in nodes of `per_node`; the job has trained for `age_s`, and its `failed_at` seconds had a failure."""

    job: str
    ranks: int
    per_node: int = 8
    age_s: float = 1800.0
    step_s: float = 0.4
    slow: tuple[int, ...] = ()
    hung: tuple[int, ...] = ()
    seed: int = 7
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = time.time() - self.age_s
        self.random = random.Random(self.seed)
        self.jitter = [self.random.gauss(1.0, 0.015) for _ in range(self.ranks)]
        self.nodes = [f"gpu-{n:03}" for n in range(-(-self.ranks // self.per_node))]

    # --- the state ---------------------------------------------------------------------------------------

    @property
    def failed_at(self) -> float:
        return self.began + 0.55 * self.age_s

    def generation(self, at: float) -> int:
        return 1 if at < self.failed_at else 2

    def spent(self, at: float) -> TimeSpent:
        """Of one rank until then."""
        passed, stopped = at - self.began, at - self.failed_at
        lost = max(0.0, min(stopped, 43.0))
        training = max(0.0, passed - 9.0 - lost)
        parts = {
            "data": 0.02, "forward": 0.27, "backward": 0.46, "communication": 0.11, "optimizer": 0.04,
            "checkpoint": 0.02, "waiting": 0.03, "idle": 0.05,
        }  # fmt: skip
        wave = 6.0 * math.sin(passed / 90) / max(training, 60.0)  # a sum that changes its pace
        parts["communication"] += wave
        parts["forward"] -= wave
        lost_parts = {"detect": 0.6 * lost, "stop": 0.03 * lost, "init": 0.17 * lost, "redo": 0.2 * lost}
        return TimeSpent(
            start=min(passed, 9.0), **{name: share * training for name, share in parts.items()}, **lost_parts
        )

    def whole(self, at: float) -> JobTime:
        spent = self.spent(at)
        hidden = 0.7 * spent.backward * self.ranks
        return JobTime(self.ranks, TimeSpent(*(self.ranks * each for each in _values(spent))), hidden)

    def step(self, at: float) -> int:
        trained = at - self.began - 9.0 if at < self.failed_at else at - self.failed_at - 43
        base = 0 if at < self.failed_at else int((self.failed_at - self.began - 40) / self.step_s)
        return base + int(max(0.0, trained) / self.step_s)

    def seen(self, rank: int, at: float) -> RankSeen:
        is_slow, is_hung = rank in self.slow, rank in self.hung
        mean = self.step_s  # of all ranks: they wait for the slowest one
        share = 0.03 if is_slow else 0.28 + 0.03 * (rank % 5) / 5
        trained = at - self.began - 60
        return RankSeen(
            rank=rank,
            local_rank=rank % self.per_node,
            pid=20_000 + rank,
            known=True,
            process="S",
            phase=RankPhase.BACKWARD if is_hung else PHASES[(int(at * 7) + rank * 3) % len(PHASES)],
            phase_s=34.0 if is_hung else 0.05,
            quiet_s=34.0 if is_hung else 0.02 + 0.05 * self.random.random(),
            step=self.step(at) - (60 if is_hung else 0),
            step_s=0.1,
            last_step_s=mean,
            mean_step_s=mean,
            spent_s=trained,
            waited_s=trained * share,
            memory=int((10 + 0.6 * self.jitter[rank]) * GIB),
            gpu=GpuSeen(rank % self.per_node, 61 * GIB, 80 * GIB, 30 if is_hung else 88 - (rank * 7) % 5),
            doing="in backward, bucket 3 of 7",
        )

    def view(self) -> JobView:
        at = time.time()
        times = tuple(RankTime(rank, self.spent(at), self.step(at)) for rank in range(self.ranks))
        whole = self.whole(at)
        last = self.ranks - self.per_node * (len(self.nodes) - 1)
        nodes = [
            NodeView(
                node,
                address=f"10.0.{n // 250}.{n % 250 + 4}",
                nproc=last if n == len(self.nodes) - 1 else self.per_node,
                node_rank=n,
                rank_offset=n * self.per_node,
                present=True,
                health=self._trouble(n),
                slow_ranks=tuple(rank for rank in self.slow if rank // self.per_node == n),
                block=f"rack {n // 8 + 1}",
            )
            for n, node in enumerate(self.nodes)
        ]
        cause = self.cause()
        decision = Decision(DecisionKind.RESTART, "restarting with the same nodes (restart 1 of 3)", 1)
        return JobView(
            JobSummary(
                self.job, Phase.RUNNING, 2, len(nodes), len(nodes), 1, len(nodes), self.ranks, 1, "", heals=1
            ),
            nodes=tuple(nodes),
            decisions=(decision,),
            failures=(Failure(1, cause),),
            ranks=times,
            time=whole,
        )

    def _trouble(self, node: int) -> tuple[str, ...]:
        slow = [rank for rank in self.slow if rank // self.per_node == node]
        return tuple(self._slow_text(rank) for rank in slow)

    def _slow_text(self, rank: int) -> str:
        slowness = Slowness("backward_s", 0.97 * self.step_s, 0.71 * self.step_s)
        return stragglers.in_words(rank, self.nodes[rank // self.per_node], slowness)

    def cause(self) -> Cause:
        rank = min(3, self.ranks - 1)
        return Cause(
            node=self.nodes[rank // self.per_node],
            rank=rank,
            local_rank=rank % self.per_node,
            failure=FailureClass.HANG,
            exit_code=1,
            reason="has made no progress for 32 s in backward, bucket 3 of 7",
            at="2026-11-23 07:24:47",
            ran_s=990.2,
            step=2310,
            hint="ddp-launch docs hangs explains the verdicts",
            traceback='Thread 20003 (MainThread)\n  File "train.py", line 88, in train\n    loss.backward()',
        )

    def notes(self) -> list[LoggedEvent]:
        texts = [
            (1, 0, "joined", f"{self.nodes[0]} joined ({len(self.nodes)} nodes have joined)"),
            (1, 1, "sealed", f"generation 1: {self.ranks} ranks on {len(self.nodes)} nodes"),
            (1, 2, "running", "the TCPStore is open; the ranks start"),
            (1, 0.2 * self.age_s, "checkpoint", "token 5f2a asks for a checkpoint: before the demo"),
            (1, 0.38 * self.age_s, "decision", "heal: rank 1 was killed by SIGKILL; the others keep their processes"),
            (1, 0.381 * self.age_s, "sealed", f"generation 1: {self.ranks} ranks on {len(self.nodes)} nodes"),
            (1, 0.55 * self.age_s, "decision", "restart: rank 3 has made no progress for 32 s (restart 1 of 3)"),
            (1, 0.55 * self.age_s + 0.1, "stopping", f"stop order sent to {len(self.nodes)} nodes"),
            (1, 0.55 * self.age_s + 1, "stopped", "all ranks that had to end have ended"),
            (2, 0.55 * self.age_s + 1.2, "sealed", f"generation 2: {self.ranks} ranks on {len(self.nodes)} nodes"),
            (2, 0.55 * self.age_s + 2, "running", "the TCPStore is open; the ranks start"),
        ]  # fmt: skip
        if self.slow:
            texts.append((2, 0.8 * self.age_s, "straggler", self._slow_text(self.slow[0])))
        return [
            LoggedEvent(n + 1, self.began + at, g, kind, "", text)
            for n, (g, at, kind, text) in enumerate(texts)
        ]

    # --- as a service ------------------------------------------------------------------------------------

    def answer(self, wanted: Any, node: int) -> Any:
        at = time.time()
        mine = range(node * self.per_node, min(self.ranks, (node + 1) * self.per_node))
        match wanted:
            case RanksWanted():
                return RanksSeen(2, 1, tuple(self.seen(rank, at) for rank in mine))
            case LoggedWanted(after, of_node):
                return self._node_use(after, node, at) if of_node else self._logged(after, at)
            case StepWanted():
                return self._last_step(wanted.rank, at)
            case StacksWanted():
                return Stacks(
                    f'rank {wanted.rank}\n  File "train.py", line 88, in train\n    loss.backward()'
                )
            case LogsWanted():
                return self._logs(wanted, mine, at)
        raise AssertionError(f"the simulation does not answer {wanted}")

    def _logged(self, after: int, at: float) -> LoggedSeen:
        """The loss, ten points in each generation."""
        points = [
            LoggedPoint(n + 1, "loss", 10 * (n - 5 * (n > 9)), f"{3 / (1 + n):.6g}", 1 + (n > 9), at)
            for n in range(20)
        ]
        return LoggedSeen(tuple(point for point in points if point.number > after), 20)

    def _node_use(self, after: int, node: int, at: float) -> LoggedSeen:
        """Of a minute, with a restart in the middle."""
        use = {
            **{"cpu_percent": 31.0 + node % 7, "memory_percent": 48.0, "gpu_memory_percent": 76.0},
            **{"gpu_percent": 91.0, "gpu_least_percent": 84.0, "gpu_celsius": 66.0},
            **{"received_bytes": 3.1e9, "sent_bytes": 3.0e9, "read_bytes": 2.2e8, "written_bytes": 1.5e6},
        }
        points = [
            LoggedPoint(
                10 * n + place + 1,
                name,
                0,
                f"{value * (1 + 0.02 * (n % 3)):.6g}",
                1 + (n > 6),
                at - 60 + 5 * n,
            )
            for n in range(12)
            for place, (name, value) in enumerate(use.items())
        ]
        return LoggedSeen(tuple(point for point in points if point.number > after), 120)

    def _last_step(self, rank: int, at: float) -> StepSeen:
        """Seven buckets, the last of which is not hidden."""
        whole = self.step_s * self.jitter[rank]
        ends = {"data": 0.02, "forward": 0.32, "backward": 0.83, "communicate": 0.94, "optimizer": 1.0}
        starts = [0.0, *list(ends.values())[:-1]]
        phases = tuple(
            StepPhase(RankPhase(name), whole * start, whole * end)
            for start, (name, end) in zip(starts, ends.items(), strict=True)
        )
        launched = [0.39 + 0.073 * n for n in range(7)]
        calls = tuple(
            StepCall("all_reduce", "0", "bfloat16", 12_500_000, True, whole * start, whole * (start + 0.105))
            for start in launched
        )
        return StepSeen(self.step(at), whole, phases, calls)

    def _logs(self, wanted: LogsWanted, mine: range, at: float) -> LogPieces:
        ranks = [rank for rank in mine if not wanted.ranks or rank in wanted.ranks]
        known = {place.rank: place.offset for place in wanted.places}
        step = self.step(at)
        pieces, places = [], []
        for rank in ranks[:2] if len(ranks) == len(mine) and self.ranks > 64 else ranks:
            first = known.get(rank, step - 12)
            loss = [
                f"step {n} loss {2.1 + 3 / (1 + n / 400):.4f} lr 3.0e-04 tokens/s 418,{n % 900 + 100}"
                for n in range(first, step)
            ]
            if loss:
                data = ("\n".join(loss) + "\n").encode()
                pieces.append(LogPiece(2, rank, LogStream.STDOUT, at, data))
            places.append(LogPlace(2, rank, LogStream.STDOUT, step))
        return LogPieces(tuple(pieces), tuple(places))


def _values(spent: TimeSpent) -> list[float]:
    return [getattr(spent, name) for name in spent.__dataclass_fields__]


class Simulated:
    """The calls of the page, for several simulated jobs."""

    def __init__(self, *jobs: Simulation) -> None:
        self._jobs = {job.job: job for job in jobs}

    async def call(self, method: str, request: Any, *, longer_s: float = 0.0) -> Any:
        if method == "ListJobs":
            jobs = [encode(job.view().summary) for job in self._jobs.values()]
            elsewhere = pb.JobElsewhere(job_id="eval-nightly", address="rdzv-1.rdzv:29400")
            return pb.ListJobsResponse(jobs=jobs, elsewhere=[elsewhere])
        job = self._jobs[request.job_id]
        match method:
            case "GetJob":
                points = tuple(each for each in _past(job) if each.at > request.points_after)
                view = replace(job.view(), points=points if request.HasField("points_after") else ())
                return pb.GetJobResponse(job=encode(view))
            case "GetRestarts":
                times = RestartTimes(2, 32.1, 0.41, 0.02, 0.06, 4.9, 0.52, 8.4, node=job.nodes[0])
                return pb.GetRestartsResponse(times=[encode(times)])
            case "Ask":
                return self._ask(job, request)
        raise AssertionError(f"the simulation does not know {method}")

    def _ask(self, job: Simulation, request: Any) -> Any:
        wanted, ranks = wanted_in(request.question), list(request.ranks)
        nodes = sorted({rank // job.per_node for rank in ranks}) if ranks else range(len(job.nodes))
        named = [job.nodes.index(node) for node in request.nodes]
        return pb.AskResponse(
            answers=[
                pb.NodeAnswer(node=job.nodes[n], answer=answer_message(0, job.answer(wanted, n)))
                for n in named or nodes
            ]
        )

    async def notes(self, job_id: str, *, follow: bool) -> AsyncIterator[Any]:
        for note in self._jobs[job_id].notes():
            yield encode(note)
        if follow:
            await asyncio.Event().wait()

    async def all_jobs(self) -> list[Any]:
        return list((await self.call("ListJobs", None)).jobs)


class Pages:
    """Pages in a thread; a call gives the URL of another one, because a URL is for one login."""

    def __init__(self, *jobs: Simulation) -> None:
        self._jobs = jobs
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._pages: list[Page] = []
        self._thread.start()

    def __call__(self) -> str:
        return asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)

    async def _start(self) -> str:
        behind = Behind(Gate(""), lambda _identity, _peer: Simulated(*self._jobs), lambda *_: None)
        page = Page(behind)
        self._pages.append(page)
        return await page.start("127.0.0.1", 0)

    async def _end(self) -> None:
        for page in self._pages:
            await page.close()
        await self._loop.shutdown_default_executor()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


@contextlib.contextmanager
def simulated_page(*jobs: Simulation) -> Iterator[Pages]:
    pages = Pages(*jobs)
    try:
        yield pages
    finally:
        pages.close()


def _past(job: Simulation) -> Iterator[Any]:
    at = job.began + 10
    while at < time.time():
        yield TimePoint(at, job.generation(at), job.step(at), job.whole(at))
        at += 5.0
