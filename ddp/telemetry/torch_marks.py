"""Wrappers of torch's functions: the status page shows the phases and steps of any script, without changes to it.

A wrapped function looks the same to a script. Functions that torch.compile may trace do nothing while it traces them.
Collectives have their own module, `ddp/telemetry/collective_marks.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from . import collective_marks, comm_words, guard, profiling, status_page, torch_api, torch_names
from .collective_marks import format_ranks, given_timeout_s
from .contracts import DEBUG, LONGEST_GROUP_NAME, REHEARSAL, SHARE_COMPILED, STEP_PROFILE, STEP_PROFILE_STEPS
from .observing import Observer
from .status_page import BACKWARD, CHECKPOINT, COMMUNICATE, DATA, EXITING, FORWARD, IDLE, OPTIMIZER
from .values import follow_writers

try:
    from . import _ending as _compiled
except ImportError:  # installed without a compiler: the race in torch remains
    _compiled = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from .status_page import Page

# --- the end of a rank: its exit code --------------------------------------------------------------
#
# Keep the exit code of a rank that ends while threads of torch are still running.
#
# A Gloo thread needs the GIL to release a tensor. If it asks for the GIL while the interpreter shuts down, Python
# aborts the process (ddp/telemetry/_core/ending.c explains how). So the exit handler first waits 2 ms for such
# threads. A thread that asks for the GIL after that blocks until the process has ended. Process groups are not
# destroyed, because their destructors would wait for these threads.

_GRACE_S = 0.002


def install_ending() -> None:
    """Install the exit handlers.

    Call this after torch (and its C++ runtime) was loaded. A second call has no effect.
    """
    # From 3.14 on, Python itself makes such threads wait.
    if _compiled is not None and sys.version_info < (3, 14) and not _compiled.outlive_threads():
        atexit.register(_let_threads_end)


def _let_threads_end() -> None:
    if torch_api.is_loaded():
        # A file of `file://` would stay, and the next job would find the ranks of this one in it.
        for group in () if torch_api.meets_in_a_file() else torch_api.groups():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        time.sleep(_GRACE_S)  # without the GIL


# --- the creation of process groups ----------------------------------------------------------------
#
# Record on the status page which process groups a script creates, and how long it lets them wait.

_OUR_BACKENDS = ("shm", "hier")
_FORMING = "init_process_group"


def mark_group_creation(page: Page) -> None:
    """Record the creation of groups as a collective of their ranks, since ranks may wait there for one that is missing.

    The timeout that the script gives the group is recorded before the group is created, because a rank may wait up to
    this timeout for the others.
    """

    status_page.keep("forming", {})

    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Creation:
        page.group_timeout(given_timeout_s(kwargs.get("timeout")))
        op, ranks = _creation(*args) if status_page.traces_collectives() else ("", [])
        creation = _Creation(args[3] if len(args) > 3 else "")
        if len(ranks) >= 2:
            creation.phase = page.mark(COMMUNICATE)
            creation.ticket = page.enter(_creators(page, op, ranks), op, "", 0, 0, -1, False, 0)
        return creation

    def after(creation: _Creation) -> None:
        if creation.phase is not None:
            page.phase(creation.phase)  # a script that starts is still starting after this
        if creation.ticket:  # not after an error: the page keeps showing where the rank was
            page.leave(creation.ticket)

    def wrap(make: Callable[..., Any]) -> Callable[..., Any]:
        return Observer("the record of new groups").around(make, before, after, _explain_backend)

    torch_api.patch(torch_names.NEW_GROUP, wrap)


# --- the end of process groups ---------------------------------------------------------------------
#
# The destructor of a Gloo group joins its threads, with the GIL held. One that still releases the tensors of its last
# collective waits for the GIL: neither goes on. Most scripts do not meet this, because their first import of
# torch._dynamo, inside of their `main`, leaves references to its variables. A rank that has it from the start meets it.

_GLOO_THREAD = "pt_gloo_runloop\n"
_RESTS_WITHIN_S, _LOOK_S = 1.0, 0.0005


def _rest_before_groups_end(_page: Page) -> None:
    """Let the threads of Gloo finish before torch destroys groups."""
    import torch.distributed as dist

    def before(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        threads = [task for task in os.listdir("/proc/self/task") if _of_task(task, "comm") == _GLOO_THREAD]
        deadline = time.monotonic() + _RESTS_WITHIN_S
        while not all(map(_waits_for_work, threads)) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)  # without the GIL

    observer = Observer("the rest before groups end")
    ending = observer.around(dist.destroy_process_group, before, lambda _state: None)
    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = ending


def _waits_for_work(task: str) -> bool:
    """It waits without a limit. For the GIL, threads wait with one. True if the kernel does not tell."""
    call = _of_task(task, "syscall").split()
    return call != ["running"] and (len(call) < 5 or int(call[4], 16) == 0)


def _of_task(task: str, name: str) -> str:
    with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/{name}") as file:
        return file.read()
    return ""


class _Creation:
    __slots__ = ("backend", "phase", "ticket")

    def __init__(self, backend: object) -> None:
        self.backend = str.__str__(backend) if isinstance(backend, str) else ""
        self.phase: int | None = None  # before it
        self.ticket = 0


def _explain_backend(error: Exception, creation: _Creation) -> None:
    """torch says "Unknown backend type shm", and nothing about the import that registers it."""
    creation.ticket = 0
    if creation.backend in _OUR_BACKENDS and "ddp.shm" not in sys.modules:
        error.add_note(
            f'"{creation.backend}" is a backend of ddp-launch. Add `import ddp.shm` before this call.'
        )


def _creation(
    size: int = -1, rank: int | None = -1, ranks_in_group: Sequence[int] | None = None, *_more: object
) -> tuple[str, list[int]]:
    """Return the function and the ranks in the launcher's numbering.

    The list is empty if the ranks are unknown or this rank is not a member.
    """
    from torch.distributed import get_rank, get_world_size, is_initialized

    ours = os.environ.get("WORLD_SIZE"), os.environ.get("RANK")
    if ranks_in_group == []:
        return _FORMING, list(range(size)) if (str(size), str(rank)) == ours else []
    known = is_initialized() and (str(get_world_size()), str(get_rank())) == ours
    return "new_group", sorted(ranks_in_group or ()) if known and rank is not None else []


def _creators(page: Page, op: str, ranks: list[int]) -> int:
    """Return the group number on the status page:

    the same for the same ranks, so that the next creation continues its count.
    """
    members = format_ranks(ranks)
    name = op if op == _FORMING else f"({members})"
    if len(name) > LONGEST_GROUP_NAME:
        name = f"({members[:24]}... {zlib.crc32(members.encode()):08x})"
    known: dict[str, int] = status_page.kept("forming")
    number = known.get(name)
    return known.setdefault(name, page.group(name, len(ranks), members)) if number is None else number


# --- patience: long timeouts while a rank is debugged ----------------------------------------------
#
# Long timeouts for process groups while a person debugs one rank: the others wait for it in a collective.
#
# The launcher sets DDP_DEBUG in all ranks. torch's functions are wrapped rather than given other defaults, because a
# script may pass a timeout of its own.

LONG = timedelta(days=7)
_FUNCTIONS = ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration")


def install_patience() -> None:
    """Wrap the functions that make groups, if a rank is debugged. torch must be imported."""
    if not os.environ.get(DEBUG):
        return
    import torch.distributed

    modules = [torch.distributed, sys.modules.get("torch.distributed.distributed_c10d")]
    for name in _FUNCTIONS:
        original = getattr(modules[0], name, None)
        if callable(original):
            patient = _patient(original)
            for module in modules:
                if getattr(module, name, None) is original:
                    setattr(module, name, patient)


def _patient(make: Callable[..., Any]) -> Callable[..., Any]:
    import inspect

    signature = inspect.signature(make)

    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return make(*args, **kwargs)  # which raises it for the script
        given.arguments["timeout"] = LONG
        return make(*given.args, **given.kwargs)

    return wrapped


# --- the profile of steps for ddp-launch plan ------------------------------------------------------
#
# Records some training steps of this rank for `ddp-launch plan`, and then ends the rank.
#
# For each step it records when the gradient of each parameter was ready, and how long the rank computed. The time
# between the last gradient and the end of the backward is communication, and is not counted. The parameters are
# those of the script's optimizers, so the model need not be wrapped. On an accelerator, moments are events in the
# stream, which are read after the last step.
#
# If several ranks run, they also measure all-reduces of some sizes. All ranks have made the same number of steps
# then.

WARM_UP = 5
_FEWEST = 3
_SIZES = tuple(1 << exponent for exponent in (2, 16, 20, 22, 24, 26))
_REPEATS = 5


def install_step_profile() -> None:
    """Record if the launcher asks for it. torch must be imported before."""
    path = os.environ.get(STEP_PROFILE)
    if path:
        _Recorder(path, int(os.environ.get(STEP_PROFILE_STEPS, "20"))).install()


class _Recorder:
    def __init__(self, path: str, steps: int) -> None:
        self._path, self._wanted = path, steps
        self._known: dict[int, int] = {}  # id of a parameter -> its place in the lists
        self._sizes: list[int] = []
        self._now: Callable[[], Any] = time.perf_counter
        self._device = "cpu"
        self._first: Any = None  # the optimizer whose steps are counted
        self._count = 0
        self._began: Any = None
        self._ended: Any = None
        self._stepped: Any = None
        self._at: list[Any] = []
        self._steps: list[tuple[Any, ...]] = []

    def install(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        observer = Observer("the profile of steps")
        register_optimizer_step_pre_hook(observer.guarded(self._before_step))
        register_optimizer_step_post_hook(observer.guarded(self._after_step))
        torch_api.patch(torch_names.RUN_BACKWARD, lambda run: observer.around(run, self._begin, self._end))
        atexit.register(observer.guarded(self._write))

    def _begin(self, _args: Any, _kwargs: Any) -> bool:
        self._began = self._now()
        self._at = [None] * len(self._sizes)
        return True

    def _end(self, _began: bool) -> None:
        self._ended = self._now()

    def _before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._first = self._first or optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in self._known:
                    self._follow(parameter)

    def _follow(self, parameter: Any) -> None:
        if hasattr(parameter, "device_mesh"):
            self._fail("its parameters are sharded (DTensor). Profile the model without fully_shard")
        place = self._known[id(parameter)] = len(self._sizes)
        self._sizes.append(parameter.numel() * parameter.element_size())
        if parameter.device.type != "cpu" and self._device == "cpu":
            self._device, self._now = parameter.device.type, _device_clock(parameter.device)

        def arrived(_gradient: Any) -> None:
            if place < len(self._at):
                self._at[place] = self._now()

        parameter.register_hook(arrived)

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if optimizer is not self._first:
            return
        before, self._stepped = self._stepped, self._now()
        self._count += 1
        if self._count > WARM_UP and self._began is not None:
            self._steps.append((before, self._began, self._at, self._ended, self._stepped))
        if len(self._steps) == self._wanted:
            self._write()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _write(self) -> None:
        if len(self._steps) < _FEWEST or not self._sizes:
            return
        record = {
            "device": self._device,
            "gradients": self._gradients(),
            "steps": [self._computing(step) for step in self._steps],
            "inside": self._measured_inside() if len(self._steps) == self._wanted else [],
        }
        self._leave(record)
        self._steps = []

    def _gradients(self) -> list[tuple[int, float]]:
        """Bytes and the median arrival of each gradient that arrives in every step."""
        found = []
        for place, nbytes in enumerate(self._sizes):
            moments = [(began, at[place]) for _, began, at, _, _ in self._steps if place < len(at)]
            arrivals = sorted(_between(began, at) for began, at in moments if at is not None)
            if arrivals:
                found.append((nbytes, arrivals[len(arrivals) // 2]))
        return found

    def _computing(self, step: tuple[Any, ...]) -> float:
        before, began, at, ended, stepped = step
        last = max((_between(began, moment) for moment in at if moment is not None), default=0.0)
        return _between(before, stepped) - max(0.0, _between(began, ended) - last)

    def _measured_inside(self) -> list[tuple[int, float]]:
        import torch
        from torch import distributed

        if not distributed.is_available() or not distributed.is_initialized():
            return []
        if distributed.get_world_size() == 1:
            return []
        return [(nbytes, self._all_reduce(torch, distributed, nbytes)) for nbytes in _SIZES]

    def _all_reduce(self, torch: Any, distributed: Any, nbytes: int) -> float:
        tensor = torch.zeros(nbytes // 4, device=self._device)
        taken = []
        for _ in range(_REPEATS + 1):
            distributed.barrier()
            began = self._now()
            distributed.all_reduce(tensor)
            taken.append((began, self._now()))
        return sorted(_between(*each) for each in taken[1:])[_REPEATS // 2]

    def _leave(self, record: dict[str, Any]) -> None:
        path = f"{self._path}.{os.environ.get('RANK', '0')}"
        with open(f"{path}.part", "w") as file:
            json.dump(record, file)
        os.replace(f"{path}.part", path)

    def _fail(self, reason: str) -> None:
        self._leave({"problem": reason})
        os._exit(1)


def _device_clock(device: Any) -> Callable[[], Any]:
    import torch

    def now() -> Any:
        event = torch.Event(device=device, enable_timing=True)
        event.record()
        return event

    return now


def _between(began: Any, ended: Any) -> float:
    if isinstance(began, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


# --- phases and steps ------------------------------------------------------------------------------


def install() -> None:
    """Install the wrappers once per process, if its page is read. torch must be imported before."""
    torch_api.warn_once()
    install_ending()
    install_patience()
    if not status_page.is_read() or not status_page.once("marks"):
        return
    page = status_page.page()
    atexit.register(page.phase, EXITING)
    for mark in (*_MARKS, mark_group_creation, _rest_before_groups_end):
        with contextlib.suppress(ImportError, AttributeError):  # the warning says what this torch lacks
            mark(page)
    install_step_profile()
    for asked in filter(os.environ.get, (REHEARSAL, SHARE_COMPILED)):
        try:
            from _ddp_launch_entry import LIBRARY, find

            find(LIBRARY, asked)()
        except Exception as error:
            sys.stderr.write(f"ddp-launch: {asked} has no effect: {error}\n")
    if status_page.traces_collectives():
        torch_api.switch_recorder_on()
        collective_marks.install(page)
        with contextlib.suppress(AttributeError):  # the same
            torch_api.patch(torch_names.NEW_GROUP, _with_guard)
        collective_marks.on_new_group(_wake_guard)
        collective_marks.on_failure(_explain)


def _with_guard(make: Callable[..., Any]) -> Callable[..., Any]:
    """It looks which sockets are Gloo's."""

    def before(_args: Any, _kwargs: Any) -> contextlib.AbstractContextManager[None]:
        guard.start()
        creating = guard.creating_group()
        creating.__enter__()
        return creating

    def after(creating: contextlib.AbstractContextManager[None]) -> None:
        creating.__exit__(None, None, None)

    return Observer("the search for lost peers").around(make, before, after)


