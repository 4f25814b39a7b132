"""Codes 5 and 6: why a job failed, and errors of ddp.launch."""

from __future__ import annotations

from rendezvous.explained.entry import Entry
from rendezvous.values.error_codes import Code

_LOG = "Read the log of the rank that the message names: `ddpctl why JOB`, or the box at the end of the job."

ENTRIES = (
    Entry(
        Code.RANK_OUT_OF_MEMORY,
        "A rank ran out of memory.",
        (
            "The model and its batch do not fit into the GPU.",
            "The kernel killed a process to free memory of the host.",
        ),
        (
            "Use a smaller batch, activation checkpointing, or sharding.",
            "For memory of the host: use fewer workers of the data loader, or raise the limit of the container.",
        ),
        "rank 3 on node1 failed first: torch.OutOfMemoryError: CUDA out of memory.",
        "operations",
    ),
    Entry(
        Code.RANK_HARDWARE,
        "A device of a rank failed.",
        ("The driver reported an error of the GPU (Xid), of its memory or of NVLink.",),
        (
            "Drain the node: `ddpctl drain JOB NODE`. `ddp-launch doctor` checks it.",
            "With --failure-policy hardware=exclude, the job goes on without the node by itself.",
        ),
        "rank 5 on node2 failed first: Xid 79: the GPU has fallen off the bus",
        "health",
    ),
    Entry(
        Code.RANK_NETWORK,
        "A rank lost its connections, and no other rank had failed before.",
        ("A network card, a cable or a switch failed.", "A firewall closes idle connections."),
        ("Test the network: `ddp-launch doctor --nnodes N --rendezvous HOST:PORT`.", _LOG),
        "rank 1 on node1 failed first: NCCL: unhandled system error",
        "communication-errors",
    ),
    Entry(
        Code.RANK_EXCEPTION,
        "The script raised an exception in a rank.",
        ("The traceback in the message shows the line.",),
        ("Correct the script.", "To stop at the exception: `ddp-launch --debug RANK script.py`."),
        "rank 0 on node1 failed first: ValueError: bad batch",
        "logs",
    ),
    Entry(
        Code.RANK_SIGNAL,
        "A signal killed a rank.",
        (
            "SIGSEGV or SIGABRT: native code crashed.",
            "SIGKILL: the system or a person killed it, often because of memory.",
        ),
        (
            "Read the stack in the log of the rank.",
            "For SIGKILL, look at `dmesg` and the limit of the container.",
        ),
        "rank 2 on node1 failed first: killed by SIGSEGV",
        "operations",
    ),
    Entry(
        Code.RANK_EXIT_CODE,
        "A rank ended with an exit code other than 0, and without an exception.",
        ("The script called sys.exit, or a library ended the process.",),
        (_LOG,),
        "rank 1 on node1 failed first: exit code 3",
        "exit-codes",
    ),
    Entry(
        Code.RANK_HANG,
        "A rank waits for another one and no rank shows a sign of life, or no progress was made for --hang-timeout.",
        (
            "A rank waits for data, a lock or a file.",
            "The ranks called different collectives, or a different number of them.",
        ),
        (
            "Read the stacks of the rank that the message names.",
            "If ranks may wait for so long, give the process group a longer timeout, or raise --hang-timeout.",
        ),
        "the job hung: rank 3 has not entered all_reduce #412",
        "hangs",
    ),
    Entry(
        Code.NODE_LOST,
        "A node of the job no longer answers.",
        ("The machine stopped, lost its network, or was taken away by the scheduler.",),
        (
            "Check the machine.",
            "To go on without it: --nnodes MIN:MAX, or --spares N, together with --max-restarts.",
        ),
        "node node2 failed first: its agent has not answered for 10 s",
        "operations",
    ),
    Entry(
        Code.ONLY_CONSEQUENCES,
        "The ranks report only lost connections, and none of them is the cause.",
        ("The network, or a process outside the job, failed.",),
        ("Look at the network and at the logs of all nodes: `ddpctl logs JOB`.",),
        "the job failed, but its ranks report only lost connections",
        "communication-errors",
    ),
    Entry(
        Code.ENDED_ON_REQUEST,
        "A person, a program or a signal ended the job. No rank failed.",
        ("Ctrl-C, SIGTERM, `ddpctl abort`, or a scheduler.",),
        ("Nothing, if this was intended. The message names who ended the job.",),
        "ddp-launch: stopped by SIGINT",
        "operations",
    ),
    Entry(
        Code.JOB_FAILED,
        "The job failed for a reason that is not in a rank.",
        ("The message has the reason.",),
        ("`ddpctl why JOB` shows what was decided, and when.",),
        "the job failed: internal error of the service",
        "operations",
    ),
    Entry(
        Code.LAUNCH_ARGUMENT_INVALID,
        "An argument of `ddp.launch` is invalid.",
        (
            "The first argument is not a function.",
            "The option makes no sense for a function, for example module or hosts.",
            "The call is in a rank of a job, perhaps in a module that the function imports.",
        ),
        ("Pass the function itself. Write options with underscores: max_restarts=3.",),
        "LaunchError: ddp.launch needs a function, not NoneType. Pass train, not train()",
        "launch",
    ),
    Entry(
        Code.CANNOT_PICKLE,
        "The function, its arguments or its result cannot be sent between processes.",
        (
            "It refers to something that only exists in this process: a lock, an open file, a socket, a CUDA tensor.",
        ),
        ("Create such objects inside the function. Return plain values or tensors on the CPU.",),
        "LaunchError: cannot send train and its arguments to the ranks: cannot pickle '_thread.lock' object",
        "launch",
    ),
    Entry(
        Code.RESULT_UNREADABLE,
        "A rank has ended well, but its result cannot be read.",
        ("A rank has called os._exit, or the disk for temporary files was full.",),
        ("Let the function return. Set TMPDIR to a folder with enough space.",),
        "LaunchError: the job has ended well, but a rank has left no result.",
        "launch",
    ),
)
