"""The options of `ddp-launch`: one table that the argument reader, the environment, the TOML file,
`--help` and `--print-config` all read. Nothing about an option is said anywhere else.

An option's text is parsed by `parse`, wherever it came from; a switch is an option whose text is
"1" or "0". torchrun's options keep torchrun's names, meanings and PET_ variables.
"""

from __future__ import annotations

from functools import partial

from launcher.settings import host_names, name_lists, values
from launcher.settings.budget_text import hang_timeout
from launcher.settings.health_options import HEALTH, WATCHING
from launcher.settings.option import Option, Reach
from launcher.settings.option import ours as _ours
from launcher.settings.option import switch as _switch
from launcher.settings.option import torch as _torch
from launcher.settings.option import torch_switch as _torch_switch
from launcher.settings.rank_options import RANKS

_ENTRY = (
    _torch_switch("--module", "the script is a module, run as python -m does", short="-m"),
    _torch_switch("--no-python", "the script is a program, executed as it is"),
    _torch_switch("--run-path", "the script is run by runpy.run_path in the rank's interpreter"),
)

_PLACES = (
    _torch(
        "--nnodes",
        "N|MIN:MAX",
        "1",
        values.nnodes,
        "machines of the job; a range lets it shrink and grow",
    ),
    _torch(
        "--nproc-per-node",
        "N|auto|gpu|cpu|xpu",
        "auto",
        values.nproc,
        "ranks on this machine; auto: one per GPU (NVIDIA or AMD), else one per usable CPU",
    ),
    _torch(
        "--node-rank",
        "N",
        None,
        values.count,
        "this machine's place, when it matters (default: natural order of the hosts)",
    ),
    _torch(
        "--role",
        "NAME",
        "default",
        lambda name: name and values.text(name),  # '' is what torchx says to torchrun
        "role of this machine's ranks",
    ),
    _ours("--spares", "N", "0", values.count, "machines beyond the world that wait, ready to replace one"),
    _ours(
        "--scale-up",
        "WHEN",
        "on-restart",
        values.choice("never", "on-restart", "immediate", "at-checkpoint"),
        "when a machine that came late enlarges the world: never, on-restart, immediate, at-checkpoint",
    ),
)

_MEETING = (
    _ours(
        "--rendezvous",
        "HOST[:PORT][,...]",
        None,
        values.endpoints,
        "the rendezvous service, or the machine that embeds it (default: in this process, no port open)",
    ),
    _ours(
        "--secret-file",
        "FILE",
        None,
        values.path,
        "a rendezvous that one of the machines embeds: the secret they all have (`ddp-rendezvous secret FILE`)",
    ),
    _switch("--insecure", "embed the rendezvous for other machines without one: the network is trusted"),
    _torch("--rdzv-id", "NAME", None, values.run_id, "name of the run (default: made from script and time)"),
    _torch(
        "--rdzv-endpoint",
        "HOST[:PORT]",
        None,
        values.torch_endpoint,
        "as --rendezvous; used when there is more than one machine",
    ),
    _torch(
        "--rdzv-conf",
        "KEY=VALUE[,...]",
        None,
        values.pairs,
        "join_timeout or timeout, and last_call_timeout: as --join-timeout and --last-call, which win",
    ),
    _torch_switch("--standalone", "one machine, embedded rendezvous, whatever rendezvous was asked for"),
    _ours(
        "--join-timeout", "TIME", "600", values.positive_duration, "give up when no world forms for so long"
    ),
    _ours(
        "--last-call",
        "TIME",
        "2",
        values.duration,
        "with MIN:MAX, once MIN are there: wait so long for another machine",
    ),
    _ours(
        "--replacement-timeout",
        "TIME",
        "60",
        values.duration,
        "wait so long for a machine to replace a lost one; with MIN:MAX, and MIN are left: not unless given",
    ),
    _ours(
        "--shrink-after",
        "TIME",
        None,
        values.duration,
        "with MIN:MAX, and MIN are left: wait for that machine so long instead",
    ),
    _torch("--master-addr", "HOST", None, values.host, "address of node rank 0, where the ranks meet"),
    _torch("--master-port", "PORT", None, values.port, "port on node rank 0 (default: any free one)"),
    _torch("--local-addr", "HOST", None, values.host, "address at which the other machines reach this one"),
    _ours(
        "--interface",
        "NAME",
        None,
        values.interface,
        "network interface whose address that is, and which the ranks use, e.g. eth0",
    ),
)

_OVER_SSH = (
    _ours(
        "--hosts",
        "HOST[:RANKS][,...]",
        None,
        host_names.hosts,
        "start the agents of all these machines from here, over ssh, in the current folder",
    ),
    _ours("--hostfile", "FILE", None, values.path, "as --hosts: a machine a line, NAME or NAME slots=RANKS"),
    _ours(
        "--ssh",
        "COMMAND",
        "ssh -T -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=5 -o ExitOnForwardFailure=yes",
        values.command,
        "how to reach them",
    ),
    _ours(
        "--send-env",
        "NAME[=VALUE][,...]",
        None,
        name_lists.variables,
        "environment to take along; PYTHONPATH, NCCL_*, GLOO_*, TORCH_*, OMP_NUM_THREADS and the like always go",
    ),
)

