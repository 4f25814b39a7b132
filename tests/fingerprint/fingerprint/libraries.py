"""Settings of torch, numpy, logging and multiprocessing."""

import logging
import os
import socket
import sys
import tempfile

from fingerprint.modules import text
from fingerprint.python import name_of


def look():
    import torch

    return {
        "torch": _torch(torch),
        "torch is fresh": [
            torch.cuda.is_initialized(),
            torch.is_inference_mode_enabled(),
            torch.is_anomaly_enabled(),
        ],
        "parallel": torch.__config__.parallel_info().splitlines(),
        "options": torch.__config__.show().splitlines(),
        "backends": _backends(torch),
        "configurations": _configurations(),
        "logging": _logging(),
        "multiprocessing": _multiprocessing(),
        "numpy": _numpy(),
        "temporary": [tempfile.tempdir, tempfile.gettempdir(), tempfile.template],
        "socket timeout": socket.getdefaulttimeout(),
        "event loops": _event_loops(),
        "decimal": _decimal(),
    }


def _torch(torch):
    return {
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "threads": torch.get_num_threads(),
        "threads between": torch.get_num_interop_threads(),
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ],
        "gradients": torch.is_grad_enabled(),
        "autocast": [
            torch.is_autocast_enabled(),
            torch.is_autocast_cache_enabled(),
            str(torch.get_autocast_dtype("cpu")),
        ],
        "precision": torch.get_float32_matmul_precision(),
        "warn always": torch.is_warn_always_enabled(),
        "sharing": [
            torch.multiprocessing.get_sharing_strategy(),
            sorted(torch.multiprocessing.get_all_sharing_strategies()),
        ],
        "printing": repr(vars(torch._tensor_str.PRINT_OPTS)),
        "flush denormal": (torch.tensor([1e-320], dtype=torch.float64) * 1).item() != 0.0,
        "debug level": str(torch.distributed.get_debug_level()),
        "distributed": [torch.distributed.is_available(), torch.distributed.is_initialized()],
        "profiler": [str(torch._C._autograd._profiler_type()), torch._C._autograd._profiler_enabled()],
        "fusion": [torch._C._jit_can_fuse_on_cpu(), torch._C._get_graph_executor_optimize()],
        "vmap level": torch._C._functorch.maybe_current_level(),
        "modes": torch._C._len_torch_dispatch_stack(),
    }


def _backends(torch):
    cudnn, cuda, mkldnn = torch.backends.cudnn, torch.backends.cuda, torch.backends.mkldnn
    return {
        "cudnn": [cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32],
        "cuda": [cuda.matmul.allow_tf32, cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()],
        "mkldnn": [mkldnn.is_available(), mkldnn.enabled],
        "opt_einsum": [torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy],
        "engine": torch.backends.quantized.engine,
        "nnpack": torch.backends.nnpack.is_available(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def _configurations():
    """Of each module that torch has made configurable: torch._dynamo.config and others."""
    found = {}
    for name, module in list(sys.modules.items()):
        copied = vars(type(module)).get("get_config_copy") or getattr(type(module), "get_config_copy", None)
        if name.startswith("torch.") and copied is not None:
            found[name] = {key: text(value) for key, value in copied(module).items()}
    return found


def _logging():
    root = logging.getLogger()
    loggers = {"root": root} | {
        name: logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger)
    }
    return {
        "loggers": {name: _logger(logger) for name, logger in loggers.items()},
        "class": name_of(logging.getLoggerClass()),
        "factory": name_of(logging.getLogRecordFactory()),
        "disabled": logging.root.manager.disable,
        "raise": logging.raiseExceptions,
        "captures warnings": logging._warnings_showwarning is not None,
        "levels": sorted(logging.getLevelNamesMapping().items()),
    }


def _logger(logger):
    handlers = [
        [name_of(type(each)), each.level, getattr(getattr(each, "stream", None), "name", None)]
        for each in logger.handlers
    ]
    return [
        logger.level,
        logger.disabled,
        logger.propagate,
        handlers,
        [name_of(each) for each in logger.filters],
    ]


def _multiprocessing():
    process, context = sys.modules.get("multiprocessing.process"), sys.modules.get("multiprocessing.context")
    if process is None or context is None:
        return None
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    current = process.current_process()
    return {
        "method": context._default_context.get_start_method(allow_none=True),
        "process": [
            current.name,
            current.daemon,
            current.pid == os.getpid(),
            process.parent_process() is None,
        ],
        "settings": {name: name_of(value) for name, value in current._config.items() if name != "authkey"},
        "children": len(process._children),
        "tracker": tracker
        and [tracker._resource_tracker._fd is None, tracker._resource_tracker._pid is None],
        "counter": next(process._process_counter),
    }


def _numpy():
    numpy = sys.modules.get("numpy")
    return numpy and [numpy.geterr(), {name: repr(value) for name, value in numpy.get_printoptions().items()}]


def _event_loops():
    events = sys.modules.get("asyncio.events")
    return events and [name_of(events._event_loop_policy), events._get_running_loop() is None]


def _decimal():
    decimal = sys.modules.get("decimal")
    return decimal and repr(decimal.getcontext())