def _wake_guard() -> None:
    guard.start().wake()


def _explain(error: RuntimeError, op: str, sequence: int) -> Exception | None:
    """Return a CommError if the script imports our library; otherwise add the cause to torch's error as a note."""
    doing = comm_words.Operation(op, sequence=sequence)
    ours = sys.modules.get("ddp.telemetry.comm_error")
    if ours is not None and is_in_this_folder(ours):
        try:
            ours.explain(error, doing)
        except ours.CommError as explained:
            return explained  # type: ignore[no-any-return]
    elif comm_words.is_communication_error(error):
        error.add_note(comm_words.explain_failure(error, doing, guard.start()).text)
    return None


def is_in_this_folder(module: Any) -> bool:
    """Whether a module is in the same folder as this one: a script may have another package of the same name."""
    path: str | None = getattr(module, "__file__", None)
    if path is None:
        return False
    return os.path.dirname(os.path.realpath(path)) == os.path.dirname(os.path.realpath(__file__))


def _mark_steps(page: Page) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    is_compiling, observer = torch.compiler.is_compiling, Observer("the record of steps")
    writers = Observer("the search for TensorBoard, W&B and MLflow")

    def begin() -> str:
        profiling.at_step()
        page.mark(OPTIMIZER)
        return guard.why_broken()

    def end() -> None:
        page.step()
        page.mark(IDLE)

    def before_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not is_compiling() and (reason := observer.run(begin)):
            # Raise if gradients may be garbage. A script that handles SIGTERM would use them, and save the result.
            from torch.distributed import DistBackendError

            raise DistBackendError(
                f"{reason}. The gradients may be garbage, so the optimizer does not use them"
            )

    def after_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not is_compiling():
            observer.run(end)
            writers.run(follow_writers)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def _mark_modules(page: Page) -> None:
    """Mark the forward of torch's DistributedDataParallel, and of ours, which inherits from it."""
    torch_api.get(torch_names.POST_FORWARD)  # both or none: a phase that begins must end
    observer = Observer("the record of forward passes")
    torch_api.patch(torch_names.PRE_FORWARD, partial(_marking_begin, page, observer))
    torch_api.patch(torch_names.POST_FORWARD, partial(_marking_end, page, observer))


