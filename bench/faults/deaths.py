"""A rank dies: the others are started again within a second, and the one that died first is named."""

from __future__ import annotations

from typing import Any

from fault_case import Case, Kind

_BAD = "ValueError: the batch is bad"


def death(name: str, injected: str, fault: str, says: str, **more: Any) -> Case:
    return Case(name, injected, says, Kind.DEATH, fault, **({"wrap": "plain", "ranks": 2} | more))


DEATHS = (
    death("exception", "an exception in the forward pass", "raises@forward", _BAD, wrap="torch"),
    death("exception-ours", "the same", "raises@forward", _BAD, wrap="ours"),
    death("exception-ours-shm", "the same", "raises@forward", _BAD, wrap="ours", backend="shm"),
    death(
        "exception-backward",
        "an exception in a hook of the backward pass",
        "raises@backward",
        _BAD,
        wrap="torch",
    ),
    death("exception-backward-ours", "the same", "raises@backward", _BAD, wrap="ours"),
    death("exception-data", "an exception in the data set", "raises@data", _BAD),
    death("exception-loader", "an exception in a DataLoader worker", "raises@data", _BAD, loaders=1),
    death("exception-end", "an exception after the last step", "raises@end", _BAD, heals=False),
    death(
        "exception-start",
        "an exception before the process group is formed",
        "raises@start",
        _BAD,
        heals=False,
    ),
    death(
        "exception-two-nodes",
        "an exception on the second node",
        "raises@forward",
        _BAD,
        nodes=2,
        ranks=2,
        commits=(3,),
        blamed=(3,),
    ),
    death("exit-3", "sys.exit(3)", "exits_3@step", "exit code 3"),
    death("exit-7", "os._exit(7) in the data set", "leaves_7@data", "exit code 7"),
    death("segfault", "a segmentation fault in native code", "segfaults@forward", "SIGSEGV"),
    death("segfault-ours-shm", "the same", "segfaults@backward", "SIGSEGV", wrap="ours", backend="shm"),
    death("abort", "abort()", "aborts@forward", "SIGABRT"),
    death("fpe", "a division by zero in native code", "divides_by_zero@forward", "SIGFPE"),
    death("bus-error", "a memory-mapped file is truncated", "reads_a_shrunken_file@data", "SIGBUS"),
    death("recursion", "infinite recursion", "recurses@forward", "RecursionError"),
    death("killed", "SIGKILL from outside", "", "SIGKILL, not from ddp-launch", outside="kill_rank"),
    death(
        "killed-ours-shm",
        "the same",
        "",
        "SIGKILL, not from ddp-launch",
        outside="kill_rank",
        wrap="ours",
        backend="shm",
    ),
    death("killed-rank-0", "SIGKILL from outside", "", "SIGKILL", outside="kill_rank_0", blamed=(0,)),
    death("terminated", "SIGTERM from outside, to one rank", "", "SIGTERM", outside="terminate_rank"),
    death(
        "loader-killed",
        "SIGKILL to a DataLoader worker",
        "",
        # Who fetches a batch just then loses the connection first; and torch's handler of SIGCHLD, which raises
        # wherever it is called, may break off the traceback of that before it comes to its last line.
        "worker.* (killed by signal: Killed|exited unexpectedly)|Connection(Reset|Refused)Error|EOFError"
        "|last line on stderr",
        outside="kill_loader",
        loaders=1,
    ),
    death(
        "memory-limit",
        "more memory than its ulimit -v",
        "allocates_beyond_its_limit@forward",
        "you tried to allocate|allocate memory",
    ),
    death(
        "cgroup-limit",
        "more memory than its cgroup allows",
        "outgrows_its_cgroup@forward",
        "out-of-memory killer",
        needs="memory_cgroup",
    ),
    death("files-limit", "more open files than its ulimit -n", "opens_too_much@data", "Too many open files"),
    death(
        "cpu-limit",
        "more CPU time than its ulimit -t",
        "uses_up_its_time@forward",
        "SIGXCPU",
        options=("--hang-timeout", "30"),
        bound_s=3.0,
    ),
    death(
        "disk-full",
        "no space left for a checkpoint",
        "writes_to_a_full_disk@checkpoint",
        "No space left on device",
        commits=(0,),
        blamed=(0,),
    ),
    death(
        "file-too-large",
        "a checkpoint larger than the limit on file sizes",
        "writes_beyond_the_limit@checkpoint",
        "File too large",
        commits=(0,),
        blamed=(0,),
    ),
    death("refused", "the data server is not running", "asks_a_dead_server@data", "Connection refused"),
)
