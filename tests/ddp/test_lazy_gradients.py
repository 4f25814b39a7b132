"""Gradients whose memory holds the conjugate or the negative of their values, as autograd returns them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from ddp.reducer.bucket_sender import InPlaceBucket
from ddp.reducer.reducer import UsedMembers

if TYPE_CHECKING:
    from collections.abc import Callable


def _conjugated() -> torch.Tensor:
    return torch.full((4,), 1 + 2j, dtype=torch.complex64).conj()


def _negated() -> torch.Tensor:
    return _conjugated().imag


@pytest.mark.parametrize("gradient", [_conjugated, _negated], ids=["conjugate", "negative"])
def test_what_is_averaged_in_place_is_its_values(gradient: Callable[[], torch.Tensor]) -> None:
    grad = gradient()
    assert grad.is_conj() or grad.is_neg()
    values = grad.clone().resolve_conj().resolve_neg()
    parameter = nn.Parameter(torch.zeros_like(values))
    parameter.grad = grad
    bucket = InPlaceBucket([parameter], copies=False)
    bucket.gather(0, 1, 0.5)
    (sent,) = bucket.payload
    assert torch.equal(sent.resolve_conj().resolve_neg(), values / 2)
    sent.add_(1)
    bucket.finish(None, UsedMembers([0], None, sent=True))
    assert torch.equal(parameter.grad, values / 2 + 1)
