from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import lab_host
import pytest
from lab_job import TRAIN, environment
from lab_network import Lab

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_STEPS_AHEAD = 300  # to import torch once is enough for most tests
_TIMEOUT_S = 300.0  # a job of five hosts on two busy cores; no wait in it is longer than a minute and a half


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = (item for item in items if item.path.is_relative_to(Path(__file__).parent))
    for item in here:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


@pytest.fixture
def lab() -> Iterator[Callable[..., Lab]]:
    """`lab(3)`, `lab(2, "service")`: hosts that are gone after the test, however it ended."""
    if reason := lab_host.what_is_missing():
        pytest.skip(reason)
    labs: list[Lab] = []

    def build(n: int, *others: str, seed: int = 0) -> Lab:
        labs.append(Lab(n, *others, seed=seed))
        return labs[-1]

    yield build
    for each in labs:
        each.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[float]]:
    """The losses of so many steps when nothing happens to them: in one process, without any launcher."""
    losses: list[float] = []

    def of_steps(n: int) -> list[float]:
        if len(losses) < n:
            folder = tmp_path_factory.mktemp("undisturbed")
            command = (sys.executable, TRAIN, str(folder), "--alone", str(n + _STEPS_AHEAD))
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
            losses[:] = [float.fromhex(line.split()[1]) for line in done.stdout.splitlines()]
        return losses

    return of_steps
