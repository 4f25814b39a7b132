"""The plain average, and no average at all; and what every hook asks of a bucket first."""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NUMBERS = (*FLOATS, torch.complex64, torch.complex128)


def all_reduce(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The average, as without a hook. To put another hook around."""
    buffer = accepted(bucket, "all_reduce", NUMBERS)
    group = group_of(state)
    work = dist.all_reduce(buffer.div_(group.size()), group=group, async_op=True)
    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda _done: buffer)
    return averaged


def noop(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sends nothing: gradients stay local and replicas drift apart. To measure what communication costs."""
    return completed(bucket.buffer())


def group_of(state: Any) -> dist.ProcessGroup:
    group = dist.group.WORLD if state is None else state
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"the state of this hook is a process group, or None for the default one, not {type(group).__name__}"
        )
    return group


def completed(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future = future_for(tensor)
    future.set_result(tensor)
    return future


def future_for(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that knows on which device the tensor lies that it will hold."""
    devices: list[int | str | torch.device] = [] if tensor.device.type == "cpu" else [tensor.device]
    return torch.futures.Future(devices=devices)


def accepted(bucket: GradBucket, hook: str, dtypes: tuple[torch.dtype, ...] = FLOATS) -> torch.Tensor:
    """The bucket's buffer, if the hook can do anything with it. All ranks have the same buckets, and all raise."""
    buffer = bucket.buffer()
    wrong = ""
    if buffer.is_sparse:
        wrong = "has a sparse gradient"
    elif buffer.dtype not in dtypes:
        wrong = f"is of {buffer.dtype}"
    if not wrong:
        return buffer
    raise TypeError(
        f"the communication hook {hook} cannot average {described(bucket)}, which {wrong}: it takes dense gradients "
        f"of {', '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}. Use another hook, or keep such "
        "parameters away from DDP with DistributedDataParallel.ignore_parameters_and_buffers()"
    )


def described(bucket: GradBucket) -> str:
    """The first parameter of a bucket, by its name if the bucket knows it; torch's own does not."""
    names: list[str] = getattr(bucket, "names", list)()
    if names:
        return f"the parameter {names[0]!r}"
    return f"a parameter of shape {list(bucket.parameters()[0].shape)}"
