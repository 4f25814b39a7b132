"""How ranks are started and stopped, a part of the table in launcher/settings/options.py."""

from __future__ import annotations

from launcher.settings import name_lists, values
from launcher.settings.option import ours as _ours
from launcher.settings.option import switch as _switch
from launcher.settings.option import torch as _torch
from launcher.settings.option import torch_switch as _torch_switch

RANKS = (
    _switch(
        "--warm-start",
        "fork ranks from a process that has torch imported already",
        default="1",
        negatable=True,
    ),
    _ours(
        "--preload",
        "MODULE[,...]",
        None,
        name_lists.modules,
        "installed modules to import once, before ranks are forked, rather than in each rank after each restart: "
        "torch._dynamo,transformers",
    ),
    _ours(
        "--trace-collectives",
        "on|off",
        "on",
        values.choice("on", "off"),
        "whether ranks note each call of torch.distributed, for whoever has to say why they hang",
    ),
    _switch(
        "--rank-timers",
        "end a rank whose torch.distributed.elastic.timer runs out; it finds the pipe in TORCHELASTIC_TIMER_FILE",
        foreign=("TORCHELASTIC_ENABLE_FILE_TIMER", lambda text: "1" if text == "1" else "0"),
    ),
    _switch("--cpu-affinity", "without GPUs: give each rank its own CPUs, and as many OpenMP threads"),
    _torch(
        "--numa-binding",
        "HOW",
        None,
        values.choice("node", "socket", "exclusive", "core-complex"),
        "bind each rank to CPUs near its GPU: node, socket, exclusive, core-complex",
        pet=False,
    ),
    _torch_switch("--virtual-local-rank", "every rank sees LOCAL_RANK 0 and its own GPU as device 0"),
    _torch(
        "--signals-to-handle",
        "NAME[,...]",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        values.signals,
        "signals that stop the job; SIGUSR1 and SIGUSR2, unless listed, go to the ranks and the job goes on",
    ),
    _torch(
        "--shutdown-timeout",
        "TIME",
        "30",
        values.duration,
        "from asking ranks to stop until they are killed",
        foreign=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str),
    ),
    _ours(
        "--checkpoint-signal",
        "NAME[,...]",
        None,
        values.signals,
        "signals that ask the ranks for a checkpoint first; one that stops the job does so after it "
        "(default: SIGTERM and SIGUSR1, if the script looks for requests)",
    ),
    _ours("--checkpoint-grace", "TIME", "60", values.duration, "time the ranks have for that checkpoint"),
)
