"""A service with the page, a job that trains at it, and a client of the page's API."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from launched import Launched, eventually
from ports import free_port
from served import Service
from test_ddpctl_questions import SCRIPT, both_run

from rendezvous.access.auth import Grant, Role, add_key, new_grant_id, read_keys, sign

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass
class Site:
    """`start` again after `service.end()`: the same ports, keys and jobs."""

    folder: Path
    keys: str
    listen: str
    web: str
    arguments: tuple[str, ...]
    service: Service = field(init=False)
    url: str = ""

    def start(self) -> None:
        words = ("--listen", self.listen, "--web", self.web, *self.arguments)
        self.service = Service(*words, "--store", f"file:{self.folder}/state")
        self.url = self.service.await_line(r"page at (\S+)")[1]
        self.service.await_endpoint()

    def token(self, role: Role, pattern: str = "*", ttl_s: float = 3600.0) -> str:
        grant = Grant(new_grant_id(), pattern, role, time.time() + ttl_s)
        return sign(grant, read_keys(self.keys)[-1])

    def client(self, role: Role = Role.OPERATOR, pattern: str = "*") -> Client:
        client = Client(self.url)
        assert client.login(self.token(role, pattern))[0] == 200
        return client


@contextlib.contextmanager
def site(folder: Path, *arguments: str, tokens: bool = True) -> Iterator[Site]:
    keys = str(folder / "keys")
    add_key(keys)
    words = (*(("--token-keys", keys) if tokens else ()), *arguments)
    found = Site(folder, keys, f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", words)
    found.start()
    try:
        yield found
    finally:
        found.service.close()


@contextlib.contextmanager
def job_at(site: Site, name: str, *options: str) -> Iterator[Launched]:
    """Two ranks that count steps, without torch. Files in `job.there` are orders: print, crash, end."""
    env = {"DDP_RENDEZVOUS_TOKEN": site.token(Role.AGENT)}
    where = ("--rendezvous", site.listen, "--rdzv-id", name, "--preflight", "off")
    words = ("--nnodes", "1", "--nproc-per-node", "2", *where, *options, "SCRIPT", "watch")
    job = Launched(site.folder / name, *words, source=SCRIPT, fake_torch="", env=env)
    try:
        eventually(lambda: both_run(job), what="the ranks run")
        yield job
    finally:
        job.clean_up()


class Client:
    """Speaks to the API as the page does."""

    def __init__(self, url: str, context: Any = None) -> None:
        parts = urlsplit(url)
        self.host, self._context = parts.netloc, context
        self.cookie = self.csrf = self.cookie_line = ""
        self.headers: dict[str, str] = {}

    def _connection(self) -> http.client.HTTPConnection:
        if self._context is not None:
            return http.client.HTTPSConnection(self.host, timeout=60, context=self._context)
        return http.client.HTTPConnection(self.host, timeout=60)

    def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        sent = {"Cookie": self.cookie, **headers}
        data = None
        if body is not None:
            data = json.dumps(body)
            sent |= {"Content-Type": "application/json"}
        connection = self._connection()
        try:
            connection.request(method, path, data, sent)
            answer = connection.getresponse()
            text = answer.read()
            found = {name.lower(): value for name, value in answer.getheaders()}
        finally:
            connection.close()
        is_json = found.get("content-type", "").startswith("application/json")
        return answer.status, json.loads(text) if is_json else text, found

    def login(self, token: str, **headers: str) -> tuple[int, Any, dict[str, str]]:
        status, found, answered = self.ask("POST", "/api/login", {"token": token}, **headers)
        if status == 200:
            self.cookie_line = answered["set-cookie"]
            self.cookie, self.csrf = self.cookie_line.partition(";")[0], found["csrf"]
        return status, found, answered

    def get(self, path: str, **query: str) -> tuple[int, Any]:
        words = "&".join(f"{name}={quote(value)}" for name, value in query.items())
        return self.ask("GET", f"/api/{path}?{words}")[:2]

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        return self.ask("POST", f"/api/{path}", body, **{"x-ddp-csrf": self.csrf})[:2]

    @contextlib.contextmanager
    def events(self, job: str, last_id: str = "") -> Iterator[Iterator[tuple[str, str, Any]]]:
        """(id, kind, data) of each event, as they come."""
        connection = self._connection()
        try:
            headers = {"Cookie": self.cookie, **({"Last-Event-ID": last_id} if last_id else {})}
            connection.request("GET", f"/api/watch?job={quote(job)}", headers=headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            yield _events_in(answer)
        finally:
            connection.close()


def _events_in(answer: http.client.HTTPResponse) -> Iterator[tuple[str, str, Any]]:
    found: dict[str, str] = {}
    while line := answer.readline().decode():
        name, _, value = line.rstrip("\n").partition(": ")
        if line == "\n" and "data" in found:
            yield found.get("id", ""), found["event"], json.loads(found["data"])
            found = {}
        else:
            found[name] = value
