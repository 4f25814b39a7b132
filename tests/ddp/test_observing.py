"""What observes the calls of a program neither raises into it, nor swallows its exceptions, nor calls its code."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import Any, NoReturn

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ddp.telemetry import status_page
from ddp.telemetry.collective_marks import UNKNOWN, options_with_mode, tensor_facts
from ddp.telemetry.observing import Observer, _observers, instances_of
from ddp.telemetry.peers import GlooSockets

# Observers that raise. They are written in C: code of this file would count as code of the program.
RAISES: Any = int  # of a tuple and a dictionary, or of a text
NOTHING: Any = str.strip


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {"observers": []}
    monkeypatch.setattr(status_page._first, "_kept", found)
    return found


def state(_args: object, _kwargs: object) -> str:
    return "x"


def double(number: int, *, plus: int = 0) -> int:
    if number < 0:
        raise ValueError("of the program")
    return 2 * number + plus


@pytest.mark.parametrize(("before", "after"), [(RAISES, NOTHING), (state, RAISES)])
@pytest.mark.usefixtures("kept")
def test_an_observer_that_raises_is_off_and_says_so_once(
    before: Any, after: Any, caplog: pytest.LogCaptureFixture
) -> None:
    observer, other = Observer("the record of numbers"), Observer("another")
    observed = observer.around(double, before, after)
    with caplog.at_level(logging.WARNING, "ddp"):
        assert [observed(2, plus=1), observed(3)] == [5, 6]
        assert other.run(RAISES, "x") is None
        assert other.run(len, "x") is None
    assert not observer.is_on
    assert len(caplog.records) == 1
    assert "the record of numbers is off" in caplog.text


@pytest.mark.parametrize("after", [NOTHING, RAISES])
@pytest.mark.usefixtures("kept")
def test_the_exception_of_the_program_passes_as_it_is(after: Any) -> None:
    seen: list[Any] = []
    failed = RAISES if after is RAISES else lambda error, state: seen.append((error, state))
    observed = Observer("x").around(double, state, after, failed)
    with pytest.raises(ValueError, match="of the program") as caught:
        observed(-1)
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert caught.traceback[-1].name == "double"
    assert seen == ([] if after is RAISES else [(caught.value, "x")])


class Interrupted(Exception):
    pass


def interrupt(_number: int, _frame: object) -> NoReturn:
    raise Interrupted


@pytest.mark.usefixtures("kept")
def test_what_a_signal_raises_in_an_observer_is_of_the_program() -> None:
    observer = Observer("x")
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        observed = observer.around(
            double, lambda _args, _kwargs: signal.raise_signal(signal.SIGUSR1), NOTHING
        )
        with pytest.raises(Interrupted):
            observed(1)
        with pytest.raises(Interrupted):
            observer.run(signal.raise_signal, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert observer.is_on


def test_a_forked_child_is_not_observed(kept: dict[str, Any]) -> None:
    del kept["observers"]
    observer = Observer("x")
    assert _observers() == [observer]
    child = os.fork()
    if not child:
        os._exit(int(observer.is_on))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert observer.is_on


# --- the facts of a collective ---------------------------------------------------------------------------


class Odd(torch.Tensor):
    """Every question about it is an error."""

    @property
    def shape(self) -> NoReturn:  # type: ignore[override]
        raise AssertionError

    def numel(self) -> NoReturn:
        raise AssertionError

    def __len__(self) -> NoReturn:
        raise AssertionError

    def __eq__(self, _other: object) -> NoReturn:
        raise AssertionError

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, *_call: object) -> NoReturn:
        raise AssertionError


class Computed(torch.Tensor):
    """Its properties are not those of a C++ object."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls) -> Computed:
        return torch.Tensor._make_wrapper_subclass(cls, (3,), dispatch_sizes_strides_policy="sizes")  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, *_call: object) -> NoReturn:
        raise AssertionError


class Mode(TorchFunctionMode):
    def __torch_function__(self, *_call: object) -> NoReturn:
        raise AssertionError


class List(list):  # type: ignore[type-arg]
    def __len__(self) -> NoReturn:
        raise AssertionError

    def __iter__(self) -> NoReturn:
        raise AssertionError


def test_the_facts_are_read_without_code_of_the_program() -> None:
    plain = torch.ones(2, 3)
    odd = plain.as_subclass(Odd)
    expected = tensor_facts(plain)
    assert expected[:2] == ("float32", 6)
    assert tensor_facts(odd) == tensor_facts([odd]) == tensor_facts(torch.nn.Parameter(plain)) == expected
    with Mode():
        assert tensor_facts(plain) == tensor_facts((plain,)) == expected
    assert tensor_facts([plain, odd])[:2] == ("float32", 12)
    assert tensor_facts([]) == ("", 0, 0)
    for unknown in (Computed(), [plain, Computed()], List([plain]), "text", None):
        assert tensor_facts(unknown) == (UNKNOWN, 0, 0)


def test_the_options_of_torch_that_say_whether_a_call_is_synchronous() -> None:
    names = {each.__name__ for each in options_with_mode()}
    assert {"AllreduceOptions", "AllgatherOptions", "BroadcastOptions", "BarrierOptions"} <= names


def test_groups_that_threads_create_at_the_same_time_end_in_any_order() -> None:
    sockets = GlooSockets()
    one, other = sockets.creating(), sockets.creating()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    other.__exit__(None, None, None)
    assert sockets.now() == set()


def test_a_search_for_objects_breaks_no_tuple_of_another_thread() -> None:
    """A list of all objects, as `gc.get_objects()` makes it, broke one in most searches."""

    class Wanted:
        pass

    class Below(Wanted):
        pass

    wanted, errors, is_over = [Wanted(), Below()], list[SystemError](), threading.Event()

    def make_tuples() -> None:
        try:
            while not is_over.is_set():
                tuple(number for number in range(50))
        except SystemError as error:
            errors.append(error)

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=make_tuples)
    thread.start()
    try:
        for _ in range(40):
            assert set(instances_of([Wanted])) == set(wanted)
    finally:
        sys.setswitchinterval(usual)
        is_over.set()
        thread.join()
    assert not errors
