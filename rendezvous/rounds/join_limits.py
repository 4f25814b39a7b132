"""The limits of what a node may ask for. Pure. A spec outside these limits could overload the service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rendezvous.values.text_limits import NAME

if TYPE_CHECKING:
    from rendezvous.values.types import AgentId, Assignment, JobSpec, NodeFacts

JOB_ID_CHARS = 128
_NODES = 100_000
_RANKS_PER_NODE = 4096
_YEAR_S = 366 * 86_400.0
_COUNT = 1_000_000
_GENERATIONS = 1_000_000_000


def objection(agent: AgentId, spec: JobSpec, facts: NodeFacts) -> str:
    """Why the service rejects this join; empty if it does not."""
    names = (
        (spec.job_id, "the job id", JOB_ID_CHARS),
        (agent.node, "the node name", NAME.max_chars),
        (agent.incarnation, "the incarnation", NAME.max_chars),
    )
    for name, what, max_chars in names:
        if words := _name_objection(name, what, max_chars):
            return words
    if not 1 <= spec.min_nodes <= spec.max_nodes <= _NODES:
        return f"--nnodes {spec.min_nodes}:{spec.max_nodes} is not within 1:{_NODES}"
    if not 1 <= facts.nproc <= _RANKS_PER_NODE:
        return f"{agent.node} wants to run {facts.nproc} ranks; a node runs 1 to {_RANKS_PER_NODE}"
    return _number_objection(spec)


def memory_objection(generation: int, running: Assignment | None) -> str:
    """Why the service rejects the generation and assignment that an agent reports; empty if it does not."""
    if not 0 <= generation <= _GENERATIONS:
        return f"generation {generation} is not within 0..{_GENERATIONS}"
    if running is None:
        return ""
    if running.generation != generation or not 0 <= running.node_rank < running.n_nodes <= _NODES:
        return f"node rank {running.node_rank} of {running.n_nodes} in generation {running.generation}"
    return ""


def _name_objection(name: str, what: str, max_chars: int) -> str:
    if not 0 < len(name) <= max_chars:
        return f"{what} has {len(name)} characters"
    if not name.isprintable():
        return f"{what} {name!r} has characters that cannot be printed"
    return ""


def _number_objection(spec: JobSpec) -> str:
    ranges = (
        ("lease", spec.lease_s, 0.1, 3600.0),
        ("join timeout", spec.join_timeout_s, 0.0, _YEAR_S),
        ("last call", spec.last_call_s, 0.0, _YEAR_S),
        ("bound of the last call", spec.last_call_bound_s, 0.0, _YEAR_S),
        ("replacement timeout", spec.replacement_timeout_s, 0.0, _YEAR_S),
        ("wait before shrinking", spec.shrink_after_s, 0.0, _YEAR_S),
        ("stop budget", spec.stop_budget_s, 0.1, _YEAR_S),
        ("node cool-down", spec.node_cooldown_s, 0.1, _YEAR_S),
        ("restart window", _YEAR_S if spec.budget.window_s is None else spec.budget.window_s, 0.1, _YEAR_S),
        ("restart budget", spec.budget.limit, 0, _COUNT),
        ("number of spares", spec.spares, 0, _NODES),
        ("node failure limit", spec.node_failure_limit, 0, _COUNT),
        ("number of policy rules", len(spec.rules), 0, 1000),
    )
    for what, value, low, high in ranges:
        if not low <= value <= high:
            return f"the {what} is {value:g}, which is not within {low:g}..{high:g}"
    return ""
