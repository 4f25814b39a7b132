"""What facts about a machine mean for a job."""

from __future__ import annotations

import pytest

from launcher.machine.gpu_state import Gpu, Process
from launcher.machine.xids import Xid
from launcher.preflight import checkup
from launcher.preflight.checkup import (
    GB,
    MB,
    Check,
    Clock,
    Gpus,
    Grade,
    Interface,
    Memory,
    Network,
    ProcessLimits,
    Report,
    SelfTest,
    SharedMemory,
    Storage,
    Versions,
    exit_code,
    failures,
    judge_clock,
    judge_gpus,
    judge_limits,
    judge_memory,
    judge_network,
    judge_self_test,
    judge_shared_memory,
    judge_storage,
    judge_versions,
    skipped,
)
from launcher.template.import_variables import too_old

OK, WARN, FAIL, SKIPPED = Grade.OK, Grade.WARN, Grade.FAIL, Grade.SKIPPED


@pytest.mark.parametrize(
    ("memory", "ranks", "grade", "words"),
    [
        (Memory(64 * GB, 60 * GB), 8, OK, "60 GB free of 64 GB"),
        (Memory(64 * GB, 60 * GB), 800, WARN, "60 GB free of 64 GB"),
        (Memory(64 * GB, 100 * MB), 1, FAIL, "100 MB free of 64 GB"),
        (
            Memory(64 * GB, 60 * GB, 8 * GB, 7 * GB),
            4,
            WARN,
            "1 GB free of the cgroup's limit of 8 GB",
        ),
        (Memory(64 * GB, 2 * GB, 8 * GB, 1 * GB), 4, OK, "2 GB free of 64 GB"),
        (
            Memory(64 * GB, 60 * GB, 8 * GB, 9 * GB),
            1,
            FAIL,
            "0 bytes free of the cgroup's limit of 8 GB",
        ),
    ],
)
def test_memory_is_what_is_left_of_the_tighter_limit(memory, ranks, grade, words):
    check = judge_memory(memory, ranks)
    assert (check.grade, check.found) == (grade, words)


def test_a_containers_default_shared_memory_is_known_for_what_it_is():
    check = judge_shared_memory(SharedMemory(64 * MB, 64 * MB))
    assert (check.grade, check.found) == (WARN, "64 MB free of 64 MB (a container's default)")
    assert "--shm-size" in check.advice
    assert "earlier jobs" in judge_shared_memory(SharedMemory(16 * GB, MB)).advice
    assert judge_shared_memory(SharedMemory(16 * GB, 16 * GB)).grade is OK
    assert judge_shared_memory(None).grade is WARN


def test_limits_on_files_and_on_locked_memory():
    grades = [
        [c.grade for c in judge_limits(ProcessLimits(files, 8 * MB))] for files in (-1, 65536, 1024, 64)
    ]
    assert grades == [[OK, SKIPPED], [OK, SKIPPED], [WARN, SKIPPED], [FAIL, SKIPPED]]
    locked = [
        judge_limits(ProcessLimits(-1, bytes_, pins_memory=True))[1].grade for bytes_ in (-1, 8 * MB, 64 * GB)
    ]
    assert locked == [OK, WARN, OK]


@pytest.mark.parametrize(
    ("storage", "grade"),
    [
        (Storage("logs", "/x", 100 * GB, 50 * GB, 500 * MB), OK),
        (Storage("logs", "/x", 100 * GB, 50 * GB, 5 * MB), WARN),
        (Storage("logs", "/x", 100 * GB, 50 * GB, 5 * MB, glimpse=True), OK),
        (Storage("logs", "/x", 100 * GB, 50 * GB, MB / 2, glimpse=True), WARN),
        (Storage("logs", "/x", 100 * GB, 500 * MB, 500 * MB), WARN),
        (Storage("logs", "/x", 100 * GB, 10 * MB), FAIL),
        (Storage("logs", "/x", 0, 0, 500 * MB), OK),
        (Storage("logs", "/x", problem="no such file or directory"), FAIL),
    ],
)
def test_disks(storage, grade):
    assert judge_storage(storage).grade is grade


