"""The arguments of the wrapper: ours, those that torch has deprecated, and the forms that only this class accepts.

`strict` is an argument of ours. With `strict=True`, gradients that torch's class leaves on a rank without a message are
an error: a backward past the wrapper or a second one after one forward, a parameter that is unfrozen or added later.
"""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from ddp.reducer.grad_bucket import GradBucket
from ddp.telemetry.coded import WrongType, WrongValue

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

_TORCHS = inspect.signature(TorchDistributedDataParallel.__init__)
_STRICT = inspect.Parameter("strict", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)


def constructor_signature() -> inspect.Signature:
    """Return the signature of our constructor: torch's arguments and `strict`."""
    return _TORCHS.replace(parameters=[*_TORCHS.parameters.values(), _STRICT])


def bound_arguments(
    wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Return all arguments of torch's constructor by name, with its defaults, and the value of `strict`."""
    given = constructor_signature().bind(wrapper, *args, **kwargs)
    given.apply_defaults()
    chosen = dict(list(given.arguments.items())[1:])
    strict = chosen.pop("strict")
    if not isinstance(strict, bool):
        raise WrongType(f"invalid strict={strict!r}. Use True or False")
    return chosen, strict


def wants_tuning(chosen: dict[str, Any]) -> bool:
    cap = chosen["bucket_cap_mb"]
    if not isinstance(cap, str):
        return False
    if cap != "auto":
        raise WrongValue(
            f'invalid bucket_cap_mb={cap!r}. Use a number of MiB, or "auto" to find the best size in the first steps'
        )
    if chosen.get("bucket_cap_mb_list"):
        raise WrongValue('bucket_cap_mb="auto" and bucket_cap_mb_list cannot be used together. Remove one')
    chosen["bucket_cap_mb"] = _TORCHS.parameters["bucket_cap_mb"].default
    return True


def replace_deprecated(chosen: dict[str, Any]) -> None:
    """Replace deprecated arguments. Warn at the caller's line: torch's warning would point into this file."""
    if chosen["check_reduction"]:
        _warn_deprecated("`check_reduction` is deprecated and has no effect. Remove it.")
        chosen["check_reduction"] = False
    if "forward_sync_buffers" not in chosen or chosen["broadcast_buffers"] is None:
        return
    if chosen["forward_sync_buffers"] is not None:
        _warn_deprecated("`broadcast_buffers` has no effect if `forward_sync_buffers` is given. Remove it.")
    else:
        _warn_deprecated(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers`. With False, buffers are synchronized at "
            "construction only, not before each forward."
        )
        chosen["forward_sync_buffers"] = chosen["broadcast_buffers"]
    chosen["broadcast_buffers"] = None


def _warn_deprecated(text: str) -> None:
    warnings.warn(text, FutureWarning, stacklevel=4)


def is_annotated_for_ours(hook: Callable[..., Any]) -> bool:
    """Whether the hook is annotated for this GradBucket. torch's check rejects this class and string annotations."""
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    promised = signature.return_annotation
    fine = (inspect.Signature.empty, torch.futures.Future[torch.Tensor], "torch.futures.Future[torch.Tensor]")
    return bucket is not None and bucket.annotation in (GradBucket, "GradBucket") and promised in fine


def group_list(process_group: Any) -> tuple[ProcessGroup, ...] | None:
    if not isinstance(process_group, list | tuple):
        return None
    if not process_group:
        raise WrongValue(
            "invalid process_group: an empty list. Use at least one group, or remove the argument"
        )
    members = [dist.get_process_group_ranks(group) for group in process_group]
    if any(ranks != members[0] for ranks in members):
        raise WrongValue(
            f"invalid process_group: its groups have different ranks, {members}. Use groups of the same ranks"
        )
    return tuple(process_group)
