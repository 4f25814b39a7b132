"""`srun ddp-launch`: nothing but the command, on a real Slurm; the scheduler's environment says the rest."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import slurm_cluster
from lab_host import eventually
from slurm_cluster import SlurmCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lab_network import Lab

NIGHTLY = pytest.mark.nightly(
    instead=(
        "::test_a_job_of_four_nodes_finds_itself_and_ranks_follow_the_nodes",
        "wings/submit/test_submit.py",
    )
)

LAUNCH = os.path.join(os.path.dirname(sys.executable), "ddp-launch")
LONG_S = 90.0
TRAIN = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("rank", rank, "of", int(total), "attempt", attempt, "on", os.environ["SLURMD_NODENAME"], flush=True)
how = sys.argv[1] if len(sys.argv) > 1 else ""
dist.barrier()  # all have said who they are
if how == "once" and rank == 2 and attempt == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if how == "until-three" and total > 3:
    while True:
        time.sleep(0.1)
        dist.all_reduce(total)
dist.destroy_process_group()
"""

pytestmark = [
    pytest.mark.skipif(bool(slurm_cluster.what_is_missing()), reason=slurm_cluster.what_is_missing()),
    pytest.mark.timeout(240),
]


@pytest.fixture
def slurm_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture
def slurm(slurm_folder: Path, lab: Callable[..., Lab]) -> SlurmCluster:
    """The folder comes first and goes last: after the daemons, which go with their hosts."""
    return SlurmCluster(lab(4, "control"), slurm_folder)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path / "train.py"


def srun(slurm: SlurmCluster, out: Path, *words: str) -> int:
    """Under srun every agent prints the story; the exit code is the worst of theirs."""
    with out.open("wb") as file:
        return slurm.start("srun", *words, stdout=file, stderr=file).wait(LONG_S)


def of_ranks(text: str) -> list[str]:
    """What ranks have printed. An agent that comes long before the others says for whom it waits."""
    return sorted(line for line in text.splitlines() if line.startswith("["))


def test_a_job_of_four_nodes_finds_itself_and_ranks_follow_the_nodes(
    slurm: SlurmCluster, script: Path
) -> None:
    out = script.with_suffix(".out")
    code = srun(slurm, out, "-N4", LAUNCH, "--nnodes", "4", "--nproc-per-node", "1", str(script))
    text = out.read_text()
    assert code == 0, text
    assert of_ranks(text) == [f"[node{i}:{i}] rank {i} of 4 attempt 0 on node{i}" for i in range(4)], text


@NIGHTLY
def test_a_rank_that_dies_is_started_again_on_all_nodes(slurm: SlurmCluster, script: Path) -> None:
    out = script.with_suffix(".out")
    words = (LAUNCH, "--nnodes", "4", "--nproc-per-node", "1", "--max-restarts", "1", str(script), "once")
    code = srun(slurm, out, "-N4", *words)
    text = out.read_text()
    assert code == 0, text
    assert text.count("of 4 attempt 0") == text.count("of 4 attempt 1") == 4


@NIGHTLY
def test_a_node_that_is_lost_is_done_without(
    slurm: SlurmCluster, script: Path, lab: Callable[..., Lab]
) -> None:
    """`--no-kill`: Slurm leaves it to the agents what becomes of a step that lost a node."""
    out = script.with_suffix(".out")
    words = (
        *(LAUNCH, "--nnodes", "3:4", "--last-call", "60s", "--nproc-per-node", "1"),
        *("--max-restarts", "1", "--replacement-timeout", "1s"),
    )
    with out.open("wb") as file:
        step = slurm.start(
            "srun", "-N4", "--no-kill", *words, str(script), "until-three", stdout=file, stderr=file
        )
    eventually(lambda: out.read_text().count("of 4 attempt 0") == 4, LONG_S, "four ranks train")
    slurm.lab.power_off(slurm.nodes[3])
    eventually(lambda: out.read_text().count("of 3 attempt 1") == 3, LONG_S, "three ranks go on")
    # Slurm itself would wait for the node for SlurmdTimeout.
    slurm.ask("scontrol", "update", "NodeName=node3", "State=DOWN", "Reason=power")
    step.wait(LONG_S)
    text = out.read_text()
    assert "node3" in text
    assert "Traceback" not in text


