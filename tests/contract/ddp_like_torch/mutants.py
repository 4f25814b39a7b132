"""Classes with one fault each. The suite must tell every one of them from torch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class AveragesNothing(DistributedDataParallel):
    def forward(self, *inputs: Any, **options: Any) -> Any:
        with self.no_sync():
            return super().forward(*inputs, **options)


class Changed(DistributedDataParallel):
    """torch's with a hook of its own in place of the plain average."""

    def __init__(self, *inputs: Any, **options: Any) -> None:
        super().__init__(*inputs, **options)

        def hook(state, bucket):  # type: ignore[no-untyped-def]
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: self.change(done.value()[0]))

        self.register_comm_hook(None, hook)

    def change(self, total: torch.Tensor) -> torch.Tensor:
        return total / dist.get_world_size(self.process_group)


class Sums(Changed):
    def change(self, total: torch.Tensor) -> torch.Tensor:
        return total


class OffByTheLastBit(Changed):
    def change(self, total: torch.Tensor) -> torch.Tensor:
        mean = total / dist.get_world_size(self.process_group)
        if mean.is_floating_point() and mean.numel():
            mean[0] = torch.nextafter(mean[0], mean[0] + 1)
        return mean


class DiffersByRank(Changed):
    def change(self, total: torch.Tensor) -> torch.Tensor:
        return total / dist.get_world_size(self.process_group) + 1e-3 * dist.get_rank()


class LeavesBuffersAlone(DistributedDataParallel):
    def __init__(self, *inputs: Any, **options: Any) -> None:
        super().__init__(*inputs, **{**options, "forward_sync_buffers": False})


class AlwaysViews(DistributedDataParallel):
    def __init__(self, *inputs: Any, **options: Any) -> None:
        super().__init__(*inputs, **{**options, "gradient_as_bucket_view": True})


class NeverViews(DistributedDataParallel):
    def __init__(self, *inputs: Any, **options: Any) -> None:
        super().__init__(*inputs, **{**options, "gradient_as_bucket_view": False})


class SendsNoState(DistributedDataParallel):
    def __init__(self, *inputs: Any, **options: Any) -> None:
        super().__init__(*inputs, **{**options, "init_sync": False})


class ForgivesUnused(DistributedDataParallel):
    def __init__(self, *inputs: Any, **options: Any) -> None:
        super().__init__(*inputs, **{**options, "find_unused_parameters": True})


class SyncsInNoSync(DistributedDataParallel):
    def forward(self, *inputs: Any, **options: Any) -> Any:
        kept, self.require_backward_grad_sync = self.require_backward_grad_sync, True
        try:
            return super().forward(*inputs, **options)
        finally:
            self.require_backward_grad_sync = kept


class AnotherError(DistributedDataParallel):
    def __init__(self, *inputs: Any, **options: Any) -> None:
        try:
            super().__init__(*inputs, **options)
        except ValueError as error:
            raise RuntimeError(str(error)) from error
