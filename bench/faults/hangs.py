"""A rank stands still, or the ranks do not do the same: who it is, and why, is said after the hang floor; then all
are started again."""

from __future__ import annotations

from typing import Any

from fault_case import Case, Kind

_STILL = "made no progress"
_DATA = "data loader"
_STOPPED = "stopped by a signal"
_ALL = (0, 1, 2)
# The buckets of torch's DDP are not seen: how far a rank has come is known, and what it waits for is not.
_UNSEEN: dict[str, Any] = {"certain": None}


def away(name: str, injected: str, fault: str, says: str = _STILL, **more: Any) -> Case:
    """One rank does not come to where the others wait for it."""
    return Case(name, injected, says, fault=fault, **more)


def astray(name: str, injected: str, fault: str, says: str, **more: Any) -> Case:
    """The ranks do different things; without DDP, so that nothing but this is in their way."""
    return Case(name, injected, says, fault=f"{fault}@tally", **({"wrap": "plain"} | more))


_STOPS = (
    away("stopped", "SIGSTOP from outside", "", _STOPPED, outside="stop_rank"),
    away("stopped-ours", "SIGSTOP from outside", "", _STOPPED, outside="stop_rank", wrap="ours"),
    away(
        "stopped-ours-shm",
        "SIGSTOP from outside",
        "",
        _STOPPED,
        outside="stop_rank",
        wrap="ours",
        backend="shm",
    ),
    away("stopped-plain", "SIGSTOP from outside", "", _STOPPED, outside="stop_rank", wrap="plain"),
    away("stopped-rank-0", "SIGSTOP from outside", "", _STOPPED, outside="stop_rank_0", blamed=(0,)),
    away(
        "stopped-two",
        "SIGSTOP to two of four ranks",
        "",
        _STOPPED,
        outside="stop_two_ranks",
        blamed=(1, 2),
        ranks=4,
        wrap="plain",
    ),
    away(
        "stopped-cold",
        "SIGSTOP from outside",
        "",
        _STOPPED,
        outside="stop_rank",
        wrap="plain",
        options=("--no-warm-start",),
        bound_s=15.0,
    ),
    away(
        "stopped-two-nodes",
        "SIGSTOP on the second node",
        "",
        _STOPPED,
        outside="stop_last_rank",
        nodes=2,
        ranks=2,
        blamed=(3,),
        wrap="plain",
    ),
    away(
        "frozen-cgroup",
        "one rank frozen by its cgroup, as by docker pause",
        "",
        "frozen by its cgroup",
        outside="freeze_rank",
        wrap="plain",
        needs="freezer",
    ),
)

_BLOCKED = (
    away("sleep-forward", "a sleep in the forward pass", "sleeps@forward", "forward", **_UNSEEN),
    away(
        "sleep-backward",
        "a sleep in a hook of the backward pass",
        "sleeps@backward",
        "backward",
    ),
    away(
        "sleep-backward-ours",
        "a sleep in a hook of the backward pass",
        "sleeps@backward",
        "backward",
        wrap="ours",
    ),
    away("sleep-gil", "a sleep in native code with the GIL held", "sleeps_with_the_gil@forward", **_UNSEEN),
    away(
        "sleep-gil-ours-shm",
        "a sleep in native code with the GIL held",
        "sleeps_with_the_gil@forward",
        wrap="ours",
        backend="shm",
    ),
    away("loop-python", "an infinite loop in Python", "loops@forward", "comput|running|CPU"),
    away(
        "loop-native",
        "an infinite loop in native code, GIL held",
        "loops_in_native_code@forward",
        "comput|running|CPU",
    ),
    away(
        "loop-native-ours",
        "an infinite loop in native code, GIL held",
        "loops_in_native_code@forward",
        "comput|running|CPU",
        wrap="ours",
    ),
    away("lock-data", "a lock held in the data set", "waits_for_a_lock@data", _DATA),
    away(
        "lock-data-ours-shm",
        "a lock held in the data set",
        "waits_for_a_lock@data",
        _DATA,
        wrap="ours",
        backend="shm",
    ),
    away("loader-stuck", "a DataLoader worker that hangs", "sleeps@data", _DATA, loaders=1),
    away(
        "loader-stopped",
        "SIGSTOP to a DataLoader worker",
        "",
        _DATA,
        outside="stop_loader",
        loaders=1,
    ),
    away(
        "loader-lock-ours",
        "a lock held in a DataLoader worker",
        "waits_for_a_lock@data",
        _DATA,
        loaders=1,
        wrap="ours",
    ),
    away("server-silent", "the data server does not answer", "waits_for_a_server@data", _DATA),
    away("fifo", "a read from a pipe that has no writer", "reads_a_fifo@data", _DATA),
    away("file-lock", "a file locked by another process", "waits_for_a_file_lock@step", wrap="plain"),
    away("command", "a command that never ends", "waits_for_a_command@step", wrap="plain"),
    away(
        "threads", "two threads that wait for each other", "waits_for_a_thread@forward", "forward", **_UNSEEN
    ),
    away(
        "uninterruptible",
        "an uninterruptible sleep (D)",
        "sleeps_beyond_signals@step",
        "uninterruptible",
        wrap="plain",
    ),
    away(
        "checkpoint-stuck",
        "a checkpoint write that never ends",
        "writes_to_a_fifo@checkpoint",
        "checkpoint",
        commits=(0,),
        blamed=(0,),
        options=("--hang-timeout", "3,checkpoint=3"),
    ),
    away(
        "evaluation-stuck",
        'ddp.section("eval", timeout=1) that never ends',
        "evaluates_for_too_long@step",
        "eval",
        wrap="plain",
    ),
)

