"""Every collective of shm gives what Gloo gives, and the same bits on every rank."""

from __future__ import annotations

import pytest
import same_as_gloo as work
import torch

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
HALVES = [torch.float16, torch.bfloat16]
FLOATS = [torch.float64, torch.float32, *HALVES]
COMPLEX = [torch.complex64, torch.complex128]
ARITHMETIC = ["SUM", "PRODUCT", "MIN", "MAX"]
BITS = ["BAND", "BOR", "BXOR"]
REDUCTIONS = [
    *((dtype, op) for dtype in FLOATS for op in ARITHMETIC),
    *((dtype, op) for dtype in INTEGERS for op in (*ARITHMETIC, *BITS)),
    *((torch.bool, op) for op in ("SUM", "PRODUCT", "MIN", "MAX", "BOR", "BAND", "BXOR")),
    *((dtype, "SUM") for dtype in COMPLEX),
]
SOME = [(torch.float32, "SUM"), (torch.bfloat16, "MAX"), (torch.int64, "BXOR"), (torch.complex64, "SUM")]
NIGHTLY = [pytest.mark.nightly]


def same(answers):
    assert all(answer == answers[0] for answer in answers)


def named(pairs):
    return [f"{str(dtype).removeprefix('torch.')}-{op}" for dtype, op in pairs]


def at_every_size(pairs, also=()):
    """All pairs at one odd size, where every rank has work and shares differ; those of `also` at the others."""
    return [
        pytest.param(size, *pair, id=f"{size}-{name}", marks=[] if size == 3 or pair in also else NIGHTLY)
        for size in (2, 3, 4)
        for pair, name in zip(pairs, named(pairs), strict=True)
    ]


@pytest.mark.parametrize(("crew", "dtype", "op"), at_every_size(REDUCTIONS, SOME), indirect=["crew"])
def test_all_reduce(crew, dtype, op):
    same(crew.run(work.all_reduce, dtype, op, (dtype, op) in SOME))


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
def test_average(crew, dtype):
    same(crew.run(work.average, dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_sums_are_rounded_once(crew, dtype):
    crew.run(work.half_sums_are_rounded_once, dtype)


@pytest.mark.parametrize("crew", [3, 4], indirect=True)
def test_sums_are_a_binary_tree(crew):
    """docs/elastic.md rests on it: a world of two that has summed pairs before gives the bits of a world of four."""
    for dtype in (torch.float32, torch.float64):
        crew.run(work.sums_are_a_tree, dtype)


@pytest.mark.parametrize(("crew", "dtype", "op"), at_every_size(SOME), indirect=["crew"])
def test_reduce_and_reduce_scatter(crew, dtype, op):
    crew.run(work.reduce_to_each_root, dtype, op)
    crew.run(work.reduce_scatter, dtype, op)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_broadcast_and_all_gather(crew, dtype):
    if dtype is not torch.float8_e4m3fn:
        same(crew.run(work.all_gather, dtype))
        same(crew.run(work.broadcast, dtype))
    else:
        same(crew.run(work.bytes_of_any_type, dtype))


def test_lists_of_tensors(crew):
    crew.run(work.lists)


def test_several_tensors_of_one_rank(crew):
    crew.run(work.several_tensors_of_one_rank)


def test_what_cannot_be_is_refused(crew):
    crew.run(work.what_cannot_be)


def test_odd_layouts(crew):
    crew.run(work.odd_layouts)


def test_blocks_in_shared_memory(crew):
    same(crew.run(work.shared_memory_blocks))


def test_blocks_are_given_back(crew):
    left = crew.run(work.blocks_are_given_back)
    assert max(left) <= 0


def test_a_blocking_call_is_done_when_it_returns(crew):
    crew.run(work.done_before_it_returns)
