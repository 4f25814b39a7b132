"""Each fault of a GPU, played by a driver library of ours and read by the code that reads the real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest
from launched import eventually
from nvml_fake import FakeDriver

from launcher.health.node_health import HealthState, NodeReading, evaluate
from launcher.health.node_watch import open_gpus
from launcher.machine.gpu_reading import Nvml, NvmlError, read_layout
from launcher.machine.gpu_state import GpuMemory, MemoryWait, in_words, next_wait, still_held
from launcher.preflight.agent_preflight import gpus
from launcher.preflight.checkup import Check, Grade, judge_gpus

if TYPE_CHECKING:
    from launched import Launch

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return FakeDriver(tmp_path, monkeypatch)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    path.write_text("6,1,1000,-;eth0: link up\n")
    return path


def judged(driver: FakeDriver, log: Path, **environ: str) -> dict[str, Check]:
    found = gpus(environ, driver.library, str(log))
    return {check.name: check for check in judge_gpus(found, wanted=True)}


def graded(checks: dict[str, Check]) -> dict[str, str]:
    return {name: check.grade.value for name, check in checks.items() if check.grade is not Grade.OK}


# --- before the start ----------------------------------------------------------------------------------


def test_sound_gpus_pass_every_check(driver: FakeDriver, log: Path) -> None:
    driver.play(
        gpus=8, **{f"gpu{at}_links": 18 for at in range(8)}, **{f"gpu{at}_fabric": 3 for at in range(8)}
    )
    checks = judged(driver, log)
    assert graded(checks) == {}
    assert checks["GPUs"].found == "8 × NVIDIA H100 80GB HBM3, driver 580.65.06"
    assert checks["PCIe"].found == "x16, generation 5"
    assert checks["NVLink"].found == "18 links of each GPU are up"
    assert checks["NVLink fabric"].found == "set up"


@pytest.mark.parametrize(
    ("how", "name", "grade", "words"),
    [
        ({"gpu1_handle": 15}, "GPUs", "fail", "GPU 1 does not respond: GPU is lost"),
        ({"gpu0_memory": "!16"}, "GPUs", "fail", "GPU 0 does not respond: GPU requires reset"),
        ({"gpu1_ecc": 2}, "GPU memory errors", "fail", "GPU 1: 2 uncorrectable since the last reset"),
        ({"gpu0_rows_pending": 1}, "GPU memory errors", "fail", "GPU 0: faulty memory rows will be retired"),
        ({"gpu0_pages_pending": 1}, "GPU memory errors", "fail", "GPU 0: faulty memory rows will be retired"),
        ({"gpu0_rows_failed": 1}, "GPU memory errors", "fail", "GPU 0: no spare memory rows are left"),
        (
            {"gpu1_clocks": "0x48"},
            "GPU clocks",
            "warn",
            "GPU 1 runs slower because of its temperature and a hardware",
        ),
        (
            {"gpu0_clocks": "0x80"},
            "GPU clocks",
            "warn",
            "GPU 0 runs slower because of an insufficient power supply",
        ),
        ({"gpu0_pcie_width": 8}, "PCIe", "warn", "GPU 0 has 8 of 16 PCIe lanes"),
        ({"gpu1_pcie_generation": 1}, "PCIe", "warn", "GPU 1 has PCIe generation 1 instead of 5"),
        (
            {"gpu0_links": 4, "gpu1_links": 4, "gpu1_links_down": 1},
            *("NVLink", "fail", "GPU 1 has 3 of 4 links"),
        ),
        (
            {"gpu0_links": 4, "gpu1_links": 4, "gpu0_links_down": 4, "gpu1_links_down": 4},
            *("NVLink", "warn", "all links of 2 GPUs are down"),
        ),
        (
            {"gpu0_links": 2, "gpu1_links": 2, "gpu1_link1_errors1": 5},
            *("NVLink", "warn", "recovered it: GPU 1 link 1: 5"),
        ),
        ({"gpu0_fabric": 2}, "NVLink fabric", "warn", "GPU 0: the NVLink fabric is not set up"),
        ({"gpu0_used": 40 << 30}, "GPUs idle", "warn", "GPU 0: 40 GB of 80 GB used"),
    ],
)
def test_a_fault_is_found_and_nothing_else(
    driver: FakeDriver, log: Path, how: dict[str, object], name: str, grade: str, words: str
) -> None:
    driver.play(**how)
    checks = judged(driver, log)
    assert graded(checks) == {name: grade}
    assert words in checks[name].found
    assert checks[name].advice


def test_who_uses_the_memory_is_named(driver: FakeDriver, log: Path) -> None:
    driver.play(gpu1_used=40 << 30, gpu1_pid=os.getpid(), gpu1_pid_memory=39 << 30)
    name = Path(f"/proc/{os.getpid()}/comm").read_text().strip()
    assert judged(driver, log)["GPUs idle"].found == (
        f"GPU 1: 40 GB of 80 GB used by {name} (pid {os.getpid()}), 39 GB"
    )
    driver.play(gpu1_pid=os.getpid())
    assert f"GPU 1 is also used by {name} (pid {os.getpid()}), 1 GB" in judged(driver, log)["GPUs idle"].found


def test_what_was_repaired_and_what_only_costs_time_is_a_note(driver: FakeDriver, log: Path) -> None:
    driver.play(gpu0_rows=2, gpu1_pages=1, gpu1_persistence=0, gpu0_pstate=8, gpu0_pcie_generation=1)
    checks = judged(driver, log)
    assert graded(checks) == {}  # an idle GPU may lower the speed of its PCIe link
    assert "GPU 0 2 remapped rows, GPU 1 1 retired pages" in checks["GPU memory errors"].found
    assert checks["GPU persistence"].found.startswith("off for GPU 1")


def test_only_gpus_that_the_job_may_use_are_judged(driver: FakeDriver, log: Path) -> None:
    driver.play(gpus=4, gpu3_ecc=2)
    assert graded(judged(driver, log)) == {"GPU memory errors": "fail"}
    assert graded(judged(driver, log, CUDA_VISIBLE_DEVICES="0,1")) == {}
    assert graded(judged(driver, log, CUDA_VISIBLE_DEVICES="GPU-000000a3")) == {"GPU memory errors": "fail"}
    assert "selects none of the 4 GPUs" in judged(driver, log, CUDA_VISIBLE_DEVICES="")["GPUs"].found


def test_a_driver_that_was_upgraded_while_loaded_says_so(driver: FakeDriver, log: Path) -> None:
    driver.play(init=18)
    checks = judged(driver, log)
    assert checks["GPUs"].grade is Grade.FAIL
    assert checks["GPUs"].found == "the driver does not respond: Driver/library version mismatch"
    assert "upgraded while it was loaded" in checks["GPUs"].advice
    with pytest.raises(NvmlError, match="mismatch"):
        Nvml(driver.library)


def test_xid_errors_of_the_kernel_log_count_by_whose_fault_they_are(driver: FakeDriver, log: Path) -> None:
    uptime_us = int(1e6 * float(Path("/proc/uptime").read_text().split()[0]))

    def line(code: int, bus: str = "0000:19:00") -> None:
        with log.open("a") as file:
            file.write(
                f"4,9,{uptime_us},-;NVRM: Xid (PCI:{bus}): {code}, pid=812, name=python3, some words\n"
            )

    line(31)
    line(79, "0000:77:00")  # not a GPU of this job
    checks = judged(driver, log)
    assert graded(checks) == {}
    assert "1 caused by programs (Xid 31)" in checks["Xid errors"].found
    line(94)
    assert graded(judged(driver, log)) == {"Xid errors": "warn"}
    line(79)
    check = judged(driver, log)["Xid errors"]
    assert check.grade is Grade.FAIL
    assert (
        "Xid 79: the GPU has fallen off the bus, in python3 (pid 812) (GPU 1 at 0000:19:00, 0 min"
        in check.found
    )
    assert "and 1 more (Xid 94)" in check.found


def test_the_journal_is_asked_where_the_kernel_log_is_not_readable(
    driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "journalctl"
    line = "NVRM: Xid (PCI:0000:19:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    tool.write_text(f"#!/bin/sh\ncat <<'EOF'\n[    1.000000] node7 kernel: {line}\nEOF\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    check = judged(driver, tmp_path / "not-readable")["Xid errors"]
    assert "Xid 79: the GPU has fallen off the bus (GPU 1 at 0000:19:00" in check.found
    tool.write_text("#!/bin/sh\nexit 1\n")
    assert judged(driver, tmp_path / "not-readable")["Xid errors"].grade is Grade.SKIPPED


def test_the_layout_of_a_machine_is_read(driver: FakeDriver, tmp_path: Path) -> None:
    driver.play(
        gpus=4, **{f"gpu{at}_links": 2 for at in range(4)}, **{f"gpu{at}_to_switch": 0 for at in range(4)}
    )
    root = tmp_path / "sys"
    files = {f"bus/pci/devices/0000:{0x18 + at:02x}:00.0/numa_node": str(at // 2) for at in range(4)}
    files |= {f"class/infiniband/mlx5_{at}/device/numa_node": str(at) for at in range(2)}
    files |= {f"devices/system/node/node{at}/cpulist": "0" for at in range(2)}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    layout = read_layout(str(root), driver.library)
    assert in_words(layout) == (
        "4 × NVIDIA H100 80GB HBM3; NVLink between GPUs 0-1, 2-3; NUMA node 0: GPU 0-1, mlx5_0; "
        "NUMA node 1: GPU 2-3, mlx5_1"
    )
    assert layout.block == ""
    driver.play(
        gpus=2, **{f"gpu{at}_{what}": 3 for at in range(2) for what in ("fabric", "clique", "cluster")}
    )
    assert read_layout(str(root), driver.library).block == "03" + "00" * 15 + "/3"
    driver.play(gpus=2, gpu0_handle=15)
    assert [gpu.index for gpu in read_layout(str(root), driver.library).gpus] == [1]


def test_the_doctor_finds_the_library_by_its_name(driver: FakeDriver) -> None:
    driver.play(gpus=2, gpu1_ecc=1, gpu0_pcie_width=4)
    command = (sys.executable, "-m", "launcher", "doctor", "--preflight", "quick", "--nproc-per-node", "2")
    environ = os.environ | driver.environ
    done = subprocess.run((*command, "--json"), env=environ, capture_output=True, text=True, timeout=100)
    report = json.loads(done.stdout)
    assert (done.returncode, report["exit_code"], report["fit"]) == (2, 2, False)
    assert report["hardware"].startswith("2 × NVIDIA H100 80GB HBM3; no NVLink")
    found = {check["name"]: check for check in report["checks"]}
    assert found["GPU topology"]["found"] == report["hardware"]
    assert found["GPU memory errors"]["grade"] == "fail"
    assert found["PCIe"] == {
        "name": "PCIe",
        "grade": "warn",
        "found": "GPU 0 has 4 of 16 PCIe lanes",
        "floor": "full width and speed",
        "advice": "reseat the GPU or its riser; check the slot's settings in the firmware",
    }


# --- while the ranks run -------------------------------------------------------------------------------


class Watched:
    """Samples as the agent takes them: `look` returns what it would report."""

    def __init__(self, driver: FakeDriver, log: str) -> None:
        found = open_gpus(driver.library, log)
        assert found is not None
        self._gpus, self._health, self._at = found, HealthState(), 0.0

    def look(self) -> tuple[str, ...]:
        self._at += 5.0
        self._health, news = evaluate(self._health, NodeReading(self._at, gpus=self._gpus.read()))
        return news


def test_faults_that_begin_while_ranks_run_are_reported(driver: FakeDriver, log: Path) -> None:
    watched = Watched(driver, str(log))
    assert watched.look() == ()
    driver.play(gpu1_clocks="0x40", gpu1_temperature=91)
    assert (watched.look(), watched.look()) == (
        (),
        ("GPU 1 runs slower because of its temperature (91 C); check its cooling and power supply",),
    )
    driver.play(gpu0_ecc=1, gpu0_rows_pending=1)
    first, second, third = watched.look()
    assert (
        first == "GPU 0 has faulty memory rows that will be retired at its next reset; reset it after the job"
    )
    assert second == "GPU 1 runs at full speed again"
    assert third.startswith("GPU 0: 1 uncorrectable memory errors (ECC)")
    driver.play(gpu0_handle=15)
    assert (watched.look(), watched.look()[0]) == (
        (),
        "GPU 0 does not respond: GPU is lost; look for Xid errors in dmesg",
    )


def test_xid_errors_reach_the_agent_from_the_kernel_log(driver: FakeDriver, log: Path) -> None:
    with log.open("a") as file:
        file.write("4,9,1000,-;NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.\n")
    watched = Watched(driver, str(log))
    assert watched.look() == ()  # it is older than the agent
    driver.play(event=1, event_gpu=0, event_xid=48)  # the same error must not be reported from two sources
    with log.open("a") as file:
        file.write("4,9,2000,-;NVRM: Xid (PCI:0000:19:00): 74, pid=812, name=python3, NVLink: fatal error\n")
    (news,) = watched.look()
    assert news.startswith(
        "GPU 1: the driver reports Xid 74: an NVLink error, in python3 (pid 812); run nvidia-smi nv"
    )
    assert watched.look() == ()


def test_without_the_kernel_log_nvml_delivers_them(driver: FakeDriver, tmp_path: Path) -> None:
    watched = Watched(driver, str(tmp_path / "not-readable"))
    assert watched.look() == ()
    driver.play(event=1, event_gpu=1, event_xid=95)
    (news,) = watched.look()
    assert news.startswith(
        "GPU 1: the driver reports Xid 95: an uncontained uncorrectable memory error; end the prog"
    )
    assert watched.look() == ()


def test_only_gpus_of_this_job_are_watched(driver: FakeDriver, log: Path) -> None:
    driver.play(gpus=4)
    for visible, indexes in ((None, [0, 1, 2, 3]), ("2,0", [0, 2]), ("GPU-000000a3", [3]), ("", [])):
        found = open_gpus(
            driver.library, str(log), {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        )
        assert found is not None
        assert [gpu.index for gpu in found.read()] == indexes


def test_a_machine_without_a_driver_has_no_gpus(tmp_path: Path) -> None:
    assert open_gpus(str(tmp_path / "libnvidia-ml.so.1")) is None


# --- between two generations -----------------------------------------------------------------------------


def test_the_memory_of_ranks_that_have_ended_is_waited_for() -> None:
    lowest = {0: 1 << 30, 1: 1 << 30}
    dead, alive = GpuMemory(0, 60 << 30, (7,)), GpuMemory(1, 60 << 30, (8,))
    unnamed, small = GpuMemory(1, 60 << 30), GpuMemory(0, 5 << 28)
    found = (dead, alive, unnamed, small)
    assert still_held(found, lowest, lambda pid: pid == 8) == (dead, unnamed)
    wait, over = next_wait(MemoryWait(0.0, 0.0), 60, 4.9)
    for now, used in ((9.8, 50), (14.7, 40), (19.6, 30), (24.5, 20), (29.4, 10)):
        assert not over
        wait, over = next_wait(wait, used, now)
    assert next_wait(wait, 5, 30.0)[1]  # in all
    assert [next_wait(wait, 10, now)[1] for now in (29.9, 34.4)] == [False, True]


def test_ranks_start_although_the_memory_of_the_ones_before_stays_in_use(
    driver: FakeDriver, launch: Launch, tmp_path: Path
) -> None:
    """The driver names the dead rank as the owner. The first reading shows what is usual."""
    driver.play(gpus=1, gpu0_used=1 << 29)
    source = f"""
import os, sys, time
plan = {str(tmp_path / "gpus.txt")!r}
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    while not os.path.exists({str(tmp_path / "read")!r}): time.sleep(0.01)
    with open(plan, "w") as file:
        file.write(f"gpus 1\\ngpu0.used {{60 << 30}}\\ngpu0.pid {{os.getpid()}}\\n")
    sys.exit(3)
"""
    words = ("--no-warm-start", "--nproc-per-node", "1", "--max-restarts", "1", "--health-port", "0")
    job = launch(*words, source=source, env=driver.environ)
    eventually(lambda: "/metrics" in job.stderr())
    url = next(word for word in job.stderr().split() if word.startswith("http:")).rsplit("/", 1)[0]
    eventually(lambda: "gpu_memory" in urlopen(f"{url}/metrics").read().decode())
    (tmp_path / "read").touch()
    assert job.wait() == 0
    assert "60.0 GiB of GPU 0 still in use" in job.stderr()
    assert "starting the next ones anyway" in job.stderr()
