"""From what is known of one ended rank to its cause."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tidy import ROOT

from launcher.failure.crash_text import CUT, modules_named
from launcher.failure.verdict import ErrorRecord, RankEnd, cause_of, shell_code
from rendezvous.values.types import Cause, FailureClass

C = FailureClass
TORCH = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def traceback(error: str, *, file: str = "train.py") -> str:
    return f'Traceback (most recent call last):\n  File "{file}", line 7, in step\n    go()\n{error}\n'


def ended(code: int | None = 1, stderr: str = "", **known: object) -> Cause:
    end = RankEnd(node="a", rank=1, local_rank=1, exit_code=code, stderr_tail=stderr)
    return cause_of(RankEnd(**{**{f: getattr(end, f) for f in RankEnd.__slots__}, **known}))


@pytest.mark.parametrize(
    ("error", "failure", "reason"),
    [
        ("ValueError: bad batch", C.USER_EXCEPTION, "ValueError: bad batch"),
        ("KeyboardWarning", C.USER_EXCEPTION, "KeyboardWarning"),
        ("a.b.CustomError: x\nmore\nlines", C.USER_EXCEPTION, "CustomError: x"),
        ("train.fit.<locals>.Stop: x", C.USER_EXCEPTION, "Stop: x"),
        ("Überlauf: x", C.USER_EXCEPTION, "Überlauf: x"),
        ("MemoryError", C.OUT_OF_MEMORY, "MemoryError"),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
            C.OUT_OF_MEMORY,
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
        ),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory",
            C.OUT_OF_MEMORY,
            None,
        ),
        ("torch.AcceleratorError: CUDA error: device-side assert triggered", C.USER_EXCEPTION, None),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", C.HARDWARE, None),
        ("RuntimeError: CUDA error: unspecified launch failure", C.USER_EXCEPTION, None),
        ("ValueError: uncorrectable input", C.USER_EXCEPTION, None),
        (
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
            "address. port: 23456, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
            C.NETWORK,
            None,
        ),
        (
            "torch.distributed.DistNetworkError: The client socket has timed out after 3000ms while trying to "
            "connect to (no.such.host, 1).",
            C.NETWORK,
            None,
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:219, unhandled system error (run with "
            "NCCL_DEBUG=INFO for details), NCCL version 2.19.3\nncclSystemError: System call failed.",
            C.NETWORK,
            None,
        ),
        ("socket.gaierror: [Errno -2] Name or service not known", C.NETWORK, None),
        ("OSError: [Errno 98] Address already in use", C.NETWORK, None),
    ],
)
def test_exceptions_by_class(error: str, failure: FailureClass, reason: str | None) -> None:
    cause = ended(1, "epoch 1\n" + traceback(error), uncaught=True)
    assert cause.failure is failure
    assert reason is None or cause.reason == reason
    assert "line 7, in step" in cause.traceback


PEER_GONE = [
    "RuntimeError: [/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1.",
    "RuntimeError: [/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [::1]:1: Connection "
    "reset by peer.",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv "
    "operation to complete",
    "RuntimeError: Application timeout caused pair closure",
    "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote "
    "server shutdown or crash?",
    "torch.distributed.DistStoreError: wait timeout after 1000ms, keys: /x",
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:219, remote process exited or there was a "
    "network error, NCCL version 2.19.3\nncclRemoteError: A call failed possibly due to a network error or a remote "
    "process exiting prematurely.",
    "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.",
    "RuntimeError: Rank 0 failed to pass monitoredBarrier in 4000 ms",
]


@pytest.mark.parametrize("error", PEER_GONE)
def test_a_lost_peer_is_a_consequence(error: str) -> None:
    text = "".join(f"[rank0]: {line}\n" for line in traceback(error, file=TORCH).splitlines())
    assert ended(1, text).failure is C.CONSEQUENCE


@pytest.mark.parametrize("error", PEER_GONE)
def test_a_lost_peer_stays_one_when_the_script_wraps_it(error: str) -> None:
    joint = "\nThe above exception was the direct cause of the following exception:\n\n"
    cause = ended(1, traceback(error, file=TORCH) + joint + traceback("TrainingError: epoch 3 failed"))
    assert (cause.failure, cause.reason) == (C.CONSEQUENCE, "TrainingError: epoch 3 failed")


def test_a_peer_lost_during_clean_up_does_not_hide_the_cause() -> None:
    joint = "\nDuring handling of the above exception, another exception occurred:\n\n"
    cause = ended(1, traceback("ValueError: bad batch") + joint + traceback(PEER_GONE[0], file=TORCH))
    assert (cause.failure, cause.reason) == (C.USER_EXCEPTION, "ValueError: bad batch")


@pytest.mark.parametrize(
    "error",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'reset by peer'))",
        "ValueError: the log said gloo/transport/tcp/pair.cc Connection closed by peer",
        "RuntimeError: web server: connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_other_peoples_connections_are_causes(error: str) -> None:
    assert ended(1, traceback(error, file="/env/lib/urllib3/response.py")).failure is not C.CONSEQUENCE


PIPE = "/usr/lib/python3.11/multiprocessing/connection.py"
FROM = "\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize(
    ("error", "file", "lost"),
    [
        ("EOFError", PIPE, True),
        ("EOFError", "train.py", True),
        ("EOFError: peer closed the connection", "train.py", True),
        ("EOFError: Ran out of input", "train.py", False),  # an empty file
        ("EOFError: EOF when reading a line", "train.py", False),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", "train.py", True),
        ("BrokenPipeError: [Errno 32] Broken pipe", PIPE, True),
        ("BrokenPipeError: [Errno 32] Broken pipe", "/usr/lib/python3.11/subprocess.py", False),
        ("asyncio.exceptions.IncompleteReadError: 0 bytes read on a total of 4 expected bytes", "a.py", True),
        ("ConnectionResetError: reset", "/env/lib/urllib3/response.py", False),
        ("RuntimeError: eof (this error originated at tensorpipe/transport/uv/connection.cc:1)", TORCH, True),
        ("ConnectionRefusedError: [Errno 111] Connection refused", "train.py", False),
        ("EOFError", "/env/lib/torch/utils/data/dataloader.py", False),  # its own worker
        ("concurrent.futures.process.BrokenProcessPool: A process in the pool was terminated", "a.py", False),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", "a.py", False),
        ("ValueError: peer closed", "train.py", False),
    ],
)
def test_a_rank_may_have_lost_a_connection_of_its_own(error: str, file: str, lost: bool) -> None:
    printed = traceback(error, file=file)
    assert ended(1, printed).lost_peer is lost
    assert ended(1, printed + FROM + traceback("RuntimeError: it is gone")).lost_peer is lost
    assert not ended(1, traceback("KeyError: 'x'") + FROM + printed).lost_peer  # while it cleaned up
    assert ended(3, printed, uncaught=False).lost_peer is lost


def test_a_rank_that_has_lost_a_connection_counts_from_its_end() -> None:
    """The other one may have been killed: the first thing that shows of it is its end."""
    assert ended(1, traceback("EOFError"), ran_s=5.0, ran_to_end_s=5.2).ran_s == 5.2
    assert ended(1, traceback("ValueError"), ran_s=5.0, ran_to_end_s=5.2).ran_s == 5.0


def test_the_watchdog_of_nccl_blames_a_peer_and_its_own_device_error_does_not() -> None:
    said = (
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "  what():  [PG ID 0] Process group watchdog thread terminated with exception: "
    )
    timeout = said + "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"
    ecc = said + "CUDA error: uncorrectable ECC error encountered"
    assert ended(None, timeout, signal=6).failure is C.CONSEQUENCE
    assert ended(None, ecc, signal=6).failure is C.HARDWARE


def test_an_earlier_logged_traceback_and_shutdown_noise_are_not_the_story() -> None:
    noise = "Exception ignored in: <function X.__del__>\n" + traceback("AttributeError: gone")
    text = traceback("OSError: retried") + "going on\n" + traceback("ValueError: bad batch") + noise
    cause = ended(1, text)
    assert cause.reason == "ValueError: bad batch"
    assert "retried" not in cause.traceback
    assert "gone" not in cause.traceback


@pytest.mark.parametrize("before", ["name? ", "(Pdb) ", "loss 0.5\r 50%|█████     | 5/10"])
def test_a_traceback_may_follow_text_without_a_newline(before: str) -> None:
    text = traceback("ValueError: bad")
    for prefix in ("", "[rank0]: "):
        cause = ended(1, before + "".join(f"{prefix}{line}\n" for line in text.splitlines()))
        assert cause.reason == "ValueError: bad"
        assert cause.traceback.startswith("Traceback")


def test_what_a_dataloader_worker_raised_is_named() -> None:
    inner = "Original " + traceback("KeyError: 'label'", file="data.py")
    cause = ended(1, traceback("KeyError: Caught KeyError in DataLoader worker process 0.\n" + inner))
    assert cause.reason == "KeyError: 'label' (in DataLoader worker process 0)"


def test_exception_groups_name_their_first_member() -> None:
    text = (
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "t.py", line 2, in <module>\n'
        "  | ExceptionGroup: many (2 sub-exceptions)\n"
        "  +-+---------------- 1 ----------------\n"
        "    | ValueError: a\n"
        "    +---------------- 2 ----------------\n"
        "    | KeyError: 'b'\n"
        "    +------------------------------------\n"
    )
    assert (
        ended(1, text).reason
        == "ExceptionGroup: many (2 sub-exceptions); first exception of the group: ValueError: a"
    )


def test_a_script_that_does_not_compile() -> None:
    cause = ended(1, "  File \"t.py\", line 4\n    x = (1\n        ^\nSyntaxError: '(' was never closed\n")
    assert cause.reason == "SyntaxError: '(' was never closed"
    assert cause.traceback.startswith('  File "t.py", line 4')


def test_leaving_with_a_text_or_a_code() -> None:
    assert ended(1, "no config\n").reason == 'exit code 1 (last line on stderr: "no config")'
    usage = ended(2, "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --foo\n")
    assert usage.reason == "exit code 2: train.py: error: unrecognized arguments: --foo"
    assert ended(7).reason == "exit code 7"
    assert ended(139).reason == "exit code 139 (a shell's code for SIGSEGV)"
    after = ended(13, traceback("ValueError: bad batch"))
    assert (after.failure, after.reason) == (
        C.EXIT_CODE,
        "exit code 13; last exception: ValueError: bad batch",
    )


@pytest.mark.parametrize(
    ("number", "stderr", "reason"),
    [
        (11, "", "killed by SIGSEGV (segmentation fault)"),
        (7, "", "killed by SIGBUS (bus error)"),
        (40, "", "killed by SIGRTMIN+6"),
        (10, traceback("ValueError: caught"), "killed by SIGUSR1"),
        (
            11,
            'Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n  File "t"',
            "killed by SIGSEGV: Fatal Python error: Segmentation fault",
        ),
        (
            6,
            "terminate called after throwing an instance of 'std::out_of_range'\n  what():  at 3\n",
            "killed by SIGABRT: std::out_of_range: at 3",
        ),
        (6, "free(): invalid pointer\n", "killed by SIGABRT (aborted): free(): invalid pointer"),
    ],
)
def test_signals_by_name(number: int, stderr: str, reason: str) -> None:
    cause = ended(None, stderr, signal=number)
    assert (cause.failure, cause.reason) == (C.SIGNAL, reason)
    assert (cause.exit_code, cause.signal) == (128 + number, number)


@pytest.mark.parametrize(
    ("oom", "failure", "words"),
    [
        (True, C.OUT_OF_MEMORY, "killed by SIGKILL: the kernel's out-of-memory killer"),
        (
            False,
            C.SIGNAL,
            "killed by SIGKILL, not from ddp-launch; the kernel reports no out-of-memory kill",
        ),
        (
            None,
            C.SIGNAL,
            "killed by SIGKILL (the kernel does not report whether memory ran out)",
        ),
    ],
)
def test_sigkill_for_memory_is_told_apart(oom: bool | None, failure: FailureClass, words: str) -> None:
    cause = ended(None, signal=9, oom_killed=oom)
    assert (cause.failure, cause.reason, cause.exit_code) == (failure, words, 137)


def test_a_child_that_was_killed_for_memory_is_told_from_an_exit_code() -> None:
    """A shell between the rank and its program gives the code of the signal."""
    assert ended(137, oom_killed=True).failure is C.OUT_OF_MEMORY
    assert ended(137).failure is C.EXIT_CODE


RECORD = ErrorRecord("ValueError", "bad batch\nsecond line", traceback("ValueError: bad batch"))


def test_a_record_is_the_cause_even_when_the_rank_was_stopped_at_its_exit() -> None:
    known = {"signal": 15, "stopped_by_us": 15, "was_exiting": True, "uncaught": True, "step": 12}
    cause = ended(None, error_record=RECORD, **known)
    assert (cause.failure, cause.reason, cause.exit_code) == (C.USER_EXCEPTION, "ValueError: bad batch", 1)
    assert (cause.signal, cause.step) == (0, 12)


def test_a_record_of_an_exception_that_the_script_has_handled_does_not_explain_a_later_signal() -> None:
    assert ended(None, signal=11, uncaught=False, error_record=RECORD).failure is C.SIGNAL


@pytest.mark.parametrize("record", [None, RECORD])
@pytest.mark.parametrize("uncaught", [None, False, True])
@pytest.mark.parametrize("code", [1, 3])
def test_what_is_raised_after_our_stop_is_a_consequence(
    code: int, uncaught: bool | None, record: ErrorRecord | None
) -> None:
    """A handler of SIGTERM raises, or exits; Lightning's raises SIGTERMException."""
    text = traceback("SIGTERMException")
    late = ended(code, text, stopped_by_us=15, uncaught=uncaught, error_record=record)
    assert (late.failure, late.stopped) == (C.CONSEQUENCE, True)
    assert late.reason == "stopped by the launcher (SIGTERM)"
    paused = ended(code, text, is_paused=True, uncaught=uncaught, error_record=record)
    assert (paused.failure, paused.reason) == (
        C.CONSEQUENCE,
        "ended after the launcher had asked it to pause",
    )


