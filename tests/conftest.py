"""For all tests: started in the background or by nohup, they would hand down to jobs that signals are ignored.

And `launch`, for real jobs; and what ran the manifests, containers or processes, is printed at the end.

Properties are tried on the same examples in every run, and nothing is made of how long one takes: that says how busy
the machine is. `make nightly` tries examples that nobody has seen.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from launched import Launched

from launcher.health.pages import Pages
from rendezvous import local

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from _pytest.terminal import TerminalReporter
    from launched import Launch

settings.register_profile("afresh", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("afresh"), derandomize=True, database=None)
settings.load_profile("same")  # before any test is read; --hypothesis-profile comes later

_FROM_TERMINALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


def pytest_configure() -> None:
    os.environ.setdefault("DDP_LAUNCH_HISTORY_DIR", "none")  # jobs of tests are nobody's history
    for signum in _FROM_TERMINALS:
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(
                signum, lambda *_: None
            )  # ignored here all the same, and the default in whatever is started


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Here, not beside those tests: where others run them for it, the process that prints loads this file only."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call":
                said = [str(value) for name, value in report.user_properties if name == "manifests"]
                if said:
                    terminalreporter.write_line(f"the manifests ran {'; '.join(said)}")


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages()
    yield made
    made.close_all()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder of this test for the sockets of jobs without a service; short, as the paths of sockets are."""
    folder = tempfile.mkdtemp(prefix="run-")
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    monkeypatch.delenv("DDP_RENDEZVOUS", raising=False)
    folders = [os.path.join(folder, f"ddp-launch-jobs-{os.getuid()}")]
    monkeypatch.setattr(local, "_folders", lambda: iter(folders))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts real jobs, and ends whatever a failing test leaves of them."""
    jobs: list[Launched] = []

    def start(*words: str, **how: object) -> Launched:
        jobs.append(Launched(tmp_path / f"job{len(jobs)}", *words, **how))  # type: ignore[arg-type]
        return jobs[-1]

    yield start
    for job in jobs:
        job.clean_up()
