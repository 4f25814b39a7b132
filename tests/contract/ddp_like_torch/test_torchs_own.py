"""The tests of DDP that torch ships, under our class: those that pass under torch's own where the CPU stands in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import compare
import pytest
from pool import Pool, Task, pool_of
from transcript import ENDED

if TYPE_CHECKING:
    from pathlib import Path

# Not among them: what needs real streams, events or SyncBatchNorm on a GPU, and what torch itself skips or fails.
PASSING = [
    "test_DistributedDataParallel",
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_ddp_broadcast_buffer",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_broadcast_buffers_deprecation_warning",
    "test_ddp_bucket_cap_mb_list",
    "test_ddp_buffer_hook_allreduce",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_build_debug_param_to_name_mapping",
    "test_ddp_build_debug_param_to_name_mapping_requires_grad",
    "test_ddp_comm_hook_logging",
    "test_ddp_control_flow_different_across_ranks",
    "test_ddp_control_flow_same_across_ranks",
    "test_ddp_create_graph",
    "test_ddp_device_mesh_initialization",
    "test_ddp_forward_backward_hook",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_hook_parity_allreduce",
    "test_ddp_hook_parity_allreduce_process_group",
    "test_ddp_ignore_params_arg",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_ddp_join_model_equivalence",
    "test_ddp_join_respects_forward_sync_buffers_false",
    "test_ddp_logging_data_cpu",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_ddp_multiple_nested_unused_params_err_ignore_params",
    "test_ddp_multiple_nested_unused_params_error",
    "test_ddp_namedtuple",
    "test_ddp_native_mixed_precision_ignored_params",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_profiling_autograd_profiler",
    "test_ddp_profiling_torch_profiler",
    "test_ddp_python_error_logged",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_sink_noclone",
    "test_ddp_static_graph_nested_types",
    "test_ddp_sync_module_states",
    "test_ddp_uneven_input_exception",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_unused_params_rebuild_buckets_exception",
    "test_ddp_zero_output_features",
    "test_detect_ddp_is_actually_static",
    "test_dump_DDP_relevant_env_vars",
    "test_get_data_parallel_params",
    "test_grads_same_across_ranks_with_no_sync",
    "test_skip_all_reduce_unused_parameters",
    "test_stateless_api_with_ddp",
    "test_static_graph_api_cpu",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
]
# `test_invalid_static_graph` is the one that passes under torch's class and not under ours: it expects a model to be of
# no use after an error in its backward. Ours goes on, and says of the next backward what is wrong with that one.
# One waits for a timeout, the other trains for a while.
SLOW = [
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_model_diff_shape_across_ranks",
]


def judged(name: str, side: str) -> None:
    """Only of those that are slow does one have to wait until its time is up."""
    task = Task("torchs_own", "run", side, (name,), group_timeout_s=10.0 if name in SLOW else 60.0)
    for number, transcript in enumerate(pool_of(2).run(task)):
        said = transcript.remarked(ENDED)
        assert not said, f"rank {number}: {said}"
        assert transcript.noted("outcome") == "passed"


@pytest.mark.parametrize(
    "name", [*PASSING, *(pytest.param(name, marks=pytest.mark.nightly) for name in SLOW)]
)
def test_under_ours(name: str) -> None:
    judged(name, compare.SECOND)


@pytest.mark.nightly(instead=("::test_under_ours", "::test_under_distributed_autograd"))
@pytest.mark.parametrize("name", [*PASSING, *SLOW])
def test_under_torchs(name: str) -> None:
    """Else the list says nothing."""
    judged(name, "torch")


def test_the_runner_tells_a_failure() -> None:
    """A class that averages nothing fails what torch's passes."""
    task = Task(
        "torchs_own", "run", "mutants:AveragesNothing", ("test_grads_same_across_ranks_with_no_sync",)
    )
    assert any(transcript.remarked(ENDED) for transcript in pool_of(2).run(task))


# Under RPC; and how many ranks each of them needs.
UNDER_RPC = {
    ("DdpComparisonTest", "test_ddp_comparison"): 4,
    ("DdpComparisonTest", "test_ddp_comparison_uneven_inputs"): 4,
    ("DdpComparisonTest", "test_ddp_dist_autograd_local_vs_remote"): 4,
    ("DdpComparisonTest", "test_ddp_dist_autograd_sparse_grads"): 4,
    ("DdpUnderDistAutogradTest", "test_backward_ddp_inside"): 6,
    ("DdpUnderDistAutogradTest", "test_backward_ddp_outside"): 6,
    ("DdpUnderDistAutogradTest", "test_backward_ddp_outside_uneven_inputs"): 6,
}


# Each of them starts its ranks anew.
UNDER_RPC_QUICK = ("test_ddp_comparison",)


def under_rpc() -> list[object]:
    return [
        pytest.param(
            kind,
            name,
            side,
            id=f"{name}-{side}",
            marks=[] if name in UNDER_RPC_QUICK and side != "torch" else [pytest.mark.nightly],
        )
        for kind, name in UNDER_RPC
        for side in (compare.SECOND, "torch")
    ]


@pytest.mark.parametrize(("kind", "name", "side"), under_rpc())
def test_under_distributed_autograd(kind: str, name: str, side: str, tmp_path: Path) -> None:
    task = Task("torchs_rpc", "run", side, (kind, name, str(tmp_path)))
    pool = Pool(UNDER_RPC[kind, name])  # a process can use remote references in its first RPC session only
    try:
        transcripts = pool.run(task)
    finally:
        pool.close()
        pool.forget()
    for number, transcript in enumerate(transcripts):
        said = transcript.remarked(ENDED)
        assert not said, f"rank {number}: {said}"
        assert transcript.noted("outcome") == "passed"
