"""`DistributedDataParallel`: torch's module with the reducer of this package.

The class inherits what torch implements in Python: arguments, errors, buffers, `no_sync`, `join`, mixed precision and
pickling. These parts behave as in the installed torch. This module adds the reducer, the checks at construction, the
communication hooks, and the checks for changes of the wrapped module.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from functools import cache
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import BuiltinCommHookType, ProcessGroup
from torch.nn.modules import module as registration
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import _ddp_launch_entry as doors
from ddp.groups import joining, wrappers
from ddp.reducer import agreement, pickled, plan
from ddp.reducer.bucket_sender import FlatBucket, ReducerSettings
from ddp.reducer.collectives import GROUP_TIMEOUT, broadcast_from_rank_0, start_sum
from ddp.reducer.grad_bucket import GradBucket
from ddp.reducer.logging_data import ReducerLogger
from ddp.reducer.reducer import Reducer, weakly, when_it_ends
from ddp.reducer.torch_reducer import TorchReducer, renew_wrapper
from ddp.telemetry import capture, torch_api, torch_marks, torch_names
from ddp.telemetry.coded import WrongType, WrongUse, WrongValue
from ddp.telemetry.comm_error import explaining

_CHECK_NUMERICS = "DDP_CHECK_NUMERICS"


class DistributedDataParallel(TorchDistributedDataParallel):
    """A replacement for torch.nn.parallel.DistributedDataParallel with the same arguments.

    `process_group` may also be a list of groups of the same ranks. Buckets then use the groups in turn. With
    `strict=True`, gradients that torch's class leaves on a rank without a message are an error.
    """

    reducer: TorchReducer  # type: ignore[assignment]
    logger: ReducerLogger  # type: ignore[assignment]
    _delayed_to: torch.Tensor
    _delayed_is_sent: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        chosen, self.__dict__["_strict"] = bound_arguments(self, args, kwargs)
        self.__dict__["_groups"] = groups = group_list(chosen["process_group"])
        if groups:
            chosen["process_group"] = groups[0]
        # torch's checks do not name the parameter and leave rank 0 waiting, so `_agree` replaces them.
        self.__dict__["_agrees_first"] = chosen.get("init_sync", True)
        self.__dict__["_buffers_first"] = (
            chosen.get("forward_sync_buffers") is not None or chosen["broadcast_buffers"] is not False
        )
        refuse_narrow(chosen["module"], chosen["mixed_precision"])
        refuse_sharded(chosen["module"], chosen["device_mesh"])
        replace_deprecated(chosen)
        torch_api.skip_in_dynamo("ddp")
        hide_communication(DistributedDataParallel)
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
        settings = ReducerSettings(
            groups=self.__dict__.get("_groups") or (self.process_group,),
            limit=self._limits(static_graph),
            find_unused=self.find_unused_parameters,
            as_views=self.gradient_as_bucket_view,
            skip_unused=getattr(self, "skip_all_reduce_unused_params", False),
            strict=self.__dict__.get("_strict", False),
        )
        self.reducer = TorchReducer(parameters, names, expect_sparse_gradient, settings)
        of_modules = list(map(vars, self.modules()))
        self.reducer.core.module_hooks = [each.get("_backward_hooks", {}) for each in of_modules]
        self.reducer.core.module_hooks += [each.get("_backward_pre_hooks", {}) for each in of_modules]
        keep_captured_memory(self.reducer.core)
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
            forward_as_torch(self)
        averaged = [*self.reducer.core.parameters, *self._delay_all_reduce_params]
        self._module_check: NotAveraged | None = NotAveraged(self.module, averaged, self.parameters_to_ignore)
        self._open_log(static_graph)
        if os.environ.get(_CHECK_NUMERICS, "0") not in ("", "0"):
            doors.find(doors.LIBRARY, _CHECK_NUMERICS)(self)
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
        options = [
            ("find_unused_parameters", self.find_unused_parameters),
            ("static_graph", static_graph),
            ("bucket_cap_mb", self.bucket_bytes_cap / plan.MIB),
            ("forward_sync_buffers", self.broadcast_buffers),  # the attribute keeps its old name
        ]
        sender = self.reducer.core.sender
        buffers_too = self.__dict__.pop("_buffers_first", True)
        named = [*self.module.named_parameters(), *(self.module.named_buffers() if buffers_too else ())]
        state = [
            (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in named
            if name not in self.parameters_to_ignore
        ]
        sender.identity = agreement.same_model(sender.group, sender.device, sender.facts, state, options)
        narrow = narrow_state(self.module, self.parameters_to_ignore, buffers=buffers_too)
        torch_api.get(torch_names.SYNC_STATES)(
            module=self.module,
            process_group=self.process_group,
            broadcast_bucket_size=self.broadcast_bucket_size,
            src=0,
            params_and_buffers_to_ignore={*self.parameters_to_ignore, *narrow},
            broadcast_buffers=buffers_too,
        )
        broadcast_as_bytes(self.process_group, narrow.values())

    def _assign_modules_buffers(self) -> None:
        super()._assign_modules_buffers()
        self.modules_buffers = as_bytes(self.modules_buffers)

    def _open_log(self, static_graph: bool) -> None:
        self.logger = ReducerLogger(self.reducer.refresh)
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
        forget_forward(state)
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
        self.reducer.core.sender.within_join = self._join_config.enable
        if self._join_config.enable and self._delay_all_reduce_params:
            raise agreement.delayed_in_join()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            check_capture(self.reducer.core)
        return super()._pre_forward(*inputs, **kwargs)

    def _check_module(self) -> None:
        """Say once, or raise if it is strict, that parameters were unfrozen or added since the module was wrapped."""
        names = self._module_check.not_averaged() if self._module_check is not None else ()
        if not names:
            return
        core = self.reducer.core
        error = agreement.changed_module(names, core.rank)
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
                raise agreement.delayed_too_late(self._delayed_names(), self.reducer.core.rank)

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
            raise agreement.never_delayed_to(self._delayed_names(), self.reducer.core.rank)

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
        self.logger._set_comm_hook_name(getattr(hook, "__qualname__", type(hook).__qualname__))
        self._comm_hooks.append((hook, state))
        self.reducer.register_comm_hook(state, hook)

    def _check_comm_hook(self, hook: Any) -> None:
        if not (callable(hook) and is_annotated_for_ours(hook)):
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


def _synchronizes(module: weakref.ref[DistributedDataParallel]) -> Callable[[], bool]:
    def answer() -> bool:
        wrapper = module()
        return wrapper is None or wrapper.require_backward_grad_sync

    return answer


# --- the arguments ---------------------------------------------------------------------------------
#
# Ours, those that torch has deprecated, and the forms that only this class accepts.
#
# `strict` is an argument of ours. With `strict=True`, gradients that torch's class leaves on a rank without a message
# are an error: a backward past the wrapper or a second one after one forward, a parameter that is unfrozen or added
# later.

_TORCHS = inspect.signature(TorchDistributedDataParallel.__init__)
_STRICT = inspect.Parameter("strict", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)


def constructor_signature() -> inspect.Signature:
    """Return the signature of our constructor: torch's arguments and `strict`."""
    return _TORCHS.replace(parameters=[*_TORCHS.parameters.values(), _STRICT])


