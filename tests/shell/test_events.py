"""`--on-event`, entry points and `--stop-when` in real jobs, and the examples of programs that receive events."""

from __future__ import annotations

import http.server
import importlib
import json
import os
import socketserver
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from launched import eventually

from launcher.notify.notifier import Subscribers

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest
    from launched import Launch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "events"
FAILS_ONCE = """
import os, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    raise ValueError("bad batch")
"""


def test_a_command_gets_each_event_of_a_job(launch: Launch, tmp_path: Path) -> None:
    events = tmp_path / "events"
    command = f"(cat; echo $DDP_LAUNCH_EVENT >&2) >> {events}; exit 3"
    job = launch(
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "--on-event",
        command,
        source=FAILS_ONCE,
        fake_torch="",
    )
    assert job.wait() == 0, job.stderr()
    told = [json.loads(line) for line in events.read_text().splitlines()]
    found = [
        event for event in told if event["event"] not in ("notice", "node")
    ]  # a busy machine has these, too
    kinds = [event["event"] for event in found]
    assert kinds[:2] == ["started", "stopping"]
    assert kinds[-1] == "ended"
    assert found[1]["cause"]["reason"] == "ValueError: bad batch"
    assert (found[1]["cause"]["rank"], found[1]["decision"]) == (1, "restart")
    assert (found[-1]["succeeded"], found[-1]["restarts"]) == (True, 1)
    said = [line for line in job.stderr().splitlines() if "--on-event" in line]
    assert {line.rpartition(" ")[0] for line in said} == {
        "ddp-launch: --on-event: the command ended with exit code 3:"
    }
    assert said[0].endswith(" started")


LOSES_ITS_ZYGOTE = """
import os, signal, time
zygote = os.path.join(os.environ["THERE"], "zygote")
part = zygote + ".part" + os.environ["RANK"]
with open(part, "w") as file:
    file.write(str(os.getppid()))
os.rename(part, zygote)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
"""


def test_commands_live_on_when_the_processes_of_a_zygote_are_ended(launch: Launch, tmp_path: Path) -> None:
    zygote, done = tmp_path / "zygote", tmp_path / "done"
    waits = f"until z=$(cat {zygote}); do sleep 0.05; done; while kill -0 $z; do sleep 0.05; done; sleep 0.5"
    command = f"cat > /dev/null; {waits}; echo $DDP_LAUNCH_EVENT >> {done}"
    words = ("--max-restarts", "1", "--no-warm-start", "--on-event", command)
    job = launch(*words, source=LOSES_ITS_ZYGOTE, env={"THERE": str(zygote.parent)})
    assert job.wait() == 0, job.stderr()
    told = done.read_text().split()
    assert (told[0], told[-1]) == ("started", "ended")
    assert "--on-event" not in job.stderr()


LOSSES = """
import sys, time
for step in range(10_000):
    loss = float("nan") if step == 20 else 0.5
    print(f"step {step} loss {loss}", flush=True)
    time.sleep(0.01)
"""


def test_a_loss_that_is_not_a_number_ends_the_job(launch: Launch) -> None:
    words = ("--nproc-per-node", "2", "--max-restarts", "5", "--stop-when", "loss is nan")
    job = launch(*words, source=LOSSES, fake_torch="")
    assert job.wait() == 123, job.stderr()
    assert 'the condition "loss is nan" of --stop-when is true' in job.said()
    assert "'step 20 loss nan'" in job.said()
    assert job.failure()["restarts"] == 0
    assert "step 2000" not in job.stdout()


REPORTS = """
import time
from ddp import status
for step in range(10_000):
    status("loss nan" if step == 5 else "fine")
    time.sleep(0.5)
"""


def test_what_a_script_reports_counts_too(launch: Launch) -> None:
    job = launch(
        "--stop-when", "loss is nan", "--nproc-per-node", "1", source=REPORTS.replace("fine", "loss nan")
    )
    assert job.wait() == 123, job.stderr()


# --- subscribers -----------------------------------------------------------------------------------------


