"""A year of a service in an hour: 100,000 simulated jobs start, fail, heal or restart, and end, in one process.

    python bench/soak.py [--jobs 100000] [--at-once 8] [--kept 1000] [--samples 10] [--json FILE] [--write-docs]

The jobs, their store (a file), their log and their journals are the service's own. Only the wire is left out: each
agent has a stream without a connection. Of ten jobs, four fail and heal in place, three fail and restart, one loses a
node, one fails for good, and one ends without a failure. A client lists and watches jobs meanwhile. Finished jobs
close a second after their end instead of a minute.

After each tenth of the jobs, it notes memory, open files, the size of the store and of the journals, and the bytes that
were logged. They must be flat: the last figure at most a tenth above the one at three tenths, when the history is full.
"""

# ruff: noqa: E402 - the path has to be put right before the package is imported
from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

from shown import ROOT, machine, publish

sys.path[:0] = [ROOT]

import grpc.aio

from rendezvous.access.auth import Gate
from rendezvous.codec import from_agent_bytes, read_to_agent
from rendezvous.main import TextLines
from rendezvous.metrics import Metrics
from rendezvous.replay.journal import Journals
from rendezvous.service import condition
from rendezvous.service import jobs as jobs_module
from rendezvous.service.agent_stream import ServiceLimits
from rendezvous.service.jobs import Jobs
from rendezvous.service.server import Agents
from rendezvous.store.file import open_file_store
from rendezvous.values.events import (
    AgentJoined,
    AgentLeft,
    AgentStopped,
    Assigned,
    Ended,
    HealReady,
    RankFailed,
    RanksFinished,
    Refused,
    Stop,
    StoreAt,
    StoreOpened,
)
from rendezvous.values.types import (
    AgentId,
    Cause,
    FailureClass,
    JobSpec,
    NodeFacts,
    Recover,
    RestartBudget,
    StoreAddress,
)

HEAL, RESTART, LOSE, FAIL, SUCCEED = "heal", "restart", "lose a node", "fail", "succeed"
STORIES = (HEAL, RESTART, HEAL, LOSE, RESTART, HEAL, FAIL, RESTART, HEAL, SUCCEED)
FLAT = 1.1
_CLOSED_AFTER_S = 1.0


@dataclass(slots=True)
class Sample:
    jobs: int
    seconds: float
    resident_mib: float
    open_files: int
    open_jobs: int
    stored_jobs: int
    store_mib: float
    journals_mib: float
    log_bytes_per_job: float


class Wire:
    """The context of a stream, as gRPC's server has it."""

    def __init__(self) -> None:
        self.to_service: asyncio.Queue[Any] = asyncio.Queue()
        self.to_agent: asyncio.Queue[bytes] = asyncio.Queue()

    async def read(self) -> Any:
        return await self.to_service.get()

    async def write(self, data: bytes) -> None:
        self.to_agent.put_nowait(data)

    def peer(self) -> str:
        return "unix:"

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def auth_context(self) -> dict[str, Any]:
        return {}


class Agent:
    """Does what the agent of a launcher does, and runs no ranks."""

    def __init__(self, service: Agents, spec: JobSpec, name: str, story: str) -> None:
        self._wire, self._id, self._story = Wire(), AgentId(name, "1"), story
        self._stream = asyncio.create_task(service._attend(None, self._wire))
        self._send(AgentJoined(self._id, spec, NodeFacts(name, "127.0.0.1", 1)))

    def _send(self, message: Any) -> None:
        self._wire.to_service.put_nowait(from_agent_bytes(message))

    async def live(self) -> None:
        """Until the job has ended."""
        node_rank, failures = 0, 0
        while True:
            match read_to_agent(await self._wire.to_agent.get()):
                case Assigned(assignment):
                    node_rank = assignment.node_rank
                    if node_rank == 0:
                        self._send(StoreOpened(self._id, assignment.generation, StoreAddress("127.0.0.1", 1)))
                case StoreAt(generation):
                    self._send(HealReady(self._id, generation, self._story == HEAL))
                    if node_rank == 0 and not failures and self._story != SUCCEED:
                        failures += 1
                        if self._story == LOSE:
                            self._send(AgentLeft(self._id, "the node goes away"))
                            break
                        self._send(RankFailed(self._id, generation, self._cause()))
                    elif self._story != LOSE:
                        self._send(RanksFinished(self._id, generation))
                case Stop(generation, decision):
                    parked = (0,) if decision.in_place and not failures else ()
                    self._send(AgentStopped(self._id, generation, parked=parked))
                case Ended() | Refused():
                    break
        self._wire.to_service.put_nowait(grpc.aio.EOF)
        await self._stream

    def _cause(self) -> Cause:
        text = "Traceback (most recent call last):\n" + '  File "train.py", line 1, in step\n' * 20
        kind = FailureClass.USER_EXCEPTION if self._story == FAIL else FailureClass.SIGNAL
        return Cause(self._id.node, 0, 0, kind, "an error", 1, traceback=text, ran_s=60.0)


