"""`ddp.check_numerics`, on real ranks: who had the NaN, and whose parameters are others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from test_training import batch, loss_of, mlp

import ddp
import ddp.shm
from ddp.groups.core_loading import native
from ddp_launch_wings.diagnostics.numerics import fingerprint

if TYPE_CHECKING:
    from ranks import Ranks
    from torch import nn

BACKENDS = [
    "gloo",
    pytest.param("shm", marks=pytest.mark.skipif(native() is None, reason="no compiled core")),
]
_SHAPES = [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}]


def wrapped_mlp(backend: str = "gloo", **options: Any) -> ddp.DistributedDataParallel:
    ddp.shm.register()
    group = dist.new_group(backend=backend)
    return ddp.DistributedDataParallel(mlp(), bucket_cap_mb=0.005, process_group=group, **options)


def spoilt_by(parameter: nn.Parameter, value: float) -> Any:
    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[0] = value
        return gradient

    return parameter.register_hook(spoil)


def step(wrapped: ddp.DistributedDataParallel, rank: int, number: int = 0) -> str:
    """-> what was raised."""
    wrapped.zero_grad()
    try:
        loss_of(wrapped, batch(rank, number)).backward()
    except ddp.NumericsError as error:
        return str(error)
    return ""


def spoilt_once(rank: int, backend: str, options: dict[str, Any], value: float) -> list[str]:
    wrapped = wrapped_mlp(backend, **options)
    said = []
    with ddp.check_numerics(wrapped):
        for number in range(6):
            name, parameter = list(wrapped.module.named_parameters())[2]
            hook = spoilt_by(parameter, value) if (rank, number) == (1, 4) else None
            said.append(step(wrapped, rank, number))
            if hook is not None:
                hook.remove()
    assert name == "2.weight"
    assert not wrapped.reducer.core.before_launch
    return said


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", _SHAPES, ids=lambda options: next(iter(options), "plain"))
def test_a_nan_is_told_with_parameter_and_rank_on_all_ranks_at_that_step(
    two_ranks: Ranks, backend: str, options: dict[str, Any]
) -> None:
    one, other = two_ranks(spoilt_once, backend, options, float("nan"))
    assert one == other
    assert [bool(text) for text in one] == [False] * 4 + [True, False]
    assert "in step 5 " in one[4]
    assert "rank 1 has NaN in the gradient of 2.weight" in one[4]
    assert "rank 0" not in one[4]


def test_an_infinity_is_told_as_one(two_ranks: Ranks) -> None:
    one, other = two_ranks(spoilt_once, "gloo", {}, float("inf"))
    assert one == other
    assert "rank 1 has Inf in the gradient of 2.weight" in one[4]


def spoilt_input(rank: int) -> str:
    wrapped = wrapped_mlp()
    ddp.check_numerics(wrapped)
    inputs = batch(rank) if rank == 1 else batch(rank) * float("nan")
    try:
        loss_of(wrapped, inputs).backward()
    except ddp.NumericsError as error:
        return str(error)
    return ""


def test_a_spoilt_input_is_seen_as_such_and_the_first_parameter_is_the_backwards_first(
    three_ranks: Ranks,
) -> None:
    texts = three_ranks(spoilt_input)
    assert len(set(texts)) == 1
    assert "rank 0 has NaN" in texts[0]
    assert "rank 2 has NaN" in texts[0]
    assert "rank 1" not in texts[0]


def accumulated(rank: int) -> list[str]:
    wrapped = wrapped_mlp()
    ddp.check_numerics(wrapped)
    parameter = next(wrapped.module.parameters())
    hook = spoilt_by(parameter, float("nan")) if rank == 0 else None
    said = []
    with wrapped.no_sync():
        said.append(step(wrapped, rank))
    if hook is not None:
        hook.remove()
    try:
        loss_of(wrapped, batch(rank, 1)).backward()
    except ddp.NumericsError as error:
        said.append(str(error))
    return said


def test_what_no_sync_left_local_is_told_when_it_is_averaged(two_ranks: Ranks) -> None:
    one, other = two_ranks(accumulated)
    assert one == other
    assert one[0] == ""
    assert "rank 0 has NaN in the gradient of 0.weight" in one[1]


def hooked(rank: int) -> str:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = wrapped_mlp()
    wrapped.register_comm_hook(None, fp16_compress_hook)
    ddp.check_numerics(wrapped)
    if rank == 1:
        spoilt_by(next(wrapped.module.parameters()), float("-inf"))
    return step(wrapped, rank)


def test_behind_a_communication_hook_it_is_still_the_ranks_own_gradient(two_ranks: Ranks) -> None:
    one, other = two_ranks(hooked)
    assert one == other
    assert "rank 1 has Inf in the gradient of 0.weight" in one


def scaled(rank: int, scale: float) -> list[str]:
    wrapped = wrapped_mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    ddp.check_numerics(wrapped, scaler=scaler)
    said, parameter = [], next(wrapped.module.parameters())
    before = parameter.detach().clone()
    for number in range(3):
        hook = spoilt_by(parameter, float("inf")) if (rank, number) == (1, 1) else None
        optimizer.zero_grad()
        text = ""
        try:
            scaler.scale(loss_of(wrapped, batch(rank, number))).backward()
            scaler.step(optimizer)
            scaler.update()
        except ddp.NumericsError as error:
            text = str(error)
        if hook is not None:
            hook.remove()
        said.append(text)
    assert not torch.equal(parameter, before)
    assert bool(torch.isfinite(parameter).all())
    return said


def test_a_scaler_that_looks_for_its_scale_is_left_alone(two_ranks: Ranks) -> None:
    assert two_ranks(scaled, 65536.0) == [["", "", ""]] * 2


def test_a_scaler_that_is_down_to_one_is_no_excuse(two_ranks: Ranks) -> None:
    one, other = two_ranks(scaled, 1.0)
    assert one == other
    assert [bool(text) for text in one] == [False, True, False]


# --- replicas ------------------------------------------------------------------------------------------


def drifted(rank: int, who: tuple[int, ...]) -> list[str]:
    wrapped = wrapped_mlp()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    ddp.check_numerics(wrapped, replicas_every=3)
    said = []
    for number in range(9):
        if rank in who and number == 4:
            with torch.no_grad():
                wrapped.module[2].bias[0] += 1e-3
        said.append(step(wrapped, rank, number))
        optimizer.step()
    return said


def test_a_replica_that_drifts_is_named_with_its_parameter(three_ranks: Ranks) -> None:
    texts = three_ranks(drifted, (1,))
    assert texts[0] == texts[1] == texts[2]
    assert [bool(text) for text in texts[0]] == [False] * 5 + [True, False, False, True]
    assert all(fact in texts[0][5] for fact in ("step 6", "2.bias", "rank 1"))
    assert "rank 0" not in texts[0][5]


def test_replicas_that_stay_the_same_say_nothing(two_ranks: Ranks) -> None:
    assert two_ranks(drifted, ()) == [[""] * 9] * 2


def test_between_two_nobody_can_say_who_is_right(two_ranks: Ranks) -> None:
    one, other = two_ranks(drifted, (0,))
    assert one == other
    assert "majority" in one[5]


def test_a_fingerprint_sees_every_bit_and_its_place() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64):
        tensor = torch.ones(5, 7).to(dtype)
        same = tensor.clone()
        assert fingerprint(tensor) == fingerprint(same)
        same[2, 3] = 0
        other = tensor.clone()
        other[3, 2] = 0
        assert len({int(fingerprint(one)) for one in (tensor, same, other)}) == 3
    transposed = torch.arange(12.0).reshape(3, 4).t()
    assert fingerprint(transposed) == fingerprint(transposed.contiguous())
    assert int(fingerprint(torch.tensor(-0.0))) != int(fingerprint(torch.tensor(0.0)))
    assert int(fingerprint(torch.empty(0))) == 0


# --- asking for it ---------------------------------------------------------------------------------------


def asked_by_environment(rank: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_CHECK_NUMERICS", "2")
        wrapped = wrapped_mlp()
        patch.setenv("DDP_CHECK_NUMERICS", "sometimes")
        with pytest.raises(ValueError, match="DDP_CHECK_NUMERICS='sometimes'"):
            wrapped_mlp()
    if rank == 0:
        with torch.no_grad():
            wrapped.module[0].bias[0] += 1
    return [step(wrapped, rank, number) for number in range(2)]


def test_the_environment_asks_for_an_unchanged_script(two_ranks: Ranks) -> None:
    one, other = two_ranks(asked_by_environment)
    assert one == other
    assert one[0] == ""
    assert "0.bias" in one[1]


def test_only_our_module_can_be_checked() -> None:
    with pytest.raises(TypeError, match=r"ddp\.check_numerics"):
        ddp.check_numerics(torch.nn.Linear(1, 1))


def in_a_join(rank: int) -> int:
    wrapped = wrapped_mlp()
    ddp.check_numerics(wrapped, replicas_every=1)
    done = 0
    with wrapped.join():
        for number in range(2 + 2 * rank):
            step(wrapped, rank, number)
            done += 1
    assert step(wrapped, rank, 9) == ""
    return done


def test_a_join_is_not_held_up(two_ranks: Ranks) -> None:
    assert two_ranks(in_a_join) == [2, 4]
