"""What torch's NCCL watchdog prints, and what follows from it for the cause of a failure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.failure.verdict import RankEnd, cause_of, cause_of_asynchronous
from rendezvous.rounds.policy import first_cause_order, in_words
from rendezvous.values.types import Cause, Doubt
from rendezvous.values.types import FailureClass as C

_LOG = "[rank1]:[E1123 03:58:16.318489074 ProcessGroupNCCL.cpp:568] [Rank 1] "
_WORK = "WorkNCCL(SeqNum=45, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=1800000)"
_STATE = "NCCL reports COMM_ERROR in process group 0"
_NEXT = "[rank1]:[E1123 03:58:16.3 ProcessGroupNCCL.cpp:2252] [PG ID 0 PG GUID 0 Rank 1]  failure detected\n"
_RUNS = RankEnd("node-b", 1, 1, None, ran_s=900.0, step=45, log="/logs/1/stderr.log")


def printed(error: str) -> str:
    return f"{_LOG}Collective {_WORK} raised the following async exception: {error}\n{_NEXT}"


def system(last: str) -> str:
    kind = (
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. "
    )
    return f"NCCL error: unhandled system error, NCCL version 2.27.5\n{kind}\nLast error:\n{last}"


_REMOTE = (
    "NCCL error: remote process exited or there was a network error, NCCL version 2.27.5\nncclRemoteError: A call "
    "failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
    "socketProgress: Connection closed by remote peer node-c<50001>"
)


def seen(stderr: str, state: str = _STATE) -> Cause:
    return cause_of_asynchronous(replace(_RUNS, stderr_tail=stderr), state)


def test_the_text_on_stderr_is_taken_for_the_state() -> None:
    cause = seen(printed(system("NET/IB : mlx5_0:1 Got async event : port error")))
    assert (cause.failure, cause.doubt) == (C.NETWORK, None)
    assert cause.reason.endswith("last error: NET/IB : mlx5_0:1 Got async event : port error")
    assert (cause.step, cause.ran_s, cause.log) == (45, 900.0, "/logs/1/stderr.log")


def test_an_error_that_lies_between_two_ranks_accuses_neither() -> None:
    cause = seen(
        printed(system("NET/IB: Got completion from peer 10.0.0.5<4000> with status=12 opcode=0 len=0"))
    )
    assert (cause.failure, cause.doubt, cause.suspects) == (C.NETWORK, Doubt.CULPRIT, (1,))


def test_an_error_of_a_peer_is_a_consequence() -> None:
    cause = seen(printed(_REMOTE))
    assert (cause.failure, cause.doubt) == (C.CONSEQUENCE, None)
    assert in_words(cause) == "rank 1 on node-b lost the connection to its peers"


@pytest.mark.parametrize(
    "stderr", ["", "an unrelated line\n", printed("NCCL error: internal error - please report")]
)
def test_what_is_not_known_stays_uncertain(stderr: str) -> None:
    cause = seen(stderr)
    assert (cause.failure, cause.doubt) == (C.CONSEQUENCE, Doubt.CULPRIT)
    assert in_words(cause).startswith("cause uncertain: rank 1: NCCL ")


def test_a_timeout_is_never_taken_for_an_error_of_this_rank() -> None:
    line = f"{_LOG}Watchdog caught collective operation timeout: {_WORK} ran for 1800012 milliseconds"
    for stderr in ("", f"{line}\n"):
        cause = seen(stderr, "Watchdog caught collective operation timeout in process group 0 (NCCL)")
        assert cause.failure is C.CONSEQUENCE
        assert cause.reason.startswith("Watchdog caught collective operation timeout")


def test_warnings_of_nccl_complete_an_error_without_details() -> None:
    warning = (
        "node-b:123:163 [0] misc/socket.cc:77 NCCL WARN NET/IB : mlx5_0:1 Got async event : port error\n"
    )
    cause = seen(warning + printed("NCCL error: unhandled system error, NCCL version 2.27.5"))
    assert (cause.failure, cause.doubt) == (C.NETWORK, None)
    assert "mlx5_0" in cause.reason


def test_a_lost_node_comes_before_an_error_between_two_ranks() -> None:
    lost = Cause("node-c", 2, 0, C.NODE_LOST, "node node-c was lost", 1)
    between = seen(
        printed(system("socketStartConnect: Connect to 10.1.2.3<4711> failed : Connection timed out"))
    )
    own = seen(printed(system("NET/IB : mlx5_0:1 Got async event : port error")))
    remote, unknown = seen(printed(_REMOTE)), seen("")
    ordered = sorted([remote, unknown, between, lost, own], key=first_cause_order)
    assert ordered == [own, lost, between, unknown, remote]


def test_a_rank_that_was_stopped_is_reported_with_the_error_of_its_own_that_torch_has_printed() -> None:
    stopped = replace(_RUNS, signal=15, stopped_by_us=15)
    own, between = (
        cause_of(replace(stopped, stderr_tail=printed(system(last))))
        for last in (
            "NET/IB : mlx5_0:1 Got async event : port error",
            "socketStartConnect: Connect to b<1> failed",
        )
    )
    assert (own.failure, own.doubt) == (C.NETWORK, None)
    assert (between.failure, between.doubt, between.suspects) == (C.NETWORK, Doubt.CULPRIT, (1,))
    for text in (printed(_REMOTE), printed("NCCL error: internal error")):
        assert cause_of(replace(stopped, stderr_tail=text)).stopped


def aborted(what: str) -> Cause:
    prefix = (
        "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: "
    )
    thrown = (
        f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {prefix}{what}\n"
    )
    return cause_of(replace(_RUNS, signal=6, stderr_tail=thrown))


def test_an_abort_by_the_watchdog_is_named_by_the_error_that_it_found() -> None:
    illegal = aborted(
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported late"
    )
    assert illegal.failure is C.USER_EXCEPTION  # a signal would count against the node
    assert illegal.reason.endswith(
        "c10::DistBackendError: CUDA error: an illegal memory access was encountered"
    )
    assert aborted("CUDA error: uncorrectable ECC error encountered").failure is C.HARDWARE
    assert aborted(_REMOTE).failure is C.CONSEQUENCE
    assert (
        aborted(f"[Rank 1] Watchdog caught collective operation timeout: {_WORK} ran").failure
        is C.CONSEQUENCE
    )


@pytest.mark.parametrize(
    ("why", "failure", "doubt"),
    [
        ("collective timeout or exception", C.CONSEQUENCE, None),
        ("ProcessGroupNCCL watchdog hang", C.HANG, Doubt.CULPRIT),
    ],
)
def test_an_abort_by_the_monitor_is_not_a_crash_of_this_rank(
    why: str, failure: C, doubt: Doubt | None
) -> None:
    fatal = f"Terminating the process after attempting to dump debug info, due to {why}."
    line = f"[rank1]:[F1123 04:00:00.1 ProcessGroupNCCL.cpp:1560] [PG ID 0 PG GUID 0(default_pg) Rank 1] {fatal}\n"
    cause = cause_of(replace(_RUNS, signal=6, stderr_tail=line))
    assert (cause.failure, cause.doubt) == (failure, doubt)
    assert why in cause.reason


def test_a_rank_that_the_monitor_aborts_is_named_also_if_it_was_stopped_meanwhile() -> None:
    """Its peers notice the end of their connections first, and the launcher may stop all ranks for that."""
    fatal = "Terminating the process after attempting to dump debug info, due to {}."
    line = "[rank1]:[F1123 04:00:00.1 ProcessGroupNCCL.cpp:1560] [PG ID 0 PG GUID 0(default_pg) Rank 1] {}\n"
    stopped = replace(_RUNS, signal=6, stopped_by_us=15)
    hangs, times_out = (
        cause_of(replace(stopped, stderr_tail=line.format(fatal.format(why))))
        for why in ("ProcessGroupNCCL watchdog hang", "collective timeout or exception")
    )
    assert (hangs.failure, hangs.doubt, hangs.stopped) == (C.HANG, Doubt.CULPRIT, False)
    assert times_out.stopped


# --- nccl2 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("why", "failure", "doubt", "words"),
    [
        ("timeout - collective operation timed out", C.CONSEQUENCE, None, "collective operation timeout"),
        ("timeout - timeout watchdog detected operation timeout", C.CONSEQUENCE, None, "operation timeout"),
        (
            "error - nccl hit async error: remote process exited or there was a network error",
            C.CONSEQUENCE,
            None,
            "NCCL error: remote process exited",
        ),
        (
            "error - nccl hit async error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
            C.NETWORK,
            Doubt.CULPRIT,
            "NCCL error: unhandled system error",
        ),
        (
            "error - timeout watchdog detected operation error",
            C.CONSEQUENCE,
            Doubt.CULPRIT,
            "watchdog detected operation error",
        ),
    ],
)
def test_an_abort_by_the_watchdog_of_nccl2(why: str, failure: C, doubt: Doubt | None, words: str) -> None:
    place = "[rank1]:[E1123 04:00:00.1 ProcessGroupNCCL.cpp:610] [TC][rank=1][name=0]"
    lines = (
        f"{place} nccl hit async error on rank 1: an error\n{place} Aborting process on rank 1 due to {why}\n"
    )
    cause = cause_of(replace(_RUNS, signal=6, stderr_tail=lines))
    assert (cause.failure, cause.doubt) == (failure, doubt)
    assert words in cause.reason


def test_an_abort_by_nccl2_shows_what_nccl_has_warned_of() -> None:
    warning = "node1:12:34 [0] misc/socket.cc:50 NCCL WARN socketProgress: Connection closed by remote peer\n"
    place = "[rank1]:[E1123 04:00:00.1 ProcessGroupNCCL.cpp:610] [TC][rank=1][name=0]"
    why = "error - nccl hit async error: remote process exited or there was a network error"
    lines = f"{warning}{place} Aborting process on rank 1 due to {why}\n"
    cause = cause_of(replace(_RUNS, signal=6, stderr_tail=lines))
    assert "Connection closed by remote peer" in cause.reason


def test_the_words_of_nccl2_in_the_output_of_a_script_are_no_abort() -> None:
    cause = cause_of(replace(_RUNS, signal=6, stderr_tail="Aborting process on rank 1 due to error - x\n"))
    assert cause.failure is C.SIGNAL
