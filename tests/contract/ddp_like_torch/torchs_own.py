"""Runs the tests that torch ships of its DDP, one at a time, in ranks of the pool, with another class in its place.

Most of them are written for GPUs. Here the CPU stands in: whatever names a CUDA device, by number or by name, is
given the CPU; what guards a test against machines without GPUs is taken off. Which tests run that way under torch's
own class is a list in test_torchs_own.py: those, and only those, say something about another class.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import types
import unittest
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import ddp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trial import Trial

CPU = torch.device("cpu")


def cpu_for(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    return value


class CpuStandsIn(TorchFunctionMode):
    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = CPU
        at = {"_parse_to": 0, "to": 1}.get(name)
        if at is not None and len(args) > at and isinstance(args[at], int):
            args = (*args[:at], CPU, *args[at + 1 :])
        kwargs = {key: cpu_for(value) for key, value in kwargs.items()}
        return func(*(cpu_for(each) for each in args), **kwargs)


def on_the_cpu(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The class, without the device ids that belong to GPUs. These tests expect the errors that torch documents."""
    strict = {"strict": True} if kind is ddp.DistributedDataParallel else {}

    class OnTheCpu(kind):  # type: ignore[misc, valid-type]
        def __init__(
            self, module: Any, device_ids: Any = None, output_device: Any = None, **options: Any
        ) -> None:
            super().__init__(module, **options, **strict)

    # Found under that name by pickle.
    OnTheCpu.__name__ = OnTheCpu.__qualname__ = kind.__name__
    setattr(sys.modules[__name__], kind.__name__, OnTheCpu)
    return OnTheCpu


def module_to_cpu(module: torch.nn.Module, *_: Any, **__: Any) -> torch.nn.Module:
    return module


def torchs_tests() -> Any:
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(dist.get_world_size()), MASTER_ADDR="127.0.0.1")
    if "expecttest" not in sys.modules:
        # torch's base class wants it for tests of printed texts, of which there are none here.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase, stand_in.ACCEPT = unittest.TestCase, False  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    return importlib.import_module("torch.testing._internal.distributed.distributed_test")


def unguarded(test: Callable[..., Any]) -> Callable[..., Any]:
    while hasattr(test, "__wrapped__"):
        test = test.__wrapped__
    return test


@contextlib.contextmanager
def standing_in(module: Any, kind: type[torch.nn.Module]) -> Iterator[None]:
    plain = on_the_cpu(kind)
    nothing = mock.MagicMock()
    with contextlib.ExitStack() as stack:
        for place in (module, torch.nn.parallel):
            stack.enter_context(mock.patch.object(place, "DistributedDataParallel", plain))
        for name in ("set_device", "synchronize", "empty_cache", "manual_seed"):
            stack.enter_context(mock.patch.object(torch.cuda, name, nothing))
        stack.enter_context(mock.patch.object(torch.cuda, "device_count", dist.get_world_size))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=0))
        stack.enter_context(mock.patch.object(torch.nn.Module, "cuda", module_to_cpu))
        stack.enter_context(CpuStandsIn())
        yield


def run(trial: Trial, name: str) -> None:
    module = torchs_tests()
    common = importlib.import_module("torch.testing._internal.common_utils")

    class Judge(common.TestCase, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        rank = trial.rank
        world_size = trial.world_size

        def _barrier(self, *_: Any, **__: Any) -> None:
            dist.barrier()

    test = unguarded(getattr(module.DistributedTest._DistTestBase, name))
    judge = Judge(name)
    # Those tests take it that all ranks begin alike; some of them leave another level of debugging behind.
    torch.manual_seed(0)
    dist.set_debug_level(dist.DebugLevel.OFF)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ), standing_in(module, trial.DDP):
        judge.file_name = folder
        try:
            test(judge)
        except unittest.SkipTest as skipped:
            trial.note("outcome", f"skipped: {skipped}")
        except SystemExit as left:
            trial.note("outcome", f"left: {left}")
        else:
            trial.note("outcome", "passed")
