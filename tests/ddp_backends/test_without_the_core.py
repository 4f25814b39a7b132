"""Where the core was not built, or sharing memory fails, everything goes over Gloo, and one line says so."""

from __future__ import annotations

import logging
import os
import resource

import pytest
import torch
import torch.distributed as dist
import training
from crew import Crew

from ddp.groups import core_loading


def note_lines():
    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logging.getLogger("ddp").addHandler(Keep())
    return lines


def switch_off(how):
    """Before the group is formed: in the process that will be a rank."""
    core_loading.native.cache_clear()
    core_loading._warnings.clear()
    kept = note_lines()
    if how == "switched off":
        os.environ["DDP_NATIVE"] = "0"
    elif how == "one rank lacks it" and dist.get_rank() == 1:
        core_loading.native = lambda: None
    elif how == "no room" and dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 33, resource.RLIM_INFINITY))
    groups = [dist.new_group(backend="shm") for _ in range(2)]
    tensor = torch.full((5,), float(dist.get_rank()))
    for group in groups:
        dist.all_reduce(tensor, group=group)
        dist.barrier(group=group)
        bucket = group.ddp_allocate(100, torch.float32).fill_(dist.get_rank())
        group.ddp_average([bucket[:50], bucket[50:]], 2).wait()
        assert torch.equal(bucket, torch.full((100,), 0.5))
    assert dist.get_backend(groups[0]) == "shm"
    return kept


def over_gloo_without_the_core(how, words):
    with Crew(2, "gloo") as ranks:
        first, second = ranks.run(switch_off, how)
    assert len(first) == 1, first
    assert words in first[0]
    assert "Gloo" in first[0]
    assert second == [], "the first rank speaks for all"


def test_without_the_core_switched_off():
    over_gloo_without_the_core("switched off", "DDP_NATIVE=0")


def test_without_the_core_on_one_rank():
    over_gloo_without_the_core("one rank lacks it", "rank 1 has no compiled core")


def test_without_the_core_for_want_of_room():
    over_gloo_without_the_core("no room", "rank 0 cannot share memory or connect: ")


def test_without_the_core_training_works():
    with Crew(2, "shm", [{"DDP_NATIVE": "0"}] * 2) as ranks:
        first, second = ranks.run(training.torchs_ddp)
        assert first == second
        ranks.run(training.functional_collectives)
        ranks.run(training.past_the_core)


@pytest.mark.parametrize("backend", ["shm", "hier"])
def test_without_the_core_our_ddp_sends_buckets(backend):
    with Crew(2, backend, [{"DDP_NATIVE": "0", "TORCH_FR_BUFFER_SIZE": "2000"}] * 2) as ranks:
        for collectives, buckets in ranks.run(training.our_ddp):
            assert collectives == buckets > 1


def offered_for(device_type):
    from ddp.reducer.collectives import BucketCollectives

    group = dist.new_group(backend="shm")
    return BucketCollectives([group], torch.device(device_type)).averages_lists


def test_only_tensors_in_ordinary_memory_are_averaged_in_place():
    """Tensors of another device go to NCCL, which does better with one bucket."""
    with Crew(1, "gloo") as ranks:
        assert ranks.run(offered_for, "cpu") == [core_loading.native() is not None]
        assert ranks.run(offered_for, "cuda") == [False]