def bound_arguments(
    wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Return all arguments of torch's constructor by name, with its defaults, and the value of `strict`."""
    given = constructor_signature().bind(wrapper, *args, **kwargs)
    given.apply_defaults()
    chosen = dict(list(given.arguments.items())[1:])
    strict = chosen.pop("strict")
    if not isinstance(strict, bool):
        raise WrongType(f"invalid strict={strict!r}. Use True or False")
    return chosen, strict


def replace_deprecated(chosen: dict[str, Any]) -> None:
    """Replace deprecated arguments. Warn at the caller's line: torch's warning would point into this file."""
    if chosen["check_reduction"]:
        _warn_deprecated("`check_reduction` is deprecated and has no effect. Remove it.")
        chosen["check_reduction"] = False
    if "forward_sync_buffers" not in chosen or chosen["broadcast_buffers"] is None:
        return
    if chosen["forward_sync_buffers"] is not None:
        _warn_deprecated("`broadcast_buffers` has no effect if `forward_sync_buffers` is given. Remove it.")
    else:
        _warn_deprecated(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers`. With False, buffers are synchronized at "
            "construction only, not before each forward."
        )
        chosen["forward_sync_buffers"] = chosen["broadcast_buffers"]
    chosen["broadcast_buffers"] = None


def _warn_deprecated(text: str) -> None:
    warnings.warn(text, FutureWarning, stacklevel=4)


def is_annotated_for_ours(hook: Callable[..., Any]) -> bool:
    """Whether the hook is annotated for this GradBucket. torch's check rejects this class and string annotations."""
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    promised = signature.return_annotation
    fine = (inspect.Signature.empty, torch.futures.Future[torch.Tensor], "torch.futures.Future[torch.Tensor]")
    return bucket is not None and bucket.annotation in (GradBucket, "GradBucket") and promised in fine


def group_list(process_group: Any) -> tuple[ProcessGroup, ...] | None:
    if not isinstance(process_group, list | tuple):
        return None
    if not process_group:
        raise WrongValue(
            "invalid process_group: an empty list. Use at least one group, or remove the argument"
        )
    members = [dist.get_process_group_ranks(group) for group in process_group]
    if any(ranks != members[0] for ranks in members):
        raise WrongValue(
            f"invalid process_group: its groups have different ranks, {members}. Use groups of the same ranks"
        )
    return tuple(process_group)


# --- types of one byte, such as FP8 ----------------------------------------------------------------
#
# They can be stored and broadcast as bytes, but no sum of them is defined.
#
# A script that computes in FP8 keeps its parameters and gradients in a wider type and casts in the forward, so none of
# its gradients is of one byte. Frozen parameters and buffers may be: a quantized model with trained adapters, for
# example.

_DTYPES = [each for each in vars(torch).values() if isinstance(each, torch.dtype)]
_NARROW = frozenset(each for each in _DTYPES if each.is_floating_point and each.itemsize == 1)


def refuse_narrow(module: Any, mixed_precision: Any) -> None:
    """Raise if the gradients of trained parameters cannot be averaged."""
    reduced = getattr(mixed_precision, "reduce_dtype", None)
    if reduced is not None and reduced in _NARROW:
        raise WrongType(
            f"invalid mixed_precision: no sum is defined for reduce_dtype={_short(reduced)}. Use bfloat16 or float16"
        )
    if not isinstance(module, torch.nn.Module):
        return  # torch says what is wrong
    ignored = set(getattr(module, torch_names.IGNORED, ()))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name not in ignored:
            _refuse_narrow_parameter(name, parameter)


def _refuse_narrow_parameter(name: str, parameter: torch.Tensor) -> None:
    if parameter.dtype in _NARROW:
        raise WrongType(
            f"the parameter {name!r} is of type {_short(parameter.dtype)}, and so is its gradient, which cannot be "
            "averaged: no sum is defined for this type. Keep parameters that are trained in bfloat16 or wider, and "
            "cast them in the forward; or freeze this one with requires_grad_(False)"
        )
    wanted = getattr(parameter, "grad_dtype", None)
    if wanted is not None and wanted != parameter.dtype:
        raise WrongType(
            f"the parameter {name!r} is of type {_short(parameter.dtype)}, but its grad_dtype is {_short(wanted)}. A "
            "gradient is averaged in the type of its parameter. Remove grad_dtype, or keep the parameter in that type "
            "and cast it in the forward"
        )


def as_bytes(tensors: Collection[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors for a broadcast; those of a type that backends do not know as bytes in the same memory."""
    if _NARROW.isdisjoint([tensor.dtype for tensor in tensors]):  # buffers come here before each forward
        return list(tensors)
    return [tensor.detach().view(torch.uint8) if tensor.dtype in _NARROW else tensor for tensor in tensors]


def narrow_state(
    module: torch.nn.Module, ignored: Iterable[str], *, buffers: bool
) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of one byte, by their names."""
    named = [*module.named_parameters(), *(module.named_buffers() if buffers else ())]
    left = set(ignored)
    return {name: tensor for name, tensor in named if name not in left and tensor.dtype in _NARROW}


def broadcast_as_bytes(group: ProcessGroup, tensors: Collection[torch.Tensor]) -> None:
    """Send the values of rank 0 to all ranks, as bytes."""
    for each in as_bytes(tensors):
        sent = each.contiguous()
        broadcast_from_rank_0(group, sent)
        if sent is not each:
            each.copy_(sent)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- sharded parameters, and those that are added later --------------------------------------------
#
# - Tensor parallelism (`parallelize_module`) makes DTensors. torch's class averages their local parts, if it gets the
#   dimension of the mesh along which the model is replicated (`device_mesh=mesh["dp"]`).
# - `fully_shard` makes DTensors and gathers them itself, so nothing may replace them.
# - `FullyShardedDataParallel` holds another shard on each rank in an ordinary tensor. A broadcast from rank 0 would
#   overwrite it without an error.
#
# The wrapper refuses what it would get wrong, before it communicates. Parameters that it ignores may be sharded.
#
# Parameters that were unfrozen or added after wrapping are not averaged (`NotAveraged`). This check reads the frozen
# parameters before every forward, which is cheap. It walks the whole module only if any module of the process has
# registered a parameter or a child since the last walk.

_TENSORS, _FSDP = "torch.distributed.tensor", "torch.distributed.fsdp"
_IGNORE = (
    "Or exclude them with DistributedDataParallel.ignore_parameters_and_buffers(module, names), if their gradients are "
    "averaged by other means"
)


def refuse_sharded(module: torch.nn.Module, device_mesh: Any) -> None:
    """Raise if the module has sharded parameters that the wrapper cannot average."""
    ignored = set(getattr(module, torch_names.IGNORED, ()))
    for owner, names in _sharded_modules(module):
        if found := sorted(set(names) - ignored):
            raise WrongUse(
                f"DistributedDataParallel cannot average {found[0]}: {owner} has sharded it. To shard within a group "
                "and replicate over groups, use fully_shard with a two-dimensional mesh, without this wrapper. "
                f"{_IGNORE}"
            )
    kind = getattr(sys.modules.get(_TENSORS), "DTensor", None)
    if kind is None or device_mesh is not None:
        return
    for name, parameter in module.named_parameters():
        if isinstance(parameter, kind) and name not in ignored:
            raise WrongUse(
                f"DistributedDataParallel cannot average {name}: it is a DTensor on {parameter.device_mesh}. Pass the "
                "dimension of the mesh along which the model is replicated, for example device_mesh=mesh['dp'], where "
                f"mesh also has the dimension of the shards. {_IGNORE}"
            )


def _sharded_modules(module: torch.nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield each module that FSDP manages, and the names of the parameters in it."""
    fsdp = sys.modules.get(_FSDP)
    names = {"FSDPModule": "fully_shard", "FullyShardedDataParallel": "FullyShardedDataParallel"}
    kinds = {kind: said for name, said in names.items() if (kind := getattr(fsdp, name, None))}
    for path, each in module.named_modules():
        for kind, said in kinds.items():
            if isinstance(each, kind):
                yield said, [f"{path}.{name}".removeprefix(".") for name, _ in each.named_parameters()]


_registrations = 0
_counting = False


def _count_registration(*_what: Any) -> None:
    global _registrations
    _registrations += 1


def _count_registrations() -> None:
    global _counting
    if not _counting:
        _counting = True
        registration.register_module_parameter_registration_hook(_count_registration)
        registration.register_module_module_registration_hook(_count_registration)


class NotAveraged:
    """The parameters of a module that are not averaged."""

    def __init__(
        self, module: torch.nn.Module, averaged: Iterable[torch.Tensor], ignored: Container[str]
    ) -> None:
        _count_registrations()
        self._seen = _registrations
        self._module = module
        self._ignored = ignored
        self._averaged = {id(parameter) for parameter in averaged}
        self._others = self._unaveraged()

    def _unaveraged(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, parameter)
            for name, parameter in self._module.named_parameters()
            if id(parameter) not in self._averaged and name not in self._ignored
        ]

    def not_averaged(self) -> list[str]:
        """Return the parameters that were unfrozen or added since the module was wrapped."""
        if self._seen != _registrations:
            self._seen, self._others = _registrations, self._unaveraged()
        return [name for name, parameter in self._others if parameter.requires_grad]


# --- what torch.compile sees -----------------------------------------------------------------------
#
# A forward communicates before and after the module's own forward. torch.compile cannot trace that: it stops there, and
# compiles the module's own forward, which it splits at the buckets. With `fullgraph=True` it must not stop, and raises
# an error with the reason from here.
#
# With `torch._dynamo.config.optimize_ddp = "python_reducer"`, torch averages gradients in hooks that it compiles along,
# and the forward has nothing else to do. Then an instance uses the two methods of torch's class, which can be traced.

_FORWARD_METHODS = (torch_names.PRE_FORWARD, torch_names.POST_FORWARD)
_NOT_TRACEABLE = (
    "DistributedDataParallel communicates before and after each forward, which torch.compile cannot trace. "
    "For one graph without breaks (fullgraph=True), compile the module before you wrap it, or set "
    "torch._dynamo.config.optimize_ddp = 'python_reducer' before you wrap it."
)


@cache
def hide_communication(wrapper: type) -> None:
    """Let torch.compile stop at the communication of this class, with a reason. It must have both methods itself."""
    disable: Any = torch.compiler.disable
    for name in _FORWARD_METHODS:
        hidden = disable(vars(wrapper)[name.name], reason=_NOT_TRACEABLE)
        setattr(wrapper, name.name, hidden)


def forward_as_torch(module: DistributedDataParallel) -> None:
    """Let an instance use torch's methods, without the marks on them, so that they can be traced."""
    for name in _FORWARD_METHODS:
        module.__dict__[name.name] = MethodType(inspect.unwrap(torch_api.get(name)), module)


def forget_forward(state: dict[str, object]) -> None:
    """Remove these methods from the state of an instance: they belong to it alone."""
    for name in _FORWARD_METHODS:
        state.pop(name.name, None)


# --- steps that are captured in a graph ------------------------------------------------------------
#
# Such as a CUDA graph, which is replayed without Python.
#
# A replay repeats the kernels and collectives of the captured step, in the same memory. So whatever the host decides or
# reads in a step must already be settled: the buckets, and which parameters are used. And the memory of a captured
# bucket must not be freed as long as the graph may be replayed, also if later steps use other buckets.


def check_capture(core: Reducer) -> None:
    """Before a forward that is captured: raise if a replay could not repeat the step."""
    if capture.is_capturing() and (obstacle := _obstacle_to_capture(core)):
        raise core.record_error(agreement.not_capturable(obstacle))


def _obstacle_to_capture(core: Reducer) -> str:
    if core.looks_for_unused:
        return (
            "find_unused_parameters=True reads in each step which parameters are used. Remove it, or set "
            "static_graph=True"
        )
    if core.sender.joins:
        return "inside join(), the host reads in each step which ranks have input. Capture outside join()"
    if core.should_rebuild:
        return (
            "the buckets are not final yet. Run some steps before the capture, forward and backward with gradient "
            "averaging: 11 are enough, as for torch's class"
        )
    return ""


def keep_captured_memory(core: Reducer) -> None:
    """From now on, keep the memory of all captured buckets as long as this reducer exists."""
    kept: dict[int, torch.Tensor] = {}
    sender = core.sender

    def keep() -> None:
        if capture.is_capturing():
            flats = [bucket.flat for bucket in sender.buckets if isinstance(bucket, FlatBucket)]
            kept.update({flat.data_ptr(): flat for flat in flats})

    core.at_round_over.append(keep)


DistributedDataParallel.__init__.__signature__ = constructor_signature()  # type: ignore[attr-defined]
wrappers.renew_with(DistributedDataParallel, renew_wrapper)
