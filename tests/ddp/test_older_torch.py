"""Construction asks an older torch for nothing that it does not have, and refuses what a newer one asks of it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from ddp import DistributedDataParallel
from ddp.reducer import module as of_wrapper

if TYPE_CHECKING:
    from collections.abc import Iterator

# What torch 2.4 does not take; the first became an argument in 2.13, and an attribute with it.
_LATER = ("forward_sync_buffers", "init_sync", "skip_all_reduce_unused_params", "bucket_cap_mb_list")


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = TorchDistributedDataParallel.__init__
    arguments = inspect.signature(newer).parameters
    defaults = {"broadcast_buffers": True, "bucket_cap_mb": 25}
    older = inspect.Signature(
        [
            each.replace(default=defaults.get(name, each.default))
            for name, each in arguments.items()
            if name not in _LATER
        ]
    )

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = older.bind(self, *args, **kwargs)
        given.apply_defaults()
        chosen = dict(given.arguments)
        if "forward_sync_buffers" in arguments:
            chosen["forward_sync_buffers"] = chosen.pop("broadcast_buffers")
        newer(**chosen)

    class Hidden:
        def __set__(self, owner: Any, value: bool) -> None:
            owner.__dict__["kept"] = value

        def __get__(self, owner: Any, _kind: type) -> bool:
            raise AttributeError("forward_sync_buffers")

    class Kept:
        def __set__(self, owner: Any, value: bool) -> None:
            owner.__dict__["kept"] = value

        def __get__(self, owner: Any, _kind: type) -> bool:
            kept: bool = owner.__dict__["kept"]
            return kept

    monkeypatch.setattr(TorchDistributedDataParallel, "__init__", __init__)
    monkeypatch.setattr(TorchDistributedDataParallel, "forward_sync_buffers", Hidden(), raising=False)
    monkeypatch.setattr(TorchDistributedDataParallel, "broadcast_buffers", Kept(), raising=False)
    monkeypatch.setattr(of_wrapper, "_TORCHS", older)


@pytest.mark.usefixtures("alone", "older_torch")
@pytest.mark.parametrize("given", [{}, {"broadcast_buffers": False}])
def test_construction_on_an_older_torch(given: dict[str, Any]) -> None:
    wrapped = DistributedDataParallel(torch.nn.Linear(2, 2), **given)
    told = wrapped._get_ddp_logging_data()
    assert told["broadcast_buffers"] == given.get("broadcast_buffers", True)


@pytest.mark.usefixtures("alone")
def test_manual_finalization_of_a_newer_torch_is_refused() -> None:
    """As torch 2.15 calls it."""
    wrapped = DistributedDataParallel(torch.nn.Linear(2, 2))
    wrapped.reducer._set_manual_finalization_required(False)
    assert not wrapped.reducer._should_finalize_after_backward()
    with pytest.raises(NotImplementedError, match="manual finalization"):
        wrapped.reducer._set_manual_finalization_required(True)
    with pytest.raises(NotImplementedError, match="manual finalization"):
        wrapped.reducer._finalize_backward_manual()
