"""Those who knock at a service: its users' commands, with whatever they were given; and what it says of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from launched import eventually
from served import Service

from rendezvous.access.auth import Grant, Role, read_keys, sign

NOT_ALLOWED = 77
QUIET_S = 60.0  # of refusals for one reason


class Watched(Service):
    """A service whose log and counters are looked at."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        super().__init__("--http", "127.0.0.1:0", *arguments, env=env)
        found = self.await_line(r"metrics at ([^:]+:\d+)")
        self.http = found[1]
        self.await_endpoint()

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=60) as answer:
            text: str = answer.read().decode()
        return text

    def refused(self, reason: str) -> int:
        text = self.metrics()
        found = re.search(rf'^ddp_rendezvous_refused_total{{reason="{reason}"}} (\d+)$', text, re.MULTILINE)
        assert found, text
        return int(found[1])

    def await_refused(self, reason: str, more_than: int) -> None:
        eventually(lambda: self.refused(reason) > more_than, what=f"{reason} is counted")

    def lines_of(self, reason: str) -> list[str]:
        """At least one: what was counted was logged, but may still be on its way to us."""

        def found() -> list[str]:
            return [line for line in self.log if f"kind={reason}:" in line]

        lines: list[str] = eventually(found, what=f"{reason} is logged")
        return lines

    def assert_logged_once(self, reason: str) -> None:
        """One line stands for a minute, and this machine may need more than that for a few commands."""
        lines = [line for line in self.lines_of(reason) if " more times in the last " not in line]
        assert lines, self.log
        at = [datetime.fromisoformat(line.split()[0]) for line in lines]
        quiet = [later - earlier for earlier, later in pairwise(at)]
        assert all(each > timedelta(seconds=QUIET_S - 1) for each in quiet), lines


def _environment(env: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("DDP_", "PET_"))} | env


@dataclass(frozen=True)
class Knock:
    """A command under way: ddpctl or ddp-launch."""

    process: subprocess.Popen[str]

    def told(self) -> tuple[int, str]:
        """Its exit code, and what stood on standard error."""
        try:
            _, said = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        return self.process.returncode, said

    def told_no(self, *wanted: str) -> None:
        code, said = self.told()
        assert code == NOT_ALLOWED, said
        assert "Traceback" not in said
        for words in wanted:
            assert words in said, said


def _start(env: dict[str, str], *words: str) -> Knock:
    command = [sys.executable, "-m", *words]
    streams: dict[str, int] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    return Knock(subprocess.Popen(command, env=_environment(env), text=True, **streams))


def ddpctl(endpoint: str, env: dict[str, str], *words: str) -> Knock:
    return _start(env, "rendezvous.control.ctl", "--rendezvous", endpoint, *(words or ("list",)))


def ddp_launch(endpoint: str, env: dict[str, str], job: str, *words: str) -> Knock:
    # Long enough for a second look at a service that a busy machine has not let answer in time.
    where = ("--nnodes", "2", "--rendezvous", endpoint, "--rdzv-id", job, "--join-timeout", "3", *words)
    quickly = ("--preflight", "off", "--nproc-per-node", "1", "--no-python", "true")
    return _start(env, "launcher", *where, *quickly)


def made(*words: str) -> str:
    """By `ddp-rendezvous`."""
    command = [sys.executable, "-m", "rendezvous.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def token(keys: str, role: str, job: str, ttl_s: float = 3600.0) -> str:
    return sign(Grant("of-a-test", job, Role(role), time.time() + ttl_s), read_keys(keys)[-1])
