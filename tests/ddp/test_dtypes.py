"""Types of gradients that cannot be averaged are refused when a module is wrapped, with the name of the parameter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ddp


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_trained_parameter_of_one_byte(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(dtype))
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(TypeError, match=f"'1.weight' is of type {name}.*bfloat16 or wider"):
        ddp.DistributedDataParallel(module)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has one type for both")
def test_a_gradient_of_another_type_than_its_parameter() -> None:
    module = nn.Linear(2, 2, dtype=torch.bfloat16)
    module.bias.grad_dtype = torch.float32
    with pytest.raises(TypeError, match="'bias' is of type bfloat16, but its grad_dtype is float32"):
        ddp.DistributedDataParallel(module)


def test_mixed_precision_that_averages_in_one_byte() -> None:
    given = SimpleNamespace(param_dtype=torch.bfloat16, reduce_dtype=torch.float8_e5m2, buffer_dtype=None)
    with pytest.raises(TypeError, match="reduce_dtype=float8_e5m2"):
        ddp.DistributedDataParallel(nn.Linear(2, 2), mixed_precision=given)


def test_an_ignored_parameter_may_be_of_any_type() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.float8_e4m3fn))
    ddp.DistributedDataParallel.ignore_parameters_and_buffers(module, ["1.weight", "1.bias"])
    with pytest.raises(
        (RuntimeError, ValueError), match="process group"
    ):  # the next thing that is missing here
        ddp.DistributedDataParallel(module)
