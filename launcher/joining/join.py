"""The data that this node sends when it joins: the spec of the job and the description of the node."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from launcher.settings.values import parse_int
from rendezvous.values.types import JobSpec, NodeFacts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from launcher.settings.spec import LaunchSpec

_STOP_MARGIN_S = 15.0  # after the ranks' grace period: to kill and reap them, and to send the reply
_SCHEDULER_INDEXES = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")
_MOST_NODES = 1 << 31


def job_spec(spec: LaunchSpec, version: str) -> JobSpec:
    return JobSpec(
        job_id=spec.run_id,
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        entry_point=spec.entry.target,
        nproc=spec.nproc_asked,
        version=version,
        budget=spec.budget,
        crash_loop=spec.crash_loop,
        join_timeout_s=spec.join_timeout_s,
        last_call_s=spec.last_call_s,
        lease_s=spec.lease_s,
        replacement_timeout_s=spec.replacement_timeout_s,
        shrink_after_s=spec.shrink_after_s,
        stop_budget_s=spec.shutdown_timeout_s + _STOP_MARGIN_S,
        spares=spec.spares,
        scale_up=spec.scale_up,
        rules=spec.rules,
        stragglers=spec.stragglers,
        recover=spec.recover,
        heal_budget=spec.heal_budget,
    )


def node_facts(spec: LaunchSpec, host: str, address: str, environ: Mapping[str, str]) -> NodeFacts:
    return NodeFacts(
        host=host,
        address=address,
        nproc=spec.nproc,
        role=spec.role,
        node_rank=spec.node_rank,
        scheduler_index=_scheduler_index(environ) if spec.max_nodes > 1 else None,
        script_args=_checksum(spec.entry.args) if spec.max_nodes > 1 else "",
    )


def _checksum(args: Sequence[str]) -> str:
    """Not the arguments themselves: they may contain a password or a token, and the service stores facts."""
    return f"{zlib.crc32(chr(0).join(args).encode(errors='surrogateescape')):08x}"


def _scheduler_index(environ: Mapping[str, str]) -> int | None:
    indexes = (parse_int(environ.get(name, "")) for name in _SCHEDULER_INDEXES)
    return next((index for index in indexes if index is not None and 0 <= index < _MOST_NODES), None)