_FAILURES = (
    _torch(
        "--max-restarts",
        "N|N/WINDOW",
        "0",
        values.budget,
        "restarts of all ranks, in all or within any WINDOW (5/1h)",
    ),
    _ours(
        "--crash-loop",
        "TIMES/TIME|off",
        "3/1s",
        values.crash_loop,
        "stop when a rank fails within TIME of its start, TIMES rounds running",
    ),
    _ours(
        "--failure-policy",
        "CLASS=ACTION[,...]",
        None,
        values.rules,
        "per class of failure (out-of-memory, hardware, network, user-exception, signal, exit-code[:N], "
        "hang, node-lost): restart, exclude (restart without that machine), fail, ignore "
        "(default: restart while the budget lasts)",
    ),
    _ours(
        "--reserved-exit-codes",
        "CODE[,...]",
        None,
        partial(values.numbers, what="exit codes", below=256),
        "a job that failed ends with 1 instead of these, for which a scheduler would start a machine again",
    ),
    _ours(
        "--hang-timeout",
        "auto|off|TIME[,...]",
        "auto",
        hang_timeout,
        "how long ranks may stand still within a step before the reason is looked for and the job restarted; then, as "
        "NAME=TIME, budgets of their own: start, first-step, checkpoint, evaluation (each 30m); auto: at least 2m, "
        "20 of the longest steps, 10m for ranks that may be at work",
    ),
    _ours(
        "--isolation-timeout",
        "TIME",
        "5m",
        values.positive_duration,
        "stop ranks that make no progress while the rendezvous is out of reach, both for so long",
    ),
)

_LOGS = (
    _torch("--log-dir", "DIR", None, values.path, "keep the ranks' logs here, one folder per run"),
    _torch(
        "--redirects",
        "STREAMS",
        "0",
        values.streams,
        "to the log file only: 0 none, 1 stdout, 2 stderr, 3 both; or per local rank, 0:3,1:2",
        short="-r",
    ),
    _torch("--tee", "STREAMS", "0", values.streams, "to the log file and the terminal; as -r", short="-t"),
    _torch(
        "--local-ranks-filter",
        "N[,...]",
        None,
        partial(values.numbers, what="local ranks", below=values.MAX_RANKS_PER_NODE),
        "show only these local ranks on the terminal",
    ),
    _torch(
        "--duplicate-stdout-filters",
        "TEXT[,...]",
        None,
        values.filters,
        "also copy stdout lines that hold one of these to a file of their own; ',,' is a comma",
    ),
    _torch(
        "--duplicate-stderr-filters",
        "TEXT[,...]",
        None,
        values.filters,
        "the same for stderr",
    ),
    Option(
        "--log-prefix",
        "in front of each line: {node} {rank} {local_rank} {role} {generation}",
        values.prefix,
        "TEMPLATE",
        "[{node}:{rank}] ",
        foreign=("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", values.prefix_from_torch),
    ),
    _ours(
        "--color",
        "WHEN",
        "auto",
        values.choice("auto", "always", "never"),
        "colour: auto (NO_COLOR turns it off), always, never",
    ),
    _ours(
        "--progress",
        "WHEN",
        "auto",
        values.choice("auto", "always", "never"),
        "the live line at the bottom: auto (on a terminal), always, never",
    ),
)

_COMMAND = (
    Option(
        "--config",
        "options from a TOML file; its keys are the long flags",
        values.path,
        "FILE",
        reach=Reach.ENVIRONMENT,
    ),
    _switch("--print-config", "show every option, its value and where it came from", reach=Reach.FLAG),
    _switch("--version", "show the version", reach=Reach.FLAG),
    _switch("--help", "show this", short="-h", torchrun=True, reach=Reach.FLAG),
)

_WITHOUT_EFFECT = (
    _torch(
        "--rdzv-backend",
        "NAME",
        None,
        values.text,
        "static is the same as leaving it out",
        without_effect="there is one rendezvous, ours",
    ),
    _torch(
        "--monitor-interval",
        "SECONDS",
        None,
        values.duration,
        "the end of a rank is seen at once",
        without_effect="the end of a rank is seen at once, nothing is polled",
    ),
    _torch(
        "--start-method",
        "NAME",
        None,
        values.choice("spawn", "fork", "forkserver"),
        "see --warm-start",
        without_effect="ranks are programs of their own; see --warm-start",
    ),
    _torch(
        "--event-log-handler",
        "NAME",
        None,
        values.text,
        "it names a plug-in inside torch",
        without_effect="it names a plug-in inside torch",
    ),
    _torch(
        "--logs-specs",
        "NAME",
        None,
        values.text,
        "it names a plug-in inside torch",
        without_effect="it names a plug-in inside torch; see --log-dir and --log-prefix",
        pet=False,
    ),
)

GROUPS: tuple[tuple[str, tuple[Option, ...]], ...] = (
    ("What to run", _ENTRY),
    ("Machines and ranks", _PLACES),
    ("How they meet", _MEETING),
    ("Several machines from one command", _OVER_SSH),
    ("When something fails", _FAILURES),
    ("Is this machine fit?", HEALTH),
    ("Is all well while it runs?", WATCHING),
    ("Starting and stopping ranks", RANKS),
    ("Logs and terminal", _LOGS),
    ("This command", _COMMAND),
    ("Accepted for torchrun's sake, with a warning", _WITHOUT_EFFECT),
)
OPTIONS: tuple[Option, ...] = tuple(option for _, group in GROUPS for option in group)
BY_SPELLING: dict[str, Option] = {name: option for option in OPTIONS for name in option.spellings}
BY_SHORT: dict[str, Option] = {option.short: option for option in OPTIONS if option.short}


def matching(name: str) -> tuple[str, ...]:
    """The spellings that `name`, whole or abbreviated, may stand for.

    What is a clear abbreviation to torchrun stays one, whatever options of ours begin alike.
    """
    if name in BY_SPELLING:
        return (name,)
    found = tuple(spelling for spelling in BY_SPELLING if spelling.startswith(name))
    of_torchrun = tuple(spelling for spelling in found if BY_SPELLING[spelling].torchrun)
    return of_torchrun or found


def negates(spelling: str) -> bool:
    return BY_SPELLING[spelling].flag != spelling
