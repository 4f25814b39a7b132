"""The options of `ddp-launch`: one table for the command line, variables, the TOML file, `--help` and `--print-config`.

No other module defines or describes an option. `parse` parses an option's text from every source. A switch is an
option whose text is "1" or "0". torchrun's options keep torchrun's names, meanings and PET_ variables.
"""

from __future__ import annotations

from functools import partial

from launcher.settings import failure_values, host_names, name_lists, values
from launcher.settings.budget_text import hang_timeout
from launcher.settings.health_options import MONITORING, PREFLIGHT
from launcher.settings.log_options import LOGS
from launcher.settings.option import Option, Reach
from launcher.settings.option import ours as _ours
from launcher.settings.option import switch as _switch
from launcher.settings.option import torch as _torch
from launcher.settings.option import torch_switch as _torch_switch
from launcher.settings.pool_options import POOL
from launcher.settings.rank_options import RANKS

_ENTRY = (
    _torch_switch("--module", "the script is a Python module; run it as `python -m` does", short="-m"),
    _torch_switch("--no-python", "the script is a program; run it directly, without Python"),
    _torch_switch(
        "--run-path",
        "run the script with runpy.run_path in the rank's interpreter, as torchrun --run-path does; without this "
        "option, the rank runs `python script.py`",
    ),
)

_NODES = (
    _torch(
        "--nnodes",
        "N|MIN:MAX",
        "1",
        values.nnodes,
        "number of nodes (machines) in the job; with a range MIN:MAX the job can shrink and grow",
    ),
    _torch(
        "--nproc-per-node",
        "N|auto|gpu|cpu|xpu",
        "auto",
        values.nproc,
        "number of ranks on this node; auto: one per GPU (NVIDIA or AMD), or one per usable CPU if there is no GPU",
    ),
    _torch(
        "--node-rank",
        "N",
        None,
        values.count,
        "rank of this node, 0 to N-1 (default: nodes are ordered by their index in Slurm or Kubernetes, then by host "
        "name)",
    ),
    _ours(
        "--topology",
        "PLACE|slurm|nvlink",
        None,
        name_lists.place,
        "where this node is in the network, from the largest unit to the smallest, for example pod1/rack7; nodes that "
        "share a unit get neighbouring node ranks. slurm: the switches that Slurm names; nvlink: the NVLink domain of "
        "the GPUs",
    ),
    _torch(
        "--role",
        "NAME",
        "default",
        lambda name: name and values.text(name),  # torchx passes '' to torchrun
        "role name of the ranks on this node",
    ),
    _ours(
        "--spares",
        "N",
        "0",
        values.count,
        "number of extra nodes, in addition to --nnodes, that join and wait to replace a failed node",
    ),
    _ours(
        "--scale-up",
        "WHEN",
        "immediate",
        values.choice("never", "on-restart", "immediate", "at-checkpoint"),
        "when the job adds a node that joined late: never, on-restart, immediate (as torchrun: restarts the ranks, or "
        "lets them continue in place where they can), at-checkpoint",
    ),
)

