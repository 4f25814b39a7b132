"""The buckets of models that are wrapped in our DistributedDataParallel, as part of a commit.

DDP arranges its buckets after the first backward, and `bucket_cap_mb="auto"` chooses their sizes by time. Some process
groups add in an order that depends on a bucket's size, and some communication hooks compress a bucket as a whole. So a
job that goes on uses the buckets of the job before, and does not measure again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp.reducer.plan import Limits

if TYPE_CHECKING:
    from collections.abc import Mapping


def wrapped(named: Mapping[str, Any]) -> dict[str, Any]:
    """The models with a reducer of ours."""
    return {name: value for name, value in named.items() if _reducer_of(value) is not None}


def _reducer_of(value: Any) -> Any:
    return getattr(getattr(value, "reducer", None), "core", None)


def of(models: Mapping[str, Any]) -> dict[str, Any]:
    """The order of parameters and the sizes of buckets, of the models that have arranged them."""
    found = {}
    for name, value in models.items():
        reducer = _reducer_of(value)
        if reducer.rebuilt:
            is_tuned = reducer.settings.tuned and reducer.tuner is None
            limit = reducer.settings.limit if reducer.tuner is not None else reducer.limit
            found[name] = {
                "order": list(reducer.agreed_order),
                "sizes": list(limit.rebuilt),
                "tuned": is_tuned,
            }
    return found


def restore(models: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
    """Arrange the buckets as they were. Collective over the groups of the models."""
    for name, value in models.items():
        reducer, plan = _reducer_of(value), kept.get(name)
        if plan is None or not reducer.should_rebuild or len(plan["order"]) != len(reducer.parameters):
            continue
        reducer.rebuild(plan["order"])
        if plan["tuned"] and reducer.settings.tuned:
            reducer.resize(Limits(reducer.settings.limit.first, tuple(plan["sizes"])))
            if reducer.tuner is not None:
                reducer.tuner.stop("keeps the bucket size of the commit")