def test_a_rank_that_had_begun_to_exit_before_our_stop_ends_by_itself() -> None:
    stopped = {"stopped_by_us": 15, "was_exiting": True}
    text = traceback("ValueError: bad batch")
    for number, code in ((0, 1), (15, None)):
        raised = ended(code, text, signal=number, uncaught=True, **stopped)
        assert (raised.reason, raised.exit_code, raised.stopped) == ("ValueError: bad batch", 1, False)
    left = ended(3, uncaught=False, **stopped)
    assert (left.failure, left.reason) == (C.EXIT_CODE, "exit code 3")
    successful = ended(None, text, signal=15, uncaught=False, **stopped)
    assert successful.stopped


STEPS = "".join(f"step {i}\n" for i in range(300))


@pytest.mark.parametrize("between", ["", "going on\n", STEPS])
@pytest.mark.parametrize("uncaught", [None, False])
def test_an_exception_that_the_script_has_handled_is_not_its_end(uncaught: bool | None, between: str) -> None:
    text = traceback("ConnectionRefusedError: [Errno 111] Connection refused") + between
    cause = ended(1, text + "no checkpoint found in /data\n", uncaught=uncaught)
    assert cause.failure is C.EXIT_CODE
    assert cause.reason == 'exit code 1 (last line on stderr: "no checkpoint found in /data")'
    assert cause.traceback.startswith("last lines on stderr, which may show why:\n")
    assert cause.traceback.endswith("\nno checkpoint found in /data")
    assert not cause.hint


