"""The description of this node, which it sends when it joins."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from launcher.settings.values import parse_int
from rendezvous.values.types import NodeFacts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from launcher.settings.spec import LaunchSpec

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
