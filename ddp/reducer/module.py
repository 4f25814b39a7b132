"""`DistributedDataParallel`: torch's module with the reducer of this package.

The class inherits what torch implements in Python: arguments, errors, buffers, `no_sync`, `join`, mixed precision and
pickling. These parts behave as in the installed torch. This module adds the reducer, the checks at construction, the
communication hooks, and the checks for changes of the wrapped module.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from ddp.groups import joining, wrappers
from ddp.reducer import (
    agreement,
    arguments,
    captured,
    compiled,
    dtypes,
    errors,
    extensions,
    fresh_start,
    module_check,
    pickled,
    plan,
)
from ddp.reducer.bucket_sender import Settings
from ddp.reducer.collectives import GROUP_TIMEOUT, start_sum
from ddp.reducer.gradient_hooks import weakly, when_it_ends
from ddp.reducer.logging_data import Log
from ddp.reducer.torch_reducer import TorchReducer
from ddp.telemetry import torch_api, torch_marks, torch_names
from ddp.telemetry.coded import WrongType, WrongUse, WrongValue
from ddp.telemetry.comm_error import explaining

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class DistributedDataParallel(TorchDistributedDataParallel):
    """A replacement for torch.nn.parallel.DistributedDataParallel with the same arguments.

    `process_group` may also be a list of groups of the same ranks. Buckets then use the groups in turn. With
    `bucket_cap_mb="auto"`, the first steps find the best bucket size. With `strict=True`, gradients that torch's class
    leaves on a rank without a message are an error.
    """

    reducer: TorchReducer  # type: ignore[assignment]
    logger: Log  # type: ignore[assignment]
    _delayed_to: torch.Tensor
    _delayed_is_sent: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        chosen, self.__dict__["_strict"] = arguments.bound_arguments(self, args, kwargs)
        self.__dict__["_groups"] = groups = arguments.group_list(chosen["process_group"])
        if groups:
            chosen["process_group"] = groups[0]
        # torch's checks do not name the parameter and leave rank 0 waiting, so `_agree` replaces them.
        self.__dict__["_agrees_first"] = chosen.get("init_sync", True)
        self.__dict__["_buffers_first"] = (
            chosen.get("forward_sync_buffers") is not None or chosen["broadcast_buffers"] is not False
        )
        self.__dict__["_tunes_buckets"] = arguments.wants_tuning(chosen)
        dtypes.refuse_narrow(chosen["module"], chosen["mixed_precision"])
        module_check.refuse_sharded(chosen["module"], chosen["device_mesh"])
        arguments.replace_deprecated(chosen)
        torch_api.skip_in_dynamo("ddp")
        compiled.hide_communication(DistributedDataParallel)
        torch_marks.install()
        self.__dict__["_delayed_to"] = chosen.get("param_to_hook_all_reduce")
        self.__dict__["_delayed_is_sent"] = False
        if "init_sync" in chosen:  # an older torch always synchronizes
            chosen["init_sync"] = False
        super().__init__(**chosen)
        # In this case torch's class has no reducer and fails in the first forward.
        if self._delay_all_reduce_all_params:
            raise WrongValue(
                "invalid delay_all_reduce_named_params: it contains all parameters. Remove at least one from it"
            )

    # --- construction ------------------------------------------------------------------------------

    def _ddp_init_helper(
        self,
        parameters: Sequence[torch.Tensor],
        expect_sparse_gradient: Sequence[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
        *_more: Any,
    ) -> None:
        names = [param_to_name_mapping[i].removeprefix(".") for i in range(len(parameters))]
        settings = Settings(
            groups=self.__dict__.get("_groups") or (self.process_group,),
            limit=self._limits(static_graph),
            find_unused=self.find_unused_parameters,
            as_views=self.gradient_as_bucket_view,
            skip_unused=getattr(self, "skip_all_reduce_unused_params", False),
            tuned=self.__dict__.get("_tunes_buckets", False),
            strict=self.__dict__.get("_strict", False),
        )
        self.reducer = TorchReducer(parameters, names, expect_sparse_gradient, settings)
        captured.keep_captured_memory(self.reducer.core)
        if settings.tuned:
            if self._averages_in_python:
                raise WrongUse(errors.without_reducer('bucket_cap_mb="auto"'))
            self.reducer.core.tune()
        if self._delay_all_reduce_params:
            self.reducer.core.at_round_over.append(weakly(self._check_delayed))
        self.reducer.core.wanted = _synchronizes(weakref.ref(self))
        if self.__dict__.pop("_agrees_first", False) and not joining.is_alone():
            self._agree(static_graph)
        if self.mixed_precision is not None:
            for i, parameter in enumerate(parameters):
                parameter._idx = i  # type: ignore[attr-defined]  # torch's module reads it
        if self._averages_in_python:
            self.reducer._remove_autograd_hooks()
            compiled.forward_as_torch(self)
        averaged = [*self.reducer.core.parameters, *self._delay_all_reduce_params]
        self._module_check: module_check.NotAveraged | None = module_check.NotAveraged(
            self.module, averaged, self.parameters_to_ignore
        )
        self._open_log(static_graph)
        for attach in extensions.when_built:
            attach(self)
        self._passing_sync_batchnorm_handle(self.module)

    def _root_copy_hook(self, *args: Any, **kwargs: Any) -> None:
        """Mixed precision copies parameters on a stream of its own. torch does not let it wait for the optimizer."""
        self._mp_stream.wait_stream(torch.accelerator.current_stream())
        super()._root_copy_hook(*args, **kwargs)

    @property
    def _averages_in_python(self) -> bool:
        """Whether torch.compile's own reducer averages the gradients."""
        return bool(getattr(self, torch_names.PYTHON_REDUCER.name, False))

    def _limits(self, static_graph: bool) -> plan.Limits:
        if any(cap < 0 for cap in getattr(self, "bucket_bytes_cap_list", [])):
            sizes = [cap / plan.MIB for cap in self.bucket_bytes_cap_list]
            raise WrongType(f"invalid bucket_cap_mb_list={sizes}: negative. Use sizes in MiB of 0 or more")
        default = getattr(self, "bucket_bytes_cap_default", False)
        first = torch_api.get(torch_names.FIRST_BUCKET) if default else self.bucket_bytes_cap
        return plan.limits(
            self.bucket_bytes_cap,
            first,
            getattr(self, "bucket_bytes_cap_list", []),
            whole_at_first=static_graph or not self.find_unused_parameters,
        )

    @explaining("the comparison of the models")
    def _agree(self, static_graph: bool) -> None:
        settings = self.reducer.core.settings
        options = [
            ("find_unused_parameters", self.find_unused_parameters),
            ("static_graph", static_graph),
            ("bucket_cap_mb", "auto" if settings.tuned else self.bucket_bytes_cap / plan.MIB),
            ("forward_sync_buffers", self.broadcast_buffers),  # the attribute keeps its old name
        ]
        sender = self.reducer.core.sender
        buffers_too = self.__dict__.pop("_buffers_first", True)
        state = self._state_to_send(buffers_too)
        sender.identity = agreement.same_model(sender.group, sender.device, sender.facts, state, options)
        narrow = dtypes.narrow_state(self.module, self.parameters_to_ignore, buffers=buffers_too)
        torch_api.get(torch_names.SYNC_STATES)(
            module=self.module,
            process_group=self.process_group,
            broadcast_bucket_size=self.broadcast_bucket_size,
            src=0,
            params_and_buffers_to_ignore={*self.parameters_to_ignore, *narrow},
            broadcast_buffers=buffers_too,
        )
        dtypes.broadcast_as_bytes(self.process_group, narrow.values())

    def _assign_modules_buffers(self) -> None:
        super()._assign_modules_buffers()
        self.modules_buffers = dtypes.as_bytes(self.modules_buffers)

    def _state_to_send(self, buffers_too: bool) -> list[plan.Entry]:
        named = [*self.module.named_parameters(), *(self.module.named_buffers() if buffers_too else ())]
        return [
            (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in named
            if name not in self.parameters_to_ignore
        ]

    def _open_log(self, static_graph: bool) -> None:
        self.logger = Log(self.reducer.refresh)
        self.reducer.write_log(self.logger)
        self.reducer.set_logger(self.logger)
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            self.broadcast_buffers,
            any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in self.module.modules()),
            static_graph,
        )

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state.pop("_module_check", None)
        state.pop("_groups", None)
        state[pickled.KEY] = pickled.origin(self.process_group)
        compiled.forget_forward(state)
        return state

    def _check_default_group(self) -> None:
        """Permit any group: the pickle says which ranks it has."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if (group := pickled.group_for(state.pop(pickled.KEY, None))) is not None:
            state["process_group"] = group  # torch's method would take the default group
        super().__setstate__(state)
        self._static_graph_delay_allreduce_enqueued = False  # of the new reducer's first step
        if self._delay_all_reduce_params:  # copying a parameter does not copy its hooks
            self._delayed_to.register_hook(self._delayed_all_reduce_hook)

    # --- a step ------------------------------------------------------------------------------------

    @explaining("the synchronization before a forward")
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not self._delay_all_reduce_all_params:
            self._check_module()
        self.reducer.core.sender.set_within_join(self._join_config.enable)
        if self._join_config.enable and self._delay_all_reduce_params:
            raise errors.delayed_in_join()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            captured.check_capture(self.reducer.core)
        return super()._pre_forward(*inputs, **kwargs)

    def _check_module(self) -> None:
        """Say once, or raise if it is strict, that parameters were unfrozen or added since the module was wrapped."""
        names = self._module_check.not_averaged() if self._module_check is not None else ()
        if not names:
            return
        core = self.reducer.core
        error = errors.changed_module(names, core.rank)
        if core.settings.strict:
            raise core.record_error(error)
        self._module_check = None
        logging.getLogger("ddp").warning("%s", error)

    @explaining("the synchronization after a forward")
    def _post_forward(self, output: Any) -> Any:
        output = super()._post_forward(output)
        if torch.is_grad_enabled() and not self.require_backward_grad_sync and not self._averages_in_python:
            self.reducer.core.keep_local()
        return output

    # --- parameters whose all-reduce is delayed ------------------------------------------------------

    def _delayed_all_reduce_hook(self, grad: torch.Tensor) -> torch.Tensor:
        """Like torch's hook, but the backward ends only after all delayed gradients are averaged."""
        buffer = self._delay_grad_buffer
        assert buffer is not None
        buffer.div_(self.process_group.size())
        work, sent = start_sum(self.process_group, buffer), buffer._version
        self._delayed_is_sent = True

        def finish() -> None:
            late = buffer._version != sent
            work.wait(GROUP_TIMEOUT)
            if late or self._is_outside_delay_buffer():
                raise errors.delayed_too_late(self._delayed_names(), self.reducer.core.rank)

        when_it_ends(finish)
        return grad

    def _is_outside_delay_buffer(self) -> bool:
        """Whether `.grad` was set to None after the forward:

        then autograd stores the new gradient outside the buffer.
        """
        pairs = zip(self._delay_all_reduce_params, self._delay_grad_views, strict=True)
        return any(p.grad is not None and p.grad.data_ptr() != view.data_ptr() for p, view in pairs)

    def _check_delayed(self) -> None:
        """Raise if delayed gradients were not averaged. It runs at the end of each averaged step."""
        sent, self._delayed_is_sent = self._delayed_is_sent, False
        if not sent and (self._is_outside_delay_buffer() or bool(self._delay_grad_buffer.any())):  # type: ignore[union-attr]
            raise errors.never_delayed_to(self._delayed_names(), self.reducer.core.rank)

    def _delayed_names(self) -> list[str]:
        delayed = set(map(id, self._delay_all_reduce_params))
        return [name for name, parameter in self.module.named_parameters() if id(parameter) in delayed]

    # --- join ----------------------------------------------------------------------------------------

    @explaining("the averaging of gradients within join()")
    def _match_all_reduce_for_bwd_pass(self) -> None:
        """Also match the all-reduce of used parameters, which ranks with input send after their buckets."""
        super()._match_all_reduce_for_bwd_pass()
        if self.reducer.core.exchanges_used:
            start_sum(self.process_group, self.reducer._get_local_used_map()).wait(GROUP_TIMEOUT)

    def _match_unused_params_allreduce(self) -> None:
        """Do nothing: `_match_all_reduce_for_bwd_pass` includes this all-reduce."""

    # --- communication hooks -----------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register `hook(state, bucket) -> Future`, which averages the buckets. See torch's documentation."""
        self._check_comm_hook(hook)
        if self._averages_in_python and str(getattr(hook, "__module__", "")).startswith("ddp.comm_hooks."):
            raise WrongType(errors.without_reducer(f"the communication hook {hook.__qualname__}"))
        self.logger._set_comm_hook_name(getattr(hook, "__qualname__", type(hook).__qualname__))
        self._comm_hooks.append((hook, state))
        self.reducer.register_comm_hook(state, hook)

    def _check_comm_hook(self, hook: Any) -> None:
        if not (callable(hook) and arguments.is_annotated_for_ours(hook)):
            super()._check_comm_hook(hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        known = {
            BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        self.logger._set_comm_hook_name(str(comm_hook_type))
        self.reducer.register_comm_hook(self.process_group, known[comm_hook_type])  # type: ignore[arg-type]

    @staticmethod
    def ignore_parameters_and_buffers(module: torch.nn.Module, names: Iterable[str]) -> None:
        """Exclude parameters and buffers, given by their dotted names, from DDP. Call it before wrapping."""
        ignored = list(names)
        known = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
        if unknown := sorted(set(ignored) - known):
            raise WrongValue(
                f"unknown parameter or buffer: {', '.join(unknown)}. Use names from module.named_parameters() or "
                "module.named_buffers()"
            )
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)


DistributedDataParallel.__init__.__signature__ = arguments.constructor_signature()  # type: ignore[attr-defined]
wrappers.renew_with(DistributedDataParallel, fresh_start.renew_wrapper)


def _synchronizes(module: weakref.ref[DistributedDataParallel]) -> Callable[[], bool]:
    def answer() -> bool:
        wrapper = module()
        return wrapper is None or wrapper.require_backward_grad_sync

    return answer