def test_what_a_script_says_before_it_leaves_is_shown_and_is_not_called_the_cause() -> None:
    usage = "cannot start:\n  no data in /data\n  no checkpoint\n\nuse --data\n"
    leak = "[W1128 10:00:00.0 ProcessGroupGloo.cpp:1] Warning: destroy_process_group() was not called\n"
    said = ended(1, usage + leak, uncaught=False)
    assert said.reason == 'exit code 1 (last line on stderr: "use --data")'
    assert said.traceback.splitlines()[1:] == [line for line in usage.splitlines() if line]
    handled = traceback("KeyError: 'lr'")
    for code in (1, 3):
        cause = ended(code, handled, uncaught=False)
        assert cause.failure is C.EXIT_CODE
        assert cause.traceback.splitlines()[1:] == handled.splitlines()
    assert not ended(1, "no config\n", uncaught=False).traceback, "the headline has it"
    many = ended(1, STEPS, uncaught=False).traceback.splitlines()
    assert (len(many), many[-1]) == (41, "step 299")


def test_an_error_of_descriptors_is_not_a_lost_peer() -> None:
    gloo = "[enforce fail at gloo/transport/tcp/loop.cc:174] rv != -1. -1 vs -1. epoll_ctl: "
    for error in ("Bad file descriptor", "Too many open files"):
        thrown = f"terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  {gloo}{error}\n"
        cause = ended(None, thrown, signal=6)
        assert cause.failure is C.USER_EXCEPTION
        assert error in cause.reason
        assert cause.hint
        assert ended(1, traceback(f"RuntimeError: {gloo}{error}")).failure is C.USER_EXCEPTION


