"""Health sources over real sockets and files: what keeps a node out of a job, and what does not."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import ssl
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import pytest
from launched import eventually
from ports import free_port

from ddp_launch_wings.health_sources.source import Source
from launcher.health.node_watch import Poll
from launcher.sources import Opinion, Severity, SourceFailed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from launched import Launch

XID_79 = 'DCGM_EXP_XID_ERRORS_COUNT{gpu="0",Hostname="node7",window_size_in_ms="300000",xid="79"} 1\n'


class Site(http.server.BaseHTTPRequestHandler):
    """Answers with `pages`, and notes the requests."""

    pages: ClassVar[dict[str, tuple[int, str]]] = {}
    then: ClassVar[dict[str, tuple[int, str]]] = {}  # from the second request on
    asked: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization", "")))
        status, text = self.pages.get(self.path, (404, "no such page"))
        self.pages.update(self.then)
        self.send_response(status)
        if status in (301, 302):
            self.send_header("Location", text)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(
    pages: dict[str, tuple[int, str]], tls: ssl.SSLContext | None = None
) -> Iterator[tuple[int, type[Site]]]:
    site = type("Site", (Site,), {"pages": pages, "then": {}, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), site)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server.server_port, site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def asked(place: str, **environ: str) -> list[str]:
    return [str(finding) for finding in Source(place).ask(environ) if finding.severity is Severity.UNFIT]


def failed(place: str, **environ: str) -> str:
    with pytest.raises(SourceFailed) as failure:
        Source(place).ask(environ)
    return str(failure.value)


# --- one question --------------------------------------------------------------------------------------


def test_an_exporter_is_asked_over_http() -> None:
    with serving({"/metrics": (200, XID_79), "/moved": (302, "/metrics")}) as (port, _):
        (found,) = asked(f"http://127.0.0.1:{port}/metrics")
        assert found == "DCGM_EXP_XID_ERRORS_COUNT: GPU 0: Xid 79: the GPU has fallen off the bus"
        assert failed(f"http://127.0.0.1:{port}/") == "404 Not Found"
        assert failed(f"http://127.0.0.1:{port}/moved") == "302 Found"  # redirects are not followed


def test_a_file_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    assert failed(str(path)) == "No such file or directory"
    path.write_text('{"unfit": ["disk 3 is broken"]}')
    assert asked(str(path)) == asked(f"file://{path}") == ["disk 3 is broken"]
    path.write_text("{}")
    assert asked(str(path)) == []
    path.write_text("")
    assert "it is empty" in failed(str(path))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "it is empty" in failed(str(pipe))  # and nobody waits for a writer
    assert failed(str(tmp_path)) == "Is a directory"


def test_a_source_that_does_not_answer_is_given_up() -> None:
    assert failed(f"http://127.0.0.1:{free_port()}/metrics") == "Connection refused"

    class Slow(Site):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            over.wait(60)

    over = threading.Event()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        with pytest.raises(SourceFailed, match=r"no answer within 0\.2 s"):
            Source(f"http://127.0.0.1:{server.server_port}/", within_s=0.2).ask({})
    finally:
        over.set()
        server.shutdown()
        server.server_close()


def test_outside_of_kubernetes_the_api_is_not_asked(tmp_path: Path) -> None:
    assert "does not run in a pod" in failed("kubernetes")
    assert "NODE_NAME is not set" in failed("kubernetes", KUBERNETES_SERVICE_HOST="127.0.0.1")
    with pytest.raises(SourceFailed, match="automountServiceAccountToken"):
        Source("kubernetes", account=str(tmp_path)).ask(
            {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "NODE_NAME": "node7"}
        )


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_the_kubernetes_api_is_asked_with_the_pods_account(tmp_path: Path) -> None:
    key, certificate = tmp_path / "tls.key", tmp_path / "ca.crt"
    making = (
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    )
    named = ("-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1")
    subprocess.run((*making, *named, "-keyout", key, "-out", certificate), check=True, capture_output=True)
    (tmp_path / "token").write_text("first\n")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    bad = {"type": "GpuMemWatch", "status": "True", "message": "GPU 0 failed"}
    here = {"kind": "Node", "status": {"conditions": [{"type": "Ready", "status": "True"}, bad]}}
    pages = {"/api/v1/nodes/node7": (200, json.dumps(here)), "/api/v1/nodes/other": (403, "{}")}
    source = Source("kubernetes", account=str(tmp_path))
    with serving(pages, tls) as (port, site):
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}
        assert [str(each) for each in source.ask(environ | {"NODE_NAME": "node7"})] == [
            "GpuMemWatch: GPU 0 failed"
        ]
        (tmp_path / "token").write_text("renewed\n")
        assert source.ask(environ | {"NODE_NAME": "node7"})
        assert site.asked == [
            ("/api/v1/nodes/node7", "Bearer first"),
            ("/api/v1/nodes/node7", "Bearer renewed"),
        ]
        with pytest.raises(SourceFailed, match="403 Forbidden: the service account may not read nodes"):
            source.ask(environ | {"NODE_NAME": "other"})
        other_ca = tmp_path / "other"
        other_ca.mkdir()
        shutil.copy(tmp_path / "token", other_ca)
        subprocess.run(
            (*making, *named, "-keyout", other_ca / "k", "-out", other_ca / "ca.crt"),
            check=True,
            capture_output=True,
        )
        with pytest.raises(SourceFailed, match="CERTIFICATE_VERIFY_FAILED"):
            Source("kubernetes", account=str(other_ca)).ask(environ | {"NODE_NAME": "node7"})


# --- while ranks run -----------------------------------------------------------------------------------


def test_sources_are_asked_again_and_keep_their_findings_when_they_fail(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    path.write_text('{"unfit": ["disk 3 is broken"]}')
    poll = Poll([Source(str(path))], {}, every_s=0.01)
    poll.start()
    try:

        def latest() -> Opinion:
            return poll.latest[0] if poll.latest else Opinion("")

        eventually(lambda: [each.name for each in latest().findings] == ["disk 3 is broken"])
        path.unlink()
        eventually(lambda: latest().problem == "No such file or directory")
        assert [each.name for each in latest().findings] == ["disk 3 is broken"]
        fresh = tmp_path / "fresh"
        fresh.write_text("{}")
        fresh.rename(path)
        eventually(lambda: latest() == Opinion(str(path), has_answered=True))
    finally:
        poll.close()


# --- a job ---------------------------------------------------------------------------------------------


def test_an_unfit_node_runs_no_rank_and_says_why(launch: Launch) -> None:
    """Also with --preflight off: the user has named this source."""
    with serving({"/metrics": (200, XID_79)}) as (port, _):
        words = (
            "--nproc-per-node",
            "1",
            "--health-source",
            f"http://127.0.0.1:{port}/metrics",
            "--preflight",
            "off",
        )
        job = launch(*words, "--no-python", "echo", "ran")
        assert job.wait() == 71
        assert "ran" not in job.stdout()
        assert "Xid 79: the GPU has fallen off the bus" in job.stderr()
        assert "leave a finding out with --health-ignore NAME, or remove --health-source" in job.stderr()


def test_a_node_that_becomes_unfit_says_so_and_its_ranks_continue(launch: Launch) -> None:
    with serving({"/health": (200, "{}")}) as (port, site):
        words = (
            "--nproc-per-node",
            "1",
            "--health-source",
            f"http://127.0.0.1:{port}/health",
            "--preflight",
            "off",
        )
        waits = 'touch "$THERE/runs"; while [ ! -e "$THERE/go" ]; do sleep 0.05; done; echo ran'
        site.then["/health"] = (200, '{"unfit": ["disk 3 is broken"]}')  # the second answer, and all others
        job = launch(*words, "--no-python", "sh", "-c", waits)
        eventually(lambda: "/health: this node is unfit: disk 3 is broken" in job.stderr())
        job.await_there("runs")
        (job.there / "go").touch()
        assert job.wait() == 0
        assert "ran" in job.stdout()


def test_a_source_that_fails_stops_no_job_and_warns_once(launch: Launch) -> None:
    place = f"http://127.0.0.1:{free_port()}/metrics"
    job = launch("--nproc-per-node", "1", "--health-source", place, source="print('ran')", fake_torch="")
    assert job.wait() == 0
    assert "ran" in job.stdout()
    assert job.stderr().count(f"health source {place}: not asked: Connection refused") == 1