def test_an_entry_point_is_called_and_its_errors_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "tracker-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: tracker\nVersion: 1.0\n")
    points = "good = tracker:good\nbad = tracker:bad\ngone = tracker:gone"
    (package / "entry_points.txt").write_text(f"[ddp_launch.events]\n{points}\n")
    (tmp_path / "tracker.py").write_text(
        "got = []\ngood = got.append\ndef bad(event):\n    raise RuntimeError('offline')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    said: list[str] = []
    subscribers = Subscribers("", said.append)
    for kind in ("started", "ended"):
        subscribers.put({"event": kind})
    subscribers.close()
    tracker = importlib.import_module("tracker")

    assert tracker.got == [{"event": "started"}, {"event": "ended"}]
    assert sorted("offline" in line for line in said) == [False, True]
    assert sum("cannot be loaded" in line for line in said) == 1


def test_a_command_that_hangs_is_killed_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = tmp_path / "child"
    for limit_s in (0.5, 10.0, 60.0):  # a shell of a busy machine may not get so far as to start a child
        monkeypatch.setattr("launcher.notify.notifier._COMMAND_S", limit_s)
        said: list[str] = []
        subscribers = Subscribers(
            f"sleep 1000 & echo $! > {child}.part; mv {child}.part {child}; wait", said.append
        )
        subscribers.put({"event": "started"})
        subscribers.close()
        assert "was killed" in said[0]
        if child.exists():
            break
    pid = int(child.read_text())
    eventually(lambda: not alive(pid))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- examples --------------------------------------------------------------------------------------------

ENDED = {
    "event": "ended",
    "job": "train",
    "node": "node0",
    "generation": 2,
    "text": "rank 5 on node1: CUDA out of memory",
    "succeeded": False,
    "cause": {"hint": "use a smaller batch", "traceback": "Traceback ..."},
}


class _Posted(http.server.BaseHTTPRequestHandler):
    got: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        self.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class _Mail(socketserver.StreamRequestHandler):
    got: ClassVar[list[str]] = []

    def handle(self) -> None:
        self.wfile.write(b"220 hello\r\n")
        while line := self.rfile.readline():
            verb = line[:4].upper()
            self.wfile.write({b"DATA": b"354 go on\r\n", b"QUIT": b"221 bye\r\n"}.get(verb, b"250 fine\r\n"))
            if verb == b"DATA":
                text = []
                while (line := self.rfile.readline()) != b".\r\n":
                    text.append(line.decode())
                self.got.append("".join(text))
                self.wfile.write(b"250 fine\r\n")
            if verb == b"QUIT":
                return


@contextmanager
def serving_on_loopback(handler: type[socketserver.BaseRequestHandler]) -> Iterator[int]:
    with socketserver.TCPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


def run(example: str, event: dict[str, Any], **env: str) -> None:
    command = [sys.executable, str(EXAMPLES / example)]
    subprocess.run(command, input=json.dumps(event), env=os.environ | env, text=True, check=True, timeout=60)


def test_the_examples() -> None:
    _Posted.got, _Mail.got = [], []
    with serving_on_loopback(_Posted) as port:
        url = f"http://127.0.0.1:{port}/"
        run("slack.py", ENDED, SLACK_WEBHOOK=url)
        run("slack.py", ENDED | {"event": "notice"}, SLACK_WEBHOOK=url)
        run("pagerduty.py", ENDED, PAGERDUTY_KEY="key", PAGERDUTY_URL=url)
        run("pagerduty.py", ENDED | {"event": "restarted"}, PAGERDUTY_KEY="key", PAGERDUTY_URL=url)
        run("pagerduty.py", ENDED | {"event": "node"}, PAGERDUTY_KEY="key", PAGERDUTY_URL=url)
    with serving_on_loopback(_Mail) as port:
        run("mail.py", ENDED, MAIL_TO="me@example.org", SMTP_HOST="127.0.0.1", SMTP_PORT=str(port))
    slack, alert, resolved = _Posted.got
    assert slack == {"text": "*train* ended (generation 2): rank 5 on node1: CUDA out of memory"}
    assert (alert["event_action"], alert["payload"]["severity"]) == ("trigger", "critical")
    assert (resolved["event_action"], resolved["dedup_key"]) == ("resolve", "train")
    (mail,) = _Mail.got
    assert "Subject: train: ended" in mail
    assert "use a smaller batch" in mail