def test_the_last_traceback_of_a_script_that_leaves_by_itself_has_no_class() -> None:
    refused = traceback("ConnectionRefusedError: [Errno 111] Connection refused")
    assert ended(1, refused, uncaught=False).failure is C.EXIT_CODE
    assert ended(9, refused, uncaught=False).reason == "exit code 9"
    assert ended(1, traceback(PEER_GONE[0], file=TORCH), uncaught=False).failure is C.CONSEQUENCE


def test_an_uncaught_exception_is_the_end_whatever_is_printed_after_it() -> None:
    later = "".join(f"wandb: line {i}\n" for i in range(99))
    cause = ended(1, traceback("ValueError: bad batch") + later, uncaught=True)
    assert (cause.failure, cause.reason) == (C.USER_EXCEPTION, "ValueError: bad batch")


@pytest.mark.parametrize(("code", "number"), [(None, 15), (None, 9), (None, 6), (143, 0), (0, 0), (1, 0)])
def test_ended_by_our_stop(code: int | None, number: int) -> None:
    cause = ended(code, signal=number, stopped_by_us=15)
    assert (cause.failure, cause.stopped) == (C.CONSEQUENCE, True)


def test_the_same_signal_from_outside_is_a_cause() -> None:
    assert ended(None, signal=15).failure is C.SIGNAL


