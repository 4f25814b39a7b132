"""The guard around everything of ours that runs inside the calls of a program.

An observer reads what a call is given and what comes of it, and changes neither. If it raises, the program must not
notice: the error is swallowed, the observer is off from then on, and the process says so once. An exception that a
signal handler of the program raises while an observer runs belongs to the program, and passes.

A forked child is not the rank, so nothing observes it.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from . import status_page

_log = logging.getLogger("ddp")
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "")
_STANDARD = os.path.join(os.path.realpath(os.path.dirname(os.__file__)), "")


class Observer:
    """Functions of ours that observe one thing together, until one of them raises."""

    __slots__ = ("is_on", "what")

    def __init__(self, what: str) -> None:
        self.what = what  # what the process says is off
        self.is_on = True
        _observers().append(self)

    def around(
        self,
        original: Callable[..., Any],
        before: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        after: Callable[[Any], object],
        failed: Callable[[Exception, Any], object] | None = None,
    ) -> Callable[..., Any]:
        """Return `original` with an observer that gets its arguments before, and what `before` returned after it.

        If `before` returns None, this call is not observed. `failed` gets the exception that the call raises, and the
        same state.
        """

        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            state = None
            if self.is_on:
                try:
                    state = before(args, kwargs)
                except Exception as error:
                    self.fail(error)
            if state is None:
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            except Exception as error:
                if failed is not None:
                    self.run(failed, error, state)
                raise
            finally:
                try:
                    after(state)
                except Exception as error:
                    self.fail(error)

        return observed

    def guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook or a callback of ours that returns None instead of raising."""

        @functools.wraps(function)
        def guarded(*args: Any) -> Any:
            return self.run(function, *args)

        return guarded

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of ours; None if it raises, or if this observer is off."""
        if self.is_on:
            try:
                return function(*args)
            except Exception as error:
                self.fail(error)
        return None

    def fail(self, error: Exception) -> None:
        """Handle an error that was raised while this observer ran. Call this in the `except` block."""
        if _is_the_programs(error):
            raise error
        self.is_on = False
        if status_page.once("an observer failed"):
            try:
                _log.warning(
                    "ddp: %s is off in this process from now on: %r at %s. The program is not affected. "
                    "Please report this",
                    *(self.what, error, _place(error)),
                )
            except Exception:
                pass


def _observers() -> list[Observer]:
    found: list[Observer] | None = status_page.kept("observers")
    if found is None:
        found = status_page.keep("observers", [])
        os.register_at_fork(after_in_child=_switch_off)
    return found


def _switch_off() -> None:
    for observer in _observers():
        observer.is_on = False


def _is_the_programs(error: Exception) -> bool:
    """Whether a signal handler has raised it. No observer calls other code of the program."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = [getattr(getattr(each, "__func__", each), "__code__", None) for each in handlers]
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if any(code is each for each in codes) or not _is_library(code.co_filename):
            return True
        traceback = traceback.tb_next
    return False


def _is_library(file: str) -> bool:
    """Whether it is a file of ours, of torch or of the standard library."""
    path = os.path.realpath(file)
    in_standard_library = path.startswith(_STANDARD) and "-packages" not in path[len(_STANDARD) :]
    torchs = getattr(sys.modules.get("torch"), "__file__", None) or file
    ours = (_OURS, os.path.join(os.path.dirname(os.path.realpath(torchs)), ""))
    return file.startswith("<") or in_standard_library or path.startswith(ours)


def _place(error: Exception) -> str:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return "" if traceback is None else f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"


# --- finding objects -------------------------------------------------------------------------------
#
# Not with `gc.get_objects()`: its list also refers to the tuples that other threads are making. Python cannot finish a
# tuple that something else refers to, so `tuple(...)` in such a thread raises a SystemError.


def instances_of(kinds: Iterable[type[Any]]) -> list[Any]:
    """All objects of these classes, and of their subclasses. It looks at all objects, unless there is no class."""
    known = {each for kind in kinds for each in with_subclasses(kind)}
    return [each for each in gc.get_referrers(*known) if type(each) in known] if known else []


def with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    subclasses: list[type[Any]] = kind.__subclasses__()
    for each in subclasses:
        yield from with_subclasses(each)
