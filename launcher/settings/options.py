"""The options of `ddp-launch`: one table for the command line, variables, the TOML file, `--help` and `--print-config`.

No other module defines or describes an option. `parse` parses an option's text from every source. A switch is an
option whose text is "1" or "0". torchrun's options keep torchrun's names, meanings and PET_ variables.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Literal

from launcher.settings import values
from launcher.settings.values import BadValue, Option, Reach, quote
from launcher.settings.values import ours as _ours
from launcher.settings.values import switch_option as _switch
from launcher.settings.values import torch as _torch
from launcher.settings.values import torch_switch_option as _torch_switch
from rendezvous.values.types import Recover, ScaleUp

# --- name lists -------------------------------------------------------------------------------------
#
# Parse options whose value is a list of names: environment variables, modules, units of the network.

_MOST_UNITS = 8  # of a place in the network


def variables(value: str) -> tuple[str, ...]:
    """Parse environment variables, each NAME, NAME* or NAME=VALUE; ',,' stands for a comma."""
    found = tuple(part.replace("\0", ",").strip() for part in value.replace(",,", "\0").split(","))
    for each in found:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(\*|=.*)?", each, re.DOTALL):
            raise BadValue(
                f"invalid variable name {quote(each)}",
                "NAME[=VALUE][,...]",
                "WANDB_API_KEY,MODE=fast",
            )
    return found


def modules(value: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in value.split(","))
    for each in found:
        if not all(part.isidentifier() for part in each.split(".")):
            raise BadValue(f"invalid module name {quote(each)}", "MODULE[,...]", "torch._dynamo,transformers")
    return found


def place(value: str) -> str:
    """Parse a path of names, such as pod1/rack7; a single word may also name a source."""
    form = ("names separated by /, at most 8 of them", "pod1/rack7")
    parts = value.strip().strip("/").split("/")
    if len(parts) > _MOST_UNITS or not all(re.fullmatch(r"[A-Za-z0-9_.:-]{1,24}", part) for part in parts):
        raise BadValue("not a place in the network", *form)
    return "/".join(parts)


# --- health options ---------------------------------------------------------------------------------
#
# Options of pre-flight checks and monitoring, a part of the table in launcher/settings/options.py.

PREFLIGHT = (
    _ours(
        "--preflight off|report|quick|full",
        values.choice("off", "report", "quick", "full"),
        "check this node before it joins. report: print what is wrong; ranks start all the same. quick: a node that "
        "fails does not run ranks. full: also run a short load test on CPU and GPUs, and measure the network between "
        "all nodes. `ddp-launch doctor` shows all results",
        default="report",
    ),
    _ours(
        "--preflight-paths DIR[,...]",
        values.paths,
        "directories for checkpoints, checked like the log directory; without --preflight, this implies "
        "--preflight quick",
    ),
    _ours(
        "--health-source SOURCE[,...]",
        values.health_sources,
        "ask SOURCE about this node before it joins, and every 30 s while ranks run; a node that it calls unfit does "
        "not join. kubernetes: conditions, taints and labels of the pod's node (node-problem-detector, NVSentinel); an "
        "http:// or https:// URL: metrics of a DCGM exporter, or JSON; a path: a file with either, or with the report "
        "of dcgmi health -c -j. A source that fails never stops a job",
        field="health_sources",
    ),
    _ours(
        "--health-ignore NAME[,...]",
        values.health_ignored,
        "conditions, taints, labels or metrics that --health-source leaves out",
        field="health_ignored",
    ),
    _switch("--json", "with `ddp-launch doctor`: print the results as JSON", reach=Reach.FLAG),
)

MONITORING = (
    _ours(
        "--stragglers off|report|exclude[,...]",
        values.stragglers,
        "report ranks that are slower than the others, and their slow phase. exclude: also leave their node out at the "
        "next restart if enough nodes remain. A rank is a straggler if its own time in a phase is 1.4 times the median "
        "of the others in three consecutive windows of 5 s. The time in which it waits for others does not count. Add "
        "factor=NUMBER or window=TIME to change these defaults",
        default="report",
    ),
    _ours(
        "--stop-when CONDITION[;...]",
        values.stop_conditions,
        "end the job, without a restart, when a condition is true. NAME is nan: a rank prints that NAME, for example "
        "loss, is not a number, or passes it to ddp.status; output matches REGEX: a line of a rank's output does",
    ),
    _ours(
        "--on-event COMMAND",
        values.text,
        "run this shell command when the job starts, restarts or ends, and when a node or a rank is in trouble. It "
        "gets the event as JSON on standard input",
    ),
    _ours(
        "--otlp-endpoint URL",
        values.http_url,
        "export traces of restarts and of the job to this OTLP endpoint, over HTTP, for example http://collector:4318 "
        "(default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT)",
    ),
    _switch(
        "--web",
        "serve a page that shows and controls this job in a browser, on a free port of 127.0.0.1. The command prints "
        "its URL with a token for one login. It needs the extra `web`: pip install 'ddp-launch[web]'",
    ),
    Option(
        "--health-port",
        "serve /livez, /readyz and /metrics over HTTP; PORT alone listens on 127.0.0.1 only",
        values.health_address,
        "[ADDRESS:]PORT",
        foreign=("DDP_HEALTH_PORT", str),
        field="health_address",
    ),
)


# --- options of logs and the terminal ---------------------------------------------------------------

_MOST_MIB = 1 << 20


def bars(value: str) -> Literal["first", "all", "none"] | tuple[int, ...]:
    match value:
        case "first" | "all" | "none":
            return value
        case _:
            return values.numbers(value, "local ranks", values.MAX_RANKS_PER_NODE)


LOGS = (
    _torch(
        "--log-dir DIR",
        values.path,
        "keep the logs of the ranks in this directory, in one folder per run",
        field="directory",
    ),
    _torch(
        "--redirects STREAMS",
        values.streams,
        "write these streams to the log file only: 0 none, 1 stdout, 2 stderr, 3 both; per local rank: 0:3,1:2",
        default="0",
        short="-r",
    ),
    _torch(
        "--tee STREAMS",
        values.streams,
        "write these streams to the log file and the terminal; same values as -r",
        default="0",
        short="-t",
    ),
    _torch(
        "--local-ranks-filter N[,...]",
        partial(values.numbers, what="local ranks", below=values.MAX_RANKS_PER_NODE),
        "show only the output of these local ranks on the terminal",
    ),
    _torch(
        "--duplicate-stdout-filters TEXT[,...]",
        values.filters,
        "also copy stdout lines that contain one of these texts to a separate file; write ',,' for a comma",
        field="stdout_filters",
    ),
    _torch(
        "--duplicate-stderr-filters TEXT[,...]",
        values.filters,
        "same for stderr lines",
        field="stderr_filters",
    ),
    Option(
        "--log-prefix",
        "prefix of each line; fields: {node} {rank} {local_rank} {role} {generation} (number of the attempt, which "
        "increases at each restart)",
        values.prefix,
        "TEMPLATE",
        "[{node}:{rank}] ",
        field="prefix",
    ),
    _torch(
        "--log-line-prefix-template TEMPLATE",
        values.prefix_from_torch,
        "the same as torchrun writes it, with ${role_name} ${local_rank} ${rank} ${hostname}; --log-prefix takes "
        "precedence",
        foreign=("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", str),
    ),
    _switch(
        "--collapse",
        "on a terminal, show equal lines of several ranks once, with their number; the log files have all lines",
        default="1",
        negatable=True,
    ),
    _switch(
        "--merged-log",
        "also write the lines of all ranks of the node, with times, to merged.log in --log-dir",
    ),
    _switch("--verbose", "also show the tracebacks of ranks that end only because another rank is gone"),
    _ours(
        "--color WHEN",
        values.choice("auto", "always", "never"),
        "when to use color: auto (on a terminal, unless NO_COLOR is set), always, never",
        default="auto",
    ),
    _ours(
        "--progress WHEN",
        values.choice("auto", "always", "never"),
        "when to show the progress line at the bottom: auto (on a terminal), always, never",
        default="auto",
    ),
    _ours(
        "--terminal WHEN",
        values.choice("auto", "never"),
        "when ranks get a terminal, so that libraries show progress bars and colors: auto (for output that is shown on "
        "a terminal), never",
        default="auto",
    ),
    _ours(
        "--bars first|all|none|N[,...]",
        bars,
        "local ranks whose progress bars are redrawn at the bottom of a terminal; first: the lowest local rank that "
        "is shown",
        default="first",
    ),
    _switch(
        "--journal",
        "keep a journal of what the agent and its service were given, in the folder of the logs, for `ddpctl replay`",
        default="1",
        negatable=True,
    ),
    _ours(
        "--journal-limit MIB",
        partial(values.count, least=1, most=_MOST_MIB),
        "size at which a journal begins a new file; the file before is kept",
        default="8",
    ),
    _ours(
        "--history-jobs N",
        partial(values.count, least=0, most=10_000),
        "keep the history of the last N finished jobs without a service, for 14 days, for `ddpctl list --all`; 0: none",
        default="100",
    ),
    _ours(
        "--history-dir DIR",
        values.text,
        "keep it in this folder, or with 'none' only beside --log-dir (default: a folder of yours in /var/tmp)",
    ),
)


# --- options of the warm pool (`ddp-launch warm`) ---------------------------------------------------

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_MEMORY_FORM = ("a number with a unit (MiB, GiB)", "2GiB")


def memory(value: str) -> int:
    """Parse an amount of memory: 512MiB, 1.5GiB."""
    number, unit = value.strip()[:-3], value.strip()[-3:]
    try:
        size = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise values.BadValue("not an amount of memory", *_MEMORY_FORM) from None
    if size <= 0:
        raise values.BadValue("the amount must be greater than 0", *_MEMORY_FORM)
    return size


POOL = (
    _switch(
        "--warm-pool",
        "fork the ranks from a template of the warm pool, if `ddp-launch warm start` has turned it on",
        default="1",
        negatable=True,
    ),
    _ours(
        "--warm-idle TIME",
        values.positive_duration,
        "for `ddp-launch warm start`: a template ends when no command has used it for this time, and the pool with its "
        "last template",
        default="30m",
    ),
    _ours(
        "--warm-templates N",
        partial(values.count, least=1, most=64),
        "for `ddp-launch warm start`: how many templates there may be at a time; each serves one script in one "
        "environment",
        default="2",
    ),
    _ours(
        "--warm-memory SIZE",
        memory,
        "for `ddp-launch warm start`: how much memory the templates may take together when a new one is started",
        default="2GiB",
    ),
    _ours(
        "--warm-dir DIR",
        values.path,
        "private folder of the pool (default: ddp-launch-warm in /run/user/UID, or /tmp/ddp-launch-warm-UID)",
    ),
)


# --- options to start and stop ranks ----------------------------------------------------------------

RANKS = (
    _switch(
        "--warm-start",
        "fork the ranks from a process that has already imported torch",
        default="1",
        negatable=True,
    ),
    _ours(
        "--preload MODULE[,...]",
        modules,
        "installed modules to import once, before the ranks are forked, for example torch._dynamo,transformers",
    ),
    _switch(
        "--learn-imports",
        "import torch._dynamo and ddp, if the script has imported them, before ranks are forked again after a failure, "
        "under the same environment variables",
        default="1",
        negatable=True,
    ),
    _ours(
        "--debug RANK[:PORT]",
        values.debug,
        "debug this global rank: it alone reads from the terminal (breakpoint(), pdb, ipdb). With PORT, it waits for "
        "an editor that connects with debugpy before its script starts. The other ranks wait for it without a limit",
    ),
    _ours(
        "--share-compiled memory|DIR",
        values.path,
        "give what torch.compile has made to ranks that start later, on any node, so that they compile nothing again. "
        "memory: within this job; DIR: also keep it there for the next start of the job",
    ),
    _ours(
        "--redundancy CODE",
        values.redundancy,
        "what other nodes keep in memory of a State of ddp.elastic that is in shards: copies:N, code:K+M (any M nodes "
        "of a group can be lost at once), auto or none, the default. A script can override it with "
        "State(redundancy=...); the ranks get it in DDP_REDUNDANCY",
    ),
    _ours(
        "--trace-collectives on|off",
        values.choice("on", "off"),
        "record each call of torch.distributed in the ranks; the report of a hang uses this record",
        default="on",
    ),
    _switch("--allow-drill", "let operators kill and freeze ranks of this node with `ddpctl drill`"),
    _switch(
        "--rank-timers",
        "kill a rank if its torch.distributed.elastic.timer expires; the ranks get the path of the timer pipe in "
        "TORCHELASTIC_TIMER_FILE",
        foreign=("TORCHELASTIC_ENABLE_FILE_TIMER", lambda text: "1" if text == "1" else "0"),
    ),
    _switch("--cpu-affinity", "without GPUs: give each rank its own CPUs, and one OpenMP thread per CPU"),
    _torch(
        "--numa-binding HOW",
        values.choice("node", "socket", "exclusive", "core-complex"),
        "bind each rank to CPUs near its GPU. node: the CPUs of the GPU's NUMA node; socket: all CPUs of that "
        "CPU socket; exclusive: cores of the NUMA node, each for one rank only; core-complex: cores "
        "that share one L3 cache",
        pet=False,
    ),
    _torch_switch(
        "--virtual-local-rank",
        "set LOCAL_RANK to 0 in every rank, and show each rank only its own GPU, as device 0",
    ),
    _torch(
        "--signals-to-handle NAME[,...]",
        values.signals,
        "signals that stop the job; SIGUSR1 and SIGUSR2 are forwarded to the ranks unless they are listed",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    ),
    _torch(
        "--shutdown-timeout TIME",
        values.duration,
        "time for the ranks to exit after SIGTERM, or SIGINT from Ctrl-C, before they are killed",
        default="30",
        foreign=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str),
    ),
    _ours(
        "--checkpoint-signal NAME[,...]",
        values.signals,
        "signals that request a checkpoint from the ranks. If a signal also stops the job, the job stops after the "
        "checkpoint. Default: SIGTERM and SIGUSR1, if the script polls for requests (see `ddp-launch docs elastic`)",
    ),
    _ours(
        "--checkpoint-grace TIME",
        values.duration,
        "time for the ranks to write a checkpoint that a signal requested",
        default="60",
    ),
)


# --- the table --------------------------------------------------------------------------------------

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
        "--nnodes N|MIN:MAX",
        values.nnodes,
        "number of nodes (machines) in the job; with a range MIN:MAX the job can shrink and grow",
        default="1",
    ),
    _torch(
        "--nproc-per-node N|auto|gpu|cpu|xpu",
        values.nproc,
        "number of ranks on this node; auto: one per GPU (NVIDIA or AMD), or one per usable CPU if there is no GPU",
        default="auto",
    ),
    _torch(
        "--node-rank N",
        values.count,
        "rank of this node, 0 to N-1 (default: nodes are ordered by their index in Slurm or Kubernetes, then by host "
        "name)",
    ),
    _ours(
        "--topology PLACE|slurm|nvlink",
        place,
        "where this node is in the network, from the largest unit to the smallest, for example pod1/rack7. Nodes that "
        "share a unit get neighbouring node ranks. slurm: the switches that Slurm names. nvlink: the NVLink domain of "
        "the GPUs",
    ),
    _torch(
        "--role NAME",
        lambda name: name and values.text(name),
        "role name of the ranks on this node",
        default="default",
    ),
    _ours(
        "--spares N",
        values.count,
        "number of extra nodes, in addition to --nnodes, that join and wait to replace a failed node",
        default="0",
    ),
    _ours(
        "--scale-up WHEN",
        values.choice(*ScaleUp),
        "when the job adds a node that joined late: never, on-restart, immediate (as torchrun: restarts the ranks, or "
        "lets them continue in place where they can), at-checkpoint",
        default="immediate",
    ),
)

_RENDEZVOUS = (
    _ours(
        "--rendezvous HOST[:PORT][,...]",
        values.endpoints,
        "address of the rendezvous service, or of the node whose ddp-launch runs it (default: this process runs it "
        "and opens no port)",
    ),
    _ours(
        "--secret-file FILE",
        values.path,
        "file with the job secret, the same on all nodes; needed if a node runs the rendezvous (create it with "
        "`ddp-rendezvous secret FILE`)",
    ),
    _switch(
        "--insecure",
        "let other nodes connect to the rendezvous of this node without a secret; use it only in a trusted network",
    ),
    _torch(
        "--rdzv-id NAME",
        values.run_id,
        "ID of the run; with more than one node, the same on all nodes (default: made from the script name, and the "
        "scheduler's job or the user)",
    ),
    _torch(
        "--rdzv-endpoint HOST[:PORT]",
        values.torch_endpoint,
        "same as --rendezvous; used only if the job has more than one node",
    ),
    _torch(
        "--rdzv-conf KEY=VALUE[,...]",
        values.pairs,
        "torchrun's rendezvous settings. join_timeout (or timeout) and last_call_timeout set --join-timeout and "
        "--last-call if these are not given. A node that is silent for keep_alive_interval (5 s) times "
        "keep_alive_max_attempt (3) is lost. Other keys have no effect",
    ),
    _torch_switch("--standalone", "run the job on this node only; other rendezvous options have no effect"),
    _ours(
        "--join-timeout TIME",
        values.positive_duration,
        "fail if not enough nodes join within this time",
        default="600",
    ),
    _ours(
        "--last-call TIME",
        values.duration,
        "with --nnodes MIN:MAX: after MIN nodes have joined, wait this long for more",
        default="2",
    ),
    _ours(
        "--replacement-timeout TIME",
        values.duration,
        "time to wait for a replacement if too few nodes remain after a node is lost; the job fails if none joins in "
        "this time",
        default="60",
    ),
    _ours(
        "--shrink-after TIME",
        values.duration,
        "with --nnodes MIN:MAX: time to wait for a replacement if at least MIN nodes remain. If none joins in this "
        "time, the job continues with fewer nodes (default: 0, or --replacement-timeout if that option is given)",
    ),
    _torch(
        "--master-addr HOST",
        values.host,
        "address of node rank 0, at which the store of torch.distributed listens",
    ),
    _torch("--master-port PORT", values.port, "port of the store on node rank 0 (default: any free port)"),
    _torch("--local-addr HOST", values.host, "address at which other nodes reach this node"),
    _ours(
        "--interface NAME",
        values.interface,
        "network interface for traffic between nodes, for example eth0. Other nodes connect to its address, and Gloo "
        "and NCCL in the ranks use this interface",
    ),
)

_OVER_SSH = (
    _ours(
        "--hosts HOST[:RANKS][,...]",
        values.hosts,
        "start the agents on all these hosts over ssh, each in the current directory",
    ),
    _ours("--hostfile FILE", values.path, "file of hosts, one per line: NAME or NAME slots=RANKS"),
    _ours(
        "--ssh COMMAND",
        values.command,
        "ssh command that connects to the hosts",
        default="ssh -T -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=5 -o ExitOnForwardFailure=yes",
    ),
    _ours(
        "--send-env NAME[=VALUE][,...]",
        variables,
        "environment variables to send to the hosts, in addition to PYTHONPATH, PYTHON_EXEC, NCCL_*, GLOO_*, TORCH_*, "
        "OMP_NUM_THREADS and others that training often needs",
    ),
)

_FAILURES = (
    _torch(
        "--max-restarts N|N/WINDOW",
        values.budget,
        "how many times the job may restart all ranks: N in total, or N within any WINDOW (5/1h)",
        default="0",
        field="budget",
    ),
    _ours(
        "--recover HOW",
        values.choice(*Recover),
        "what happens to ranks that survive a failure. auto: ranks inside State.run of ddp.elastic keep their "
        "processes, the others restart. in-place: the same, and the decision says why if that is not possible. "
        "restart: all ranks restart",
        default="auto",
    ),
    _ours(
        "--max-heals N|N/WINDOW|unlimited",
        values.heals,
        "how many times failed ranks are replaced while the others keep their processes; after that, all ranks restart "
        "as often as --max-restarts permits",
        default="unlimited",
        field="heal_budget",
    ),
    _ours(
        "--resume-arg ARGUMENTS",
        values.resume_arg,
        "arguments to add to those of the script after a failure, if its ranks have saved a state with ddp.on_failure; "
        "{path} stands for its path: --resume-arg '--checkpoint {path}'. The ranks also get it in DDP_RESUME_PATH",
    ),
    _ours(
        "--resume-file FILE",
        values.path,
        "keep the path of a saved state in FILE, so that a job that starts later with the same FILE continues there, "
        "for example after the scheduler has stopped this one (see --resume-arg). With several nodes, FILE must be in "
        "storage that they share. It is removed after the first step from there",
    ),
    _ours(
        "--crash-loop TIMES/TIME[,TIMES/step]|off",
        values.crash_loop,
        "TIMES/TIME: fail the job if the same rank fails TIMES times in a row within TIME after its start, before its "
        "first training step. TIMES/step: fail it after TIMES failures in a row without a further step (example: "
        "3/1s,5/step)",
        default="off",
    ),
    _ours(
        "--failure-policy CLASS=ACTION[,...]",
        values.rules,
        "what to do after a failure of a class. Classes: out-of-memory, hardware, network, user-exception, signal, "
        "exit-code[:N], hang, node-lost. Actions: restart, heal (as --recover auto, also after user-exception), "
        "exclude (restart without that node), fail, ignore (the other ranks continue). Default: as --recover, but "
        "restart after user-exception",
        field="rules",
    ),
    _ours(
        "--reserved-exit-codes CODE[,...]",
        partial(values.numbers, what="exit codes", below=256),
        "exit with 1 instead of these exit codes; use it for codes that your scheduler handles in a special way, "
        "for example with a requeue",
    ),
    _ours(
        "--hang-timeout auto|off|TIME[,...]",
        values.hang_timeout,
        "auto: find the rank that blocks the others, and restart the job. This needs a rank that waits for another, "
        "and no sign of life of any rank for 10m or a longer timeout of a process group. TIME: do so if ranks make no "
        "progress within a step for TIME, without further evidence. Add NAME=TIME to set the limit of another phase: "
        "start, first-step, checkpoint, evaluation (30m each)",
        default="auto",
    ),
    _ours(
        "--isolation-timeout TIME",
        values.positive_duration,
        "stop the ranks if, for TIME, the rendezvous is unreachable and they make no progress",
        default="5m",
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
    _torch(
        "--print-completion bash|zsh|fish|tcsh",
        values.text,
        "print a script that completes commands in this shell, then exit; the same as `ddp-launch completion`",
        reach=Reach.FLAG,
        pet=False,
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
        "--rdzv-backend NAME",
        values.text,
        "torchrun's rendezvous backend; the values static and ddp do not print a warning",
        without_effect="ddp-launch always uses its own rendezvous",
    ),
    _torch(
        "--monitor-interval SECONDS",
        values.duration,
        "torchrun's polling interval",
        without_effect="the agent detects the exit of a rank immediately, without polling",
    ),
    _torch(
        "--start-method NAME",
        values.choice("spawn", "fork", "forkserver"),
        "how torchrun starts processes",
        without_effect="ranks are separate programs; see --warm-start",
    ),
    _torch(
        "--event-log-handler NAME",
        values.text,
        "plug-in of torchrun for events",
        without_effect="ddp-launch does not load plug-ins of torchrun",
    ),
    _torch(
        "--logs-specs NAME",
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