def test_long_accounts_are_bounded_and_keep_the_exception() -> None:
    frames = "".join(f'  File "t.py", line {i}, in f\n    f()\n' for i in range(500))
    deep = ended(1, f"Traceback (most recent call last):\n{frames}RecursionError: deep\n")
    assert len(deep.traceback.splitlines()) <= 40
    assert deep.traceback.endswith("RecursionError: deep")
    talkative = ended(1, traceback("ValueError: x\n" + "more\n" * 500), uncaught=True)
    assert "ValueError: x" in talkative.traceback
    assert len(talkative.traceback.splitlines()) <= 40
    assert len(ended(1, traceback("ValueError: " + "x" * 100_000)).reason) <= 600


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("ModuleNotFoundError: No module named 'nosuch.thing'", "nosuch is installed"),
        ("ImportError: cannot import name 'DDP' from 'ddp' (/home/u/ddp.py)", "rename it"),
        ("RuntimeError: CUDA error: device-side assert triggered", "CUDA_LAUNCH_BLOCKING"),
        ("OSError: [Errno 98] Address already in use", "a process uses that port"),
        ("ValueError: bad batch", ""),
    ],
)
def test_hints(error: str, hint: str) -> None:
    found = ended(1, traceback(error)).hint
    assert hint in found
    assert bool(hint) == bool(found)


