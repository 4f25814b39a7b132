"""The rest of what torch's module, its join, its hooks and its mixed precision expect of a reducer."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from ddp.reducer import seams
from ddp.reducer.between_steps import LastingReducer
from ddp.reducer.round import Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    from ddp.reducer.grad_bucket import GradBucket
    from ddp.reducer.logging_data import Log


class TorchReducer(LastingReducer):
    """A Reducer under the names of torch's."""

    _log: Callable[[], Log | None] = staticmethod(lambda: None)
    tuning: seams.Tuner | None = None

    def tune(self) -> None:
        """Finds the size of the buckets from now on, instead of keeping to the one that was given."""
        for make in seams.tuners:
            self.tuning = make(self)

    # --- hooks -------------------------------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: Callable[[Any, GradBucket], Any]) -> None:
        self.sending.register_hook(state, hook)
        self._follow_plan()

    def _follow_plan(self) -> None:
        """The plan has been made anew from nothing."""
        self._adopt(self.sending.plan)
        self._round, self._lesson, self.rebuilt = None, None, False
        self._watch_as(Mode.OBSERVE)
        if self.tuning is not None and self.tuning.going:
            self.tuning.stop("begins anew")
        if self.settings.tuned:
            self.tune()

    def _run_comm_hook(self, bucket: GradBucket) -> Any:
        return self.sending.run_hook(bucket)

    def _run_allreduce_hook(self, bucket: GradBucket) -> Any:
        return self.sending.sum_bucket(bucket)

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        self.sending.await_futures(futures)

    # --- join --------------------------------------------------------------------------------------

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        self.sending.join_with(work, use_static_world_size)

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        return self.sending.zero_buckets()

    def _get_local_used_map(self) -> torch.Tensor:
        """How many ranks used each parameter in the backward that is over."""
        before = self.previous
        if before is not None and before.used_anywhere is not None:
            counts: torch.Tensor = before.used_anywhere
            return counts
        return self.nothing_used()

    def nothing_used(self) -> torch.Tensor:
        return torch.zeros(len(self.parameters), dtype=torch.int32, device=self.sending.device)

    def _push_all_rebuilt_params(self) -> None:
        """A rank without input has observed nothing."""
        if self._should_rebuild and self._lesson is None:
            self.learn_nothing()

    # --- mixed precision, optimizers in the backward -----------------------------------------------

    def _autograd_hook(self, index: int) -> None:
        self._arrived(index)

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype | None) -> None:
        """The gradients come through `_autograd_hook`, of parameters that are others during a step."""
        self.sending.use_dtype(dtype)
        self._adopt(self.sending.plan)
        self._hooked_by_others = True
        self._watch.remove()

    def _set_optimizer_in_backward(self) -> None:
        self.sending.gradients_are_consumed()

    # --- the module's life -------------------------------------------------------------------------

    def _set_static_graph(self) -> None:
        if self.stopwatch.iteration:
            late = "set_static_graph() should be called before training loop starts and after "
            raise self._told(RuntimeError(f"{late}DistributedDataParallel is constructed."))
        self.static_graph = True

    def _remove_autograd_hooks(self) -> None:
        self._watch.remove()

    def _check_reducer_finalized(self) -> None:
        self._ensure_prior_finished()

    def _reset_state(self) -> None:
        self.sending.start_over()
        self._follow_plan()
        self._lacking = None

    def _update_process_group(self, group: ProcessGroup) -> None:
        self.sending.use_groups((group,))
        self.rank = group.rank()
        self._follow_plan()

    def _set_sparse_metadata(self, metadata: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError(
            "sparse metadata is read by torch's own reducer only; use torch.nn.parallel.DistributedDataParallel "
            "for it, or leave it out: sparse gradients are averaged without."
        )

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.stopwatch.sample_rate = rate

    def set_logger(self, log: Log) -> None:
        self._log = weakref.ref(log)

    def _told(self, error: RuntimeError) -> RuntimeError:
        log = self._log()
        if log is not None:
            log.set_error_and_log(str(error))
        return error

    def _ddp_graph_static(self) -> bool:
        return self.graph_is_static

    def get_backward_stats(self) -> list[int]:
        """Per-parameter times are not kept: most parameters have no hook."""
        return [0] * len(self.parameters)

    def refresh(self, log: Log) -> None:
        """Of the first ten steps and every n-th after them, as torch does."""
        if self.stopwatch.iteration and self.stopwatch.sampling:
            self.tell(log)
            if self._looks_for_unused:
                log.tell({}, {"can_set_static_graph": int(self.graph_is_static)})

    def tell(self, log: Log) -> None:
        """What `_get_ddp_logging_data` shows of the reducer."""
        facts, chosen = self.sending.facts, self.sending.plan
        sizes = [sum(facts[i].nbytes for i in bucket.members) for bucket in chosen.buckets]
        listed = ", ".join(map(str, sizes))
        members = ", ".join(" ".join(map(str, bucket.members)) for bucket in chosen.buckets)
        before = self.previous
        order = ", ".join(map(str, (before.order if before and before.order else self._own_order)))
        log.tell(
            {
                "backend_name": self.sending.backend_name,
                "dtypes": ", ".join(dict.fromkeys(self.sending.dtype_names)),
                "bucket_sizes": listed,
                "prev_iteration_grad_ready_order_indices": order,
                **(
                    {"rebuilt_bucket_sizes": listed, "rebuilt_per_bucket_param_indices": members}
                    if self.rebuilt
                    else {}
                ),
            },
            {
                "world_size": self.sending.group.size(),
                "rank": self.rank,
                "iteration": self.stopwatch.iteration,
                "num_parameter_tensors": len(facts),
                "total_parameter_size_bytes": sum(one.nbytes for one in facts),
                "bucket_cap_bytes": self.settings.limit.largest,
                "find_unused_parameters": int(self.settings.find_unused),
                "gradient_as_bucket_view": int(self.settings.as_views),
                "has_rebuilt_buckets": int(self.rebuilt),
                "is_multi_device_module": int(len({one.device for one in facts}) > 1),
                "num_buckets_reduced": before.reduced if before else len(chosen.buckets),
                "unused_parameter_size": sum(facts[i].nbytes for i in (before.unused if before else ())),
            },
        )
        if (threads := self.sending.gloo_threads) is not None:
            log.tell({}, {"gloo_num_threads": threads})
        log.tell_times(self.stopwatch)


def reducer_of(model: object, asked: str, only: str) -> TorchReducer:
    """Of a model that is wrapped by ddp.DistributedDataParallel; anything else is told what it was asked for."""
    reducer = getattr(model, "reducer", None)
    if not isinstance(reducer, TorchReducer):
        raise TypeError(f"{asked} was given a {type(model).__name__}, but only {only}: wrap the model first")
    return reducer
