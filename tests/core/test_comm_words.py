"""Which errors are about a peer or a connection, and not about the script."""

from __future__ import annotations

import pytest

from ddp.telemetry.comm_words import is_communication_error, is_fault_of_this_rank


class DistError(RuntimeError):
    """As torch names it. These tests do not import torch."""


class DistBackendError(DistError): ...


QUOTED = (
    "Got the following error when running the callback: DistBackendError: rank 0 died (noticed by rank 1)"
)


@pytest.mark.parametrize(
    ("error", "is_about_communication"),
    [
        (RuntimeError(QUOTED), True),  # torch's reducer, over a group that was made in Python
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (RuntimeError("The size of tensor a (8) must match the size of tensor b (4)"), False),
        (ValueError("connection reset by peer"), False),
        (RuntimeError("ProcessGroupGloo::allgather: invalid tensor size at index 1"), False),
        (RuntimeError("Cannot use ReduceOp.PREMUL_SUM with Gloo"), False),
        (RuntimeError("Backend gloo does not support alltoall_base"), False),
        (RuntimeError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!"), False),
        (
            NotImplementedError("the mpi4py backend does not support sparse tensors. Use the backend gloo"),
            False,
        ),
        (DistBackendError("MPI: MPI_ERR_COUNT: invalid count argument"), False),
        (DistBackendError("MPI: MPI_ERR_PROC_FAILED: process failure"), True),
        (DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1, invalid usage\nncclInvalidUsage"), False),
        (DistBackendError("NCCL error: unhandled system error\nsocket closed by remote peer"), True),
    ],
)
def test_an_error_of_communication_is_recognized(error: Exception, is_about_communication: bool) -> None:
    assert is_communication_error(error) is is_about_communication


@pytest.mark.parametrize(
    ("text", "own"),
    [
        (
            "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)\nDuplicate GPU detected : rank 1",
            True,
        ),
        ("NCCL error: unhandled system error\nLast error:\nBootstrap : no socket interface found", True),
        (
            "NCCL error: unhandled system error\nLast error:\nNET/IB : mlx5_0:1 Got async event : port error",
            True,
        ),
        (
            "NCCL error: unhandled system error\nsocketProgress: Connection closed by remote peer node-1<5>",
            False,
        ),
        ("NCCL error: remote process exited or there was a network error", False),
        ("Connection closed by peer [127.0.0.1]:1", False),
        ("the tensor has an invalid argument", False),
    ],
)
def test_faults_of_a_rank_itself_are_not_waited_out(text: str, own: bool) -> None:
    assert is_fault_of_this_rank(RuntimeError(text)) is own