def test_a_name_that_stands_for_this_machine_only_is_a_warning_where_others_are_to_use_it():
    def of(**how):
        return judge_network(Network("node1", ("127.0.1.1",), Interface("eth0", "10.0.0.1", 1500), **how))[0]

    assert of(alone=False).grade is WARN
    assert of(alone=True).grade is OK
    assert of(alone=False, asked=True).grade is OK
    assert judge_network(Network("node1"))[0].grade is WARN


def test_an_interface_that_is_down_fails_only_where_it_was_asked_for():
    down = Interface("eth1", "10.0.0.1", 1500, up=False)
    assert judge_network(Network("a", ("10.0.0.1",), down, asked=True))[1].grade is FAIL
    assert judge_network(Network("a", ("10.0.0.1",), down))[1].grade is WARN
    assert (
        judge_network(Network("a", ("10.0.0.1",), Interface("eth7", exists=False), asked=True))[1].grade
        is FAIL
    )
    assert judge_network(Network("a", ("10.0.0.1",)))[1].grade is SKIPPED


def test_only_a_clock_that_is_surely_off_is_named():
    assert judge_clock(Clock(0.4, 0.001)).grade is OK
    assert judge_clock(Clock(3.0, 2.5)).grade is OK  # a slow round trip may have made it up
    check = judge_clock(Clock(3.0, 0.01))
    assert check.grade is WARN
    assert "3.000 s (±0.010 s) behind" in check.found
    assert "3.000 s (±0.010 s) ahead" in judge_clock(Clock(-3.0, 0.01)).found


def test_versions_in_words_and_for_the_service():
    had = Versions("3.11.7", "2.13.0+cpu", nccl="2.27.3")
    assert str(had) == "python=3.11.7 torch=2.13.0+cpu nccl=2.27.3"
    assert judge_versions(had).found == "python 3.11.7, torch 2.13.0+cpu, nccl 2.27.3"
    assert judge_versions(Versions("3.11.7")).grade is Grade.SKIPPED
    old = judge_versions(Versions("3.11.7", "2.7.1"), too_old("2.7.1"))
    assert (old.grade, old.found) == (FAIL, "needs torch 2.8 or newer, found 2.7.1: upgrade torch")


@pytest.mark.parametrize(
    ("release", "old"),
    [
        ("2.7.1+cpu", True),
        ("1.13.1", True),
        ("2.8.0", False),
        ("2.16.0.dev20261101", False),
        ("3.0.0", False),
        ("", False),
    ],
)
def test_a_torch_that_is_too_old_is_known(release, old):
    assert bool(too_old(release)) is old


# --- GPUs (tests/shell/test_gpu_faults.py plays the faults) ------------------------------------------------


def test_gpus_that_are_missing_are_noticed():
    sound = Gpu(0, "H100", "0000:18:00.0", memory_total=80 * GB)
    (first, *_) = judge_gpus(Gpus((sound,), present=1, on_bus=2), wanted=True)
    assert first.found == "2 GPUs on the PCIe bus, but the driver reports only 1"
    assert first.grade is WARN
    (gone,) = judge_gpus(Gpus(on_bus=8, problem="the driver does not respond: GPU is lost"), wanted=False)
    assert gone.grade is FAIL
    assert judge_gpus(Gpus(), wanted=True)[0].grade is SKIPPED
    assert judge_gpus(Gpus(on_bus=1), wanted=False)[0].grade is WARN


