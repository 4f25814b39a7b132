"""The API of the page: who may see and do what, live events, and the answers that the views show."""

from __future__ import annotations

import json
import signal
import ssl
import time
from typing import TYPE_CHECKING, Any

import pytest
from authority import Authority
from launched import Launched, eventually
from paging import Client, Site, job_at, site
from serve_settings import parse_serve
from served import SOON_S
from test_auth_gate import command

from ddp_launch_wings.web import door
from rendezvous.access.auth import Role
from rendezvous.service.settings import SettingsUnusable

if TYPE_CHECKING:
    from pathlib import Path

JOB = "watched"


def until(events: Any, kind: str, is_it: Any = lambda _: True) -> tuple[str, Any]:
    """The id and the data of the first event of this kind that is the one."""
    deadline = time.monotonic() + SOON_S
    for number, name, data in events:
        if name == kind and is_it(data):
            return number, data
        assert time.monotonic() < deadline, f"no such {kind}; the last event is {name}: {data}"
    raise AssertionError(f"the stream has ended without such {kind}")


# --- who gets in ---------------------------------------------------------------------------------------------


def test_without_a_login_there_are_only_the_files(shared: Site) -> None:
    client = Client(shared.url)
    assert client.ask("GET", "/")[0] == 200
    for path in ("session", "jobs", "watch", "watch-jobs", "why", "stacks", "rank", "step"):
        assert client.get(path, job=JOB)[0] == 401, path
    for path in ("logs", "order", "logout"):
        assert client.post(path, job=JOB)[0] == 401, path
    assert client.login("a.b.c")[0] == 401
    assert client.login(shared.token(Role.VIEWER, ttl_s=-1))[0] == 401


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(shared: Site) -> None:
    client = shared.client()
    assert "HttpOnly" in client.cookie_line
    assert "SameSite=strict" in client.cookie_line
    headers = client.ask("GET", "/")[2]
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert client.ask("GET", "/api/jobs")[2]["cache-control"] == "no-store"


def test_a_token_that_may_only_look_cannot_act(shared: Site, job: Launched) -> None:
    for role in (Role.VIEWER, Role.AGENT):
        client = shared.client(role)
        assert client.get("session")[1]["may_control"] is False
        for action in ("restart", "abort", "checkpoint"):
            status, answer = client.post("order", job=JOB, action=action)
            assert (status, "does not permit" in answer["problem"]) == (403, True), action
        assert client.post("order", job=JOB, action="drain", node="a")[0] == 403
    assert job.agent.poll() is None


def test_a_token_is_for_its_jobs(shared: Site, job: Launched) -> None:
    client = shared.client(Role.OPERATOR, "others-*")
    assert client.get("jobs")[1] == {"jobs": [], "elsewhere": []}
    for path, query in (
        ("watch", {}),
        ("why", {}),
        ("rank", {"rank": "0"}),
        ("stacks", {"rank": "0"}),
        ("step", {"rank": "0"}),
    ):
        assert client.get(path, job=JOB, **query)[0] == 403, path
    assert client.post("logs", job=JOB)[0] == 403
    assert client.post("order", job=JOB, action="abort")[0] == 403
    assert job.agent.poll() is None


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-ddp-csrf": "0" * 64},
        {"sec-fetch-site": "cross-site"},
        {"origin": "http://evil.example"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_another_site_cannot_act(shared: Site, job: Launched, headers: dict[str, str]) -> None:
    client = shared.client()
    if "x-ddp-csrf" not in headers and headers:
        headers = {**headers, "x-ddp-csrf": client.csrf}
    status, _, _ = client.ask("POST", "/api/order", {"job": JOB, "action": "abort"}, **headers)
    assert status == 403
    assert job.agent.poll() is None


def test_another_site_cannot_log_a_user_in(shared: Site) -> None:
    client = Client(shared.url)
    assert client.login(shared.token(Role.VIEWER), **{"sec-fetch-site": "cross-site"})[0] == 403


def test_a_session_ends_with_its_logout(shared: Site) -> None:
    client = shared.client()
    status, _, headers = client.ask("POST", "/api/logout", {}, **{"x-ddp-csrf": client.csrf})
    assert status == 200
    assert "Max-Age=0" in headers["set-cookie"]


def test_only_files_of_the_page_are_served(shared: Site) -> None:
    client = Client(shared.url)
    for path in ("/../server.py", "/%2e%2e/server.py", "/static/index.html", "/css", "/js/../../server.py"):
        assert client.ask("GET", path)[0] == 404, path
    assert client.ask("POST", "/index.html", {})[0] == 405
    tag = client.ask("GET", "/index.html")[2]["etag"]
    assert client.ask("GET", "/index.html", **{"If-None-Match": tag})[0] == 304


@pytest.mark.parametrize("body", ["x" * (2 << 20), "{", "[]"])
def test_a_body_that_cannot_be_used_is_refused(shared: Site, body: str) -> None:
    client = shared.client()
    connection = client._connection()
    headers = {"Cookie": client.cookie, "x-ddp-csrf": client.csrf, "Content-Type": "application/json"}
    connection.request("POST", "/api/order", body, headers)
    answer = connection.getresponse()
    assert answer.status == 400
    assert json.loads(answer.read())["problem"]
    connection.close()


# --- how it is served ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ((), ("--tls-cert", "--token-keys")),
        (("--insecure",), ("--tls-cert", "--token-keys")),
        (("--token-keys", "keys"), ("--tls-cert",)),
        (("--tls-cert", "a", "--tls-key", "b"), ("--token-keys",)),
    ],
)
def test_other_machines_are_served_only_with_tls_and_tokens(
    options: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsUnusable) as error:
        parse_serve(("--web", "0.0.0.0:1", *options), {})
    assert "--web 0.0.0.0:1 is reachable from other machines" in str(error.value)
    assert [each in str(error.value) for each in ("--tls-cert", "--token-keys")] == [
        each in missing for each in ("--tls-cert", "--token-keys")
    ]


