"""`ddp.on_failure`: the survivors of a failure save the state of the last finished step, with a function of the script.

Theory of operation
-------------------
When a rank dies, parameters and optimizers of all others are those of the last step that they have finished. They stay
so until the next optimizer step, which needs gradients of all ranks. So a survivor needs no copy of them. From the
optimizer step on it only keeps what the next step changes before it communicates: buffers and random generators.

A survivor saves at one of these points, and nowhere else:

    a failed collective    in a forward or backward pass, or anywhere else since the script has begun one
    a stop of the launcher (SIGTERM) is noted, and takes effect at the next forward pass or optimizer step, or when the
                           launcher aborts the collective in which the rank waits

Between an optimizer step and the next forward or backward pass a script updates its counters and schedulers. A state
from there is saved only if the script has called `step_complete()`. One from within an optimizer step is never saved,
but for the passes of its closure as long as it has changed no parameter. Neither is one in which only some of several
optimizers have made their step.

The survivors agree through the store of their generation, which the launcher keeps: each tells how many steps it has
finished, and the one that is furthest saves. There is one save in a generation, so no two ranks write the same file.
If the store is gone with its node, the ranks of one other node choose one of them.

The function has `limit_s` for all of this. Then the process ends, and the launcher restarts the job without this
state. The path counts only after the function has returned it: `launcher.ranks.worker` reads it from a file, and the
service tells all nodes of the next generation.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp.elastic.generators import GeneratorHolder
from ddp.telemetry import guard, status_page, torch_api, torch_names
from ddp.telemetry.coded import WrongType, WrongUse, WrongValue
from ddp.telemetry.comm_words import first_line, is_communication_error, is_fault_of_this_rank
from ddp.telemetry.contracts import GENERATION, RESUME_FILE, RESUME_PATH, SAVED_STATE, SAVING, SCRATCH
from ddp.telemetry.observing import Observer, instances_of
from ddp.telemetry.sections import checkpointing

Save = Callable[[str], str | os.PathLike[str] | None]

S = TypeVar("S", bound="Save")
_STOPPED = "the launcher stops this rank"
_KEPT = "the last step"
LIMIT_S = 25.0  # the launcher kills a rank 30 s after its order to stop (--shutdown-timeout)


@overload
def on_failure(save: S, *, limit_s: float = LIMIT_S) -> S: ...
@overload
def on_failure(save: None = None, *, limit_s: float = LIMIT_S) -> Callable[[S], S]: ...
def on_failure(save: Any = None, *, limit_s: float = LIMIT_S) -> Any:
    """Let a survivor of a failure call `save(reason)`, which saves the state of the last step and returns its path.

    Also as a decorator. Call it once on all ranks, before the training. `save` must not communicate. It may take
    `limit_s`. `resume_path()` returns the path in the next generation. Without the launcher, this has no effect.
    """
    if save is None:
        return functools.partial(on_failure, limit_s=limit_s)
    _check(save, limit_s)
    if os.environ.get(SCRATCH):
        if kind := _kind_without_replicas():
            raise WrongUse(_refusal(kind))
        if not status_page.once("a function to save"):
            raise WrongUse("ddp.on_failure was called before. Save everything in one function")
        if guard.start().has_agent:  # else the variable is left from a launcher
            _LastStep(save, limit_s).install()
    return save


def resume_path() -> str | None:
    """Return what `save` has returned after the last failure; None if nothing was saved."""
    return os.environ.get(RESUME_PATH) or None


def step_complete() -> None:
    """Tell `on_failure` that everything that belongs to the last optimizer step is updated: counters, schedulers.

    A failure before the next forward pass then saves this step, too: call it before other communication. A rank that
    is to stop saves and ends here.
    """
    last: _LastStep | None = status_page.kept(_KEPT)
    if last is not None:
        last.complete()


def _check(save: object, limit_s: float) -> None:
    if not callable(save):
        raise WrongType(f"invalid save={save!r} in ddp.on_failure: not a function. Use save(reason) -> path")
    if not 0 < limit_s < float("inf"):
        raise WrongValue(f"invalid limit_s={limit_s!r} in ddp.on_failure. Use a positive number of seconds")
    with suppress(ValueError):  # a function without a signature
        signature = inspect.signature(save)
        try:
            signature.bind("reason")
        except TypeError as error:
            raise WrongType(
                f"ddp.on_failure calls save(reason), and {save!r} does not take it: {error}. Use def save(reason): ..."
            ) from error
        if signature.return_annotation in (None, "None"):
            raise WrongType(
                f"{save!r} returns None, and ddp.on_failure tells the next generation the path that it returns. "
                "Return the path"
            )


# --- state that one rank does not have alone -----------------------------------------------------------

_WITHOUT_REPLICAS = (
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.fsdp", "FSDPModule"),
    ("ddp.averaging", "LocalSGD"),
)
_OPTIMIZERS_WITHOUT = {"ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"}


def _refusal(what: str) -> str:
    return (
        f"ddp.on_failure lets one rank save for all, but with {what} each rank has another part or another state. "
        "Use ddp.elastic.State, which keeps the state of all ranks"
    )


def _kind_without_replicas() -> str:
    """What this process has that makes its state differ from that of other ranks; "" if nothing is found."""
    found = ((name, getattr(sys.modules.get(module), name, None)) for module, name in _WITHOUT_REPLICAS)
    kinds = {kind: name for name, kind in found if isinstance(kind, type)}
    for each in instances_of((*kinds, Optimizer)):
        if name := next((name for kind, name in kinds.items() if issubclass(type(each), kind)), ""):
            return name
        if issubclass(type(each), Optimizer) and (name := _kind_of(each)):
            return name
    return ""


def _kind_of(optimizer: Any) -> str:
    """The same for what one optimizer updates."""
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    if name := next((kind for kind in kinds if kind in _OPTIMIZERS_WITHOUT), ""):
        return name
    parameters = (each for group in getattr(optimizer, "param_groups", ()) for each in group["params"])
    is_sharded = any(place.is_shard() for each in parameters for place in getattr(each, "placements", ()))
    return "parameters in shards (DTensor)" if is_sharded else ""


def _versions(optimizer: Any) -> list[int]:
    return [each._version for group in optimizer.param_groups for each in group["params"]]


# --- where the script is in its step -------------------------------------------------------------------


class _LastStep:
    """The last finished step of this process, and what becomes of it after a failure."""

    def __init__(self, save: Save, limit_s: float) -> None:
        self._save, self._limit_s = save, limit_s
        self._counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._stepping: Any = None  # the optimizer that is in its step
        self._versions: list[int] | None = None  # of the parameters, before a step that runs a closure
        self._in_pass = 0  # forward and backward passes of the script that are going on
        self._is_between = True  # from an optimizer step to the next pass
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # buffers, and copies of them
        self._holder = GeneratorHolder()
        self._generators: Any = None
        self._refused = ""
        file = os.environ.get(RESUME_FILE, "")
        self._file = file and os.path.abspath(file)  # the script may change its folder
        # The script may soon have newer checkpoints of its own than what this file names.
        self._used = self._file if os.environ.get("RANK") == "0" else ""
        self._stop = False  # the launcher, or somebody, has sent SIGTERM
        self._before: Any = signal.SIG_DFL  # the handler of the script
        self._over = False  # this process has saved or not, and does not again
        self._deadline = float("inf")

    def install(self) -> None:
        observer = Observer("ddp.on_failure")
        register_optimizer_step_pre_hook(observer.guarded(self._begin_step))
        register_optimizer_step_post_hook(observer.guarded(self._end_step))
        torch_api.patch(torch_names.PRE_FORWARD, self._around_forward)
        torch_api.patch(torch_names.RUN_BACKWARD, self._around_backward)
        status_page.keep(_KEPT, self)
        self._explain = status_page.kept("on_failure")
        status_page.keep("on_failure", self._collective_failed)
        self._uncaught = sys.excepthook
        sys.excepthook = self._on_uncaught
        guard.start().saves()
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGTERM)
            if handler not in (None, signal.SIG_IGN):  # None: not of Python, as of ddp.elastic
                self._before = signal.signal(signal.SIGTERM, self._on_stop)

    # --- the parts of a step ---------------------------------------------------------------------------

    def complete(self) -> None:
        self._is_between = False
        if self._stop and self._stepping is None:
            self._finish(_STOPPED)

    def _begin_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._stop:
            self._finish(_STOPPED)
        if optimizer not in self._counts and not self._refused:
            self._refuse(_kind_of(optimizer))
        has_closure = len(args) > 1 or kwargs.get("closure") is not None  # args[0] is the optimizer
        self._versions = _versions(optimizer) if has_closure else None
        self._stepping = optimizer

    def _is_updating(self) -> bool:
        """Whether an optimizer may have changed something: it has not in a closure that it runs first."""
        if self._stepping is None:
            return False
        return self._versions is None or self._versions != _versions(self._stepping)

    def _end_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        if self._used:
            _forget(self._used)
            self._used = ""
        self._kept = [(each, each.detach().clone()) for model in self._models for each in model.buffers()]
        self._generators = self._holder.hold()
        self._stepping, self._is_between = None, True

    def _around_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def _pre_forward(module: Any, *inputs: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(module, *inputs, **kwargs)
            if module not in self._models:
                self._models.add(module)
                if module.process_group.size() < dist.get_world_size():
                    self._refuse("a model that only some ranks train together")
            self._begin_pass()
            return self._passing(forward, module, *inputs, **kwargs)

        return _pre_forward

    def _around_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def backward(*args: Any, **kwargs: Any) -> Any:
            self._begin_pass()
            return self._passing(run, *args, **kwargs)

        return backward

    def _begin_pass(self) -> None:
        self._is_between = self._is_between and self._is_updating()
        if self._stop and not self._is_updating():
            self._finish(_STOPPED)

    def _passing(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._in_pass += 1
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if self._in_pass == 1:
                self._failed(error)
            raise
        finally:
            self._in_pass -= 1

    def _refuse(self, what: str) -> None:
        if what and not self._refused:
            self._refused = what
            _tell(_refusal(what))

    # --- failures --------------------------------------------------------------------------------------

    def _collective_failed(self, error: RuntimeError, op: str, sequence: int) -> Exception | None:
        if not self._in_pass:  # else when the error has left the pass
            self._failed(error)
        return self._explain(error, op, sequence) if self._explain is not None else None

    def _on_uncaught(self, kind: Any, error: BaseException, traceback: Any) -> None:
        if isinstance(error, RuntimeError):
            self._failed(error)
        self._uncaught(kind, error, traceback)

    def _failed(self, error: BaseException) -> None:
        chain = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
            chain.append(cause)
        if any(map(is_communication_error, chain)) and not any(map(is_fault_of_this_rank, chain)):
            self._finish(first_line(str(error)))

    def _on_stop(self, signum: int, frame: Any) -> None:
        if callable(self._before):
            self._before(signum, frame)
        self._stop = True
        if self._over or self._refused or not self._counts or guard.start().is_healing:
            self._end()
        elif not callable(self._before):  # else the script has its own way, and its own time
            self._watch()

    def _watch(self) -> None:
        """Start the clock, once."""
        if self._deadline == float("inf"):
            self._deadline = time.monotonic() + self._limit_s
            threading.Thread(target=self._end_late, name="ddp-on-failure", daemon=True).start()

    def _end_late(self) -> None:
        time.sleep(max(0.0, self._deadline - time.monotonic()))
        if not self._over:
            _tell(f"no state was saved within {self._limit_s:g} s (limit_s), so this process ends")
            os._exit(128 + signal.SIGTERM)

    def _end(self) -> None:
        """End as without `on_failure`, if the launcher has stopped this process and the script does not handle it."""
        if not self._stop or callable(self._before):
            return
        if threading.current_thread() is not threading.main_thread():
            os._exit(128 + signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _finish(self, why: str) -> None:
        """Save the state of the last step, if this is the rank to do it. Only the first call has an effect."""
        watcher = guard.start()
        if not self._over and not watcher.is_healing and self._counts and os.getpid() == watcher.pid:
            self._watch()
            watcher.leave_collectives()
            if problem := self._problem():
                _tell(f"the state of the last step is not saved: {problem}")
            else:
                self._save_if_chosen(watcher.wait_for_reason() or why)
            self._over = True
        self._end()

    def _problem(self) -> str:
        if self._refused:
            return f"{self._refused} is not supported"
        if self._is_updating():
            return "the failure came within an optimizer step"
        if self._is_between:
            return "the failure came between an optimizer step and the next forward pass, without ddp.step_complete()"
        return "" if len(set(self._counts.values())) == 1 else "not all optimizers have made this step"

    def _save_if_chosen(self, reason: str) -> None:
        step = max(self._counts.values())
        scratch, generation = os.environ[SCRATCH], os.environ.get(GENERATION, "")
        if not _is_chosen(step, f"{scratch}/{SAVING}{generation}", self._deadline):
            return
        began = time.monotonic()
        try:
            with checkpointing():
                with torch.no_grad():
                    for buffer, kept in self._kept:
                        buffer.copy_(kept)
                self._holder.set_back(self._generators)
                path = _absolute(self._save(reason))
        except BaseException as error:
            _tell(f"save(reason) failed, so nothing was saved: {type(error).__name__}: {error}")
            return
        if time.monotonic() > self._deadline:
            return
        record(f"{scratch}/{SAVED_STATE}{generation}", step, path)
        self._keep_for_later_jobs(step, path)
        _tell(
            f"saved the state after {step} steps in {time.monotonic() - began:.1f} s: {path}. Why: {reason}"
        )

    def _keep_for_later_jobs(self, step: int, path: str) -> None:
        try:
            if self._file:
                record(self._file, step, path)
        except OSError as error:
            _tell(f"a job that starts later does not get {path}: cannot write --resume-file: {error}")


def _absolute(path: object) -> str:
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise WrongType(f"it returned {path!r} instead of a path, so the next generation cannot be told")
    text = os.fspath(path)
    text = text if "://" in text else os.path.abspath(text)
    text.encode()  # a name that is not text cannot be sent
    return text


def record(file: str, step: int, path: str) -> None:
    """Tell the agent of this node. The file is whole or not there."""
    part = f"{file}.{os.getpid()}"
    with open(part, "w", encoding="utf-8") as opened:
        json.dump({"step": step, "path": path}, opened)
    os.replace(part, file)


def _forget(file: str) -> None:
    """Remove a `--resume-file` that still names what these ranks have begun with."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        with open(file, encoding="utf-8") as opened:
            is_used = json.load(opened)["path"] == resume_path()
        if is_used:
            os.unlink(file)


