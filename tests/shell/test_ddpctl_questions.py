"""ddpctl asks the agents of a real job: `top`, `logs` and `stacks`, through a service with tokens."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from launched import Launched, eventually
from served import Service, serving
from test_releases import node, sides  # noqa: F401 - a fixture

from rendezvous.access.auth import Grant, Role, add_key, new_grant_id, read_keys, sign
from rendezvous.control.ctl import main
from rendezvous.control.why import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Two ranks that count steps, without torch. Each line that comes to their folder is printed.
SCRIPT = """
import os, sys, time
from ddp.telemetry import status_page
from ddp.telemetry.status_page import COMMUNICATE, FORWARD, IDLE
rank, folder = int(os.environ["RANK"]), os.environ["THERE"]
page = status_page.page()
said = len(os.listdir(folder))  # first: what comes after the first line is an order
if "watch" in sys.argv:
    open(os.environ["DDP_CHECKPOINT_REQUEST"] + f".watched.{rank}", "w").close()
print("first line of rank", rank, flush=True)
print("an error of rank", rank, file=sys.stderr, flush=True)

def answer_checkpoint_request():
    request = os.environ["DDP_CHECKPOINT_REQUEST"]
    if os.path.exists(request) and not os.path.exists(f"{request}.done.{rank}"):
        open(f"{request}.done.{rank}", "w").close()

def a_function_to_find():
    page.phase(FORWARD)
    time.sleep(0.01)
    page.phase(COMMUNICATE)
    time.sleep(0.01)
    page.step()
    page.phase(IDLE)

while True:
    a_function_to_find()
    answer_checkpoint_request()
    orders = sorted(os.listdir(folder))
    for order in orders[said:]:
        if order.endswith("crash"):
            sys.exit(3) if rank == 1 else time.sleep(60)
        print(order, "from rank", rank, flush=True)
        if order.endswith("end"):
            print("the last line of rank", rank, flush=True)
            sys.exit(0)
    said = len(orders)
"""


@dataclass
class Scene:
    service: Service
    job: Launched
    keys: str

    def say(self, order: str) -> None:
        """Both ranks print it."""
        (self.job.there / order).write_text("")

    def token(self, role: Role, pattern: str = "*") -> str:
        return sign(Grant(new_grant_id(), pattern, role, time.time() + 3600), read_keys(self.keys)[-1])


def both_run(job: Launched) -> bool:
    """Both have said all that they say at first, and see every order that comes now."""
    said = job.stdout() + job.stderr()
    return all(f"{line} of rank {rank}" in said for line in ("first line", "an error") for rank in (0, 1))


@contextmanager
def scene_in(folder: Path, *options: str, script: tuple[str, ...] = ()) -> Iterator[Scene]:
    keys = str(folder / "keys")
    add_key(keys)
    with serving("--token-keys", keys) as service:
        scene = Scene(service, None, keys)  # type: ignore[arg-type]
        token = scene.token(Role.AGENT)
        where = ("--rendezvous", service.endpoint, "--rdzv-id", "asked", "--preflight", "off")
        env = {"DDP_RENDEZVOUS_TOKEN": token}
        words = ("--nnodes", "1", "--nproc-per-node", "2", *where, *options, "SCRIPT", *script)
        scene.job = Launched(folder / "job", *words, source=SCRIPT, fake_torch="", env=env)
        try:
            eventually(lambda: both_run(scene.job), what="the ranks run")
            yield scene
        finally:
            scene.job.clean_up()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene_in(tmp_path_factory.mktemp("asked"), script=("watch",)) as found:
        yield found


class Ctl:
    """Runs ddpctl in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch, scene: Scene) -> None:
        self._capsys, self._patch, self._scene = capsys, patch, scene

    def __call__(self, *words: str, role: Role = Role.VIEWER, pattern: str = "*") -> tuple[int, str, str]:
        self._patch.setenv("DDP_RENDEZVOUS_TOKEN", self._scene.token(role, pattern))
        code = main(["--rendezvous", self._scene.service.endpoint, *words])
        out, err = self._capsys.readouterr()
        return code, out, err

    def answer(self, *words: str) -> str:
        """What it prints, as soon as the agent has opened its stream for questions."""

        def printed() -> tuple[str] | None:
            code, out, err = self(*words)
            assert code == 0 or "stream for questions" in err, err
            return (out,) if code == 0 else None

        (out,) = eventually(printed)
        return str(out)


@pytest.fixture
def ctl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, scene: Scene) -> Ctl:
    return Ctl(capsys, monkeypatch, scene)


def test_top_shows_each_rank_with_its_steps(ctl: Ctl) -> None:
    def trained() -> Any:
        """Half of the time is communication: after a while, whatever the machine did between two steps."""
        found = json.loads(ctl.answer("top", "-o", "json"))
        return (
            found
            if all(r["step"] > 20 and 0.2 < (r["communication"] or 0.0) < 0.8 for r in found["ranks"])
            else None
        )

    found = eventually(trained)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert 0.02 <= rank["mean_step_s"] < 60.0
        assert rank["memory"] > 1 << 20
    out = ctl.answer("top", "--sort", "step", "--reverse")
    assert out.startswith("running, generation 1, 2 ranks on 1 node, 0 restarts, job asked\n")


def test_stacks_show_the_function_that_the_rank_is_in(ctl: Ctl) -> None:
    assert eventually(lambda: "a_function_to_find" in ctl.answer("stacks", "1"))
    assert json.loads(ctl.answer("stacks", "asked", "0", "-o", "json"))["rank"] == 0


