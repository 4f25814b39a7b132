"""`ddpctl page`: the page of all jobs of this user on this machine, running and finished, or of the jobs of a service.

It calls the jobs as the other commands of ddpctl do. So it shows a job also after its end, from the file that its
launcher has left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import _ddp_launch_entry as doors
from rendezvous.values.contracts import INVALID_USAGE, UNUSABLE
from rendezvous.values.error_codes import Code, with_code

if TYPE_CHECKING:
    import argparse

    from rendezvous.control.service import Service

HELP = "serve the page of your jobs on this machine, running and finished, or of a service"
_LOOPBACK = "127.0.0.1"
_FRESH_S = 5.0


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        metavar="PORT",
        help=f"of the page, on {_LOOPBACK} (default: a free one)",
    )


def carry_out(arguments: argparse.Namespace) -> int:
    if problem := doors.find(doors.PAGE, "web").missing_packages("ddpctl page"):
        return _failed(problem, UNUSABLE, Code.PACKAGE_MISSING)
    if not 0 <= arguments.port < 65_536:
        return _failed(
            f"invalid --port {arguments.port}: use a number from 0 to 65535",
            INVALID_USAGE,
            Code.INVALID_VALUE,
        )
    from rendezvous.grpc_io import choose_engine, silence_grpc

    choose_engine()
    silence_grpc()
    from rendezvous.client.credential_files import OptionsUnusable

    try:
        return asyncio.run(_serve(arguments))
    except OptionsUnusable as error:
        return _failed(str(error), INVALID_USAGE, error.code)
    except OSError as error:
        words = (
            f"cannot listen at {_LOOPBACK}:{arguments.port}: {error.strerror or error}. Use another --port"
        )
        return _failed(words, UNUSABLE, Code.CANNOT_LISTEN)


def _failed(words: str, exit_code: int, code: Code) -> int:
    sys.stderr.write(f"ddpctl: {with_code(words, code)}\n")
    return exit_code


async def _serve(arguments: argparse.Namespace) -> int:
    """Until a signal ends it."""
    from ddp_launch_wings.web.server import Behind, Page
    from rendezvous.access.auth import Gate, Refusals
    from rendezvous.client.credential_files import client_options
    from rendezvous.control.commands import DEFAULT_ENDPOINT
    from rendezvous.control.service import Service, endpoints
    from rendezvous.metrics import Metrics

    where, options = endpoints(arguments.rendezvous or DEFAULT_ENDPOINT), client_options(os.environ)

    def make() -> Service:
        is_local = not arguments.rendezvous
        return Service(where, options, arguments.timeout, finds_local=is_local, log_dir=arguments.log_dir)

    jobs = _Jobs(make)
    page = Page(Behind(Gate(""), lambda _identity, _peer: jobs, Refusals(Metrics()).note))
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    url = await page.start(_LOOPBACK, arguments.port)
    sys.stdout.write(f"page of your jobs, for one login: {url}\nCtrl-C ends it\n")
    sys.stdout.flush()
    try:
        await over.wait()
    finally:
        await page.close()
    return 0


class _Jobs:
    """The calls of the page. What a `Service` knows of jobs that have ended is of the time when it first looked."""

    def __init__(self, make: Callable[[], Service]) -> None:
        self._make, self._service, self._until = make, make(), 0.0

    def _now(self) -> Service:
        time = asyncio.get_running_loop().time()
        if time >= self._until:
            self._service, self._until = self._make(), time + _FRESH_S
        return self._service

    async def call(self, method: str, request: Any, *, longer_s: float = 0.0) -> Any:
        if method != "ListJobs":
            return await self._now().call(method, request, longer_s=longer_s)
        from rendezvous.pb import rendezvous_pb2 as pb

        return pb.ListJobsResponse(jobs=await self.all_jobs())

    def notes(self, job_id: str, *, follow: bool) -> AsyncIterator[Any]:
        return self._now().notes(job_id, follow=follow)

    async def all_jobs(self) -> list[Any]:
        return await self._now().all_jobs(may_be_none=True)
