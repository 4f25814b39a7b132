"""Copies around the caches have the bytes that torch's copies have, and touch nothing beside their targets."""

from __future__ import annotations

import random
from array import array
from typing import TYPE_CHECKING

import pytest
import torch

from ddp.elastic.images import copies

if TYPE_CHECKING:
    from types import ModuleType

LARGE = 1 << 18  # elements


def compiled() -> ModuleType:
    native = copies.compiled()
    if native is None:
        pytest.skip("this processor, or this installation, has no such copies")
    return native


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each call copies around the caches. A small state would fit into them."""
    native = compiled()
    counts: list[int] = []

    class Counting:
        def copy(self, rows: array[int]) -> None:
            counts.append(len(rows) // 3)
            native.copy(rows)

    monkeypatch.setattr(copies, "compiled", Counting)
    monkeypatch.setattr(copies, "_IN_CACHE", 1 << 20)
    return counts


def test_every_length_and_every_alignment() -> None:
    native, chance = compiled(), random.Random(1)
    source = torch.frombuffer(bytearray(chance.randbytes(600)), dtype=torch.uint8)
    for length in (*range(200), 255, 256, 257, 511):
        for to, begin in ((0, 0), (1, 0), (0, 1), (16, 5), (63, 64), (33, 8)):
            target = torch.full((700,), 7, dtype=torch.uint8)
            native.copy(array("Q", (target.data_ptr() + to, source.data_ptr() + begin, length)))
            wanted = torch.full((700,), 7, dtype=torch.uint8)
            wanted[to : to + length] = source[begin : begin + length]
            assert torch.equal(target, wanted), (length, to, begin)


def test_what_has_other_bytes_is_left_to_torch(around: list[int]) -> None:
    plain = torch.rand(LARGE)
    sources = [
        plain,
        torch.rand(512, 513).t(),  # another order
        torch.rand(LARGE, dtype=torch.float64),  # another type than its target
        torch.rand(LARGE, dtype=torch.complex64).conj(),
        torch.rand(LARGE, dtype=torch.complex64).conj().imag,  # its bytes have the other sign
        torch.rand(1, 1).expand(512, 512),
        torch.rand(10),  # small
        torch._efficientzerotensor((LARGE,)),
        torch.nn.Parameter(torch.rand(LARGE)),
    ]
    targets = [
        torch.full(each.shape, 9, dtype=torch.float32 if each.dtype is torch.float64 else each.dtype)
        for each in sources
    ]
    with torch.no_grad():
        copies.copy_all(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.to(target.dtype))
    assert around == [2]  # the first and the last


def test_a_target_in_another_order_is_left_to_torch(around: list[int]) -> None:
    source, target = torch.rand(512, 1024), torch.zeros(1024, 512).t()
    more = torch.zeros(LARGE)
    with torch.no_grad():
        copies.copy_all([target, more], [source, torch.ones(LARGE)])
    assert torch.equal(target, source)
    assert more.sum() == LARGE
    assert around == [1]


def test_autograd_sees_the_write(around: list[int]) -> None:
    weight = torch.ones(LARGE)
    scaled = torch.ones(LARGE, requires_grad=True) * weight
    with torch.no_grad():
        copies.copy_all([weight], [torch.zeros(LARGE)])
    assert around == [1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scaled.sum().backward()


def test_a_small_state_is_copied_through_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "compiled", object)  # it has no copy()
    targets, sources = [torch.zeros(LARGE) for _ in range(3)], [torch.rand(LARGE) for _ in range(3)]
    with torch.no_grad():
        copies.copy_all(targets, sources)
    assert all(map(torch.equal, targets, sources))


def test_torch_copies_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "compiled", lambda: None)
    monkeypatch.setattr(copies, "_IN_CACHE", 1)
    target, source = torch.zeros(LARGE), torch.rand(LARGE)
    with torch.no_grad():
        copies.copy_all([target], [source])
    assert torch.equal(target, source)


def test_rows_that_are_cut_off_are_refused() -> None:
    with pytest.raises(ValueError, match="three numbers"):
        compiled().copy(array("Q", (0, 0)))
