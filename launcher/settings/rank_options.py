"""Options to start and stop ranks, a part of the table in launcher/settings/options.py."""

from __future__ import annotations

from launcher.settings import name_lists, values
from launcher.settings.debug_option import debug
from launcher.settings.option import ours as _ours
from launcher.settings.option import switch as _switch
from launcher.settings.option import torch as _torch
from launcher.settings.option import torch_switch as _torch_switch

RANKS = (
    _switch(
        "--warm-start",
        "fork the ranks from a process that has already imported torch",
        default="1",
        negatable=True,
    ),
    _ours(
        "--preload",
        "MODULE[,...]",
        None,
        name_lists.modules,
        "installed modules to import once, before the ranks are forked, for example torch._dynamo,transformers",
    ),
    _switch(
        "--learn-imports",
        "import the modules of torch that the script has imported before the ranks are forked again after a failure, "
        "under the same environment variables",
        default="1",
        negatable=True,
    ),
    _ours(
        "--debug",
        "RANK[:PORT]",
        None,
        debug,
        "debug this global rank: it alone reads from the terminal (breakpoint(), pdb, ipdb); with PORT, it waits for "
        "an editor that connects with debugpy before its script starts. The other ranks wait for it without a limit",
    ),
    _ours(
        "--logical-world",
        "N",
        None,
        lambda text: values.count(text, least=1),
        "train with N logical ranks, whatever the number of ranks: a script with elastic.LogicalWorld() gives the same "
        "bits in worlds of every size up to N; the ranks get the number in DDP_LOGICAL_WORLD",
    ),
    _ours(
        "--redundancy",
        "CODE",
        None,
        values.redundancy,
        "what other nodes keep in memory of a State of ddp.elastic that is in shards: copies:N, code:K+M (any M nodes "
        "of a group can be lost at once), auto or none, the default. A script can override it with "
        "State(redundancy=...); the ranks get it in DDP_REDUNDANCY",
    ),
    _ours(
        "--trace-collectives",
        "on|off",
        "on",
        values.choice("on", "off"),
        "record each call of torch.distributed in the ranks; the report of a hang uses this record",
    ),
    _switch(
        "--rank-timers",
        "kill a rank if its torch.distributed.elastic.timer expires; the ranks get the path of the timer pipe in "
        "TORCHELASTIC_TIMER_FILE",
        foreign=("TORCHELASTIC_ENABLE_FILE_TIMER", lambda text: "1" if text == "1" else "0"),
    ),
    _switch("--cpu-affinity", "without GPUs: give each rank its own CPUs, and one OpenMP thread per CPU"),
    _torch(
        "--numa-binding",
        "HOW",
        None,
        values.choice("node", "socket", "exclusive", "core-complex"),
        "bind each rank to CPUs near its GPU. node: the CPUs of the GPU's NUMA node; socket: all CPUs of that "
        "CPU socket; exclusive: cores of the NUMA node, each for one rank only; core-complex: cores "
        "that share one L3 cache",
        pet=False,
    ),
    _ours(
        "--gpu-order",
        "visible|nvlink",
        "visible",
        values.choice("visible", "nvlink"),
        "which GPU each local rank gets. visible: as CUDA_VISIBLE_DEVICES lists them; nvlink: GPUs that NVLink "
        "connects in pairs or small groups come one after the other",
    ),
    _torch_switch(
        "--virtual-local-rank",
        "set LOCAL_RANK to 0 in every rank, and show each rank only its own GPU, as device 0",
    ),
    _torch(
        "--signals-to-handle",
        "NAME[,...]",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        values.signals,
        "signals that stop the job; SIGUSR1 and SIGUSR2 are forwarded to the ranks unless they are listed",
    ),
    _torch(
        "--shutdown-timeout",
        "TIME",
        "30",
        values.duration,
        "time for the ranks to exit after SIGTERM, or SIGINT from Ctrl-C, before they are killed",
        foreign=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str),
    ),
    _ours(
        "--checkpoint-signal",
        "NAME[,...]",
        None,
        values.signals,
        "signals that request a checkpoint from the ranks. If a signal also stops the job, the job stops after the "
        "checkpoint. Default: SIGTERM and SIGUSR1, if the script polls for requests (see `ddp-launch docs elastic`)",
    ),
    _ours(
        "--checkpoint-grace",
        "TIME",
        "60",
        values.duration,
        "time for the ranks to write a checkpoint that a signal requested",
    ),
)
