"""Agents with one set of packages, and a service with another. `make matrix` names the Python of the service."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from launched import Launch

SERVICE_PYTHON = os.environ.get("MATRIX_OTHER_PYTHON", sys.executable)
# Two ranks train for a step, one of them fails once.
TRAIN = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(2)
dist.all_reduce(total)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    sys.exit(3)
dist.barrier()
print("sum", total.tolist(), flush=True)
"""


@pytest.fixture
def endpoint() -> Iterator[str]:
    where = f"127.0.0.1:{free_port()}"
    command = [SERVICE_PYTHON, "-m", "rendezvous.main", "serve", "--listen", where, "--store", "memory"]
    service = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    yield where
    service.terminate()
    service.wait()


@pytest.mark.nightly(
    instead=("matrix/test_matrix.py", "shell/test_two_nodes_join.py::test_two_agents_form_one_world")
)
def test_two_nodes_restart_through_a_service_with_other_packages(
    launch: Launch, endpoint: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    where = ("--nnodes", "2", "--rendezvous", endpoint, "--rdzv-id", "wire")
    nodes = [launch(*where, "--nproc-per-node", "1", "--max-restarts", "1", str(script)) for _ in range(2)]
    assert [node.wait() for node in nodes] == [0, 0], "".join(node.stderr() for node in nodes)
    assert "".join(node.stdout() for node in nodes).count("sum [2.0, 2.0]") == 2
