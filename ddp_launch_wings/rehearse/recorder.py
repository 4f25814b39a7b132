"""Records what each step of this rank begins with, and plays the fault of this run: it runs in the ranks.

The file of a process has one JSON object per line:

    process   who it is: rank, generation, size of the world, and what `ddp.resume_path()` is
    step      before an optimizer step: digests of weights and optimizer, learning rates; and, as they were before the
              forward pass, digests of the inputs and of the random generators
    done      after it
    values    what the script gave to `ddp.log` and other writers since the line before
    wrote     a file that was opened for writing, and the line of the script that did
    line      a line of the script that matters for advice: of the step, the seed, torch.save
    final     digests of all parameters and buffers when the process ends

The steps of the first optimizer count. A fault is played before its step: in the forward pass, or when the gradients
are averaged and the weights are still the old ones.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import mmap
import os
import random
import signal
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp.telemetry.contracts import (
    GENERATION,
    REHEARSAL,
    RESUME_PATH,
    RING_AT,
    STATUS_PAGE,
    VALUES_AT,
    VALUES_END,
    ring_lines,
)

PLAN, GATE, GO, BALLAST = "plan.json", "at-step", "go", "ballast"
_GATE_S, _LOOK_S, _SLOWEST_S = 60.0, 0.005, 1.0


def install() -> None:
    """Called in each rank of a rehearsal, when it has torch."""
    folder = os.environ[REHEARSAL]
    with open(os.path.join(folder, PLAN), encoding="utf-8") as file:
        plan = json.load(file)
    recorder = RankRecorder(folder, Fault(folder, plan))
    register_optimizer_step_pre_hook(recorder.guarded(recorder.before_step))
    register_optimizer_step_post_hook(recorder.guarded(recorder.after_step))
    _around(DistributedDataParallel, "_pre_forward", recorder.guarded(recorder.before_forward))
    for owner, name in ((torch, "manual_seed"), (torch, "save")):
        _around(owner, name, recorder.guarded(lambda *_given, name=name: recorder.note_line(name)))
    sys.addaudithook(recorder.guarded(recorder.on_audit))
    finish = recorder.guarded(recorder.finish)
    atexit.register(finish)
    _around(os, "_exit", lambda code: None if code else finish())


def _around(owner: Any, name: str, before: Callable[..., None]) -> None:
    original = getattr(owner, name)

    def observed(*args: Any, **kwargs: Any) -> Any:
        before(*args)
        return original(*args, **kwargs)

    setattr(owner, name, observed)


# --- what is recorded ------------------------------------------------------------------------------


class RankRecorder:
    def __init__(self, folder: str, fault: Fault) -> None:
        self._pid, self._fault = os.getpid(), fault
        self._file = os.open(
            os.path.join(folder, f"rank-{os.environ['RANK']}-{time.time_ns()}-{self._pid}.jsonl"),
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
            0o600,
        )
        self._optimizers: list[Any] = []
        self._models: list[Any] = []
        self._before: dict[str, Any] = {}  # what was seen before the forward pass
        self._known: set[tuple[str, ...]] = set()
        self._count, self._is_off = 0, False
        self._ring = _Ring()
        names = ("RANK", "WORLD_SIZE", GENERATION)
        rank, size, generation = (int(os.environ.get(name, "0")) for name in names)
        began = os.environ.get(RESUME_PATH, "")
        self._write("process", rank=rank, size=size, generation=generation, began_from=began)

    def guarded(self, function: Callable[..., None]) -> Callable[..., None]:
        """An error here ends the recording, and not the script."""

        def run(*args: Any, **_kwargs: Any) -> None:
            if self._is_off or os.getpid() != self._pid or torch.compiler.is_compiling():
                return
            try:
                function(*args)
            except Exception as error:
                self._is_off = True
                self._write("problem", text=f"{type(error).__name__}: {error}")

        return run

    def _write(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, "at": time.time(), **fields})
        os.write(self._file, line.encode() + b"\n")

    def before_forward(self, model: Any, *inputs: Any) -> None:
        if not any(each is model for each in self._models):
            self._models.append(model)
        if torch.is_grad_enabled() and not self._before:  # of several micro-batches the first
            self.note_line("forward")
            self._write_values()
            self._before = {"inputs": _digest(_tensors(inputs)), "generators": _generators()}
            self._fault.at(self._count + 1, "forward")

    def before_step(self, optimizer: Any, *_: Any) -> None:
        if not any(each is optimizer for each in self._optimizers):
            self._optimizers.append(optimizer)
        if optimizer is not self._optimizers[0]:
            return
        self.note_line("step")
        self._write_values()
        seen = self._before or {"inputs": "", "generators": _generators()}
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        states = _states(optimizer)
        weights = _digest(_parameters(optimizer))
        self._write("step", number=self._count + 1, weights=weights, optimizer=states, rates=rates, **seen)
        self._fault.at(self._count + 1, "optimizer", optimizer)

    def after_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer is self._optimizers[0]:
            self._count += 1
            self._before = {}
            self._write("done", number=self._count)
            self._fault.after(self._count)

    def _write_values(self) -> None:
        if values := self._ring.lines():
            self._write("values", values=values)

    def note_line(self, what: str) -> None:
        where = script_line()
        if where and (what, where) not in self._known:
            self._known.add((what, where))
            self._write("line", what=what, where=where)

    def on_audit(self, event: str, given: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(given[0], str | bytes):
            return
        _path, mode, flags = given
        appends = "a" in mode if isinstance(mode, str) else bool(flags & os.O_APPEND)
        if not (flags & (os.O_WRONLY | os.O_RDWR)):
            return
        path, where = os.path.realpath(os.fsdecode(given[0])), script_line()
        if not where or path.startswith(("/dev/", "/proc/")) or (path, where) in self._known:
            return
        self._known.add((path, where))
        self._write("wrote", path=path, where=where, appends=appends)

    def finish(self) -> None:
        """Once, at the end: `os._exit` may follow the functions of `atexit`."""
        self._is_off = True
        self._write_values()
        found: dict[str, str] = {}
        for model in self._models:
            named = (*model.module.named_parameters(), *model.module.named_buffers())
            found |= {name: _digest([tensor]) for name, tensor in named}
        known = {id(each) for model in self._models for each in model.parameters()}
        for place, optimizer in enumerate(self._optimizers):
            for number, each in enumerate(_parameters(optimizer)):
                if id(each) not in known:
                    found[f"parameter {number} of optimizer {place}"] = _digest([each])
        if found:
            self._write("final", weights=found)


class _Ring:
    """What `ddp.log` writes behind the status page of this rank (`ddp/telemetry/values.py`)."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._read = 0
        with suppress(OSError, KeyError, ValueError):
            file = os.open(os.environ[STATUS_PAGE], os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._memory = mmap.mmap(file, VALUES_END, prot=mmap.PROT_READ)
            finally:
                os.close(file)
            self._read = self._written()

    def _written(self) -> int:
        assert self._memory is not None
        return int.from_bytes(self._memory[VALUES_AT:RING_AT], "little")

    def lines(self) -> list[Any]:
        """The records since the last call. NaN is a number here."""
        if self._memory is None:
            return []
        end = self._written()
        found = ring_lines(self._memory[RING_AT:VALUES_END], self._read, end, self._written())
        self._read = end
        return [json.loads(line)[1] for line in found]


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _states(optimizer: Any) -> str:
    crc = 0
    for place, parameter in enumerate(_parameters(optimizer)):
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            words = _digest([value]) if isinstance(value, torch.Tensor) else repr(value)
            crc = zlib.crc32(f"{place} {name} {words}".encode(), crc)
    return f"{crc:08x}"


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    crc = 0
    for each in tensors:
        own = each.to_local() if hasattr(each, "to_local") else each
        flat = own.detach().cpu().contiguous()
        size = flat.numel() * flat.element_size()
        if size:
            crc = zlib.crc32((ctypes.c_char * size).from_address(flat.data_ptr()), crc)
    return f"{crc:08x}"


def _generators() -> dict[str, str]:
    found = {"torch": _digest([torch.get_rng_state()])}
    found["python"] = f"{zlib.crc32(repr(random.getstate()).encode()):08x}"
    if numpy := sys.modules.get("numpy"):
        with suppress(AttributeError):  # its import runs
            found["numpy"] = f"{zlib.crc32(repr(numpy.random.get_state(legacy=False)).encode()):08x}"
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = _digest([torch.cuda.get_rng_state()])
    return found


_NOT_SCRIPT = tuple(
    os.path.realpath(each)
    for each in (
        *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *(os.path.dirname(str(sys.modules[name].__file__)) for name in ("torch", "ddp")),
        os.path.dirname(os.path.dirname(os.path.realpath(__file__))),
    )
)


def script_line() -> str:
    """The innermost line of the user's code on the stack, as `train.py:41`."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and not os.path.realpath(file).startswith(_NOT_SCRIPT):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# --- the fault of this run -------------------------------------------------------------------------


class Fault:
    """Played once in a run: files in the folder of the run say that it was."""

    def __init__(self, folder: str, plan: dict[str, Any]) -> None:
        self._folder, self._kind = folder, plan.get("kind", "")
        rank = int(os.environ["RANK"])
        self._is_mine = plan.get("rank") in (rank, None)
        self._step, self._moment = plan.get("step", 0), plan.get("moment", "")
        self._played = os.path.join(folder, f"played-{rank}")
        self._slow, self._since = False, time.monotonic()
        self._full_until = 0
        with suppress(OSError):
            os.unlink(BALLAST)  # the process that filled the disk has ended

    def at(self, step: int, moment: str, optimizer: Any = None) -> None:
        if not self._is_mine or not self._kind:
            return
        if self._slow and moment == "optimizer":
            time.sleep(min(_SLOWEST_S, 3 * (time.monotonic() - self._since)))
        if step < self._step or (moment == "forward" and self._moment != "forward") or not self._is_first():
            return
        getattr(self, f"_{self._kind}")(step, optimizer)

    def after(self, step: int) -> None:
        self._since = time.monotonic()
        if self._full_until and step >= self._full_until:
            self._full_until = 0
            with suppress(OSError):
                os.unlink(BALLAST)

    def _is_first(self) -> bool:
        try:
            file = os.open(self._played, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        os.write(file, json.dumps({"at": time.time()}).encode())
        os.close(file)
        return True

    def _kill(self, _step: int, _optimizer: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _freeze(self, _step: int, _optimizer: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _slow_down(self, _step: int, _optimizer: Any) -> None:
        self._slow = True

    def _nan(self, _step: int, optimizer: Any) -> None:
        """On all ranks, as after the average with a rank that has it."""
        next(each.grad for each in _parameters(optimizer) if each.grad is not None).fill_(float("nan"))

    def _fill_disk(self, step: int, _optimizer: Any) -> None:
        """The folder of the run is a small file system of its own. It is full for two steps."""
        self._full_until = step + 1
        with suppress(OSError), open(BALLAST, "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))

    def _wait(self, _step: int, _optimizer: Any) -> None:
        """Until the command has done what is done from outside."""
        gate, go = os.path.join(self._folder, GATE), os.path.join(self._folder, GO)
        with open(gate, "w", encoding="utf-8") as file:
            file.write(str(os.getpid()))
        deadline = time.monotonic() + _GATE_S
        while not os.path.exists(go) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
