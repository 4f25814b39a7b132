"""What runs in the ranks of test_commits_there.py: commits of a state on a device that is slow, or stands still."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import emu
import torch
from averaging_trials_there import DEVICE, batch, layers, loss_of
from torch import nn
from waiting_trials_there import OnTwo

from ddp import elastic
from ddp.elastic import keeper
from ddp.elastic.images import image, kept_images
from ddp.telemetry import capture, guard, status_page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Tensors = dict[str, torch.Tensor]


class Training:
    """A model on the device with an optimizer, and a State that keeps them."""

    def __init__(self, there: str, rank: int, shared: bool = False, **options: Any) -> None:
        self.place = Path(there, "shared" if shared else f"rank{rank}")
        self.place.mkdir(mode=0o700, exist_ok=True)
        os.environ |= {"DDP_SCRATCH": str(self.place), "TORCHELASTIC_RUN_ID": "test"}
        self.rank = rank
        self.model = options.pop("model", None) or layers().to(DEVICE)
        optimizer = options.pop("optimizer", lambda parameters: torch.optim.Adam(parameters, foreach=True))
        self.optimizer = optimizer(self.model.parameters())
        self.state = elastic.State(model=self.model, optimizer=self.optimizer, step=0, **options)
        self.resumed = self.state.resume()

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, batch(0, self.state.step)).backward()
        self.optimizer.step()
        self.state.step += 1

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()
            self.state.commit()

    def warm(self) -> Training:
        """Until commits are overlapped, and all of their memory is there."""
        self.steps(5)
        self.state.flush()
        return self

    @property
    def keeper(self) -> Any:
        return self.state._keeper

    @property
    def copies(self) -> torch.Stream:
        """The stream on which a snapshot goes to the host."""
        return next(iter(self.keeper._overlap._snapshot._streams.values()))

    def now(self) -> Tensors:
        torch.accelerator.synchronize()
        of_model = {name: each.detach().cpu().clone() for name, each in self.model.state_dict().items()}
        of_optimizer = {
            f"{number}.{name}": each.detach().cpu().clone()
            for number, named in self.optimizer.state_dict()["state"].items()
            for name, each in named.items()
        }
        return of_model | of_optimizer

    def kept(self) -> list[tuple[int, Tensors]]:
        """The whole commits in memory, by number."""
        found = []
        for path in kept_images.slots_in([self.place / "elastic"]):
            try:
                each = image.Image(memoryview(kept_images.map_for_reading(path)))
            except image.DamagedImage:
                continue
            tensors = {
                leaf.path.removeprefix("objects.model.").removeprefix("objects.optimizer.state."): (
                    each.tensor(number).clone()  # type: ignore[union-attr]
                )
                for number, leaf in enumerate(each.layout.leaves)
            }
            found.append((each.head.number, tensors))
        return sorted(found, key=lambda pair: pair[0])


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@contextmanager
def opened_later(gate: emu.Gate) -> Iterator[threading.Event]:
    """Another thread opens the gate when the event is set: just before a call that must wait for it."""
    calls = threading.Event()

    def open_it() -> None:
        calls.wait()
        gate.open()

    thread = threading.Thread(target=open_it)
    thread.start()
    try:
        yield calls
    finally:
        calls.set()
        thread.join()


# --- the training does not wait --------------------------------------------------------------------------


def waits(rank: int, there: str) -> tuple[list[str], int, int]:
    """-> why the host waited in steps with commits, and the newest whole commit while the device stood still, after."""
    training = Training(there, rank).warm()
    emu.take_sync_reasons()
    inputs = batch(rank, 9)  # a copy from the host, which waits
    emu.take_sync_reasons()
    gate = emu.Gate()
    training.optimizer.zero_grad()
    loss_of(training.model, inputs).backward()
    training.optimizer.step()
    training.state.commit()
    before = training.keeper.newest
    reasons = emu.take_sync_reasons()
    gate.open()
    training.state.flush()
    after = training.keeper.newest
    training.state.close()
    return reasons + emu.take_sync_reasons(), before, after


def launches(rank: int, there: str) -> dict[str, int]:
    """What a commit gives to the device."""
    training = Training(there, rank).warm()
    before = emu.counters()
    training.state.commit()
    training.state.flush()
    after = emu.counters()
    training.state.close()
    return {name: after[name] - before[name] for name in after if name != "queries"}


def generators_wait(rank: int, there: str) -> list[str]:
    from ddp.elastic import generators

    training = Training(there, rank, model=nn.Sequential(nn.Linear(6, 6), nn.Dropout()).to(DEVICE))
    emu.take_sync_reasons()
    gate = emu.Gate()
    training.model(torch.empty(4, 6, device=DEVICE))  # dropout draws from the generator
    generators.get()
    reasons = emu.take_sync_reasons()
    gate.open()
    training.state.close()
    return reasons


# --- nobody overtakes a snapshot --------------------------------------------------------------------------


def _by_foreach(training: Training) -> None:
    for _ in range(3):
        training.step()


def _by_kernels_that_torch_does_not_know(training: Training) -> None:
    """As in the replay of a graph: no hook, no version of a tensor changes."""
    views = [emu.kernel_view(each.data) for each in training.model.parameters()]
    emu.launch(lambda: [view.fill_(7.0) for view in views])


def _by_hand(training: Training) -> None:
    with torch.no_grad():
        for each in (*training.model.parameters(), *training.model.buffers()):
            each.zero_()


def _on_a_stream_of_the_user(training: Training) -> None:
    stream = torch.Stream(DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    _by_hand(training)
    torch.accelerator.set_stream(before)
    before.wait_stream(stream)


OVERTAKERS: dict[str, tuple[Callable[[Training], None], Any]] = {
    "foreach": (_by_foreach, lambda parameters: torch.optim.Adam(parameters, foreach=True)),
    "fused": (_by_foreach, lambda parameters: torch.optim.Adam(parameters, fused=True)),
    "one by one": (_by_foreach, lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9)),
    "graph": (_by_kernels_that_torch_does_not_know, torch.optim.Adam),
    "by hand": (_by_hand, torch.optim.Adam),
    "stream": (_on_a_stream_of_the_user, torch.optim.Adam),
}


def overtaken(rank: int, there: str, who: str) -> list[bool]:
    """-> whether the commit has the state of its time: copied to the host soon, and long after."""
    overtake, optimizer = OVERTAKERS[who]
    training = Training(there, rank, optimizer=optimizer).warm()
    found = []
    for slow_device in (True, False):
        training.step()
        wanted = training.now()
        with emu.slow(kernels=0.001 if slow_device else 0.0):
            gate = emu.Gate(training.copies)
            training.state.commit()
            overtake(training)
            if not slow_device:
                torch.accelerator.current_stream().synchronize()
            found.append(training.keeper.newest == training.state._number - 1)
            gate.open()
            training.state.flush()
        number, kept = training.kept()[-1]
        found += [number == training.keeper.newest, equal(kept, wanted), not equal(wanted, training.now())]
    training.state.close()
    return found


def on_two_devices(rank: int, there: str) -> bool:
    training = Training(there, rank, model=OnTwo()).warm()
    training.step()
    wanted = training.now()
    with emu.slow(kernels=0.001):
        training.state.commit()
        training.step()
    training.state.flush()
    found = equal(training.kept()[-1][1], wanted)
    training.state.close()
    return found


def resumed(rank: int, there: str) -> tuple[bool, list[float]]:
    """-> whether a training that goes on from an overlapped commit ends as one without a pause; its random numbers."""

    def ended(name: str, pause: bool) -> Tensors:
        Path(there, name).mkdir(exist_ok=True)
        torch.manual_seed(3)
        training = Training(f"{there}/{name}", rank).warm()
        with emu.slow(kernels=0.0005):
            for _ in range(1 + rank):  # each rank has generators of its own
                torch.rand(1, device=DEVICE)
            training.steps(2)
            if pause:
                training.state.flush()
                torch.rand(5, device=DEVICE)
                training.state._keeper = None  # as if the process had died
                training.state._forget_leaving()
                training = Training(f"{there}/{name}", rank)
                assert training.resumed is not None
                assert training.resumed.number == 7
            training.steps(3)
        found = training.now() | {"random": torch.rand(5, device=DEVICE).cpu()}
        training.state.close()
        return found

    whole, paused = ended("whole", False), ended("paused", True)
    return equal(whole, paused), whole["random"].tolist()


# --- who waits for whom ------------------------------------------------------------------------------------


def _newest_after(training: Training, call: Callable[[], object]) -> int:
    """The newest whole commit when a call has returned that must wait for the copy of the last one."""
    gate = emu.Gate(training.copies)
    training.state.commit()
    with opened_later(gate) as calls:
        calls.set()
        call()
        newest: int = training.keeper.newest
    training.state.flush()
    return newest - training.state._number


def waiting_calls(rank: int, there: str) -> dict[str, int]:
    """-> by a call: how far behind the last commit that was asked for the newest whole one is when it returns."""

    class Graph:
        def capture_begin(self) -> None:
            pass

    training = Training(there, rank, folder=f"{there}/disk{rank}", disk_every=1).warm()
    emu.CUDAGraph = Graph  # type: ignore[attr-defined]
    keeper._settle_before_captures.cache_clear()
    keeper._settle_before_captures("emu")
    found = {
        # The second commit may be whole too by now.
        "commit": min(-1, _newest_after(training, training.state.commit)),
        "flush": _newest_after(training, training.state.flush),
        "checkpoint": _newest_after(training, training.state.checkpoint),
        "capture": _newest_after(training, Graph().capture_begin),
    }
    del emu.CUDAGraph  # type: ignore[attr-defined]
    numbers = [number for number, _tensors in training.kept()]
    found["resume"] = _newest_after(training, lambda: None) or 0
    gate = emu.Gate(training.copies)
    training.state.commit()
    with opened_later(gate) as calls:
        calls.set()
        again = training.state.resume()
    assert again is not None
    found["resume"] = again.number - training.state._number
    found["kept"] = min(3, len(numbers))
    training.state.close()
    return found


def without_tensors(rank: int, there: str) -> int:
    """-> how far a rank that stores only its generators is ahead of its device."""
    training = Training(there, rank, shared=True).warm()
    assert (training.keeper._signature.role.part is None) == (rank == 1)
    gate = emu.Gate()
    training.state.commit()
    ahead: int = training.keeper.newest - (training.state._number - 1)
    gate.open()
    training.state.flush()
    assert training.keeper.newest == training.state._number
    training.state.close()
    return ahead


# --- what goes wrong ---------------------------------------------------------------------------------------


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _refused(training: Training, spoil: Callable[[], object], repair: Callable[[], object]) -> list[Any]:
    """-> what commit() raised, what the next one raised, and the newest whole commit compared with the first."""
    gate = emu.Gate()
    number = training.state._number + 1
    spoil()
    first = _error_of(training.state.commit)
    gate.open()
    training.keeper.settle()
    repair()
    newest = training.kept()[-1][0] - number
    second = _error_of(training.state.commit)
    third = _error_of(training.state.flush)
    return [first, second, newest, third, training.keeper.newest - number]


def failures(rank: int, there: str) -> dict[str, list[Any]]:
    training = Training(there, rank).warm()
    found = {}

    def fail() -> None:
        raise RuntimeError("illegal access")

    found["device"] = _refused(training, lambda: emu.launch(fail), lambda: None)
    whole = guard.why_broken
    found["garbage"] = _refused(
        training,
        lambda: setattr(guard, "why_broken", lambda ask=False: "NCCL reports an error"),
        lambda: setattr(guard, "why_broken", whole),
    )
    before = os.environ.get("DDP_GENERATION")
    os.environ["DDP_GENERATION"] = ""
    found["generation"] = _refused(
        training,
        lambda: os.environ.update(DDP_GENERATION="9"),
        lambda: os.environ.update(DDP_GENERATION=""),
    )
    os.environ.pop("DDP_GENERATION") if before is None else os.environ.update(DDP_GENERATION=before)
    training.state.close()
    return found


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def log_lines() -> Iterator[list[str]]:
    handler, logger = _Lines(), logging.getLogger("ddp.elastic")
    for what in ("no room for snapshots", "unpinned commits"):
        status_page._first._kept.pop(what, None)
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def without(rank: int, there: str, what: str) -> tuple[bool, list[str], bool]:
    """-> whether commits are right without something, what the log says, and whether they were overlapped."""
    _free, whole = emu.mem_get_info()
    pin, info = keeper._pinned, emu.mem_get_info
    training = Training(there, rank, overlap=what != "wish")
    with log_lines() as lines:
        if what == "room":
            emu.mem_get_info = lambda device=None: (1 << 20, 1 << 30)
        if what == "pins":
            keeper._pinned = lambda _slot, _type: "cudaHostRegister: 304"
        training.steps(2)
        training.step()
        if what == "memory":
            del emu.mem_get_info
            emu.set_memory_limit(emu.memory_allocated() + 4096)
        training.state.commit()
        emu.set_memory_limit(whole)
        training.warm().step()
        wanted = training.now()
        training.state.commit()
        training.step()
        training.state.flush()
        right = equal(training.kept()[-1][1], wanted)
    emu.mem_get_info, keeper._pinned = info, pin
    is_overlapped = training.keeper._overlap._snapshot is not None
    training.state.close()
    return right, lines, is_overlapped


def in_a_capture(rank: int, there: str) -> str:
    training = Training(there, rank).warm()
    emu.is_current_stream_capturing = lambda: True  # type: ignore[attr-defined]
    capture._questions.cache_clear()
    said = _error_of(training.state.commit)
    del emu.is_current_stream_capturing  # type: ignore[attr-defined]
    capture._questions.cache_clear()
    training.state.close()
    return said
