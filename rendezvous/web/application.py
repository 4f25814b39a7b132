"""The routes of the page: its files, its API, and the streams of live events.

Every route under /api, except the login, needs a session. The checks of calls over gRPC decide what it may see and do:
the routes only pass on who asks. Requests that do something are POST, and need the header that
`rendezvous.web.logins` explains.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rendezvous.access.auth import Denied, Right
from rendezvous.access.refusals import Reason
from rendezvous.control.asking import NoSuchJob
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.version import VERSION
from rendezvous.web import asking, guarding
from rendezvous.web.files import read_files
from rendezvous.web.guarding import Refused
from rendezvous.web.requests import BadRequest, fields, logs_request, order_request, text
from rendezvous.web.stream import STILL_HERE, wire
from rendezvous.web.views import ROW, summary

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from rendezvous.access.auth import Identity
    from rendezvous.control.asking import Caller
    from rendezvous.web.feed import Feed, Feeds
    from rendezvous.web.logins import Logins, Session

    Answer = Callable[[Any, Session], Awaitable[Response]]

_JOBS_EVERY_S = 1.0
_CODES = {
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_STREAM = {"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}


class Application:
    """`caller_of`: the calls that an identity makes, from an address. `only`: the job, if there is just one."""

    def __init__(
        self,
        logins: Logins,
        feeds: Feeds,
        caller_of: Callable[[Identity, str], Caller],
        refused: Callable[[Reason, str, str], None],
        *,
        cookie: str,
        is_secure: bool,
        only: str = "",
    ) -> None:
        self._logins, self._feeds, self._caller_of, self._refused = logins, feeds, caller_of, refused
        self._cookie, self._is_secure, self._only = cookie, is_secure, only
        self._files = read_files()
        self._closing = asyncio.Event()

    def asgi(self) -> Any:
        looks: dict[str, Answer] = {
            **{"session": self._session, "jobs": self._jobs, "rank": self._rank, "why": self._why},
            **{
                "stacks": self._stacks,
                "step": self._step,
                "watch": self._watch,
                "watch-jobs": self._watch_jobs,
            },
        }
        acts: dict[str, Answer] = {"logs": self._logs, "order": self._order, "logout": self._logout}
        routes = [
            Route("/api/login", self._login, methods=["POST"]),
            *(Route(f"/api/{path}", self._guarded(each), methods=["GET"]) for path, each in looks.items()),
            *(
                Route(f"/api/{path}", self._guarded(each, acts=True), methods=["POST"])
                for path, each in acts.items()
            ),
            Route("/{name:path}", self._file, methods=["GET"]),
        ]
        app = Starlette(routes=routes)
        return guarding.with_headers(app, is_secure=self._is_secure)

    def close(self) -> None:
        """End the streams."""
        self._closing.set()

    # --- who asks ------------------------------------------------------------------------------------------

    def _guarded(self, answer: Answer, *, acts: bool = False) -> Callable[[Any], Awaitable[Response]]:
        async def checked(request: Any) -> Response:
            try:
                session = self._logins.session(request.cookies.get(self._cookie, ""))
                if acts:
                    guarding.check_origin(request.headers)
                    guarding.check_csrf(request.headers, session)
                return await answer(request, session)
            except Exception as error:
                return self._failed(error, guarding.peer_of(request))

        return checked

    def _failed(self, error: Exception, peer: str) -> Response:
        match error:
            case Denied():
                if error.reason is not Reason.NO_TOKEN:  # nobody is logged in yet
                    self._refused(error.reason, peer, error.words)
                return _problem(_CODES[error.code], error.words)
            case Refused():
                return _problem(403, str(error))
            case grpc.aio.AioRpcError():
                return _problem(_CODES.get(error.code(), 500), error.details() or "")
            case NoSuchJob():
                return _problem(404, str(error))
            case BadRequest():
                return _problem(400, str(error))
            case _:
                raise error

    def _caller(self, request: Any, session: Session) -> Caller:
        return self._caller_of(session.identity, guarding.peer_of(request))

    async def _login(self, request: Any) -> Response:
        try:
            guarding.check_origin(request.headers)
            cookie = self._logins.login(text(fields(await guarding.body_of(request)), "token", 4096))
            age_s = self._logins.max_age_s(cookie, time.time())
            response = JSONResponse(self._described(self._logins.session(cookie)))
        except (Denied, Refused, BadRequest) as error:
            return self._failed(error, guarding.peer_of(request))
        response.set_cookie(
            self._cookie,
            cookie,
            max_age=age_s,
            httponly=True,
            samesite="strict",
            secure=self._is_secure,
            path="/",
        )
        return response

    async def _logout(self, request: Any, _: Session) -> Response:
        self._logins.logout(request.cookies.get(self._cookie, ""))
        response = JSONResponse({})
        response.delete_cookie(
            self._cookie, path="/", httponly=True, samesite="strict", secure=self._is_secure
        )
        return response

    async def _session(self, _: Any, session: Session) -> Response:
        return JSONResponse(self._described(session))

    def _described(self, session: Session) -> dict[str, Any]:
        return {
            "name": session.identity.name,
            "role": session.role,
            "may_control": session.may_control(),
            "until": session.until,
            "csrf": session.csrf,
            "only": self._only,
            "columns": ROW,
            "version": VERSION,
        }

    # --- jobs ----------------------------------------------------------------------------------------------

    async def _jobs(self, request: Any, session: Session) -> Response:
        return JSONResponse(await self._list(self._caller(request, session), session))

    async def _list(self, caller: Caller, session: Session) -> dict[str, Any]:
        if self._only:
            jobs, others = [job for job in await caller.all_jobs() if job.job_id == self._only], []
        else:
            listed = await caller.call("ListJobs", pb.ListJobsRequest())
            jobs, others = listed.jobs, listed.elsewhere
        rows = [{**summary(job), "may_control": session.may_control(job.job_id)} for job in jobs]
        return {
            "jobs": sorted(rows, key=lambda row: str(row["job"])),
            "elsewhere": [{"job": other.job_id, "replica": other.address} for other in others],
        }

    async def _watch_jobs(self, request: Any, session: Session) -> Response:
        caller = self._caller(request, session)

        async def events() -> AsyncIterator[bytes]:
            last, quiet_s = "", 0.0
            while not self._closing.is_set() and self._is_valid(request):
                try:
                    found = json.dumps(await self._list(caller, session))
                except grpc.aio.AioRpcError:
                    return  # the browser tries again
                quiet_s = 0.0 if found != last or quiet_s >= 10.0 else quiet_s + _JOBS_EVERY_S
                if found != last:
                    yield f"event: jobs\ndata: {found}\n\n".encode()
                elif not quiet_s:
                    yield STILL_HERE
                last = found
                await self._pause(_JOBS_EVERY_S)

        return StreamingResponse(events(), headers=_STREAM)

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._closing.wait(), seconds)
        except TimeoutError:
            pass

    def _is_valid(self, request: Any) -> bool:
        """Whether the session has not ended since the stream began."""
        try:
            self._logins.session(request.cookies.get(self._cookie, ""))
        except Denied:
            return False
        return True

    # --- one job -------------------------------------------------------------------------------------------

    async def _watch(self, request: Any, session: Session) -> Response:
        job = self._asked_job(request, session)
        feed = await self._feeds.of(job)
        last_id = request.headers.get("last-event-id") or request.query_params.get("after", "")
        return StreamingResponse(self._events(request, feed, last_id), headers=_STREAM)

    async def _events(self, request: Any, feed: Feed, last_id: str) -> AsyncIterator[bytes]:
        yield b"retry: 1000\n\n"
        async with aclosing(feed.events(last_id)) as entries:  # type: ignore[type-var]
            async for entry in entries:
                if self._closing.is_set() or not self._is_valid(request):
                    return
                yield STILL_HERE if entry is None else wire(entry, feed.name)

    async def _rank(self, request: Any, session: Session) -> Response:
        feed = self._feeds.known(self._asked_job(request, session))
        found = None if feed is None else feed.rank(_number(request, "rank"))
        return _problem(404, "this rank does not run now") if found is None else JSONResponse(found)

    async def _why(self, request: Any, session: Session) -> Response:
        generation = _number(request, "generation") if "generation" in request.query_params else 0
        caller = self._caller(request, session)
        return JSONResponse(await asking.why(caller, self._asked_job(request, session), generation))

    async def _stacks(self, request: Any, session: Session) -> Response:
        job, rank = self._asked_job(request, session), _number(request, "rank")
        return JSONResponse(await asking.stacks(self._caller(request, session), job, rank))

    async def _step(self, request: Any, session: Session) -> Response:
        job, rank = self._asked_job(request, session), _number(request, "rank")
        return JSONResponse(await asking.step(self._caller(request, session), job, rank))

    async def _logs(self, request: Any, session: Session) -> Response:
        wanted = logs_request(await guarding.body_of(request))
        self._check_job(wanted.job, session, Right.READ)
        return JSONResponse(await asking.logs(self._caller(request, session), wanted))

    async def _order(self, request: Any, session: Session) -> Response:
        wanted = order_request(await guarding.body_of(request))
        self._check_job(wanted.job, session, Right.CONTROL)
        who = session.identity.name
        return JSONResponse(await asking.order(self._caller(request, session), wanted, who))

    def _asked_job(self, request: Any, session: Session) -> str:
        job = str(request.query_params.get("job", ""))
        self._check_job(job, session, Right.READ)
        return job

    def _check_job(self, job: str, session: Session, right: Right) -> None:
        """Raises `BadRequest`, `Denied` or `NoSuchJob`."""
        if not job:
            raise BadRequest("'job' is missing")
        if self._only not in ("", job):
            raise NoSuchJob(f"this page shows job {self._only!r} only")
        session.identity.require(right, job)

    # --- files ---------------------------------------------------------------------------------------------

    async def _file(self, request: Any) -> Response:
        found = self._files.get(request.path_params["name"] or "index.html")
        if found is None:
            return Response("not found\n", 404, media_type="text/plain")
        headers = {"etag": found.tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == found.tag:
            return Response(None, 304, headers)
        return Response(found.data, 200, headers, found.media_type)


def _number(request: Any, name: str) -> int:
    value = request.query_params.get(name, "")
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise BadRequest(f"invalid {name!r}: use a whole number")
    return int(value)


def _problem(status: int, words: str) -> Response:
    return JSONResponse({"problem": words}, status)