_RENDEZVOUS = (
    _ours(
        "--rendezvous",
        "HOST[:PORT][,...]",
        None,
        values.endpoints,
        "address of the rendezvous service, or of the node whose ddp-launch runs it (default: this process runs it "
        "and opens no port)",
    ),
    _ours(
        "--secret-file",
        "FILE",
        None,
        values.path,
        "file with the job secret, the same on all nodes; needed if a node runs the rendezvous (create it with "
        "`ddp-rendezvous secret FILE`)",
    ),
    _switch(
        "--insecure",
        "let other nodes connect to the rendezvous of this node without a secret; use it only in a trusted network",
    ),
    _torch(
        "--rdzv-id",
        "NAME",
        None,
        values.run_id,
        "ID of the run; with more than one node, the same on all nodes (default: made from the script name, and the "
        "scheduler's job or the user)",
    ),
    _torch(
        "--rdzv-endpoint",
        "HOST[:PORT]",
        None,
        values.torch_endpoint,
        "same as --rendezvous; used only if the job has more than one node",
    ),
    _torch(
        "--rdzv-conf",
        "KEY=VALUE[,...]",
        None,
        values.pairs,
        "torchrun's rendezvous settings; the keys join_timeout (or timeout) and last_call_timeout set --join-timeout "
        "and --last-call if these are not given; other keys have no effect",
    ),
    _torch_switch("--standalone", "run the job on this node only; other rendezvous options have no effect"),
    _ours(
        "--join-timeout",
        "TIME",
        "600",
        values.positive_duration,
        "fail if not enough nodes join within this time",
    ),
    _ours(
        "--last-call",
        "TIME",
        "2",
        values.duration,
        "with --nnodes MIN:MAX: after MIN nodes have joined, wait this long for more",
    ),
    _ours(
        "--replacement-timeout",
        "TIME",
        "60",
        values.duration,
        "time to wait for a replacement if too few nodes remain after a node is lost; the job fails if none joins in "
        "this time",
    ),
    _ours(
        "--shrink-after",
        "TIME",
        None,
        values.duration,
        "with --nnodes MIN:MAX: time to wait for a replacement if at least MIN nodes remain. If none joins in this "
        "time, the job continues with fewer nodes (default: 0, or --replacement-timeout if that option is given)",
    ),
    _torch(
        "--master-addr",
        "HOST",
        None,
        values.host,
        "address of node rank 0, at which the store of torch.distributed listens",
    ),
    _torch(
        "--master-port",
        "PORT",
        None,
        values.port,
        "port of the store on node rank 0 (default: any free port)",
    ),
    _torch("--local-addr", "HOST", None, values.host, "address at which other nodes reach this node"),
    _ours(
        "--interface",
        "NAME",
        None,
        values.interface,
        "network interface for traffic between nodes, for example eth0; other nodes connect to its address, and Gloo "
        "and NCCL in the ranks use this interface",
    ),
)

_OVER_SSH = (
    _ours(
        "--hosts",
        "HOST[:RANKS][,...]",
        None,
        host_names.hosts,
        "start the agents on all these hosts over ssh, each in the current directory",
    ),
    _ours("--hostfile", "FILE", None, values.path, "file of hosts, one per line: NAME or NAME slots=RANKS"),
    _ours(
        "--ssh",
        "COMMAND",
        "ssh -T -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=5 -o ExitOnForwardFailure=yes",
        values.command,
        "ssh command that connects to the hosts",
    ),
    _ours(
        "--send-env",
        "NAME[=VALUE][,...]",
        None,
        name_lists.variables,
        "environment variables to send to the hosts, in addition to PYTHONPATH, PYTHON_EXEC, NCCL_*, GLOO_*, TORCH_*, "
        "OMP_NUM_THREADS and others that training often needs",
    ),
)

_FAILURES = (
    _torch(
        "--max-restarts",
        "N|N/WINDOW",
        "0",
        failure_values.budget,
        "how many times the job may restart all ranks: N in total, or N within any WINDOW (5/1h)",
    ),
    _ours(
        "--recover",
        "HOW",
        "auto",
        values.choice("auto", "in-place", "restart"),
        "what happens to ranks that survive a failure: auto (ranks inside State.run of ddp.elastic keep their "
        "processes, the others restart), in-place (the same, and the decision says why if that is not possible), "
        "restart (all ranks restart)",
    ),
    _ours(
        "--max-heals",
        "N|N/WINDOW|unlimited",
        "unlimited",
        failure_values.heals,
        "how many times failed ranks are replaced while the others keep their processes; after that, all ranks restart "
        "as often as --max-restarts permits",
    ),
    _ours(
        "--crash-loop",
        "TIMES/TIME[,TIMES/step]|off",
        "off",
        failure_values.crash_loop,
        "fail the job if the same rank fails within TIME after its start, before its first training step, TIMES times "
        "in a row, or if the job fails TIMES times in a row without a further step (example: 3/1s,5/step)",
    ),
    _ours(
        "--failure-policy",
        "CLASS=ACTION[,...]",
        None,
        failure_values.rules,
        "what to do after a failure of a class. Classes: out-of-memory, hardware, network, user-exception, signal, "
        "exit-code[:N], hang, node-lost. Actions: restart, heal (as --recover auto, also after user-exception), "
        "exclude (restart without that node), fail, ignore (the other ranks continue). Default: as --recover, but "
        "restart after user-exception",
    ),
    _ours(
        "--reserved-exit-codes",
        "CODE[,...]",
        None,
        partial(values.numbers, what="exit codes", below=256),
        "exit with 1 instead of these exit codes; use it for codes that your scheduler handles in a special way, "
        "for example with a requeue",
    ),
    _ours(
        "--hang-timeout",
        "auto|off|TIME[,...]",
        "auto",
        hang_timeout,
        "auto: if a rank waits for another one and no rank shows a sign of life, for 10m or a longer timeout of a "
        "process group, find the rank that blocks the others and restart the job. TIME: do so if ranks make no "
        "progress within a step for TIME, without further evidence. Add NAME=TIME to set the limit of another phase: "
        "start, first-step, checkpoint, evaluation (30m each)",
    ),
    _ours(
        "--isolation-timeout",
        "TIME",
        "5m",
        values.positive_duration,
        "stop the ranks if, for TIME, the rendezvous is unreachable and they make no progress",
    ),
)