def test_a_rank_or_job_that_does_not_exist_is_named(ctl: Ctl) -> None:
    code, _, err = ctl("stacks", "2")
    assert (code, err) == (1, "ddpctl: job 'asked' has no rank 2: its ranks are 0 to 1 [DDP-2014]\n")
    code, _, err = ctl("logs", "another")
    assert (code, "job 'another' does not exist" in err) == (1, True)


def test_logs_show_the_streams_of_the_chosen_ranks(ctl: Ctl) -> None:
    host = os.uname().nodename
    said = ctl.answer("logs", "--rank", "1", "--stream", "stderr").strip()
    # The node name has a number if another test has a job of several nodes on this host.
    assert re.fullmatch(rf"\[{re.escape(host)}(#\d+)?:1\] an error of rank 1", said)
    lines = [json.loads(line) for line in ctl.answer("logs", "--tail", "all", "-o", "json").splitlines()]
    assert {(line["rank"], line["stream"]) for line in lines} == {
        (r, s) for r in (0, 1) for s in ("stdout", "stderr")
    }


def test_logs_continue_at_the_cursor(ctl: Ctl, scene: Scene, tmp_path: Path) -> None:
    cursor = ("--cursor-file", str(tmp_path / "cursor"), "--no-prefix", "--rank", "0")
    ctl.answer("logs", *cursor)
    scene.say("1-more")
    assert eventually(lambda: ctl.answer("logs", *cursor)) == "1-more from rank 0\n"
    assert ctl.answer("logs", *cursor) == ""


def test_a_checkpoint_is_taken_for_operators_only_and_noted(ctl: Ctl) -> None:
    ctl.answer("stacks", "0")
    code, _, err = ctl("checkpoint")
    assert (code, "a token with role viewer does not permit to control jobs" in err) == (77, True)
    code, out, err = ctl("checkpoint", "--reason", "before lunch", role=Role.OPERATOR)
    assert (code, "all ranks have taken a checkpoint" in out) == (0, True), err
    assert "asks for a checkpoint: before lunch" in ctl.answer("events", "asked")


def test_without_a_failure_there_is_no_story(ctl: Ctl) -> None:
    assert ctl.answer("why") == "job asked: nothing has failed\n"


def test_an_agent_may_not_ask_about_another_job(ctl: Ctl) -> None:
    code, _, err = ctl("logs", "asked", pattern="team-b-*")
    assert (code, "not for job 'asked'" in err) == (77, True)


class Follower:
    """`ddpctl logs -f` in a process of its own."""

    def __init__(self, scene: Scene, *words: str) -> None:
        env = {**os.environ, "DDP_RENDEZVOUS_TOKEN": scene.token(Role.VIEWER)}
        command = [sys.executable, "-m", "rendezvous.control.ctl", "--rendezvous", scene.service.endpoint]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([*command, "logs", "-f", *words], env=env, stdout=pipe, text=True)
        self.lines: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as out:
            self.lines.extend(iter(out.readline, ""))

    def has(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def wait(self) -> int:
        code = self.process.wait(60)
        self._reading.join(60)
        return code


def assert_the_story_is_complete(found: Any, text: str) -> None:
    assert (found["cause"]["rank"], found["cause"]["exit_code"], found["generation"]) == (1, 3, 1)
    times = {part: found["restart_times"][f"{part}_s"] for part in PARTS}
    assert all(0 <= seconds < 60 for seconds in times.values()), times
    assert "verdict     exit-code: " in text
    assert "decided     restart: " in text


def test_logs_are_followed_over_a_restart_and_its_story_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with scene_in(tmp_path, "--max-restarts", "1") as scene:
        follower = Follower(scene, "--tail", "all")
        try:
            eventually(lambda: follower.has("first line of rank 1"), what="the lines before")
            scene.say("1-hello")
            eventually(lambda: follower.has("1-hello from rank 0"), what="a new line")
            scene.say("2-crash")
            eventually(lambda: sum("first line of rank 1" in each for each in follower.lines) == 2)
            ctl = Ctl(capsys, monkeypatch, scene)
            ask = ("why", "-o", "json")
            eventually(lambda: (json.loads(ctl.answer(*ask))["restart_times"] or {}).get("redo_s"))
            assert_the_story_is_complete(json.loads(ctl.answer(*ask)), ctl.answer("why"))
            code, _, err = ctl("checkpoint", role=Role.OPERATOR)
            assert (code, "not all ranks of this node watch for requests" in err) == (1, True)
            scene.say("9-end")
            assert scene.job.wait() == 0
            assert follower.wait() == 0
        finally:
            follower.process.kill()
        ends = [line for line in follower.lines if "the last line of rank" in line]
        assert len(ends) == 2
        assert sum("1-hello from rank 0" in line for line in follower.lines) == 1


def test_an_agent_of_the_last_release_refuses_in_words(
    sides: Any,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving() as service:
        job = node(
            service.endpoint, "old", "--nnodes", "1", "--no-python", "sleep", "60", env=sides["released"]
        )
        try:
            service.await_line("ranks start")
            assert main(["--rendezvous", service.endpoint, "stacks", "old", "0"]) == 1
            assert "its release (0.1.0) does not answer questions" in capsys.readouterr().err
        finally:
            job.send_signal(signal.SIGTERM)
            job.communicate(timeout=60)
