"""Errors of NCCL, on a backend for CPUs that reports them as ProcessGroupNCCL does (tests/nccl)."""

from __future__ import annotations

from typing import Any

from fault_case import Case, Kind

_PATIENT = ("--hang-timeout", "60")  # the launcher's own search for hangs is not what finds the fault
_QUICK_DUMPS = (("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "500"),)  # as the launcher sets it on nodes with GPUs
_PORT = "NCCL error: unhandled system error .* port error"
_TIMEOUT = ("--timeout", "1")


def nccl(name: str, injected: str, fault: str, says: str, place: str = "tally", **more: Any) -> Case:
    given: dict[str, Any] = {
        "wrap": "plain",
        "backend": "nccl_like",
        "options": _PATIENT,
        "env": _QUICK_DUMPS,
    }
    return Case(name, injected, says, Kind.NCCL, f"{fault}@{place}" if fault else "", **(given | more))


NCCL = (
    nccl(
        "nccl-port", "the network card of a rank fails; its peers get remote errors", "nccl_port_error", _PORT
    ),
    nccl("nccl-port-ours", "the same", "nccl_port_error", _PORT, wrap="ours"),
    nccl("nccl-port-torch", "the same", "nccl_port_error", _PORT, wrap="torch"),
    nccl(
        "nccl-port-unprinted",
        "the same, and torch does not print the error",
        "nccl_port_error_unprinted",
        "cause uncertain: rank 1: NCCL reports COMM_ERROR|lost the connection to its peers",
        blamed=None,
        certain=None,
    ),
    nccl(
        "nccl-port-checkpoint",
        "the network card fails while all ranks make a checkpoint of ddp.elastic",
        "nccl_port_error_in_a_checkpoint",
        _PORT,
        "checkpoint",
        commits=(0, 1, 2),
        heals=False,  # it makes a State of its own
    ),
    nccl(
        "nccl-port-group",
        "the same in a collective of a smaller group; a third rank waits in one of all ranks",
        "nccl_port_error_in_a_group",
        _PORT,
        "pairs",
        commits=(0, 1),
    ),
    nccl(
        "nccl-port-two-nodes",
        "the same on the second of two nodes",
        "nccl_port_error",
        "rank 3 .* port error",
        nodes=2,
        ranks=2,
        commits=(3,),
        blamed=(3,),
    ),
    nccl(
        "nccl-port-unhandled",
        "the same in a step, with TORCH_NCCL_ASYNC_ERROR_HANDLING=0: torch never ends the process",
        "nccl_port_error",
        _PORT,
        env=(*_QUICK_DUMPS, ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")),
    ),
    nccl(
        "nccl-port-propagated",
        "the same with TORCH_NCCL_PROPAGATE_ERROR=1: torch tells the other ranks",
        "nccl_port_error",
        _PORT,
        env=(*_QUICK_DUMPS, ("TORCH_NCCL_PROPAGATE_ERROR", "1")),
    ),
    nccl(
        "nccl-port-blocking",
        "the same with TORCH_NCCL_BLOCKING_WAIT=1: no watchdog, the waiting call raises the error",
        "nccl_port_error",
        _PORT,
        env=(("TORCH_NCCL_BLOCKING_WAIT", "1"),),
    ),
    nccl(
        "nccl-timeout-blocking",
        "a rank sleeps until the waiting calls of the others time out",
        "nccl_sleeps",
        "rank 1 .*sleeping",
        heals=False,  # their calls raise the error of a lost peer, and nobody has ended who could be asked
        env=(("TORCH_NCCL_BLOCKING_WAIT", "1"),),
        script_options=_TIMEOUT,
        bound_s=3.0,
    ),
    nccl(
        "nccl-killed-silently",
        "SIGKILL to a rank; its peers do not notice, as over NVLink",
        "nccl_is_silent",
        "SIGKILL",
        "step",
        commits=(0, 2),
        outside="kill_rank",
    ),
    nccl(
        "nccl-no-answer",
        "a completion with status 12: one of two network cards does not answer",
        "nccl_no_answer",
        "network; cause uncertain: rank 1: .*from peer .* with status=12",
        certain=False,
    ),
    nccl(
        "nccl-link",
        "a connection between two ranks breaks; both live, and one of them notices",
        "nccl_lost_link",
        "rank 1 on .* lost the connection to its peers",
        blamed=(),
        certain=None,
    ),
    nccl(
        "nccl-internal",
        "an internal error of NCCL on one rank",
        "nccl_internal_error",
        "cause uncertain: rank 1: NCCL error: internal error",
        certain=False,
    ),
    nccl("nccl-usage", "a call that NCCL rejects", "nccl_invalid_usage", "invalid usage"),
    nccl(
        "nccl-illegal-access",
        "a kernel accesses memory illegally; torch's watchdog ends the process",
        "nccl_illegal_access",
        "SIGABRT: .*illegal memory access",
    ),
    nccl("nccl-ecc", "an uncorrectable memory error of a GPU", "nccl_ecc", "SIGABRT: .*uncorrectable ECC"),
    nccl("nccl-killed", "SIGKILL to a rank; its peers get remote errors", "", "SIGKILL", outside="kill_rank"),
    nccl(
        "nccl-dies-slowly",
        "a process that takes 0.2 s to end: its peers report their errors before",
        "nccl_dies_slowly",
        "SIGSEGV",
    ),
    nccl(
        "nccl-abort-hangs",
        "the card fails, the abort of the communicator never returns, and the script handles SIGTERM",
        "nccl_port_error_and_abort_hangs",
        _PORT,
        script_options=("--handles-sigterm",),
        bound_s=4.0,  # --shutdown-timeout is 2 s
    ),
    nccl(
        "nccl-timeout",
        "a rank sleeps until the timeout of the process group expires on the others",
        "nccl_sleeps",
        "rank 1 .*sleeping",
        script_options=_TIMEOUT,
        bound_s=3.0,
    ),
    nccl(
        "nccl-timeout-unguarded",
        "the same without tracing: torch's watchdogs end the processes",
        "nccl_sleeps",
        "",
        script_options=_TIMEOUT,
        options=(*_PATIENT, "--trace-collectives", "off"),
        blamed=None,
        certain=None,
        bound_s=6.0,
    ),
    nccl(
        "nccl-watchdog-hangs",
        "an operation and torch's watchdog thread hang; torch's monitor ends the process",
        "nccl_watchdog_hangs",
        "ProcessGroupNCCL watchdog hang",
        env=(
            *_QUICK_DUMPS,
            ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "1"),
            ("TORCH_NCCL_COORD_CHECK_MILSEC", "200"),
        ),
        certain=False,
        bound_s=6.0,
    ),
    nccl(
        "nccl-init-hangs",
        "communicators that are never created: all ranks wait in their first collective",
        "nccl_init_hangs",
        "no rank is the cause",
        "start",
        commits=(0, 1, 2),
        options=("--hang-timeout", "3,start=3,first-step=3"),
        blamed=(),
        certain=False,
        bound_s=6.0,
    ),
    nccl(
        "nccl-init-fails",
        "a rank without a network interface cannot create its communicator",
        "nccl_init_fails",
        "no socket interface",
        "start",
        keeps=False,  # the others are in the middle of the creation of theirs
    ),
    nccl(
        "nccl-other-op",
        "broadcast where the others call all_reduce",
        "other_operation",
        "entered broadcast",
        options=(),
        bound_s=6.0,
    ),
    nccl(
        "nccl-node-lost",
        "a node of two ranks disappears; the others get remote errors",
        "",
        "node .* was lost",
        outside="kill_node",
        nodes=2,
        ranks=2,
        has_service=True,
        blamed=(),
        bound_s=8.0,
    ),
)
