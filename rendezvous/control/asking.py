"""Questions of ddpctl to the agents of a job, and the job they are about if the user names none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from rendezvous.codec import question_message, told_in
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.error_codes import Code, Coded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rendezvous.values.questions import FromConversation, Wanted

_NODES_AT_ONCE = 64  # if the answers of all nodes do not fit into one message


class Caller(Protocol):
    """Calls the service: over gRPC (`Service`), or in its own process."""

    async def call(self, method: str, request: Any, *, longer_s: float = 0.0) -> Any:
        """Raises `grpc.aio.AioRpcError`."""

    def notes(self, job_id: str, *, follow: bool) -> AsyncIterator[Any]: ...

    async def all_jobs(self) -> list[Any]: ...


class NoSuchJob(Coded):
    """The job cannot be determined. The message is for the user."""

    code = Code.NO_SUCH_JOB


class BadArgument(Coded):
    """An argument cannot be used, such as a file that cannot be read. The message is for the user."""

    code = Code.FILE_UNREADABLE


async def inquire(
    service: Caller,
    job_id: str,
    wanted: Wanted,
    *,
    nodes: Sequence[str] = (),
    ranks: Sequence[int] = (),
    wait_s: float = 5.0,
) -> list[tuple[str, FromConversation]]:
    """The answers by node, in the order of node ranks."""
    question = question_message(0, wanted)

    async def ask(named: Sequence[str]) -> Any:
        request = pb.AskRequest(job_id=job_id, nodes=named, ranks=ranks, question=question, wait_s=wait_s)
        return await service.call("Ask", request, longer_s=wait_s)

    response = await ask(nodes)
    answers = {each.node: told_in(each.answer) for each in response.answers}
    if response.left_out:
        job = (await service.call("GetJob", pb.GetJobRequest(job_id=job_id))).job
        left = [n.node for n in job.nodes if n.HasField("node_rank") and n.node not in answers]
        for first in range(0, len(left), _NODES_AT_ONCE):
            response = await ask(left[first : first + _NODES_AT_ONCE])
            answers |= {each.node: told_in(each.answer) for each in response.answers}
    return list(answers.items())


async def job_named(service: Caller, given: str, *, ended_too: bool = False) -> str:
    """`given`, or the only job that has not ended; with `ended_too`, the only job. Raises `NoSuchJob`."""
    if given:
        return given
    jobs = await service.all_jobs()
    running = [job.job_id for job in jobs if job.phase != pb.PHASE_ENDED]
    if len(running) == 1:
        return str(running[0])
    if running:
        raise NoSuchJob(f"{len(running)} jobs run ({', '.join(running[:8])}): name one")
    if ended_too and len(jobs) == 1:
        return str(jobs[0].job_id)
    if ended_too and jobs:
        raise NoSuchJob(
            f"{len(jobs)} jobs have ended ({', '.join(job.job_id for job in jobs[:8])}): name one"
        )
    ended = f" ({len(jobs)} have ended: `ddpctl list` shows them)" if jobs else ""
    raise NoSuchJob(f"no job runs{ended}")