LIBRARY = "/usr/lib/python3.11"


@pytest.mark.parametrize(
    ("error", "file", "is_shared_memory"),
    [
        ("OSError: [Errno 28] No space left on device", f"{LIBRARY}/multiprocessing/synchronize.py", True),
        ("OSError: [Errno 28] No space left on device", f"{LIBRARY}/multiprocessing/shared_memory.py", True),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/x'", "train.py", True),
        ("OSError: [Errno 28] No space left on device", "train.py", False),
        (
            "RuntimeError: unable to allocate shared memory(shm): No space left on device (28)",
            "train.py",
            True,
        ),
    ],
)
def test_a_full_shared_memory_is_told_from_a_full_disk(error: str, file: str, is_shared_memory: bool) -> None:
    hint = ended(1, traceback(error, file=file)).hint
    assert hint.startswith("/dev/shm ") is is_shared_memory
    assert "/dev/shm" in hint


@pytest.mark.parametrize(
    ("error", "file", "names"),
    [
        ("ModuleNotFoundError: No module named 'torch.nn'; 'torch' is not a package", "train.py", "torch.py"),
        (
            "AttributeError: module 'signal' has no attribute 'SIGINT'",
            f"{LIBRARY}/subprocess.py",
            "signal.py",
        ),
        ("AttributeError: module 'time' has no attribute 'slep'", "train.py", ""),
        (
            "ImportError: cannot import name 'PIPE' from 'subprocess' (/home/u/subprocess.py)",
            f"{LIBRARY}/site-packages/torch/a.py",
            "subprocess.py",
        ),
        ("ImportError: cannot import name 'step' from 'utils' (/home/u/utils.py)", "train.py", ""),
        (
            "AttributeError: module 'torch' has no attribute 'new'",
            f"{LIBRARY}/site-packages/transformers/a.py",
            "",
        ),
    ],
)
def test_a_file_that_hides_a_module_is_named(error: str, file: str, names: str) -> None:
    hint = ended(stderr=traceback(error, file=file)).hint
    assert names in hint
    assert bool(hint) == bool(names)


SITE = f"{LIBRARY}/site-packages"


@pytest.mark.parametrize(
    ("error", "file", "hint"),
    [
        ("AttributeError: module 'json' has no attribute 'JSONEncoder'", f"{SITE}/a.py", "/home/u/json.py hides"),
        (
            "AttributeError: partially initialized module 'json' has no attribute 'loads' (most likely due to a "
            "circular import)",
            f"{SITE}/a.py",
            "/home/u/json.py hides",
        ),
        ("AttributeError: module 'numpy' has no attribute 'ndarray'", f"{SITE}/a.py", "/home/u/numpy hides"),
        ("ImportError: cannot import name 'nn' from 'numpy' (unknown location)", "train.py", "/home/u/numpy hides"),
        ("ModuleNotFoundError: No module named 'numpy.linalg'", "train.py", "/home/u/numpy hides"),
        ("AttributeError: module 'numpy.linalg' has no attribute 'x'", "train.py", "/home/u/numpy hides"),
        ("AttributeError: module 'torch' has no attribute 'new'", f"{SITE}/a.py", ""),
        ("ValueError: module 'json' has no attribute 'x'", f"{SITE}/a.py", ""),
    ],
)  # fmt: skip
def test_a_file_that_the_agent_has_found_is_named_whoever_raised(error: str, file: str, hint: str) -> None:
    found = ended(
        stderr=traceback(error, file=file), hiding={"json": "/home/u/json.py", "numpy": "/home/u/numpy"}
    )
    assert found.hint.startswith(hint)
    assert bool(found.hint) == bool(hint)