def _tell(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(f"ddp.on_failure: rank {os.environ.get('RANK', '?')}: {text}\n")
        sys.stderr.flush()


# --- which survivor saves ------------------------------------------------------------------------------
#
# Each survivor enters how far it is, and waits until all but one rank have, or `_SETTLE_S`. The one that is furthest
# by then is chosen for good: whoever comes later finds the choice.

_SETTLE_S = 1.0
_LOOK_EVERY_S = 0.01
_CONNECT = timedelta(seconds=3)


def _is_chosen(step: int, local: str, deadline: float) -> bool:
    for _attempt in range(2):  # the launcher may just be cutting the connections of this process
        try:
            return _chosen_by_all(_store(), step, deadline)
        except (RuntimeError, OSError, ValueError):
            continue
    return _is_on_the_node_that_saves() and _is_first(local)


def _store() -> Any:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    made = dist.TCPStore(address, port, None, False, timeout=_CONNECT, wait_for_workers=False)
    return dist.PrefixStore(f"ddp/on_failure/{os.environ.get(GENERATION, '')}", made)


def _chosen_by_all(store: Any, step: int, deadline: float) -> bool:
    rank, others = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    mine, furthest = f"{step}:{rank}", ""
    while (now := store.compare_set("furthest", furthest, mine).decode()) != mine:
        if _is_further(now, step, rank):
            break
        furthest = now
    settled = min(time.monotonic() + _SETTLE_S, deadline)
    present = store.add("present", 1)
    while present < others and time.monotonic() < settled:
        time.sleep(_LOOK_EVERY_S)
        present = store.add("present", 0)
    chosen = store.compare_set("chosen", "", store.get("furthest").decode()).decode()
    return bool(chosen == mine)


def _is_further(other: str, step: int, rank: int) -> bool:
    """Among equals the first rank: DDP gives its buffers to all others."""
    its_step, _colon, its_rank = other.partition(":")
    return (int(its_step), -int(its_rank)) > (step, -rank)


def _is_on_the_node_that_saves() -> bool:
    """The store is gone. It was in the agent of the first node, or in rank 0 of that node: that one is lost."""
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    alone = os.environ.get("LOCAL_WORLD_SIZE") == "1"
    return os.environ.get("GROUP_RANK") == ("1" if agents or alone else "0")


def _is_first(file: str) -> bool:
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError:
        return False
    return True
