"""Serves the page with uvicorn, in the event loop of the process that has the jobs."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import hashlib
import hmac
import json
import os
import secrets
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ddp_launch_wings.web.feed import ROW, Feed, Feeds, step_view, story_view, summary
from ddp_launch_wings.web.requests import (
    STILL_HERE,
    BadRequest,
    LogsRequest,
    OrderRequest,
    fields,
    logs_request,
    order_request,
    text,
    wire,
)
from rendezvous.access.auth import Certificates, Denied, Gate, Grant, Identity, Reason, Right
from rendezvous.access.secret import file_problem
from rendezvous.control.ctl_text import LogLine, lines_of, on_terminal
from rendezvous.control.ctl_text import line_as_dict as line_dict
from rendezvous.control.service import Caller, NoSuchJob, inquire
from rendezvous.control.why import story_of
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.service.listener import Listener, listen_at
from rendezvous.values.contracts import VERSION
from rendezvous.values.questions import (
    CannotAnswer,
    Checkpointed,
    CheckpointWanted,
    LoggedSeen,
    LoggedWanted,
    LogPieces,
    LogPlace,
    LogStream,
    LogsWanted,
    Stacks,
    StacksWanted,
    StepSeen,
    StepWanted,
)

Answer = Callable[[Any, "Session"], Awaitable[Response]]


_LAST_ANSWERS_S = 2
_CERTIFICATE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Behind:
    """What the page shows. `only`: the job, if there is just one."""

    gate: Gate
    caller_of: Callable[[Identity, str], Caller]
    refused: Callable[[Reason, str, str], None]
    only: str = ""
    grant: Grant | None = None  # without tokens: what the user of the page may do; None: everything


class Page:
    def __init__(self, behind: Behind, certificates: Certificates | None = None) -> None:
        self._behind, self._certificates = behind, certificates
        self._logins = Logins(behind.gate, behind.grant)
        reader = behind.caller_of(Identity("the page"), "")
        self._feeds = Feeds(reader)
        self._renewing: asyncio.Task[None] | None = None
        self._stamp = _stamp(certificates)
        self._config: uvicorn.Config | None = None
        self._server: uvicorn.Server | None = None
        self._app: Application | None = None
        self._listener: Listener | None = None
        self._task: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self, host: str, port: int) -> str:
        """Listen, and return the URL, with the token of the only login if there is one. Raises `OSError`."""
        listening = await asyncio.to_thread(listen_at, host, port)
        bound = listening[0].getsockname()[1]
        certificates, scheme = self._certificates, "http" if self._certificates is None else "https"
        app = self._app = Application(
            self._logins,
            self._feeds,
            self._behind.caller_of,
            self._behind.refused,
            self._admit,
            cookie=f"ddp_session_{bound}",
            is_secure=certificates is not None,
            only=self._behind.only,
        )
        self._config = config = _config(app, certificates)
        config.load()
        server = self._server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # the process has handlers of its own
        self._task = asyncio.get_running_loop().create_task(server.serve([]), name="page")

        def protocol() -> asyncio.BaseProtocol:
            found: asyncio.BaseProtocol = config.http_protocol_class(
                config=config, server_state=server.server_state, app_state={}
            )
            return found

        self._listener = Listener(protocol, self._note_crowd, config.ssl)
        self._listener.start(listening)
        if certificates is not None:
            self._renewing = asyncio.get_running_loop().create_task(self._keep_certificate(), name="page TLS")
        shown = f"[{host}]" if ":" in host else host
        once = f"#login={self._logins.once}" if self._logins.once else ""
        self.url = f"{scheme}://{shown}:{bound}/"
        return self.url + once

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        if self._renewing is not None:
            self._renewing.cancel()
        if self._app is not None:
            self._app.close()
        await self._feeds.close()
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task])

    def _admit(self, address: str, port: int, name: str) -> bool:
        return self._listener is not None and self._listener.admit(address, port, name)

    def _note_crowd(self, address: str) -> None:
        self._behind.refused(Reason.CROWD, address, "too many open connections to the page without a login")

    async def _keep_certificate(self) -> None:
        while True:
            await asyncio.sleep(_CERTIFICATE_EVERY_S)
            self._renew_certificate()

    def _renew_certificate(self) -> None:
        """Use a certificate that was replaced for new connections. A pair that does not match is not used yet."""
        stamp, certificates = _stamp(self._certificates), self._certificates
        if certificates is None or self._config is None or not stamp or stamp == self._stamp:
            return
        with contextlib.suppress(OSError):
            if not file_problem(certificates.certificate, certificates.key, certificates.client_ca):
                self._config.ssl.load_cert_chain(certificates.certificate, certificates.key)
                self._stamp = stamp


def _config(app: Application, certificates: Certificates | None) -> uvicorn.Config:
    secure: dict[str, Any] = {}
    if certificates is not None:
        secure = {"ssl_certfile": certificates.certificate, "ssl_keyfile": certificates.key}
        if certificates.client_ca:
            secure |= {"ssl_ca_certs": certificates.client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return uvicorn.Config(
        app.asgi(),
        lifespan="off",
        ws="none",
        http="h11",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_LAST_ANSWERS_S,
        **secure,
    )


def _stamp(certificates: Certificates | None) -> tuple[int, ...]:
    if certificates is None:
        return ()
    try:
        found = [os.stat(path) for path in (certificates.certificate, certificates.key)]
    except OSError:
        return ()
    return tuple(value for each in found for value in (each.st_mtime_ns, each.st_ino, each.st_size))


# --- the routes of the page: its files, its API, and the streams of live events ---------------------
#
# Every route under /api, except the login, needs a session. The checks of calls over gRPC decide what it may see and
# do: the routes only pass on who asks. Requests that do something are POST, and need the header that
# the section on logins explains.

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
    """`caller_of`: the calls that an identity makes, from an address. `only`: the job, if there is just one.

    `admit`: a connection has shown a session; false if there are too many. See `rendezvous.service.listener`.
    """

    def __init__(
        self,
        logins: Logins,
        feeds: Feeds,
        caller_of: Callable[[Identity, str], Caller],
        refused: Callable[[Reason, str, str], None],
        admit: Callable[[str, int, str], bool],
        *,
        cookie: str,
        is_secure: bool,
        only: str = "",
    ) -> None:
        self._logins, self._feeds, self._caller_of, self._refused = logins, feeds, caller_of, refused
        self._admit = admit
        self._cookie, self._is_secure, self._only = cookie, is_secure, only
        self._files = read_files()
        self._closing = asyncio.Event()

    def asgi(self) -> Any:
        looks: dict[str, Answer] = {
            **{"session": self._session, "jobs": self._jobs, "rank": self._rank, "why": self._why},
            "node": self._node,
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
        return with_headers(app, is_secure=self._is_secure)

    def close(self) -> None:
        """End the streams."""
        self._closing.set()

    # --- who asks ------------------------------------------------------------------------------------------

    def _guarded(self, answer: Answer, *, acts: bool = False) -> Callable[[Any], Awaitable[Response]]:
        async def checked(request: Any) -> Response:
            try:
                session = self._logins.session(request.cookies.get(self._cookie, ""))
                if not self._admit(*peer_address(request), session.identity.name):
                    raise Crowded
                if acts:
                    check_origin(request.headers)
                    check_csrf(request.headers, session)
                return await answer(request, session)
            except Exception as error:
                return self._failed(error, peer_of(request))

        return checked

    def _failed(self, error: Exception, peer: str) -> Response:
        match error:
            case Denied():
                if error.reason is not Reason.NO_TOKEN:  # before a login
                    self._refused(error.reason, peer, error.words)
                return _problem(_CODES[error.code], error.words)
            case Refused():
                return _problem(403, str(error))
            case Crowded():
                return _problem(503, "too many open connections to the page: close some of its windows")
            case grpc.aio.AioRpcError():
                return _problem(_CODES.get(error.code(), 500), error.details() or "")
            case NoSuchJob():
                return _problem(404, str(error))
            case BadRequest():
                return _problem(400, str(error))
            case _:
                raise error

    def _caller(self, request: Any, session: Session) -> Caller:
        return self._caller_of(session.identity, peer_of(request))

    async def _login(self, request: Any) -> Response:
        try:
            check_origin(request.headers)
            cookie = self._logins.login(text(fields(await body_of(request)), "token", 4096))
            age_s = self._logins.max_age_s(cookie, time.time())
            response = JSONResponse(self._described(self._logins.session(cookie)))
        except (Denied, Refused, BadRequest) as error:
            return self._failed(error, peer_of(request))
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

    async def _node(self, request: Any, session: Session) -> Response:
        job, rank = self._asked_job(request, session), _number(request, "rank")
        after = _number(request, "after") if "after" in request.query_params else 0
        return JSONResponse(await node_use(self._caller(request, session), job, rank, after))

    async def _why(self, request: Any, session: Session) -> Response:
        generation = _number(request, "generation") if "generation" in request.query_params else 0
        caller = self._caller(request, session)
        return JSONResponse(await why(caller, self._asked_job(request, session), generation))

    async def _stacks(self, request: Any, session: Session) -> Response:
        job, rank = self._asked_job(request, session), _number(request, "rank")
        return JSONResponse(await stacks(self._caller(request, session), job, rank))

    async def _step(self, request: Any, session: Session) -> Response:
        job, rank = self._asked_job(request, session), _number(request, "rank")
        return JSONResponse(await step(self._caller(request, session), job, rank))

    async def _logs(self, request: Any, session: Session) -> Response:
        wanted = logs_request(await body_of(request))
        self._check_job(wanted.job, session, Right.READ)
        answer = search if wanted.search else logs
        return JSONResponse(await answer(self._caller(request, session), wanted))

    async def _order(self, request: Any, session: Session) -> Response:
        wanted = order_request(await body_of(request))
        self._check_job(wanted.job, session, Right.CONTROL)
        return JSONResponse(await order(self._caller(request, session), wanted))

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


# --- asking -----------------------------------------------------------------------------------------
#
# What the page asks once: the output of ranks, stacks, the story of a failure; and what it orders.
#
# Each function is the page's side of a command of ddpctl, with the same calls.

_STACKS_S, _LOGS_S, _STEP_S, _NODE_S = 8.0, 5.0, 35.0, 5.0
_SEARCH_S, _EVER_S, _MOST_FOUND = 10.0, 1e8, 500
_CHECKPOINT_S, _MORE_S = 300.0, 5.0


async def node_use(caller: Caller, job: str, rank: int, after: int) -> dict[str, Any]:
    """How much of the node of a rank was used, since a point."""
    wanted = LoggedWanted(after, of_node=True)
    ((node, told),) = await inquire(caller, job, wanted, ranks=[rank], wait_s=_NODE_S)
    if not isinstance(told, LoggedSeen):
        return {"node": node, "points": [], "last": after}
    points = [[each.at, each.name, float(each.value), each.generation] for each in told.points]
    return {"node": node, "points": points, "last": told.last}


async def logs(caller: Caller, wanted: LogsRequest) -> dict[str, Any]:
    """The lines since the places in the request, and the places for the next one."""
    places = tuple(LogPlace(g, r, LogStream(s), at) for g, r, s, at in wanted.places)
    asked = LogsWanted(wanted.ranks, tail=wanted.tail, places=places, wait_s=wanted.wait_s)
    answers = await inquire(caller, wanted.job, asked, ranks=wanted.ranks, wait_s=_LOGS_S + wanted.wait_s)
    told = [(node, each) for node, each in answers if isinstance(each, LogPieces)]
    after = {(p.generation, p.rank, str(p.stream)): p.offset for _, each in told for p in each.places}
    before = {(g, r, s): at for g, r, s, at in wanted.places}
    return {
        "lines": [_line(each) for each in lines_of((node, p) for node, each in told for p in each.pieces)],
        "places": [[*key, at] for key, at in sorted((before | after).items())],
        "more": any(each.more for _, each in told),
        "ended": bool(told) and all(each.ended for _, each in told),
        "silent": [f"node {node}: {each.reason}" for node, each in answers if isinstance(each, CannotAnswer)],
    }


async def search(caller: Caller, wanted: LogsRequest) -> dict[str, Any]:
    """The last lines with a text, of all generations; as many of the output as can be read in a limited time."""
    loop = asyncio.get_running_loop()
    give_up_at, text = loop.time() + _SEARCH_S, wanted.search.casefold()
    found: deque[dict[str, Any]] = deque(maxlen=_MOST_FOUND)
    places: tuple[LogPlace, ...] = ()
    number, more, silent = 0, True, []
    while more and loop.time() < give_up_at:
        asked = LogsWanted(wanted.ranks, since_s=None if places else _EVER_S, places=places)
        answers = await inquire(caller, wanted.job, asked, ranks=wanted.ranks, wait_s=_LOGS_S)
        told = [(node, each) for node, each in answers if isinstance(each, LogPieces)]
        silent = [f"node {node}: {each.reason}" for node, each in answers if isinstance(each, CannotAnswer)]
        for line in map(_line, lines_of((node, p) for node, each in told for p in each.pieces)):
            if text in line["text"].casefold():
                number += 1
                found.append(line)
        known = {
            (p.generation, p.rank, p.stream): p
            for p in (*places, *(p for _, each in told for p in each.places))
        }
        places, more = tuple(known.values()), any(each.more for _, each in told)
    return {"lines": list(found), "found": number, "all": not more, "silent": silent}


def _line(line: LogLine) -> dict[str, Any]:
    return {**line_dict(line), "text": on_terminal(line.text, color=False)}


async def stacks(caller: Caller, job: str, rank: int) -> dict[str, Any]:
    ((node, told),) = await inquire(caller, job, StacksWanted(rank), ranks=[rank], wait_s=_STACKS_S)
    if isinstance(told, Stacks):
        return {"node": node, "text": told.text, "problem": ""}
    assert isinstance(told, CannotAnswer)
    return {"node": node, "text": "", "problem": told.reason}


async def step(caller: Caller, job: str, rank: int) -> dict[str, Any]:
    """The next whole step of a rank: its phases, and its collectives."""
    ((_, told),) = await inquire(caller, job, StepWanted(rank), ranks=[rank], wait_s=_STEP_S)
    if isinstance(told, StepSeen):
        return {**step_view(told), "problem": ""}
    return {"problem": told.reason if isinstance(told, CannotAnswer) else "the agent gave no answer"}


async def why(caller: Caller, job_id: str, generation: int) -> dict[str, Any] | None:
    """None: nothing has failed. Raises `NoSuchJob` if this generation has not failed."""
    job = (await caller.call("GetJob", pb.GetJobRequest(job_id=job_id))).job
    story = await story_of(caller, job_id, job, generation)
    return None if story is None else story_view(story, job)


# --- orders --------------------------------------------------------------------------------------------------


async def order(caller: Caller, wanted: OrderRequest) -> dict[str, Any]:
    """Carry out what a person has confirmed. The service adds who it was."""
    reason = f"{wanted.reason or 'no reason given'} (on the page)"
    if wanted.action == "checkpoint":
        return await _checkpoint(caller, wanted.job, reason)
    method, request = _request(wanted, reason)
    return {"job": summary((await caller.call(method, request)).job), "silent": []}


def _request(wanted: OrderRequest, reason: str) -> tuple[str, Any]:
    job, node = wanted.job, wanted.node
    requests: Mapping[str, tuple[str, Any]] = {
        "drain": ("DrainNode", pb.DrainNodeRequest(job_id=job, node=node, reason=reason)),
        "resume": ("ResumeNode", pb.ResumeNodeRequest(job_id=job, node=node)),
        "restart": ("RestartJob", pb.RestartJobRequest(job_id=job, reason=reason)),
        "abort": ("AbortJob", pb.AbortJobRequest(job_id=job, reason=reason)),
    }
    return requests[wanted.action]


async def _checkpoint(caller: Caller, job: str, reason: str) -> dict[str, Any]:
    wanted = CheckpointWanted(reason, _CHECKPOINT_S)
    answers = await inquire(caller, job, wanted, wait_s=_CHECKPOINT_S + _MORE_S)
    late = f"not all ranks have taken the checkpoint within {_CHECKPOINT_S:g} s"
    silent = [
        f"node {node}: {told.reason if isinstance(told, CannotAnswer) else late}"
        for node, told in answers
        if not (isinstance(told, Checkpointed) and told.taken)
    ]
    took = [told.took_s for _, told in answers if isinstance(told, Checkpointed)]
    return {"job": None, "silent": silent, "took_s": max(took, default=0.0)}


# --- the files of the page, as they lie in this package ---------------------------------------------

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class File:
    data: bytes
    media_type: str
    tag: str


def read_files() -> dict[str, File]:
    """By their path in the URL. Nothing else is served, whatever a URL says."""
    root = Path(__file__).parent / "static"
    found = (path for path in sorted(root.rglob("*")) if path.suffix in _TYPES)
    return {path.relative_to(root).as_posix(): _file(path) for path in found}


def _file(path: Path) -> File:
    data = path.read_bytes()
    return File(data, _TYPES[path.suffix], f'"{hashlib.sha256(data).hexdigest()[:16]}"')


# --- guarding ---------------------------------------------------------------------------------------
#
# What protects the page in a browser: headers of answers, and checks of requests that do something.

_BODY_BYTES = 1 << 20
CSRF_HEADER = "x-ddp-csrf"
# Only files of the page itself; no inline script, no inline style; no site may put the page into a frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
_TLS_HEADERS = {"strict-transport-security": "max-age=31536000"}


class Refused(Exception):
    """The request does not come from the page. The message is for its author."""


class Crowded(Exception):
    """There is no place for another connection of this session."""


def with_headers(app: Any, *, is_secure: bool) -> Any:
    added = [(k.encode(), v.encode()) for k, v in {**_HEADERS, **(_TLS_HEADERS if is_secure else {})}.items()]

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                if not any(name == b"cache-control" for name, _ in headers):
                    headers.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*headers, *added]}
            await send(message)

        await app(scope, receive, send_with_headers)

    return wrapped


def check_origin(headers: Mapping[str, str]) -> None:
    """Raises `Refused` if a browser says that another site sent the request."""
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        raise Refused("this request comes from another site")
    origin = headers.get("origin", "")
    if origin and origin.partition("://")[2] != headers.get("host", ""):
        raise Refused("this request comes from another site")


def check_csrf(headers: Mapping[str, str], session: Session) -> None:
    given = headers.get(CSRF_HEADER, "")
    if not hmac.compare_digest(given.encode(), session.csrf.encode()):
        raise Refused(f"the header {CSRF_HEADER} is missing or wrong: load the page again")


async def body_of(request: Any) -> bytes:
    """Raises `BadRequest` if it is too long or not declared as JSON."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise BadRequest("the body must be application/json")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _BODY_BYTES:
            raise BadRequest(f"the body is longer than {_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def peer_of(request: Any) -> str:
    return peer_address(request)[0]


def peer_address(request: Any) -> tuple[str, int]:
    return (request.client.host, request.client.port) if request.client is not None else ("", 0)


# --- who uses the page: logins, and the cookie of a session -----------------------------------------
#
# Theory of operation
# -------------------
# A login is a token of the API. The cookie of the session is not this token: a browser sends cookies to all ports of a
# host, and what listens there must not get a token. It contains the same grant, signed with the same key for this
# purpose only. The service stores no sessions, so they outlive a restart, and end when the token expires or its key is
# removed. The cookie is HttpOnly: no script can read it.
#
# A service without tokens, and a job of `ddp-launch --web`, print a URL with a random token that is valid for one
# login. Its session is a random value that is valid as long as the process. The token is behind the `#` of the URL:
# browsers do not send this part, so it is in no log and in no Referer.
#
# Every request that does something needs a header with a value that is derived from the cookie. Pages of other sites
# can neither read it nor set the header. SameSite=Strict and the check of Sec-Fetch-Site and Origin are two more
# barriers.

_RANDOM_SESSIONS = 64  # of one process; the oldest ends when there are more
_LONGEST_S = 30 * 86_400


@dataclass(frozen=True, slots=True)
class Session:
    identity: Identity
    csrf: str

    @property
    def role(self) -> str:
        grant = self.identity.grant
        return "operator" if grant is None else grant.role.value

    @property
    def until(self) -> float | None:
        return None if self.identity.grant is None else self.identity.grant.until

    def may_control(self, job_id: str | None = None) -> bool:
        return self.identity.may(Right.CONTROL, job_id)


class Logins:
    """`gate` checks tokens. If it uses none, there is one login, with `once`, and `grant` is what its user may do."""

    def __init__(self, gate: Gate, grant: Grant | None = None) -> None:
        self._gate, self._one = gate, Identity(f"user {_user()}", grant)
        self.once = "" if gate.uses_tokens else secrets.token_urlsafe(32)
        self._sessions: list[str] = []

    def login(self, credential: str) -> str:
        """The cookie of a new session. Raises `Denied`."""
        if self._gate.uses_tokens:
            return self._gate.session_of(credential.strip())
        if not self.once or not hmac.compare_digest(credential.strip().encode(), self.once.encode()):
            used = "" if self.once else " The token of the URL was used before; it is valid for one login."
            raise _unknown(f"this is not the token of the URL that was printed at the start.{used}")
        self.once = ""
        cookie = secrets.token_urlsafe(32)
        self._sessions = [*self._sessions, cookie][-_RANDOM_SESSIONS:]
        return cookie

    def logout(self, cookie: str) -> None:
        self._sessions = [each for each in self._sessions if each != cookie]

    def session(self, cookie: str) -> Session:
        """Raises `Denied`."""
        if self._gate.uses_tokens:
            return Session(self._gate.holder_of_session(cookie), csrf_of(cookie))
        known = [each for each in self._sessions if hmac.compare_digest(each.encode(), cookie.encode())]
        if not known:
            raise _unknown("log in: open the URL that was printed at the start")
        return Session(self._one, csrf_of(cookie))

    def max_age_s(self, cookie: str, now: float) -> int:
        until = self.session(cookie).until
        return _LONGEST_S if until is None else int(max(1, min(until - now, _LONGEST_S)))


def _user() -> str:
    """Who runs this process: for a job of ddp-launch, and a service on loopback, also the user of the page."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container without this user
        return str(os.getuid())


def csrf_of(cookie: str) -> str:
    return hmac.digest(cookie.encode(), b"actions of the page", hashlib.sha256).hex()


def _unknown(words: str) -> Denied:
    return Denied(words, Reason.BAD_TOKEN)
