"""The sampler under a DataLoader that runs ahead of the training."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from ddp.elastic import ElasticSampler


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_fetched_ahead_does_not_count(workers: int) -> None:
    sampler = ElasticSampler(40, num_replicas=2, rank=0, seed=5)
    whole = list(sampler)
    loader = DataLoader(range(40), batch_size=3, sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
    batches = iter(loader)
    trained = [next(batches).tolist(), next(batches).tolist()]
    sampler.advance(6)
    del batches
    rest = [batch.tolist() for batch in loader]
    assert [sample for batch in (*trained, *rest) for sample in batch] == whole
    assert sampler.consumed == 12
    assert len(sampler) == 14


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_an_undisturbed_epoch_is_shared_out_as_by_torch(shuffle: bool, drop_last: bool) -> None:
    for rank in range(3):
        how = {"num_replicas": 3, "rank": rank, "shuffle": shuffle, "seed": 7, "drop_last": drop_last}
        ours, torchs = ElasticSampler(20, **how), DistributedSampler(range(20), **how)  # type: ignore[arg-type]
        for epoch in range(2):
            ours.set_epoch(epoch)
            torchs.set_epoch(epoch)
            assert list(ours) == list(torchs)
            assert len(ours) == len(torchs)


def test_set_epoch_keeps_the_place_in_the_epoch_that_is_under_way() -> None:
    sampler = ElasticSampler(10)
    sampler.load_state_dict({"size": 10, "epoch": 3, "consumed": 4, "seed": 1})
    sampler.set_epoch(3)
    assert (sampler.epoch, sampler.consumed, len(sampler)) == (3, 4, 6)
    sampler.set_epoch(4)
    assert (sampler.epoch, sampler.consumed, len(sampler)) == (4, 0, 10)
    assert list(sampler.epochs(6)) == [4, 5]
    assert list(sampler.epochs(6)) == []


def test_the_epoch_goes_on_after_state_was_loaded() -> None:
    sampler = ElasticSampler(30, num_replicas=1, rank=0, seed=2)
    order = list(sampler)
    sampler.advance(11)
    other = ElasticSampler(30, num_replicas=1, rank=0, seed=0)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == order[11:]
    assert torch.tensor(order).sort().values.tolist() == list(range(30))


def test_no_such_rank() -> None:
    with pytest.raises(ValueError, match=r"rank=2\b"):
        ElasticSampler(10, num_replicas=2, rank=2)