def test_modules_in_question() -> None:
    lines = [
        "AttributeError: module 'a.b' has no attribute 'c'",
        "ImportError: cannot import name 'd' from partially initialized module 'e.f' (most likely ...)",
        "ModuleNotFoundError: No module named 'g.h'; 'g' is not a package",
        "ModuleNotFoundError: No module named 'absent'",
    ]
    assert modules_named("\n".join(lines)) == ("g", "e", "a")
    assert len(modules_named("\n".join(f"module 'm{i}' has no attribute 'x'" for i in range(99)))) == 8


def test_a_broken_connection_in_a_function_that_we_wrap_is_of_torch() -> None:
    marks = str(ROOT / "ddp" / "telemetry" / "collective_marks.py")
    assert Path(marks).exists()
    frames = "".join(f'  File "{file}", line 1, in f\n    f()\n' for file in ("train.py", TORCH, marks))
    found = ended(
        stderr=f"Traceback (most recent call last):\n{frames}RuntimeError: Connection reset by peer\n"
    )
    assert found.failure is FailureClass.CONSEQUENCE


def test_shell_code() -> None:
    assert shell_code(RankEnd("a", 0, 0, exit_code=None, signal=signal.SIGSEGV)) == 139
    assert shell_code(RankEnd("a", 0, 0, exit_code=3)) == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Traceback (most recent call last):",
        "  + Exception Group Traceback (most",
        "\r\r\x1b[",
        "terminate called",
    ],
)
def test_text_cut_anywhere_is_survived(text: str) -> None:
    assert ended(1, text).reason.startswith("exit code 1")


def test_an_account_too_long_to_keep_is_told_from_both_its_ends() -> None:
    frame = '  File "train.py", line 7, in step\n    go()\n'
    cut = traceback("").rstrip("\n") + "\n" + CUT + "\n"
    assert ended(stderr=f"{cut}{frame * 500}RecursionError: too deep\n").reason == "RecursionError: too deep"
    message = traceback("RuntimeError: Missing keys: " + "a, " * 3000) + CUT + "\n"
    assert ended(stderr=message).reason.startswith("RuntimeError: Missing keys: a, a,")
    survived = traceback("KeyError: 'long ago'") + CUT + "\n" + "step done\n" * 50 + "no data left\n"
    assert ended(stderr=survived).reason == 'exit code 1 (last line on stderr: "no data left")'


def test_a_script_that_went_away_is_not_said_to_refuse_its_arguments() -> None:
    gone = ended(2, "python: can't open file '/x/train.py': [Errno 2] No such file or directory\n")
    assert "can't open file" in gone.reason
    assert not gone.hint
    assert ended(2, "usage: t.py\nt.py: error: unrecognized arguments: --x\n").hint


def test_an_abort_on_the_way_out_does_not_hide_the_exception_before_it() -> None:
    """Seen with gloo, under plain python too: the group's thread is left when the interpreter ends."""
    stderr = traceback("ValueError: own mistake") + "terminate called without an active exception\n"
    cause = ended(None, stderr, signal=signal.SIGABRT)
    assert (cause.reason, cause.failure) == ("ValueError: own mistake", C.USER_EXCEPTION)
    assert cause.exit_code == 1


def test_an_abort_of_its_own_is_an_abort() -> None:
    thrown = "terminate called after throwing an instance of 'std::runtime_error'\n  what():  broken\n"
    for stderr in (
        "terminate called without an active exception\n",
        traceback("ValueError: caught") + thrown,
    ):
        assert ended(None, stderr, signal=signal.SIGABRT).reason.startswith("killed by SIGABRT")
