"""The command line and environment for each host of `--hosts`.

Pure. The command line is made from the merged settings, so a host does not need the environment or the files of this
host.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from launcher.settings.options import OPTIONS
from launcher.settings.values import Host, parse_int
from launcher.ssh_control import SSH_CONTROL
from launcher.template.contracts import BACKEND, NATIVE, TIMEOUT_S
from rendezvous.values.error_codes import Code
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from launcher.settings.config import Settings

# Options that this command sets for each host, or that have no meaning for a single host.
_OURS = {
    *("hosts", "hostfile", "ssh", "send_env", "nnodes", "nproc_per_node", "node_rank", "rendezvous"),
    *(
        "secret_file",
        "insecure",
        "rdzv_id",
        "rdzv_endpoint",
        "rdzv_backend",
        "master_addr",
        "master_port",
        "standalone",
    ),
    *("color", "config", "print_config", "version", "help"),
}
_SENT = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "DDP_RENDEZVOUS_*", "NCCL_*", "GLOO_*")
_SENT_TOO = ("TORCH_*", "TORCHELASTIC_*", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHON_EXEC")
_OF_LIBRARY = (BACKEND, TIMEOUT_S, NATIVE)
ALWAYS_SENT = (*_SENT, *_SENT_TOO, *_OF_LIBRARY)
_SET_HERE = ("node_rank", "rdzv_endpoint", "master_addr", "master_port", "secret_file", "insecure")


def check(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """Return one warning for each option that has no effect; raise `UsageError` if an option contradicts --hosts."""
    ours = settings.of("hosts" if settings["hosts"] else "hostfile")
    if settings["standalone"]:
        raise settings.of("standalone").wrong(
            f"contradicts {ours.quoted}",
            f"use either --standalone or {ours.option.flag}",
            code=Code.CONTRADICTING_OPTIONS,
        )
    if settings["local_addr"]:
        raise settings.of("local_addr").wrong(
            f"with {ours.quoted} it would give the same address to all nodes",
            "use --interface to select the network",
            code=Code.CONTRADICTING_OPTIONS,
        )
    tasks = parse_int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks is not None and tasks > 1:
        raise ours.wrong(
            f"srun has started {tasks} copies of ddp-launch, and each copy would start agents on all hosts",
            f"remove {ours.option.flag}, because srun starts the agents, or run the command once without srun",
        )
    given = (settings.of(dest) for dest in _SET_HERE)
    return [
        f"{each.quoted}: has no effect, because {ours.option.flag} sets the same value"
        for each in given
        if each.given
    ]


def world_of(settings: Settings, found: Sequence[Host]) -> tuple[int, int]:
    """The value of --nnodes, else the number of hosts minus the spares."""
    if not settings.of("nnodes").given:
        most = len(found) - settings["spares"]
        if most < 1:
            raise settings.of("spares").wrong(
                f"no host remains for training: only {len(found)} hosts are listed",
                "use fewer spares, or list more hosts",
            )
        return most, most
    least, most = settings["nnodes"]
    if least > len(found):
        raise settings.of("nnodes").wrong(
            f"only {len(found)} hosts are listed", "list more hosts, or use a smaller --nnodes"
        )
    return least, most


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """The settings that are the same for all hosts of a job."""

    program: str
    folder: str
    run_id: str
    nnodes: tuple[int, int]
    rendezvous: str  # a deployed service; "": the `--hosts` command serves it
    color: str
    words: tuple[str, ...]  # the script and its arguments


def argv_for(
    settings: Settings, shared: SharedSettings, rendezvous: str, host: Host, node_rank: int | None
) -> list[str]:
    """The agent's argv on `host`."""
    least, most = shared.nnodes
    nproc = settings.of("nproc_per_node")
    values = {
        "--nnodes": f"{least}:{most}" if least != most else str(most),
        "--nproc-per-node": str(host.slots or "") or (nproc.text or ""),
        "--rdzv-id": shared.run_id,
        "--rendezvous": rendezvous,
        "--color": shared.color,
    }
    if node_rank is not None:
        values["--node-rank"] = str(node_rank)
    words = [shared.program, *(f"{flag}={text}" for flag, text in values.items())]
    return [*words, *_forwarded_options(settings), "--", *shared.words]


def _forwarded_options(settings: Settings) -> list[str]:
    words = []
    for option in OPTIONS:
        setting = settings.of(option.dest)
        if option.dest in _OURS or not setting.given or setting.text is None:
            continue
        if not option.is_switch:
            words.append(f"{option.flag}={setting.text}")
        elif setting.value:
            words.append(option.flag)
        elif option.negatable:
            words.append(option.spellings[1])
    return words


def remote_command(folder: str, words: Sequence[str]) -> str:
    """One line with the same meaning in sh, bash, zsh, fish and csh."""
    return f"cd {shlex.quote(folder)} && exec env {SSH_CONTROL}=1 {shlex.join(words)}"


def sent_environment(environ: Mapping[str, str], more: Sequence[str]) -> dict[str, str]:
    """Environment variables sent to the hosts: those that training often needs, and those of --send-env."""
    patterns = (*ALWAYS_SENT, *(name for name in more if "=" not in name))
    found = {name: value for name, value in environ.items() if any(_fits(name, each) for each in patterns)}
    for text in more:
        name, equals, value = text.partition("=")
        if equals:
            found[name] = value
    return found


def _fits(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