def test_a_page_has_a_port() -> None:
    for address in ("unix:/tmp/page", "localhost", "127.0.0.1:http"):
        with pytest.raises(SettingsUnusable, match=r"[uU]se HOST:PORT"):
            parse_serve(("--web", address), {})


def test_without_the_extra_the_service_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert door.missing_packages() == ""
    monkeypatch.setattr(door, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert "pip install 'ddp-launch[web]'" in door.missing_packages()


def test_a_port_that_is_taken_is_named(shared: Site) -> None:
    done = command("serve", "--listen", "127.0.0.1:0", "--web", shared.web)
    assert done.returncode == 1
    assert f"cannot listen on {shared.web} (--web): Address already in use" in done.stderr


def test_without_tokens_the_url_is_good_for_one_login(tmp_path: Path) -> None:
    with site(tmp_path, tokens=False) as alone:
        url, _, once = alone.url.partition("#login=")
        client, other = Client(url), Client(url)
        assert client.login("guessed")[0] == 401
        assert client.login(once)[0] == 200
        status, answer, _ = other.login(once)
        assert (status, "was used before" in answer["problem"]) == (401, True)
        assert client.get("session")[1]["may_control"] is True
        assert client.post("logout")[0] == 200
        assert client.get("session")[0] == 401


def test_tls_and_a_certificate_that_is_replaced(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.issue("service")
    with site(tmp_path, "--tls-cert", certificate, "--tls-key", key) as secured:
        assert secured.url.startswith("https://")
        context = ssl.create_default_context(cafile=authority.certificate)
        client = Client(secured.url.replace("127.0.0.1", "localhost"), context)
        assert client.login(secured.token(Role.VIEWER))[0] == 200
        assert "Secure" in client.cookie_line
        assert "strict-transport-security" in client.ask("GET", "/")[2]
        with pytest.raises(OSError, match=r"reset|closed|[Rr]emote|BadStatus|violation"):
            Client(secured.url).ask("GET", "/")
        other = Authority(tmp_path, "other")
        other.issue("service")  # writes the same two files
        trusted = ssl.create_default_context(cafile=other.certificate)
        renewed = Client(f"https://{client.host}", trusted)

        def is_renewed() -> bool:
            try:
                return renewed.ask("GET", "/")[0] == 200
            except ssl.SSLError:
                return False

        eventually(is_renewed, what="the new certificate is served")


# --- what it shows -------------------------------------------------------------------------------------------


def test_the_jobs_are_listed(shared: Site, job: Launched) -> None:
    (found,) = [each for each in shared.client().get("jobs")[1]["jobs"] if each["job"] == JOB]
    assert (found["phase"], found["ranks"], found["may_control"]) == ("running", 2, True)
    assert shared.client(Role.VIEWER).get("jobs")[1]["jobs"][0]["may_control"] is False


def test_ranks_are_live_and_the_output_is_read(shared: Site, job: Launched) -> None:
    client = shared.client(Role.VIEWER)
    columns = client.get("session")[1]["columns"]
    with client.events(JOB) as events:
        _, snapshot = until(events, "snapshot")
        assert snapshot["job"]["phase"] == "running"
        step = columns.index("step")
        _, first = until(events, "ranks", lambda ranks: len(ranks["rows"]) == 2)
        until(events, "ranks", lambda ranks: ranks["rows"][0][step] > first["rows"][0][step])
        assert client.get("rank", job=JOB, rank="1")[1]["pid"] > 0
    status, logs = client.post("logs", job=JOB, ranks=[1], tail=10)
    assert status == 200
    assert "first line of rank 1" in [line["text"] for line in logs["lines"]]
    (job.there / "say-hello").write_text("")
    status, more = client.post("logs", job=JOB, ranks=[1], places=logs["places"], wait_s=20)
    assert [line["text"] for line in more["lines"]] == ["say-hello from rank 1"]


def test_stacks_are_those_of_now(shared: Site, job: Launched) -> None:
    client = shared.client(Role.VIEWER)

    def shows_the_function() -> bool:
        status, found = client.get("stacks", job=JOB, rank="1")
        assert status == 200
        return "a_function_to_find" in found["text"]

    eventually(shows_the_function, what="a look while the rank is in it, as it is most of the time")
    assert shared.client().get("stacks", job=JOB, rank="99")[0] == 404


def test_the_last_step_of_a_rank_is_watched(shared: Site, job: Launched) -> None:
    """The script spends half of each step in the phase forward, and half in communication."""
    client = shared.client(Role.VIEWER)

    def watched() -> Any:
        """A busy machine may not look while a phase lasts."""
        status, step = client.get("step", job=JOB, rank="0")
        assert (status, step["problem"]) == (200, "")
        return step if {"forward", "communicate"} <= {name for name, _, _ in step["phases"]} else None

    step = eventually(watched, what="a step with both phases")
    assert 0.015 < step["duration_s"] < 60
    last = 0.0
    for _, start, end in step["phases"]:
        assert last <= start <= end <= step["duration_s"] + 1e-6
        last = start


def test_a_lost_connection_catches_up(shared: Site, job: Launched) -> None:
    client = shared.client()
    with client.events(JOB) as events:
        number, _ = until(events, "snapshot")
    status, done = client.post("order", job=JOB, action="checkpoint", reason="before the demo")
    assert (status, done["silent"]) == (200, [])
    with client.events(JOB, number) as events:
        kind, found = next((kind, data) for _, kind, data in events if kind in ("snapshot", "note"))
    assert kind == "note"
    assert "asks for a checkpoint: before the demo (on the page)" in found["text"]
    with client.events(JOB, "another.7") as events:
        _, snapshot = until(events, "snapshot")
    assert found in snapshot["notes"]


def test_a_failure_has_its_story_and_an_order_its_author(shared: Site, job: Launched) -> None:
    client = shared.client()
    who = client.get("session")[1]["name"]
    assert client.get("why", job=JOB)[1] is None
    with client.events(JOB) as events:
        (job.there / "x-crash").write_text("")
        until(events, "job", lambda view: view["generation"] == 2 and view["phase"] == "running")
        status, story = client.get("why", job=JOB)
        rows = dict(story["rows"])
        assert (status, story["generation"], story["generations"]) == (200, 1, [1])
        assert rows["what failed"].startswith("rank 1 on ")
        assert "restart" in rows["decided"]
        assert client.get("why", job=JOB, generation="7")[0] == 404
        eventually(lambda: client.get("why", job=JOB)[1]["parts"]["fork"] is not None)
        status, _ = client.post("order", job=JOB, action="restart", reason="for a test")
        assert status == 200
        _, note = until(
            events, "note", lambda note: note["kind"] == "decision" and "for a test" in note["text"]
        )
        assert f"(on the page) (ordered by {who})" in note["text"]
        until(events, "job", lambda view: view["generation"] == 3 and view["phase"] == "running")


def test_a_service_that_restarts_is_found_again(shared: Site, job: Launched) -> None:
    """The session is still valid, and the stream begins with a snapshot."""
    client = shared.client()
    with client.events(JOB) as events:
        number, _ = until(events, "snapshot")
        assert shared.service.end(signal.SIGTERM) == 0
        assert not [kind for _, kind, _ in events if kind == "snapshot"]
    shared.start()
    with client.events(JOB, number) as events:
        _, snapshot = until(events, "snapshot")
        assert snapshot["job"]["job"] == JOB
        until(events, "ranks", lambda ranks: len(ranks["rows"]) == 2)
    assert job.agent.poll() is None


def test_the_charts_outlive_the_job_and_the_service(shared: Site, job: Launched) -> None:
    with job_at(shared, "charted") as one:
        with shared.client().events("charted") as events:
            until(events, "points")
        (one.there / "q-end").write_text("")
        assert one.wait() == 0
    assert shared.service.end(signal.SIGTERM) == 0
    shared.start()
    with shared.client().events("charted") as events:
        _, snapshot = until(events, "snapshot")
    assert snapshot["job"]["is_over"]
    assert [point[2] for point in snapshot["points"]][-1:] == [2]
    assert snapshot["points"][-1][3] > snapshot["points"][0][3], "steps of a rank, when it ended"


def test_an_abort_ends_the_job(shared: Site, job: Launched) -> None:
    client = shared.client()
    who = client.get("session")[1]["name"]
    with client.events(JOB) as events:
        until(events, "snapshot")
        assert client.post("order", job=JOB, action="abort", reason="enough")[0] == 200
        _, view = until(events, "job", lambda view: view["is_over"])
        assert view["phase"] == "failed"
        assert f"enough (on the page) (ordered by {who})" in view["reason"]
    assert job.wait() != 0
    assert client.post("order", job=JOB, action="restart")[0] == 409
    assert client.post("logs", job=JOB)[0] == 409
