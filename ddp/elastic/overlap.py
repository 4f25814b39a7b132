"""The part of a commit that runs while the training goes on: at most one commit at a time.

The thread of the training takes a snapshot (`snapshot`) and goes on. A thread waits until the device has made it,
copies it to the host, and completes the image there. Only then does the commit exist, for this rank and for all others.

- The next commit waits until this one is complete: there is one snapshot. So a rank is at most two commits ahead of
  the slowest one, and keeps three (docs/decisions/0025-commits-beside-the-training.md).
- What goes wrong is raised by the next call of commit(), flush() or checkpoint().
- The first commits of a generation are made before the training goes on. What memory the device has to spare is known
  only after a step or two.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ddp.elastic.snapshot import NoRoom, Snapshot
from ddp.groups import accelerator
from ddp.telemetry import capture, status_page
from ddp.telemetry.coded import Coded, WrongUse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddp.elastic.leaves import Leaf

log = logging.getLogger("ddp.elastic")
_BEFORE = 2  # commits before the first one that is overlapped
_NO_ROOM = (
    "ddp.elastic: commit() waits for the device: a copy of the state does not fit into its memory: %s. Training "
    "continues. State(overlap=False) turns these copies off; State(every=N) makes fewer commits"
)


class Overlap:
    """The commits of one rank and generation. `is_on`: whether they may be overlapped."""

    def __init__(self, is_on: bool = False) -> None:
        self.is_on = is_on
        self._n_commits = 0
        self._for: Any = None  # what the snapshot fits
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._failed: dict[int, Exception] = {}  # by the number of the commit

    def take(
        self, layout: object, places: Sequence[tuple[Leaf, int]], tensors: Sequence[torch.Tensor]
    ) -> Snapshot | None:
        """Take a snapshot; None: this commit is made at once. `layout`: changes if places or devices do."""
        if not self.is_on:
            return None
        if capture.is_capturing():
            raise WrongUse(
                "commit() during the capture of a graph: the state does not exist yet. Call it after the replay"
            )
        self._n_commits += 1
        if self._n_commits <= _BEFORE:
            return None
        if self._for is not layout:
            self._for, self._snapshot = layout, None  # the old memory is free before the new one is asked for
            self._snapshot = _new_snapshot(places, tensors)
        if self._snapshot is not None:
            self._snapshot.take(tensors)
        return self._snapshot

    def start(self, number: int, finish: Callable[[], None]) -> None:
        """Let a thread finish a commit."""
        thread = threading.Thread(target=self._run, args=(number, finish), name="ddp-copy", daemon=True)
        _running.add(self)
        try:
            thread.start()
        except RuntimeError:  # the process cannot start another thread
            stream = torch.accelerator.current_stream()
            self._run(number, finish)
            torch.accelerator.set_stream(stream)
        else:
            self._thread = thread

    def _run(self, number: int, finish: Callable[[], None]) -> None:
        try:
            finish()
        except Exception as error:
            self._failed[number] = error

    def settle(self) -> None:
        """Wait until the last commit is complete, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def end(self) -> None:
        """Free the memory of the device."""
        self.settle()
        self._for = self._snapshot = None

    def raise_error(self, failure: type[Coded], first: int = 0) -> None:
        """Raise an error if a commit from `first` on has failed and was not reported yet."""
        numbers = [number for number in list(self._failed) if number >= first]
        if not numbers:
            return
        number, error = numbers[-1], [self._failed.pop(each) for each in numbers][-1]
        if isinstance(error, Coded):
            raise error
        raise failure(
            f"commit {number} could not be copied from the device: {error}. The commits before it are still valid. "
            "If the device has failed, end this process: the restarted ranks resume from them"
        ) from error


def _new_snapshot(places: Sequence[tuple[Leaf, int]], tensors: Sequence[torch.Tensor]) -> Snapshot | None:
    device = accelerator.current()
    assert device is not None
    try:
        found = Snapshot(places, tensors, torch.device(device.type, torch.accelerator.current_device_index()))
    except NoRoom as error:
        if status_page.once("no room for snapshots"):
            log.warning(_NO_ROOM, error)
        return None
    _settle_before_captures(device.type)
    return found


# --- captures of graphs ---------------------------------------------------------------------------

_running: weakref.WeakSet[Overlap] = weakref.WeakSet()


@functools.cache
def _settle_before_captures(device_type: str) -> None:
    """Complete commits before a capture begins: by default, any thread that asks the device for something breaks it."""
    module = torch.get_device_module(device_type)
    graphs: list[Any] = [getattr(module, name, None) for name in ("CUDAGraph", "XPUGraph")]
    for graph in (*graphs, getattr(torch.accelerator, "Graph", None)):
        if hasattr(graph, "capture_begin"):
            graph.capture_begin = _after_settling(graph.capture_begin)


def _after_settling(begin: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin)
    def capture_begin(*arguments: Any, **more: Any) -> Any:
        for each in list(_running):
            each.settle()
        return begin(*arguments, **more)

    return capture_begin
