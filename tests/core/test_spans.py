"""Which bytes of a commit each device sends."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ddp.elastic.images.spans import DeviceSpan, Stored, spans


def test_small_tensors_of_the_host_lie_inside_of_a_span() -> None:
    tensors = [Stored(0, 60, "emu:0"), Stored(64, 4, ""), Stored(128, 0, "emu:1"), Stored(128, 10, "emu:0")]
    assert spans(tensors) == (DeviceSpan("emu:0", 0, 138),)


def test_large_tensors_of_the_host_and_other_devices_divide_spans() -> None:
    large = 1 << 20
    tensors = [Stored(0, 60, "emu:0"), Stored(64, large, ""), Stored(64 + large, 64, "emu:0")]
    assert spans(tensors) == (DeviceSpan("emu:0", 0, 60), DeviceSpan("emu:0", 64 + large, 128 + large))
    tensors = [Stored(0, 60, "emu:0"), Stored(64, 64, "emu:1"), Stored(128, 64, "emu:0")]
    assert [each.device for each in spans(tensors)] == ["emu:0", "emu:1", "emu:0"]
    assert spans([Stored(0, large, "")]) == ()


@given(st.lists(st.tuples(st.sampled_from(["", "emu:0", "emu:1"]), st.integers(0, 200_000)), max_size=12))
def test_each_tensor_of_a_device_is_in_one_span_of_its_device(described: list[tuple[str, int]]) -> None:
    tensors, end = [], 0
    for device, n_bytes in described:
        tensors.append(Stored(end, n_bytes, device))
        end += -(-n_bytes // 64) * 64
    found = spans(tensors)
    for each in tensors:
        holders = [span for span in found if span.has(each)]
        if each.device and each.n_bytes:
            assert len(holders) == 1
            assert each.begin + each.n_bytes <= holders[0].end
        elif not each.device:
            assert not holders
    assert all(one.end <= other.begin for one, other in itertools.pairwise(found))