def test_the_server_of_mps_is_not_another_program():
    def idle(*names):
        using = tuple(Process(700 + at, 1 << 20, name) for at, name in enumerate(names))
        found = Gpus((Gpu(0, "H100", memory_total=80 * GB, processes=using),), present=1)
        return next(check for check in judge_gpus(found, wanted=True) if check.name == "GPUs idle")

    assert idle("nvidia-cuda-mps").grade is OK
    assert idle("nvidia-cuda-mps", "python3").found == "GPU 0 is also used by python3 (pid 701), 1 MB"


def test_what_cannot_be_read_is_skipped_with_the_reason():
    unknown = Gpu(0, "GeForce", "0000:18:00.0", memory_total=8 * GB)
    checks = {check.name: check for check in judge_gpus(Gpus((unknown,), present=1), wanted=True)}
    assert checks["GPU memory errors"].grade is SKIPPED
    assert checks["Xid errors"].found.startswith("not checked: the kernel log is not readable")


def test_an_xid_error_of_the_device_fails_for_an_hour():
    sound = Gpu(0, "H100", "0000:2a:00.0", memory_total=80 * GB)
    lost = Xid("0000:2a:00", 79, at_s=3000.0)
    for uptime_s, grade in ((3600.0, FAIL), (90_000.0, WARN)):
        found = Gpus((sound,), present=1, xids=(lost,), uptime_s=uptime_s, log_readable=True)
        check = next(check for check in judge_gpus(found, wanted=True) if check.name == "Xid errors")
        assert check.grade is grade


def test_devices_at_work_are_measured_by_their_peers():
    results = [SelfTest(f"cuda:{at}", "H100", 6e14, 1500 * GB) for at in range(8)]
    assert judge_self_test(results[0], results).grade is OK
    slow = SelfTest("cuda:5", "H100", 4e14, 1500 * GB)
    assert judge_self_test(slow, [*results, slow]).grade is FAIL
    assert judge_self_test(SelfTest("cuda:0", "H100", 6e14, 1500 * GB, wrong=True), results).grade is FAIL
    assert judge_self_test(SelfTest("cuda:0", "H100", problem="CUDA error"), results).grade is FAIL
    assert judge_self_test(SelfTest("cpu", "CPU", 1e8, GB), []).grade is WARN
    assert judge_self_test(SelfTest("cpu", "CPU", 1e11, 9 * GB), []).grade is OK


# --- all of it -------------------------------------------------------------------------------------------


def test_the_worst_grade_makes_the_exit_code_and_only_failures_make_unfit():
    fine, bad, poor = Check("a", OK, "x"), Check("b", FAIL, "y"), Check("c", WARN, "z")
    assert [exit_code(c) for c in ([], [fine], [skipped("d", "e")], [fine, poor], [bad, poor])] == [
        0,
        0,
        0,
        1,
        2,
    ]
    assert failures([fine, poor]) == ""
    assert failures([bad, poor, bad]) == "b: y; b: y"


def test_the_table_says_what_is_wanted_and_what_to_do_and_has_colour_on_request_only():
    checks = (
        Check("memory", OK, "60 GB free", "at least 1 GB"),
        Check("/dev/shm", WARN, "64 MB", "at least 512 MB", "docker run --shm-size=8g"),
        Check("logs in /a/very/long/path/that/does/not/fit", FAIL, "read-only file system"),
    )
    text = checkup.table(Report("node1", "quick", checks, took_s=0.04))
    assert text.splitlines() == [
        "node1: quick check, 0.0 s",
        "ok      memory                              60 GB free",
        "warn    /dev/shm                            64 MB (required: at least 512 MB)",
        "                                            → docker run --shm-size=8g",
        "fail    logs in /a/very/long/path/that/does/not/fit",
        "                                            read-only file system",
        "failed: 1 check failed, 1 warning",
    ]
    assert "\x1b[" in checkup.table(Report("node1", "quick", checks), color=True)
    told = checkup.as_json(Report("node1", "quick", checks))
    assert (told["fit"], told["exit_code"], told["checks"][1]["grade"]) == (False, 2, "warn")