_COMMAND = (
    Option(
        "--config",
        "read options from a TOML file; its keys are the long flags",
        values.path,
        "FILE",
        reach=Reach.ENVIRONMENT,
    ),
    _switch(
        "--print-config", "print every option with its value and its source, then exit", reach=Reach.FLAG
    ),
    _switch(
        "--version",
        "print the versions of ddp-launch, torch, the compiled core and the protocol, then exit",
        reach=Reach.FLAG,
    ),
    _switch(
        "--help",
        "print the common options and examples, then exit; --help all prints every option",
        short="-h",
        torchrun=True,
        reach=Reach.FLAG,
    ),
)

_WITHOUT_EFFECT = (
    _torch(
        "--rdzv-backend",
        "NAME",
        None,
        values.text,
        "torchrun's rendezvous backend; the values static and ddp do not print a warning",
        without_effect="ddp-launch always uses its own rendezvous",
    ),
    _torch(
        "--monitor-interval",
        "SECONDS",
        None,
        values.duration,
        "torchrun's polling interval",
        without_effect="the agent detects the exit of a rank immediately, without polling",
    ),
    _torch(
        "--start-method",
        "NAME",
        None,
        values.choice("spawn", "fork", "forkserver"),
        "how torchrun starts processes",
        without_effect="ranks are separate programs; see --warm-start",
    ),
    _torch(
        "--event-log-handler",
        "NAME",
        None,
        values.text,
        "plug-in of torchrun for events",
        without_effect="ddp-launch does not load plug-ins of torchrun",
    ),
    _torch(
        "--logs-specs",
        "NAME",
        None,
        values.text,
        "plug-in of torchrun for logs",
        without_effect="ddp-launch does not load plug-ins of torchrun; see --log-dir and --log-prefix",
        pet=False,
    ),
)

GROUPS: tuple[tuple[str, tuple[Option, ...]], ...] = (
    ("What to run", _ENTRY),
    ("Nodes and ranks", _NODES),
    ("Rendezvous and network", _RENDEZVOUS),
    ("Start several nodes from one command", _OVER_SSH),
    ("Failures and restarts", _FAILURES),
    ("Pre-flight checks", PREFLIGHT),
    ("Monitoring", MONITORING),
    ("Starting and stopping ranks", RANKS),
    ("Starting warm a second time", POOL),
    ("Logs and terminal", LOGS),
    ("This command", _COMMAND),
    ("Accepted for compatibility with torchrun (no effect, prints a warning)", _WITHOUT_EFFECT),
)
OPTIONS: tuple[Option, ...] = tuple(option for _, group in GROUPS for option in group)
BY_SPELLING: dict[str, Option] = {name: option for option in OPTIONS for name in option.spellings}
BY_SHORT: dict[str, Option] = {option.short: option for option in OPTIONS if option.short}


def matching(name: str) -> tuple[str, ...]:
    """Spellings that match `name`, which is complete or abbreviated.

    An abbreviation that matches torchrun's options selects among these only, even if one of our options matches too.
    """
    if name in BY_SPELLING:
        return (name,)
    found = tuple(spelling for spelling in BY_SPELLING if spelling.startswith(name))
    of_torchrun = tuple(spelling for spelling in found if BY_SPELLING[spelling].torchrun)
    return of_torchrun or found


def negates(spelling: str) -> bool:
    return BY_SPELLING[spelling].flag != spelling
