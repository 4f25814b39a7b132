"""Every way to compute the erasure code gives the same bytes."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING

import pytest

from ddp_launch_wings.redundancy import parity
from ddp_launch_wings.redundancy.placement import parity_rows, product

if TYPE_CHECKING:
    from collections.abc import Iterator


@cache
def multiples(coefficient: int) -> bytes:
    return bytes(product(coefficient, i) for i in range(256))


def by_definition(rows: tuple[tuple[int, ...], ...], inputs: list[bytes]) -> list[bytes]:
    found = []
    for row in rows:
        total = 0
        for coefficient, each in zip(row, inputs, strict=True):
            total ^= int.from_bytes(each.translate(multiples(coefficient)))
        found.append(total.to_bytes(len(inputs[0])))
    return found


@pytest.fixture(params=["gfni", "avx2", "ssse3", "plain", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    native = parity.compiled()
    name: str = request.param
    if name == "torch":
        monkeypatch.setattr(parity, "compiled", lambda: None)
    elif native is None or name not in native.sets():
        pytest.skip(f"{name} is not supported here")
    else:
        native.choose(name)
        monkeypatch.setattr(parity, "compiled", lambda: native)
    yield name
    if native is not None:
        native.choose(native.sets()[0])


@pytest.mark.parametrize(("k", "m"), [(1, 1), (1, 2), (3, 1), (3, 5), (9, 4)])
def test_all_ways_agree_with_the_definition(way: str, k: int, m: int) -> None:
    for n_bytes in (0, 8, 24, 64, 1000, 8200):
        agrees(k, m, n_bytes)


def agrees(k: int, m: int, n_bytes: int) -> None:
    numbers = random.Random(n_bytes)
    inputs = [numbers.randbytes(n_bytes) for _ in range(k)]
    outputs = [memoryview(bytearray(b"\xff" * n_bytes)) for _ in range(m)]
    rows = parity_rows(k, m)
    parity.combine(rows, [memoryview(bytearray(each)) for each in inputs], outputs)
    assert [bytes(each) for each in outputs] == by_definition(rows, inputs)


def test_all_coefficients(way: str) -> None:
    everything = bytes(range(256))
    rows = tuple((c,) for c in range(1, 256))
    outputs = [memoryview(bytearray(256)) for _ in rows]
    parity.combine(rows, [memoryview(bytearray(everything))], outputs)
    for (c,), output in zip(rows, outputs, strict=True):
        assert bytes(output) == multiples(c), c


def test_what_does_not_fit_is_refused() -> None:
    native = parity.compiled()
    if native is None:
        pytest.skip("the compiled part is not installed")
    eight, nine = memoryview(bytearray(8)), memoryview(bytearray(9))
    with pytest.raises(ValueError, match="different lengths"):
        native.combine(b"\x01", (eight,), (nine,))
    with pytest.raises(ValueError, match="2 coefficients for 1 rows of 1"):
        native.combine(b"\x01\x01", (eight,), (eight,))
    with pytest.raises(ValueError, match="1 to 255"):
        native.combine(b"", (), (eight,))
    with pytest.raises(BufferError):
        native.combine(b"\x01", (eight,), (bytes(8),))
    with pytest.raises(ValueError, match="does not support the instruction set mmx"):
        native.choose("mmx")