ELASTIC = """
import os, sys, time
import torch, ddp
from ddp import elastic

folder = sys.argv[1]
place = ddp.init()
torch.manual_seed(0)
model = ddp.DistributedDataParallel(torch.nn.Linear(4, 1))
state = elastic.State(model=model, step=0, every=1, disk_every=10**6, folder=f"{folder}/commits")
state.resume()
state.should_checkpoint()  # whoever has looked once has a scheduler's signal answered with a checkpoint
print("rank", place.rank, "begins at step", state.step, flush=True)
while not os.path.exists(f"{folder}/finish"):
    model(torch.ones(2, 4)).sum().backward()
    state.step += 1
    state.commit()
    if state.should_checkpoint():
        # Beforehand: it may be stopped as soon as it is saved, and before it can say so.
        print("rank", place.rank, "saves step", state.step, flush=True)
        state.checkpoint()
    time.sleep(0.01)
state.close()
ddp.shutdown()
"""


def numbers_after(words: str, out: Path) -> list[int]:
    """At the ends of the lines with these words, as far as lines are whole."""
    lines = out.read_text().rpartition("\n")[0].splitlines() if out.exists() else []
    return [int(line.rpartition(" ")[2]) for line in lines if words in line]


@NIGHTLY
def test_a_job_that_is_requeued_saves_itself_first_and_goes_on_from_there(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Pre-emption with requeue is the same: SIGTERM to every process of the step, then a new start elsewhere."""
    (tmp_path / "train.py").write_text(ELASTIC)
    batch, out = tmp_path / "job.sh", tmp_path / "out"
    command = f"{LAUNCH} --nnodes 2 --nproc-per-node 1 {tmp_path}/train.py {tmp_path}"
    batch.write_text(f"#!/bin/sh\nexec srun {command}\n")
    streams = (f"--output={out}", f"--error={out}", "--open-mode=append", f"--chdir={tmp_path}")
    job = slurm.submit(batch, "-N2", "--requeue", *streams)

    eventually(lambda: len(numbers_after("begins at step", out)) == 2, LONG_S, "two ranks train")
    assert slurm.ask("scontrol", "requeue", job) == ""
    eventually(lambda: len(numbers_after("begins at step", out)) == 4, 2 * LONG_S, "two ranks train again")
    saved = numbers_after("saves step", out)
    assert len(saved) == 2, out.read_text()
    assert saved[0] == saved[1] > 0
    assert numbers_after("begins at step", out) == [0, 0, saved[0], saved[0]]
    (tmp_path / "finish").touch()
    eventually(
        lambda: slurm.about(job, "JobState") == "COMPLETED", LONG_S, f"it completes\n{out.read_text()}"
    )
    assert slurm.about(job, "Restarts") == "1"


# --- ddpctl submit -------------------------------------------------------------------------------------


CTL = os.path.join(os.path.dirname(sys.executable), "ddpctl")


def submitted(slurm: SlurmCluster, folder: Path, job_file: str) -> str:
    """The job's number, from what sbatch prints. What is in front of `[env]` is the job's own."""
    environment = f'[env]\nPATH = "{os.path.dirname(LAUNCH)}:{os.environ["PATH"]}"\nOMP_NUM_THREADS = "1"\n'
    (folder / "ddp.toml").write_text(job_file + environment)
    said = slurm.ask(
        "env", "-u", "DDP_RENDEZVOUS_SECRET", "-C", str(folder), CTL, "submit", "--target", "slurm"
    )
    number = said.rpartition(" ")[2]
    assert number.isdigit(), said
    return number


@NIGHTLY
def test_a_job_file_runs_and_its_fields_arrive(slurm: SlurmCluster, script: Path) -> None:
    job = submitted(
        slurm,
        script.parent,
        f"""
name = "train"
script = ["train.py"]
workdir = "{script.parent}"
nodes = 2
ranks_per_node = 1
[resources]
cpu = 2
memory = "100Mi"
[slurm]
partition = "lab"
account = "vision"
time = "01:02:00"
gres = "accelerator:1"
exclude = "node0"
options = ["--comment='two words'"]
""",
    )
    out = script.parent / f"train-{job}.log"

    def said() -> str:
        return out.read_text() if out.exists() else ""

    eventually(lambda: slurm.about(job, "JobState") == "COMPLETED", LONG_S, "it completes")
    expected_of_ranks = [f"[node{i + 1}:{i}] rank {i} of 2 attempt 0 on node{i + 1}" for i in (0, 1)]
    assert of_ranks(said()) == expected_of_ranks, said()
    expected = {
        "JobName": "train",
        "Partition": "lab",
        "Account": "vision",
        "TimeLimit": "01:02:00",
        "NodeList": "node[1-2]",
        "NumNodes": "2",
        "CPUs/Task": "2",
        "Requeue": "1",
        "MinMemoryNode": "100M",
        "TresPerNode": "gres:accelerator:1",
    }
    assert {name: slurm.about(job, name) for name in expected} == expected
    assert "two words" in slurm.ask("scontrol", "show", "job", job)


@NIGHTLY
def test_an_elastic_job_does_not_queue_for_machines_that_it_can_do_without(
    slurm: SlurmCluster, script: Path
) -> None:
    job = submitted(
        slurm,
        script.parent,
        'name = "train"\nscript = ["train.py"]\nnodes = "2:3"\nspares = 1\nranks_per_node = 1\n'
        'options = ["--last-call=60s"]\n[resources]\ncpu = 2\nmemory = "100Mi"\n[slurm]\nexclude = "node0"\n',
    )
    eventually(lambda: slurm.about(job, "JobState") == "COMPLETED", LONG_S, "it completes")
    assert (slurm.about(job, "NodeList"), slurm.about(job, "NumCPUs")) == ("node[1-3]", "6")
    assert (script.parent / f"train-{job}.log").read_text().count("of 3 attempt 0") == 3


@NIGHTLY
def test_an_array_is_so_many_jobs(slurm: SlurmCluster, script: Path) -> None:
    job = submitted(
        slurm,
        script.parent,
        'name = "sweep"\nscript = ["train.py"]\nnodes = 2\nranks_per_node = 1\n[resources]\ncpu = 2\n'
        'memory = "100Mi"\n[slurm]\narray = "0-1"\n',
    )

    def finished() -> list[str]:
        return [each.read_text() for each in sorted(script.parent.glob("sweep-*.log"))]

    eventually(
        lambda: [each.count("of 2 attempt 0") for each in finished()] == [2, 2],
        LONG_S,
        f"both of {job} train",
    )


@NIGHTLY  # Slurm takes its time
def test_a_job_that_is_preempted_goes_on_from_its_checkpoint(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A service that remembers: what is started again is another job to it."""
    (tmp_path / "train.py").write_text(ELASTIC)
    serve = os.path.join(os.path.dirname(LAUNCH), "ddp-rendezvous")
    with (tmp_path / "service").open("wb") as log:
        slurm.start(serve, "serve", "--listen", "0.0.0.0:29400", "--insecure", stdout=log, stderr=log)
    job = submitted(
        slurm,
        tmp_path,
        f'name = "train"\nscript = ["train.py", "{tmp_path}"]\nnodes = 2\nranks_per_node = 1\n'
        f'rendezvous = "{slurm.control.address}:29400"\n[resources]\ncpu = 2\nmemory = "100Mi"\n',
    )
    out = tmp_path / f"train-{job}.log"

    eventually(lambda: len(numbers_after("begins at step", out)) == 2, LONG_S, "two ranks train")
    (tmp_path / "urgent.sh").write_text("#!/bin/sh\nexit 0\n")
    urgent = slurm.submit(
        tmp_path / "urgent.sh", "-N4", "--exclusive", "--partition=urgent", f"--chdir={tmp_path}"
    )
    eventually(lambda: slurm.about(urgent, "JobState") == "COMPLETED", LONG_S, "the urgent one runs")
    eventually(lambda: len(numbers_after("begins at step", out)) == 4, 2 * LONG_S, "two ranks train again")
    saved = numbers_after("saves step", out)
    assert len(saved) == 2, out.read_text()
    assert numbers_after("begins at step", out) == [0, 0, saved[0], saved[0]]
    (tmp_path / "finish").touch()
    eventually(
        lambda: slurm.about(job, "JobState") == "COMPLETED", LONG_S, f"it completes\n{out.read_text()}"
    )
    assert slurm.about(job, "Restarts") == "1"
    log = (tmp_path / "service").read_text()
    assert f"train-{job}-0" in log
    assert f"train-{job}-1" in log
