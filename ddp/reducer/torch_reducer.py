"""The reducer interface that torch's module, join, hooks and mixed precision call, under torch's names."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ddp.groups import successors, wrappers
from ddp.reducer import agreement
from ddp.reducer.reducer import Reducer
from ddp.telemetry import torch_names
from ddp.telemetry.coded import WrongType, WrongUse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ddp.reducer.bucket_sender import ReducerSettings
    from ddp.reducer.grad_bucket import GradBucket
    from ddp.reducer.logging_data import ReducerLogger


class TorchReducer:
    """A `Reducer` under the names that torch's module, its join, its hooks and its mixed precision use.

    `core` is the reducer itself, for the modules of this package.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        sparse: Sequence[bool],
        settings: ReducerSettings,
    ) -> None:
        self.core = Reducer(parameters, names, sparse, settings)

    # --- a step ------------------------------------------------------------------------------------

    def _rebuild_buckets(self) -> bool:
        return self.core.rebuild_buckets()

    def prepare_for_forward(self) -> None:
        self.core.prepare_for_forward()

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        self.core.prepare_for_backward(outputs)

    def _delay_all_reduce(self) -> None:
        self.core.delay_all_reduce()

    # --- hooks -------------------------------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: Callable[[Any, GradBucket], Any]) -> None:
        self.core.sender.register_hook(state, hook)
        self.core.forget()

    def _run_comm_hook(self, bucket: GradBucket) -> Any:
        return self.core.sender.run_hook(bucket)

    def _run_allreduce_hook(self, bucket: GradBucket) -> Any:
        return self.core.sender.sum_bucket(bucket)

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        self.core.sender.await_futures(futures)

    # --- join --------------------------------------------------------------------------------------

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        self.core.sender.join_with(work, use_static_world_size)

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        return self.core.sender.zero_buckets()

    def _get_local_used_map(self) -> torch.Tensor:
        """Return how many ranks used each parameter in the previous backward."""
        before = self.core.previous
        if before is not None and before.usage is not None:
            return before.usage.counts
        return torch.zeros(len(self.core.parameters), dtype=torch.int32, device=self.core.sender.device)

    def _push_all_rebuilt_params(self) -> None:
        self.core.follow_step()

    # --- mixed precision, optimizers in the backward -----------------------------------------------

    def _autograd_hook(self, index: int) -> None:
        self.core.hooks.report(index)

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype | None) -> None:
        """Accept gradients through `_autograd_hook`. Mixed precision replaces the parameters' data during a step."""
        self.core.sender.use_dtype(dtype)
        self.core.hooks.remove()
        self.core.forget()

    def _set_optimizer_in_backward(self) -> None:
        self.core.sender.skip_write_back()

    # --- module lifecycle --------------------------------------------------------------------------

    def _set_static_graph(self) -> None:
        if self.core.stopwatch.iteration:
            late = "set_static_graph() should be called before training loop starts and after "
            raise self.core.record_error(RuntimeError(f"{late}DistributedDataParallel is constructed."))
        self.core.make_static()

    def _remove_autograd_hooks(self) -> None:
        self.core.hooks.remove()

    def _check_reducer_finalized(self) -> None:
        self.core.check_finished()

    def _reset_state(self) -> None:
        self.core.sender.start_over()
        self.core.forget()

    def _update_process_group(self, group: ProcessGroup) -> None:
        start_anew(self.core, (group,))

    def _set_sparse_metadata(self, metadata: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError(
            "sparse metadata is not supported. Sparse gradients are averaged without it: remove the call, or use "
            "torch.nn.parallel.DistributedDataParallel"
        )

    # From 2.15 on, a script may finalize a backward itself.

    def _set_manual_finalization_required(self, required: bool) -> None:
        if required:
            raise agreement.no_manual_finalization()

    def _should_finalize_after_backward(self) -> bool:
        return False

    def _finalize_backward_manual(self) -> None:
        raise agreement.no_manual_finalization()

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.core.stopwatch.sample_rate = rate

    def set_logger(self, log: ReducerLogger) -> None:
        self.core.log = weakref.ref(log)

    def _ddp_graph_static(self) -> bool:
        return self.core.graph_is_static

    def get_backward_stats(self) -> list[int]:
        """Return zeros: the hooks count in C, without a clock."""
        return [0] * len(self.core.parameters)

    def refresh(self, log: ReducerLogger) -> None:
        """Update the log after the first ten steps and then after every n-th, like torch."""
        core = self.core
        if core.stopwatch.iteration and core.stopwatch.sampling:
            self.write_log(log)
            if core.looks_for_unused:
                log.update({}, {"can_set_static_graph": int(core.graph_is_static)})

    def write_log(self, log: ReducerLogger) -> None:
        """Write the reducer's data to the log, for `_get_ddp_logging_data`."""
        core = self.core
        facts, chosen = core.sender.facts, core.sender.plan
        sizes = [sum(facts[i].nbytes for i in bucket.members) for bucket in chosen.buckets]
        listed = ", ".join(map(str, sizes))
        members = ", ".join(" ".join(map(str, bucket.members)) for bucket in chosen.buckets)
        before = core.previous
        order = ", ".join(map(str, before.order if before else ()))
        log.update(
            {
                "backend_name": core.sender.backend_name,
                "dtypes": ", ".join(dict.fromkeys(core.sender.dtype_names)),
                "bucket_sizes": listed,
                "prev_iteration_grad_ready_order_indices": order,
                **(
                    {"rebuilt_bucket_sizes": listed, "rebuilt_per_bucket_param_indices": members}
                    if core.rebuilt
                    else {}
                ),
            },
            {
                "world_size": core.sender.group.size(),
                "rank": core.rank,
                "iteration": core.stopwatch.iteration,
                "num_parameter_tensors": len(facts),
                "total_parameter_size_bytes": sum(one.nbytes for one in facts),
                "bucket_cap_bytes": core.settings.limit.largest,
                "find_unused_parameters": int(core.settings.find_unused),
                "gradient_as_bucket_view": int(core.settings.as_views),
                "has_rebuilt_buckets": int(core.rebuilt),
                "is_multi_device_module": int(len({one.device for one in facts}) > 1),
                "num_buckets_reduced": before.reduced if before else len(chosen.buckets),
                "unused_parameter_size": sum(facts[i].nbytes for i in (before.unused if before else ())),
            },
        )
        if (threads := core.sender.gloo_threads) is not None:
            log.update({}, {"gloo_num_threads": threads})
        log.update_times(core.stopwatch)


def reducer_of(model: object, function: str) -> Reducer:
    """Return the reducer of a wrapped model. Raise for any other object; `function` is the caller, for the error."""
    reducer = getattr(model, "reducer", None)
    if not isinstance(reducer, TorchReducer):
        raise WrongType(
            f"{function} needs a ddp.DistributedDataParallel, but got a {type(model).__name__}. Wrap the model first"
        )
    if getattr(model, torch_names.PYTHON_REDUCER.name, False):
        raise WrongUse(agreement.without_reducer(function))
    return reducer.core


# --- start again ------------------------------------------------------------------------------------
#
# A wrapped model of ours returns to the state after its construction, with groups that were formed again.
#
# A replacement has constructed its model just now. All ranks must have the same plan of buckets, so the survivors
# return to the first plan as well. The reducer stays the same object: the diagnostics and the optimizer hold it.


def renew_wrapper(wrapper: Any) -> None:
    """Let a `DistributedDataParallel` of ours start again. CannotReform: the state of its hook cannot."""
    core: Reducer = wrapper.reducer.core
    groups = tuple(successors.of(group) for group in core.settings.groups)
    if wrapper.__dict__.get("_groups"):
        wrapper.__dict__["_groups"] = groups
    wrapper.process_group = groups[0]
    start_anew(core, groups)
    wrapper._has_rebuilt_buckets = False
    wrapper._static_graph_delay_allreduce_enqueued = (
        False  # by which torch averages the first step at its end
    )
    wrapper.__dict__["_delayed_is_sent"] = False
    if wrapper._delay_grad_buffer is not None:
        wrapper._delay_grad_buffer.zero_()
    for _hook, state in wrapper._comm_hooks:
        wrappers.renew_hook_state(state)


def start_anew(reducer: Reducer, groups: Sequence[ProcessGroup]) -> None:
    """Forget the last backward and everything that was observed, and use these groups."""
    reducer.settings = replace(reducer.settings, groups=tuple(groups))
    reducer.sender.start_anew(reducer.settings)
    reducer.forget()
