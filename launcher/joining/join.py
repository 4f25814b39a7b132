"""The description of this node, which it sends when it joins."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence

from launcher.settings.spec import LaunchSpec
from launcher.settings.values import parse_int, quote
from rendezvous.values.contracts import PORT
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.types import NodeFacts

_SCHEDULER_INDEXES = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")
_MOST_NODES = 1 << 31


def node_facts(spec: LaunchSpec, host: str, address: str, environ: Mapping[str, str]) -> NodeFacts:
    return NodeFacts(
        host=host,
        address=address,
        nproc=spec.nproc,
        role=spec.role,
        node_rank=spec.node_rank,
        scheduler_index=_scheduler_index(environ) if spec.job.max_nodes > 1 else None,
        script_args=_checksum(spec.entry.args) if spec.job.max_nodes > 1 else "",
    )


def _checksum(args: Sequence[str]) -> str:
    """Not the arguments themselves: they may contain a password or a token, and the service stores facts."""
    return f"{zlib.crc32(chr(0).join(args).encode(errors='surrogateescape')):08x}"


def _scheduler_index(environ: Mapping[str, str]) -> int | None:
    indexes = (parse_int(environ.get(name, "")) for name in _SCHEDULER_INDEXES)
    return next((index for index in indexes if index is not None and 0 <= index < _MOST_NODES), None)


# --- the address of the rendezvous -----------------------------------------------------------------
#
# Decides where the rendezvous of a job is: in this process, served by this agent, or at an address to connect to.
#
# Without I/O: the caller passes the environment and the host name. An address that was given comes first, then this
# process if the job has one node, then the first node that the scheduler reports.
#
#     one node, no address                     the embedded service, in this process, no port
#     --rendezvous a:29400                     the agent on host `a` serves; all agents connect
#     --rendezvous a:29400,b:29400             a deployed service: all agents connect
#     --hosts a,b (over ssh)                   the command that starts all agents serves; all agents connect
#     Slurm, several nodes                     the first node of the job serves, on a port computed from the job ID
#     Kubernetes Indexed Job, several nodes    the pod with index 0 serves, at its name in the headless service

_SLURM_PORTS = range(20000, 30000)  # below the kernel's ephemeral range


@dataclass(frozen=True, slots=True)
class Endpoint:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Embedded:
    """In this process."""


@dataclass(frozen=True, slots=True)
class MayServe:
    """One address: the agent on the host with this address serves there; all agents connect, also that one."""

    endpoint: Endpoint
    why: str


@dataclass(frozen=True, slots=True)
class Deployed:
    endpoints: tuple[Endpoint, ...]


Location = Embedded | MayServe | Deployed


class NoRendezvous(ValueError):
    """The message says which options to use."""


def find_rendezvous(
    rendezvous: str,
    max_nodes: int,
    fqdn: str,
    environ: Mapping[str, str],
    served: bool = False,
    given_by: str = "--rendezvous",
) -> Location:
    """`served`: a service already listens at the address, so no agent serves. `given_by`: the option that set it."""
    if rendezvous:
        endpoints = tuple(parse_endpoint(text) for text in rendezvous.split(",") if text.strip())
        if len(endpoints) == 1 and not served:
            return MayServe(endpoints[0], given_by)
        return Deployed(endpoints)
    if max_nodes == 1:
        return Embedded()
    found = _on_slurm(environ) or _on_kubernetes(fqdn, environ)
    if found is None:
        raise NoRendezvous(
            f"--nnodes {max_nodes}: the address of the rendezvous is not known. Give every node the same --rendezvous "
            "HOST:PORT, where HOST is one of the nodes or a running service. Or start ddp-launch on the nodes with "
            "srun or as a Kubernetes Indexed Job, which provide the address."
        )
    return found


def parse_endpoint(text: str) -> Endpoint:
    """HOST, HOST:PORT, [IPv6]:PORT, or a bare IPv6 address."""
    text = text.strip()
    bracketed = re.fullmatch(r"\[([^\[\]]+)\](?::(.*))?", text)
    if bracketed:
        host, port = bracketed[1], bracketed[2] or str(PORT)
    else:
        host, colon, port = text.rpartition(":")
        if not colon or ":" in host:  # a name alone, or an IPv6 address without brackets
            host, port = text, str(PORT)
    number = parse_int(port)
    if not host or set(host) & set("[]") or number is None or not 0 < number < 65536:
        raise NoRendezvous(
            f"invalid --rendezvous {quote(text)}: not an address. Use HOST:PORT, for example node1:{PORT}"
        )
    return Endpoint(host, number)


def _on_slurm(environ: Mapping[str, str]) -> MayServe | None:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    job = parse_int(environ.get("SLURM_JOB_ID", ""))
    if not nodes or job is None:
        return None
    port = _SLURM_PORTS.start + job % len(_SLURM_PORTS)
    return MayServe(Endpoint(first_of_hostlist(nodes), port), "the first node of the Slurm job")


def first_of_hostlist(text: str) -> str:
    """Return the first host of a list in Slurm's short form: "gpu03" for "gpu[03-07,12],cpu1"."""
    first = re.match(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*", text)
    assert first is not None  # every part may be empty
    return re.sub(r"\[([^\]-]+?)(?:[-,][^\]]*)?\]", r"\1", first[0])


def _on_kubernetes(fqdn: str, environ: Mapping[str, str]) -> MayServe | None:
    """An Indexed Job names its pods JOB-INDEX; their DNS names are in the subdomain of the headless service."""
    index = environ.get("JOB_COMPLETION_INDEX", "")
    pod, dot, domain = fqdn.partition(".")
    if not index.isdigit() or not pod.endswith(f"-{index}"):
        return None
    first = f"{pod[: -len(index)]}0{dot}{domain}"
    return MayServe(Endpoint(first, PORT), "the pod with index 0 of the Kubernetes job")