def _marking_begin(page: Page, observer: Observer, pre: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
    waits = status_page.keep("torchs_reducer", _TorchsReducer(page))

    def begin(module: Any) -> None:
        has_gradients = is_grad_enabled()
        page.evaluates(not has_gradients)
        waits.forward(module, has_gradients)
        # torch's C++ code exchanges buffers here, and once the order of the buckets. No other mark shows these waits.
        page.mark(COMMUNICATE if has_gradients else FORWARD)

    @functools.wraps(pre)
    def _pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return pre(self, *inputs, **kwargs)
        observer.run(begin, self)
        prepared = pre(self, *inputs, **kwargs)
        observer.run(page.mark, FORWARD)
        return prepared

    return _pre_forward


class _TorchsReducer:
    """Tells the page when a backward pass of torch's DDP only waits for its buckets.

    torch's reducer waits in C++, in a callback at the end of the backward pass that it queues when the last bucket is
    launched. A callback that is queued before it, when the backward pass begins, runs just before it: all gradients
    are computed. On a GPU the reducer waits on the device, and the host sees nothing of it.
    """

    def __init__(self, page: Page) -> None:
        from torch import Tensor, distributed

        queue, awaits = torch_api.get(torch_names.ENGINE).queue_callback, page.awaits
        self._begun = Observer("the time that torch's DDP waits").guarded(lambda _gradients: queue(awaits))
        self._without_overrides = torch_api.get(torch_names.WITHOUT_OVERRIDES)
        self._class = getattr(distributed, "Reducer", None)  # its C++ reducer; ours tells the page itself
        self._tensor = Tensor  # a class that inherits from it may run code of the script
        self.is_due = False

    def forward(self, module: Any, has_gradients: bool) -> None:
        self.is_due = has_gradients and type(vars(module).get("reducer")) is self._class

    def backward(self, args: tuple[Any, ...]) -> None:
        """The hook is not removed, which would take as long as the rest: the graph of a step ends with it."""
        self.is_due = False
        root = args[0][0] if args and type(args[0]) is tuple and args[0] else None
        if type(root) is self._tensor and not torch_api.is_autograd_compiled():
            with self._without_overrides():
                if root.grad_fn is not None:
                    root.grad_fn.register_prehook(self._begun)


def _marking_end(page: Page, observer: Observer, post: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    is_compiling = torch.compiler.is_compiling

    @functools.wraps(post)
    def _post_forward(self: Any, output: Any) -> Any:
        output = post(self, output)
        if not is_compiling():
            observer.run(page.mark, IDLE)
        return output

    return _post_forward


def _mark_backward(page: Page) -> None:
    """Wrap the autograd engine, not torch.autograd.backward and grad: torch.compile compares these two by identity."""

    def before(args: tuple[Any, ...], _kwargs: Any) -> int:
        waits: _TorchsReducer | None = status_page.kept("torchs_reducer")
        if waits is not None and waits.is_due:
            waits.backward(args)
        return page.mark(BACKWARD)

    def wrap(run: Callable[..., Any]) -> Callable[..., Any]:
        return Observer("the record of backward passes").around(run, before, page.back)

    torch_api.patch(torch_names.RUN_BACKWARD, wrap)


def _mark_loaders(page: Page) -> None:
    import torch

    is_grad_enabled = torch.is_grad_enabled

    def before(_args: Any, _kwargs: Any) -> int:
        page.evaluates(not is_grad_enabled())
        return page.mark(DATA)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        return Observer("the record of data loaders").around(original, before, page.back)

    torch_api.patch(torch_names.NEXT_BATCH, wrap)


def _mark_saving(page: Page) -> None:
    import torch
    import torch.serialization

    observer = Observer("the record of checkpoints")
    saving = observer.around(torch.save, lambda _args, _kwargs: page.phase(CHECKPOINT), page.phase)
    torch.save = torch.serialization.save = saving


def _mark_replays(page: Page) -> None:
    """Mark replays of graphs: a replayed step runs no other function that is marked, and would look like a hang."""
    import torch

    observer = Observer("the record of replayed graphs")
    owners = [(torch.accelerator, "Graph")]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:  # CUDAGraph, XPUGraph
        owners.append((torch.get_device_module(accelerator), f"{accelerator.type.upper()}Graph"))
    for module, name in owners:
        graph_class: Any = getattr(module, name, None)
        original = getattr(graph_class, "replay", None)
        if callable(original):
            graph_class.replay = observer.around(
                original, lambda _args, _kwargs: page.mark(BACKWARD), page.back
            )


_MARKS = (_mark_steps, _mark_modules, _mark_backward, _mark_loaders, _mark_saving, _mark_replays)