async def one_job(jobs: Jobs, service: Agents, number: int) -> None:
    story = STORIES[number % len(STORIES)]
    budget = RestartBudget(0 if story in (FAIL, LOSE) else 3)
    job_id = f"job-{number:06}"
    # These agents send no heartbeats: on a busy machine a shorter lease would end, and the lost agent never hear of it.
    spec = JobSpec(
        job_id, 2, 2, budget=budget, replacement_timeout_s=0.2, recover=Recover.AUTO, lease_s=3600.0
    )
    agents = [Agent(service, spec, name, story) for name in ("a", "b")]
    watching = number % 50 == 0
    living = asyncio.gather(*(agent.live() for agent in agents))
    if watching:
        job = await jobs.open(job_id)
        watcher = job.watch(0)
        await jobs.listed()
        await living
        job.watchers.discard(watcher)
    else:
        await living


# --- the whole ---------------------------------------------------------------------------------------


class CountedLog(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.bytes += len(self.format(record)) + 1


async def soak(options: argparse.Namespace, folder: str) -> list[Sample]:
    jobs_module._IDLE_S = jobs_module._MAINTAIN_EVERY_S = _CLOSED_AFTER_S
    log = CountedLog()
    log.setFormatter(TextLines())
    logging.basicConfig(level="INFO", handlers=[log], force=True)
    path, kept = os.path.join(folder, "store"), os.path.join(folder, "journals")
    os.mkdir(kept)
    store, limits, journals = (
        await open_file_store(path),
        ServiceLimits(),
        Journals(kept, 1 << 20, print, 16 << 20),
    )
    jobs = Jobs(
        *(store, limits, Metrics()),
        history_s=14 * 86_400.0,
        history_jobs=options.kept,
        resume_grace_s=1.0,
        one_tenant=True,
        journals=journals,
    )
    service = Agents(jobs, Gate("", lambda _: None), limits)
    maintaining = asyncio.create_task(jobs.maintain())
    samples: list[Sample] = []
    began_at, share = time.monotonic(), options.jobs // options.samples
    for part in range(options.samples):
        before = log.bytes
        numbers = iter(range(part * share, (part + 1) * share))

        async def turn(numbers: Any = numbers) -> None:
            for number in numbers:
                await one_job(jobs, service, number)

        await asyncio.gather(*(turn() for _ in range(options.at_once)))
        while len(jobs) or not journals._queue.empty():  # noqa: ASYNC110  # they tell nobody
            await asyncio.sleep(0.1)
        await jobs.delete_old(time.time(), time.monotonic())
        gc.collect()
        sample = Sample(
            (part + 1) * share,
            round(time.monotonic() - began_at, 1),
            round(condition.resident_bytes() / 2**20, 1),
            condition.open_files(),
            len(jobs),
            len(await store.jobs()),
            round(_size_of(folder, "store") / 2**20, 2),
            round(_size_of(kept, "") / 2**20, 2),
            round((log.bytes - before) / share, 1),
        )
        samples.append(sample)
        print(sample, file=sys.stderr, flush=True)
    maintaining.cancel()
    await jobs.close(0.0)
    await store.close()
    await asyncio.to_thread(journals.close)
    return samples


def _size_of(folder: str, prefix: str) -> int:
    return sum(
        each.stat().st_size for each in os.scandir(folder) if each.is_file() and each.name.startswith(prefix)
    )


MEASURED = ("resident_mib", "open_files", "stored_jobs", "store_mib", "journals_mib", "log_bytes_per_job")


def growth(samples: list[Sample]) -> dict[str, float]:
    """The last figure in parts of the one at three tenths."""
    early, late = samples[max(0, len(samples) * 3 // 10 - 1)], samples[-1]
    return {name: round(getattr(late, name) / max(getattr(early, name), 1e-9), 3) for name in MEASURED}


def table(samples: list[Sample]) -> str:
    names = ("jobs", *MEASURED)
    heads = (
        "jobs",
        "memory, MiB",
        "open files",
        "jobs in the store",
        "store, MiB",
        "journals, MiB",
        "log per job, bytes",
    )
    lines = [f"| {' | '.join(heads)} |", f"|{'---:|' * len(heads)}"]
    lines += [f"| {' | '.join(f'{getattr(each, name):,}' for name in names)} |" for each in samples]
    grown = ", ".join(f"{name} {value:g}" for name, value in growth(samples).items())
    lines += ["", f"Last figure / figure at three tenths: {grown}."]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    page = os.path.join(ROOT, "docs", "operations.md")
    parser.add_argument("--jobs", type=int, default=100_000, help="default %(default)s")
    parser.add_argument("--at-once", type=int, default=8, help="jobs at the same time (default %(default)s)")
    parser.add_argument("--kept", type=int, default=1000, help="finished jobs (default %(default)s)")
    parser.add_argument("--samples", type=int, default=10, help="default %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write every figure there")
    parser.add_argument("--write-docs", metavar="FILE", nargs="?", const=page, help="default: %(const)s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-soak-") as folder:
        samples = asyncio.run(soak(options, folder))
    text = f"{table(samples)}\n\nMachine: {machine()}."
    publish("soak", text, {"machine": machine(), "samples": [asdict(each) for each in samples]}, options)
    return 0 if all(value <= FLAT for value in growth(samples).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
