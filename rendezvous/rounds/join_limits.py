"""The limits of a join. Pure. A job spec outside these limits could overload the service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rendezvous.values.text_limits import NAME

if TYPE_CHECKING:
    from rendezvous.values.types import AgentId, Assignment, JobSpec, NodeFacts, RestartBudget

JOB_ID_CHARS = 128
_NODES = 100_000
_RANKS_PER_NODE = 4096
_YEAR_S = 366 * 86_400.0
_COUNT = 1_000_000
_GENERATIONS = 1_000_000_000


def join_problem(agent: AgentId, spec: JobSpec, facts: NodeFacts) -> str:
    """Why the service rejects this join; empty if it does not."""
    names = (
        (spec.job_id, "the job id (--rdzv-id)", JOB_ID_CHARS),
        (agent.node, "the node name", NAME.max_chars),
        (agent.incarnation, "the incarnation", NAME.max_chars),
    )
    for name, what, max_chars in names:
        if problem := _name_problem(name, what, max_chars):
            return problem
    if not 1 <= spec.min_nodes <= spec.max_nodes <= _NODES:
        return f"invalid --nnodes {spec.min_nodes}:{spec.max_nodes}: use MIN:MAX with 1 <= MIN <= MAX <= {_NODES}"
    if not 1 <= facts.nproc <= _RANKS_PER_NODE:
        return f"invalid --nproc-per-node {facts.nproc} on {agent.node}: use 1 to {_RANKS_PER_NODE}"
    return _number_problem(spec)


def reported_state_problem(generation: int, running: Assignment | None) -> str:
    """Why the service rejects the generation and assignment that an agent reports; empty if it does not."""
    if not 0 <= generation <= _GENERATIONS:
        return f"the agent reports generation {generation}: expected 0 to {_GENERATIONS}"
    if running is None:
        return ""
    if running.generation != generation or not 0 <= running.node_rank < running.n_nodes <= _NODES:
        return (
            f"the agent reports an invalid assignment: node rank {running.node_rank} of {running.n_nodes} nodes "
            f"in generation {running.generation}"
        )
    return ""


def _name_problem(name: str, what: str, max_chars: int) -> str:
    if not 0 < len(name) <= max_chars:
        return f"{what} has {len(name)} characters; use 1 to {max_chars}"
    if not name.isprintable():
        return f"{what} {name!r} contains control characters; remove them"
    return ""


def _number_problem(spec: JobSpec) -> str:
    ranges = (
        ("the lease", spec.lease_s, 0.1, 3600.0),
        ("--join-timeout", spec.join_timeout_s, 0.0, _YEAR_S),
        ("--last-call", spec.last_call_s, 0.0, _YEAR_S),
        ("the maximum of --last-call", spec.last_call_bound_s, 0.0, _YEAR_S),
        ("--replacement-timeout", spec.replacement_timeout_s, 0.0, _YEAR_S),
        ("--shrink-after", spec.shrink_after_s, 0.0, _YEAR_S),
        ("--shutdown-timeout", spec.stop_budget_s, 0.1, _YEAR_S),
        ("the time for which a node is excluded", spec.node_cooldown_s, 0.1, _YEAR_S),
        ("the window of --max-restarts", _window_s(spec.budget), 0.1, _YEAR_S),
        ("--max-restarts", spec.budget.limit, 0, _COUNT),
        ("the window of --max-heals", _window_s(spec.heal_budget), 0.1, _YEAR_S),
        ("--max-heals", spec.heal_budget.limit, 0, _COUNT),
        ("--spares", spec.spares, 0, _NODES),
        ("the number of failures that exclude a node", spec.node_failure_limit, 0, _COUNT),
        ("the number of --failure-policy rules", len(spec.rules), 0, 1000),
    )
    for what, value, low, high in ranges:
        if not low <= value <= high:
            return f"{what} is {value:,.10g}: use {low:,.10g} to {high:,.10g}"
    return ""


def _window_s(budget: RestartBudget) -> float:
    return _YEAR_S if budget.window_s is None else budget.window_s
