from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from ddp.reducer.plan import Bucket, BucketPlan, Capabilities, CostModel, Kind, ParameterInfo, choose, cut

NOTHING = Capabilities()
KIB = 1024


def n_chunks(costs: CostModel) -> int:
    """Of a bucket with a hundred gradients of 64 KiB."""
    facts = [ParameterInfo("w", (16 * KIB,), (1,), "float32", "cpu", 4)] * 100
    return len(cut(BucketPlan((Bucket(tuple(range(100)), Kind.FLAT),)), facts, costs.chunk))


def test_a_cpu_copies_early_in_small_chunks() -> None:
    costs = choose("cpu", "gloo", NOTHING)
    assert n_chunks(costs) == 50
    assert costs.scaled_alone == 16 * KIB
    assert not costs.average_in_collective


@pytest.mark.parametrize(("device", "backend"), [("cuda", "nccl"), ("xpu", "xccl"), ("cuda", "gloo")])
def test_an_accelerator_gathers_a_bucket_with_one_hook_and_copies_it_together(
    device: str, backend: str
) -> None:
    costs = choose(device, backend, NOTHING)
    assert n_chunks(costs) == 1
    assert costs.scaled_alone > 2**40


@pytest.mark.parametrize(
    ("device", "backend", "offered", "averages"),
    [
        ("cuda", "nccl", NOTHING, True),
        ("cuda", "gloo", NOTHING, False),
        ("cpu", "gloo", NOTHING, False),
        ("cpu", "", NOTHING, False),
        ("emu", "eccl", NOTHING, False),
        ("emu", "eccl", Capabilities(averages=True), True),
        ("cpu", "shm", Capabilities(averages=True), True),
    ],
)
def test_the_collective_divides_where_the_backend_can(
    device: str, backend: str, offered: Capabilities, averages: bool
) -> None:
    assert choose(device, backend, offered).average_in_collective is averages


def test_registered_memory_is_for_accelerators_whose_backend_allocates_it() -> None:
    assert choose("cuda", "nccl", Capabilities(allocates=True)).registered_memory
    assert not choose("cuda", "nccl", NOTHING).registered_memory
    assert not choose("cpu", "gloo", Capabilities(allocates=True)).registered_memory


def test_costs_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        choose("cpu", "gloo", NOTHING).chunk = 1  # type: ignore[misc]