# Gloo raises errors in ranks that did nothing wrong, and these end by them.
_ASTRAY = (
    astray(
        "other-op", "broadcast where the others call all_reduce", "other_operation", "broadcast.*all_reduce"
    ),
    astray(
        "other-op-two",
        "the same, with two ranks: either one may be wrong",
        "other_operation",
        "broadcast|all_reduce",
        ranks=2,
        blamed=(0, 1),
        certain=False,
        keeps=False,
    ),
    astray(
        "other-op-shm",
        "the same, over shared memory",
        "other_operation",
        "broadcast.*ranks 0 and 2 .*all_reduce",
        backend="shm",
    ),
    astray(
        "other-shape",
        "all_reduce of 4,096 elements where the others have 4",
        "other_shape",
        r"4,096 x float32.*ranks 0 and 2 .*4 x float32",
        keeps=False,
    ),
    astray(
        "other-shape-shm",
        "the same, over shared memory",
        "other_shape",
        r"4,096 x float32.*ranks 0 and 2 .*4 x float32",
        backend="shm",
    ),
    astray(
        "other-type",
        "all_reduce of float64 where the others have float32",
        "other_type",
        r"4 x float64.*ranks 0 and 2 .*4 x float32",
        keeps=False,
    ),
    astray("skips", "one rank skips an all_reduce", "skips", "barrier.*all_reduce"),
    Case(
        "two-groups",
        "one rank calls the all_reduces of two groups in another order",
        "deadlock|group",
        fault="swaps_two_groups@two groups",
        commits=_ALL,
        wrap="plain",
    ),
    Case(
        "chain",
        "rank 0 waits for rank 1 in one group, rank 1 for rank 2 in another; rank 2 sleeps",
        _STILL,
        fault="is_the_root_of_a_chain@pairs",
        commits=_ALL,
        blamed=(2,),
        wrap="plain",
    ),
    astray(
        "objects",
        "all_gather_object that one rank does not enter",
        "gathers_objects_without_it",
        _STILL,
        commits=_ALL,
    ),
    astray("gather", "all_gather that one rank does not enter", "gathers_without_it", _STILL, commits=_ALL),
    astray(
        "barrier", "a barrier that one rank does not enter", "misses_the_barrier", "barrier", commits=_ALL
    ),
    astray(
        "receive",
        "all ranks receive, and no rank sends",
        "receives_from_nobody",
        "deadlock|recv",
        commits=_ALL,
        blamed=_ALL,
        certain=False,
    ),
    astray(
        "neighbour",
        "rank 0 receives from rank 1, which sleeps",
        "waits_for_a_neighbour",
        _STILL,
        commits=(0, 1),
    ),
    astray(
        "too-little",
        "rank 0 waits for a second message; rank 1 has sent only one and receives",
        "sends_too_little",
        "deadlock|recv",
        commits=(0, 1),
        blamed=(0, 1),
        certain=False,
    ),
    Case(
        "done-early",
        "the data of one rank ends early; it waits in the final barrier",
        "barrier",
        fault="is_done_early@step",
        heals=False,
        **_UNSEEN,
    ),
    Case(
        "done-early-ours",
        "the data of one rank ends early; it waits in the final barrier",
        "barrier",
        fault="is_done_early@step",
        heals=False,
        wrap="ours",
    ),
    Case(
        "leaves-early",
        "one rank exits with code 0 in the middle",
        "rank 1 .*exited",
        fault="leaves_0@step",
        wrap="plain",
    ),
)

_INNOCENT = tuple(
    Case(name, injected, "", Kind.INNOCENT, fault, blamed=(), **more)
    for name, injected, fault, more in (
        ("pause", "a pause of 1 s, less than the hang timeout", "pauses@forward", {}),
        ("pause-loader", "a pause of 1 s in the data loader", "pauses@data", {"loaders": 1}),
        ("evaluation", '6 s within ddp.section("eval", timeout=60)', "evaluates_for_long@step", {}),
        (
            "traced",
            "a debugger stops one rank for 6 s",
            "",
            {"outside": "trace_rank_for_a_while", "wrap": "plain"},
        ),
        ("all-stopped", "all ranks stopped and continued 6 s later", "", {"outside": "stop_all_for_a_while"}),
    )
)

HANGS = (*_STOPS, *_BLOCKED, *_ASTRAY, *_INNOCENT)
