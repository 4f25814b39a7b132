"""Runs the tests that torch ships of DDP under distributed autograd (RPC), in ranks of the pool, with another class."""

from __future__ import annotations

import importlib
import os
import unittest
from typing import TYPE_CHECKING
from unittest import mock

import torch.distributed as dist
from torchs_own import torchs_tests

if TYPE_CHECKING:
    from trial import Trial

_PLACE = "torch.testing._internal.distributed"


def run(trial: Trial, kind: str, name: str, folder: str) -> None:
    """These tests form groups of their own, by files in the folder."""
    torchs_tests()  # which puts something in the place of a package that torch's base class imports
    module = importlib.import_module(f"{_PLACE}.ddp_under_dist_autograd_test")
    fixture = importlib.import_module(f"{_PLACE}.rpc.tensorpipe_rpc_agent_test_fixture")
    common = importlib.import_module("torch.testing._internal.common_utils")
    dist.destroy_process_group()
    rank = trial.rank

    class Judge(common.TestCase, fixture.TensorPipeRpcAgentTestFixture, getattr(module, kind)):  # type: ignore[misc, name-defined]
        file_name = os.path.join(folder, name)

    Judge.rank = rank
    with mock.patch.object(module, "DistributedDataParallel", trial.DDP):
        try:
            getattr(Judge(name), name)()
        except unittest.SkipTest as skipped:
            trial.note("outcome", f"skipped: {skipped}")
        else:
            trial.note("outcome", "passed")
