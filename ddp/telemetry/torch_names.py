"""Every private name of torch on which the library and the launcher depend, with the releases that have it.

A name is private if a part of it begins with an underscore, or if torch does not document it. Such names appear and
vanish with any release. So all of them are listed here, and only `torch_api` looks them up. Other modules may use two
kinds of listed names directly, because there is no other way: the names of a class that they inherit, and attributes of
torch's objects (`ON_OBJECTS`). `LAUNCHER` lists what the launcher assumes, which never imports torch. A test compares
the lists with the code.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

Version = tuple[int, int]

OLDEST: Version = (2, 8)  # the oldest release that is supported; docs/compatibility.md has the results


class Use(Enum):
    CALLED = "called"
    READ = "read"
    OVERRIDDEN = "overridden"
    PATCHED = "patched"


@dataclass(frozen=True, slots=True)
class Name:
    owner: str  # "module", or "module:Class"
    name: str
    use: Use
    loses: str  # what does not work without it; "" if `instead` does the same
    takes: tuple[str, ...] = ()  # the first parameters, of a function in Python that we replace
    since: Version = OLDEST
    until: Version | None = None  # the first release that does not have it
    instead: str = ""  # what is used in the other releases
    set_in_init: bool = False  # an attribute of the objects, not of the class

    @property
    def path(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"

    def is_in(self, version: Version) -> bool:
        return self.since <= version and (self.until is None or version < self.until)


_REDUCER = "ddp.DistributedDataParallel"
_BACKENDS = "the backends shm and hier"
_COLLECTIVES = "the record of collectives"
_GUARD = "the guard"
_FORWARD, _BACKWARD = "the phase FORWARD on the status page", "the phase BACKWARD on the status page"
_RPC = "gradients of a distributed backward (RPC)"
_COMMITS = "commits of ddp.elastic"
_HEALING = "healing in place"

_DDP = "torch.nn.parallel.distributed:DistributedDataParallel"
_C10D = "torch.distributed.distributed_c10d"
_BINDINGS = "torch._C._distributed_c10d"
_GROUP = "torch.distributed:ProcessGroup"


def _each(owner: str, use: Use, loses: str, *names: str) -> tuple[Name, ...]:
    return tuple(Name(owner, name, use, loses) for name in names)


# --- what is replaced in torch itself ----------------------------------------------------------------

PRE_FORWARD = Name(_DDP, "_pre_forward", Use.PATCHED, _FORWARD, ("self", "inputs", "kwargs"))
POST_FORWARD = Name(_DDP, "_post_forward", Use.PATCHED, _FORWARD, ("self", "output"))
RUN_BACKWARD = Name("torch.autograd", "_engine_run_backward", Use.PATCHED, _BACKWARD, ("t_outputs",))
NEXT_BATCH = Name(
    "torch.utils.data.dataloader:_BaseDataLoaderIter",
    "__next__",
    Use.PATCHED,
    "the phase DATA on the status page",
    ("self",),
)
NEW_GROUP = Name(
    _C10D,
    "_new_process_group_helper",
    Use.PATCHED,
    "the record of groups that are being created",
    ("group_size", "group_rank", "global_ranks_in_group", "backend", "store"),
)
COMPILED_AUTOGRAD = Name(
    "torch._dynamo.compiled_autograd",
    "compiled_autograd_enabled",
    Use.READ,
    "the time that torch's DDP waits for collectives",
)
COMPILE_LOCK, GRAPH_COUNTERS, COMPILER_CACHE_FOLDER, COMPILED_ARTIFACTS = (
    Name(owner, name, Use.READ, "--share-compiled")
    for owner, name in (
        ("torch._dynamo.convert_frame", "compile_lock"),
        ("torch._dynamo.utils", "counters"),
        ("torch._inductor.runtime.cache_dir_utils", "cache_dir"),
        ("torch.compiler._cache:CacheArtifactManager", "_seen_artifacts"),
    )
)
SET_GROUP_NAME = Name(_GROUP, "_set_group_name", Use.PATCHED, f"{_GUARD} for groups that are created late")

# --- what is called ----------------------------------------------------------------------------------

ENGINE = Name("torch.autograd:Variable", "_execution_engine", Use.CALLED, _REDUCER)
SYNC_STATES = Name(
    "torch.distributed.utils",
    "_sync_module_states",
    Use.CALLED,
    _REDUCER,
    ("module", "process_group", "broadcast_bucket_size", "src", "params_and_buffers_to_ignore"),
)
FIRST_BUCKET = Name(_BINDINGS, "_DEFAULT_FIRST_BUCKET_BYTES", Use.READ, _REDUCER)
HOOKS_OF_ALL_MODULES = (
    Name("torch.nn.modules.module", "_global_backward_hooks", Use.READ, _REDUCER),
    Name("torch.nn.modules.module", "_global_backward_pre_hooks", Use.READ, _REDUCER),
)
FUTURE = Name("torch._C", "Future", Use.READ, f"communication hooks, {_COLLECTIVES}")
WITHOUT_OVERRIDES = Name("torch._C", "DisableTorchFunction", Use.CALLED, _COLLECTIVES)
FOREACH_COPY = Name("torch", "_foreach_copy_", Use.CALLED, _REDUCER)
FOREACH_DIVIDE = Name("torch", "_foreach_div_", Use.CALLED, _BACKENDS)
FOREACH_NORM = Name("torch", "_foreach_norm", Use.CALLED, "ddp.check_numerics on GPUs")
SKIPPED_BY_DYNAMO = Name(
    "torch._dynamo.trace_rules", "add", Use.CALLED, "torch.compile of a wrapped module", ("import_name",)
)
DISABLE_DYNAMO = Name("torch", "_disable_dynamo", Use.CALLED, _FORWARD, ("fn", "recursive"))
RPC_IS_USED = Name("torch._C._distributed_rpc", "_is_current_rpc_agent_set", Use.CALLED, _RPC)
RPC_CONTEXT = Name("torch._C._distributed_autograd", "_current_context", Use.CALLED, _RPC)
SHARD_OF_DTENSOR = Name(
    "torch.distributed.tensor._utils",
    "compute_local_shape_and_global_offset",
    Use.CALLED,
    f"{_COMMITS} with DTensors",
    ("global_shape", "mesh", "placements"),
)
VERIFY_MODEL = Name(
    "torch.nn.parallel.distributed",
    "_verify_param_shape_across_processes",
    Use.PATCHED,
    _HEALING,
    ("process_group", "tensors"),
)
SYNC_STATES_OF_DDP = Name(
    "torch.nn.parallel.distributed", "_sync_module_states", Use.PATCHED, _HEALING, ("module", "process_group")
)
REGISTER_GROUP = Name(_BINDINGS, "_register_process_group", Use.CALLED, _HEALING)
UNREGISTER_GROUP = Name(_BINDINGS, "_unregister_process_group", Use.CALLED, _HEALING)
SET_DEFAULT_GROUP = Name(_C10D, "_update_default_pg", Use.CALLED, _HEALING, ("pg",))
INIT_METHOD = Name(_C10D, "_default_pg_init_method", Use.READ, _HEALING)
STORE_BARRIER = Name(
    _C10D, "_store_based_barrier", Use.CALLED, _HEALING, ("rank", "store", "group_name", "rendezvous_count")
)
WORLD = Name(_C10D, "_world", Use.READ, f"{_GUARD}, and a clean exit of ranks")
RESET_OF_FSDP = Name(
    "torch.distributed.fsdp:FSDPModule",
    "reset_iter_state",
    Use.CALLED,
    "healing in place of models in shards (FSDP2)",
    since=(2, 13),
    instead="all ranks are restarted",
)
STATES_OF_MODULES = Name(
    "torch.distributed._composable_state",
    "_module_state_mapping",
    Use.READ,
    "",
    instead="all objects of the process are searched for models in shards",
)
DEFAULT_STORE = Name(_C10D, "_get_default_store", Use.CALLED, "the names of lost peers")
# It is empty until a variable sets its size (the second one is the older name). From 2.11 on there is a default size.
RECORDER_HAS_SIZE: Version = (2, 11)
RECORDER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
RECORDER_OF_EACH: Version = (2, 15)  # each backend but NCCL has one of its own; before, all of them have one
RECORD_OF_ALL = Name(_BINDINGS, "_dump_fr_trace_json", Use.CALLED, "flight recorders of Gloo")
RECORD_OF_NCCL = Name(
    _BINDINGS, "_dump_nccl_trace_json", Use.CALLED, "", instead="builds without NCCL have none"
)

# --- what a class of ours inherits and uses ----------------------------------------------------------

_OVERRIDDEN = (
    Name(
        _DDP,
        "_ddp_init_helper",
        Use.OVERRIDDEN,
        _REDUCER,
        ("self", "parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph"),
    ),
    Name(_DDP, "_set_static_graph", Use.OVERRIDDEN, f"static_graph of {_REDUCER}", ("self",)),
    Name(_DDP, "_delayed_all_reduce_hook", Use.OVERRIDDEN, "delay_all_reduce_named_params", ("self", "grad")),
    Name(_DDP, "_match_all_reduce_for_bwd_pass", Use.OVERRIDDEN, f"join() of {_REDUCER}", ("self",)),
    Name(_DDP, "_match_unused_params_allreduce", Use.OVERRIDDEN, f"join() of {_REDUCER}", ("self",)),
    Name(_DDP, "_assign_modules_buffers", Use.OVERRIDDEN, "buffers of one byte, such as FP8", ("self",)),
    Name(_DDP, "_check_default_group", Use.OVERRIDDEN, f"pickles of {_REDUCER}", ("self",)),
    Name(_DDP, "_check_comm_hook", Use.OVERRIDDEN, "communication hooks", ("self", "hook")),
    Name(_DDP, "_root_copy_hook", Use.OVERRIDDEN, "mixed precision on an accelerator", ("self",)),
    Name(_DDP, "_register_builtin_comm_hook", Use.OVERRIDDEN, "built-in hooks", ("self", "comm_hook_type")),
)
_INHERITED = (
    *_each(_DDP, Use.CALLED, _REDUCER, "_passing_sync_batchnorm_handle", "_get_ddp_logging_data"),
    *_each(_DDP, Use.CALLED, _HEALING, "_build_params_for_reducer", "_build_debug_param_to_name_mapping"),
    Name(
        _DDP,
        "_set_params_and_buffers_to_ignore_for_model",
        Use.CALLED,
        f"ignore_parameters_and_buffers of {_REDUCER}",
        ("module", "params_and_buffers_to_ignore"),
    ),
)
_SET_BY_INIT = tuple(
    Name(_DDP, name, Use.READ, loses, set_in_init=True)
    for name, loses in (
        ("_delay_all_reduce_all_params", _REDUCER),
        ("_delay_all_reduce_params", _REDUCER),
        ("_delay_grad_buffer", "delay_all_reduce_named_params"),
        ("_delay_grad_views", "delay_all_reduce_named_params"),
        ("_comm_hooks", "communication hooks"),
        ("_has_rebuilt_buckets", _HEALING),
    )
)
PYTHON_REDUCER = Name(
    _DDP, "_use_python_reducer", Use.READ, "", instead="no Python reducer", set_in_init=True
)

_OF_GROUPS = (
    *_each(_GROUP, Use.OVERRIDDEN, f"{_BACKENDS}, {_GUARD}", "_get_backend"),
    *_each(_GROUP, Use.CALLED, f"{_BACKENDS}, {_GUARD}", "_device_types"),
    *_each(_GROUP, Use.CALLED, _BACKENDS, "_set_default_backend", "_register_backend"),
)

IGNORED = "_ddp_params_and_buffers_to_ignore"
GATHERED = "_unsharded_param"
FULL_PRECISION, HOOK_OF_FORWARD = "_fp_param", "_ddp_mp_hook_state"

# --- attributes of torch's objects -------------------------------------------------------------------

# Of tensors, storages, process groups and their options, and of torch's own modules: no class to look them up in.
ON_OBJECTS: dict[str, str] = {
    "_version": "torch.Tensor: counts changes in place",
    "_values": "torch.Tensor: the values of a sparse tensor that is not coalesced",
    "_backward_hooks": "torch.Tensor and torch.nn.Module: hooks of the script",
    "_backward_pre_hooks": "torch.nn.Module: hooks of the script",
    "_post_accumulate_grad_hooks": "torch.Tensor: hooks of the script",
    "_buffers": "torch.nn.Module: its own buffers, without those of the modules below it",
    "_modules": "torch.nn.Module: the modules directly below it",
    "_cdata": "torch.UntypedStorage: the address of its C++ object",
    "_idx": "torch.nn.Parameter: its index, which torch's mixed precision reads",
    GATHERED: "FSDPParam: the whole parameter, once it has been gathered",
    "_get_fsdp_state": "FSDPModule: its state",
    "_fsdp_param_groups": "FSDPState: the parameters that are gathered together",
    "_state_ctx": "FSDPState: what all states of a model have in common",
    "_is_root": "FSDPState: whether it is that of a whole model; None before the first forward",
    "_all_gather_result": "FSDPParamGroup: an all-gather without a wait",
    FULL_PRECISION: "torch.nn.Parameter: its data, while mixed precision lets a copy stand for it",
    HOOK_OF_FORWARD: "torch.nn.Parameter: the hook that mixed precision has registered in a forward",
    "_submodule_to_event": "DistributedDataParallel: the events of copies for which mixed precision has not waited",
    "_mp_stream": "DistributedDataParallel: the stream on which mixed precision copies parameters",
    "_threads": "the number of threads, in the options of ProcessGroupGloo",
    "_timeout": "the timeout, in the options of ProcessGroupNCCL",
    "_context_id": "the number of a context of torch.distributed.autograd",
    IGNORED: "torch.nn.Module: the names that _set_params_and_buffers_to_ignore_for_model has set",
    "_join_config": "torch.distributed.algorithms.join.Joinable: whether join() is active",
    "_static_graph_delay_allreduce_enqueued": "DistributedDataParallel: reset in a copy, whose reducer saw no step",
}

NAMES: tuple[Name, ...] = (
    *(PRE_FORWARD, POST_FORWARD, RUN_BACKWARD, NEXT_BATCH, NEW_GROUP),
    *(SET_GROUP_NAME, ENGINE, SYNC_STATES, FIRST_BUCKET, FUTURE, FOREACH_COPY, WITHOUT_OVERRIDES),
    *(FOREACH_DIVIDE, FOREACH_NORM, SKIPPED_BY_DYNAMO, DISABLE_DYNAMO, RPC_IS_USED, RPC_CONTEXT),
    *(
        VERIFY_MODEL,
        SYNC_STATES_OF_DDP,
        REGISTER_GROUP,
        UNREGISTER_GROUP,
        SET_DEFAULT_GROUP,
        INIT_METHOD,
        STORE_BARRIER,
    ),
    *(
        SHARD_OF_DTENSOR,
        RESET_OF_FSDP,
        STATES_OF_MODULES,
        WORLD,
        DEFAULT_STORE,
        RECORD_OF_ALL,
        RECORD_OF_NCCL,
        PYTHON_REDUCER,
    ),
    *(COMPILE_LOCK, GRAPH_COUNTERS, COMPILER_CACHE_FOLDER, COMPILED_ARTIFACTS),
    *HOOKS_OF_ALL_MODULES,
    *_OVERRIDDEN,
    *_INHERITED,
    *_SET_BY_INIT,
    *_OF_GROUPS,
)

# Methods of ProcessGroup that torch renamed: our groups have both names, and both are marked.
GROUP_METHODS: dict[str, str] = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}

# --- what the launcher assumes -----------------------------------------------------------------------

# It never imports torch. An environment variable or a format that torch changes shows in the tests of these modules.
LAUNCHER: dict[str, str] = {
    "TCPStore(master_listen_fd)": "launcher.template.store: the store serves a socket that listens already",
    "TCPStore(is_master)": "launcher.template.store: whether a store serves or connects, by name or as third argument",
    "default_generator": "launcher.template.loop: torch's random numbers start again in each rank",
    "get_device_module(...).is_initialized": "launcher.template.warm: a process that uses a GPU cannot be forked",
    "flight recorder, JSON": "launcher.health.flight_recorder: version, entries, pg_config",
    "flight recorder, pickle": "launcher.health.flight_recorder: what NCCL's watchdog writes",
    "TORCH_FR_BUFFER_SIZE": "launcher.health.flight_recorder: the number of collectives that the flight recorder keeps",
    "TORCH_FR_DUMP_TEMP_FILE": "launcher.health.flight_recorder: where NCCL's watchdog writes the recorder",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "launcher.health.flight_recorder: the former name",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "launcher.health.flight_recorder: the former name",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "launcher.health.flight_recorder",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "launcher.health.flight_recorder",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "launcher.health.flight_recorder",
    "TORCH_INCLUDE_STACK_TRACE": "launcher.health.flight_recorder",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "launcher.ranks.worker_env: as torchrun sets it",
    "TORCHELASTIC_*": "launcher.ranks.worker_env: as torchrun sets them; tests/contract compares with torchrun",
}
