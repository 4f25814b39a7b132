"""`ddpctl profile` on a rank that trains with torch: the trace has its steps, and training goes on."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest
from launched import eventually
from served import serving

from rendezvous.control.ctl import main

if TYPE_CHECKING:
    from pathlib import Path

    from launched import Launch

TRAIN = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while not os.path.exists(os.path.join(os.environ["THERE"], "end")):
    model(torch.ones(4, 8)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    open(os.path.join(os.environ["THERE"], "trains"), "w").close()
    time.sleep(0.005)
"""


@pytest.mark.nightly(instead="core/test_profiling.py")
def test_the_trace_shows_the_steps_of_the_rank(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rank0.json.gz"
    with serving() as service:
        where = ("--rendezvous", service.endpoint, "--rdzv-id", "profiled", "--preflight", "off")
        job = launch("--nnodes", "1", "--nproc-per-node", "1", *where, source=TRAIN)
        job.await_there("trains")
        ask = ("--rendezvous", service.endpoint, "profile", "0", "--seconds", "0.3", "--out", str(out))

        def profiled() -> bool:
            code = main(ask)
            early = (
                "no job runs",
                "no ranks yet",
                "stream for questions",
                "no process group",
                "does not run",
            )
            err = capsys.readouterr().err
            assert code == 0 or any(words in err for words in early), err
            return code == 0

        eventually(profiled)
        assert main(["--rendezvous", service.endpoint, "profile", "1"]) == 1
        assert "has no rank 1" in capsys.readouterr().err
        (job.there / "end").write_text("")
        assert job.wait() == 0
        assert "profiles rank 0 for 0.3 s" in "".join(service.log)
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert sum(name.startswith("Optimizer.step") for name in names) >= 2
    assert any("AddmmBackward" in name for name in names)
    assert not list(tmp_path.glob("*.part"))
