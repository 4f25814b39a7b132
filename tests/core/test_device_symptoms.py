"""Messages of NCCL, CUDA, Gloo, the network's drivers and our own groups, as they are printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.failure.symptoms import TABLE, SuggestedAction, symptom
from launcher.failure.verdict import RankEnd, cause_of
from launcher.health import nccl_env
from launcher.machine.xids import XIDS, xid_in
from rendezvous.values.types import Cause
from rendezvous.values.types import FailureClass as C

_NCCL = "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, "
_HEAD = 'Traceback (most recent call last):\n  File "/job/train.py", line 7, in step\n    loss.backward()\n'

MESSAGES = [
    (
        _NCCL
        + "remote process exited or there was a network error, NCCL version 2.27.5\nncclRemoteError: A call "
        "failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
        "socketProgress: Connection closed by remote peer node-b<45678>",
        C.CONSEQUENCE,
        "first cause",
    ),
    (
        _NCCL + "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
        "Last error:\nsocketStartConnect: Connect to 10.1.2.3<4711> failed : Software caused connection abort",
        C.NETWORK,
        "NCCL_DEBUG=INFO",
    ),
    (
        _NCCL + "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
        "Last error:\nError while creating shared memory segment /dev/shm/nccl-7Kq1bB (size 9637888)",
        C.OUT_OF_MEMORY,
        "--shm-size",
    ),
    (
        _NCCL + "unhandled system error, NCCL version 2.27.5\nLast error:\n"
        "Call to ibv_reg_mr failed with error Cannot allocate memory",
        C.OUT_OF_MEMORY,
        "",
    ),
    (
        _NCCL
        + "unhandled system error, NCCL version 2.27.5\nLast error:\nCall to ibv_reg_mr_iova2 failed with "
        "error Bad address",
        C.NETWORK,
        "ulimit -l unlimited",
    ),
    (
        _NCCL + "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
        C.OUT_OF_MEMORY,
        "",
    ),
    (
        _NCCL
        + "unhandled cuda error, NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 999 'unknown error'",
        C.HARDWARE,
        "nvidia-smi",
    ),
    (
        _NCCL
        + "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.5\nncclInvalidUsage: This "
        "usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 "
        "both on CUDA device 1a000",
        C.USER_EXCEPTION,
        "set_device",
    ),
    (
        _NCCL + "internal error - please report this issue to the NCCL developers, NCCL version 2.27.5\n"
        "ncclInternalError: Internal check failed.",
        C.USER_EXCEPTION,
        "NCCL_DEBUG",
    ),
    (
        "torch.distributed.DistBackendError: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum="
        "1234, OpType=ALLREDUCE, NumelIn=262144, NumelOut=262144, Timeout(ms)=600000) ran for 600031 milliseconds "
        "before timing out.",
        C.CONSEQUENCE,
        "flight recorder",
    ),
    (
        "torch.AcceleratorError: CUDA error: device-side assert triggered",
        C.USER_EXCEPTION,
        "CUDA_LAUNCH_BLOCKING",
    ),
    (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        C.OUT_OF_MEMORY,
        "smaller batch",
    ),
    ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", C.HARDWARE, "Xid"),
    (
        "torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution",
        C.HARDWARE,
        "nvidia-smi nvlink",
    ),
    (
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        C.USER_EXCEPTION,
        "compute-sanitizer",
    ),
    ("RuntimeError: CUDA error: unspecified launch failure", C.USER_EXCEPTION, "dmesg"),
    (
        "RuntimeError: GPU lost: NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.",
        C.HARDWARE,
        "Xid 79",
    ),
    (
        _NCCL
        + "remote process exited or there was a network error\nLast error:\nNET/IB: Got completion from peer "
        "10.0.0.5<40000> with status=12 opcode=0 len=0 vendor err 129 (Recv)",
        C.CONSEQUENCE,
        "first cause",
    ),
    (
        _NCCL + "unhandled system error\nLast error:\nNET/IB: Got completion from peer 10.0.0.5<40000> with "
        "status=12 opcode=0 len=0 vendor err 129 (Recv)",
        C.NETWORK,
        "ibstat",
    ),
    (
        _NCCL + "unhandled system error\nLast error:\nNET/IB : mlx5_0:1 Got async event : port error",
        C.NETWORK,
        "ibstat",
    ),
    (
        _NCCL
        + "unhandled system error\nLast error:\nNET/OFI Request 0x7f completed with error. RC: 103. Error: "
        "unreachable remote",
        C.NETWORK,
        "fi_info",
    ),
    (
        _NCCL + "unhandled system error\nLast error:\nBootstrap : no socket interface found",
        C.NETWORK,
        "NCCL_SOCKET_IFNAME",
    ),
    (
        _NCCL
        + "unhandled system error\nLast error:\nsocketStartConnect: Connect to 10.1.2.3<4711> failed : No "
        "route to host",
        C.NETWORK,
        "NCCL_SOCKET_IFNAME",
    ),
    (
        "torch.distributed.DistBackendError: rank 2 died (noticed by rank 0); this rank was in all-reduce",
        C.CONSEQUENCE,
        "",
    ),
    (
        "torch.distributed.DistBackendError: rank 1 aborted the process group; this rank was in all-reduce",
        C.CONSEQUENCE,
        "",
    ),
    (
        "torch.distributed.DistBackendError: rank 1 has not joined all-reduce in time; rank 0 waited 5.0 s for it",
        C.CONSEQUENCE,
        "",
    ),
]


def ended(error: str) -> Cause:
    return cause_of(RankEnd("node-a", 1, 1, 1, stderr_tail=f"{_HEAD}{error}\n"))


@pytest.mark.parametrize(
    ("error", "failure", "hint"), MESSAGES, ids=[error[-40:] for error, _, _ in MESSAGES]
)
def test_messages(error: str, failure: C, hint: str) -> None:
    cause = ended(error)
    assert cause.failure is failure
    assert hint in cause.hint


# torch 2.11 adds this to every error of CUDA; older releases have a part of it.
_NOTE = (
    "\nSearch for `cudaErrorUnknown' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for "
    "more information.\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
_OF_CUDA = [message for message in MESSAGES if "Error: CUDA error: " in message[0]]


@pytest.mark.parametrize(("error", "failure", "hint"), _OF_CUDA, ids=[each[0][-40:] for each in _OF_CUDA])
def test_the_note_that_torch_adds_changes_nothing(error: str, failure: C, hint: str) -> None:
    cause = ended(error + _NOTE)
    assert cause.failure is failure
    assert hint in cause.hint


def test_collectives_that_do_not_fit_blame_nobody_with_certainty() -> None:
    said = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at "
        "/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 2732 vs 4. "
        "Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?"
    )
    cause = cause_of(RankEnd("node-a", 1, 1, None, signal=6, stderr_tail=said))
    assert (cause.failure, cause.uncertain) == (C.USER_EXCEPTION, True)
    assert cause.reason.startswith("the collectives of the ranks do not match: gloo::EnforceNotMet")
    assert cause.hint == TABLE[0].hint


def test_a_comm_error_is_a_consequence_unless_what_it_is_chained_to_is_not() -> None:
    joint = "\nThe above exception was the direct cause of the following exception:\n\n"
    ours = (
        _HEAD
        + "ddp.CommError: all_reduce #7 has failed: rank 2 (on b) is gone: it died, or left before the others\n"
    )
    gone = _HEAD + "RuntimeError: [pair.cc:553] gloo/transport/tcp: Connection closed by peer [::1]:1.\n"
    ecc = _HEAD + "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered in nccl\n"
    classes = [
        cause_of(RankEnd("a", 1, 1, 1, stderr_tail=first + joint + ours)).failure for first in (gone, ecc)
    ]
    assert classes == [C.CONSEQUENCE, C.HARDWARE]


def test_what_the_script_says_itself_is_its_own_affair() -> None:
    assert ended("ValueError: no route to host in the routing table, nccl").failure is C.USER_EXCEPTION
    assert ended("RuntimeError: the NVLink diagram is missing").failure is C.USER_EXCEPTION


def test_every_line_of_the_table_is_reached() -> None:
    for line in TABLE:
        assert any(symptom(f"nccl: {needle} x") is line for needle in line.phrases), line.phrases
    assert {line.restart for line in TABLE if line.failure is C.HARDWARE} == {SuggestedAction.EXCLUDE}
    assert {line.restart for line in TABLE if line.failure is C.USER_EXCEPTION} == {SuggestedAction.FAIL}


def test_the_page_shows_the_tables() -> None:
    page = (Path(__file__).parents[2] / "docs" / "communication-errors.md").read_text()
    for line in TABLE:
        said = ", ".join(f"`{needle}`" for needle in line.phrases)
        assert f"| {said} | {line.failure} | {line.restart} | {line.hint} |" in page
    for name, value, why in nccl_env.SHARED:
        assert f"| `{name}` | `{value}` | {why} |" in page
    assert all(f"| `{name}` | a path | {why} |" in page for name, why in nccl_env.OF_RANK)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", 79),
        ("NVRM: Xid (PCI:0000:0a:00): 119, pid=1, Timeout waiting for RPC from GSP0", 119),
        ("Xid 48", 48),
        ("no such thing", None),
    ],
)
def test_numbers_of_xids(text: str, number: int | None) -> None:
    assert xid_in(text) == number
    assert number is None or number in XIDS
