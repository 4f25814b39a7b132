"""A late dataclass cannot be told from one of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
import threading
from dataclasses import field
from typing import Any, ClassVar

import pytest

from rendezvous.values.late_dataclass import dataclass


def classes(maker: Any) -> dict[str, type]:
    """The same classes by either decorator."""

    @maker(frozen=True, slots=True)
    class Point:
        """A docstring."""

        KINDS: ClassVar[tuple[str, ...]] = ("a", "b")
        x: int
        y: int = 2
        tags: tuple[str, ...] = field(default_factory=tuple)
        note: str = field(default="", compare=False, repr=False)

        @property
        def total(self) -> int:
            return self.x + self.y

    @maker(frozen=True, slots=True)
    class Named(Point):
        y: int = 7
        name: str = "n"

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("negative")

    @maker(frozen=True, slots=True)
    class Empty:
        pass

    @maker(frozen=True, slots=True)
    class Keyed:
        a: int = field(kw_only=True)
        b: int = field(init=False, default=3)

        def __eq__(self, other: object) -> bool:
            return True

    return {each.__name__: each for each in (Point, Named, Empty, Keyed)}


@pytest.fixture(params=["late", "eager", "complete"])
def made(request: pytest.FixtureRequest) -> dict[str, Any]:
    found = classes(dataclasses.dataclass if request.param == "eager" else dataclass)
    if request.param == "complete":
        for each in found.values():
            dataclasses.fields(each)
    return found


def test_instances(made: dict[str, Any]) -> None:
    point = made["Point"](1)
    assert (point.x, point.y, point.tags, point.note, point.total, point.KINDS) == (
        1,
        2,
        (),
        "",
        3,
        ("a", "b"),
    )
    assert repr(point).endswith("Point(x=1, y=2, tags=())")
    assert repr(made["Named"](1, name="z")).endswith("Named(x=1, y=7, tags=(), name='z')")
    assert repr(made["Empty"]()).endswith("Empty()")
    assert point == made["Point"](1, 2, (), "another")
    assert point != made["Point"](2)
    assert point != made["Named"](1, 2)
    assert hash(point) == hash(made["Point"](1)) == hash((1, 2, ()))
    assert (made["Keyed"](a=1).b, made["Keyed"](a=1) == made["Keyed"](a=2)) == (3, True)
    assert made["Point"].__doc__ == "A docstring."
    assert not hasattr(point, "__dict__")
    for wrong in ({}, {"x": 1, "z": 2}, {"x": 1, "X": 2}):
        with pytest.raises(TypeError):
            made["Point"](**wrong)
    with pytest.raises(TypeError):
        made["Keyed"](1)
    with pytest.raises(ValueError, match="negative"):
        made["Named"](-1)


def test_they_are_frozen(made: dict[str, Any]) -> None:
    point = made["Point"](1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.x = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        del point.x
    with pytest.raises((AttributeError, TypeError)):
        point.other = 2


def test_fields_before_there_is_an_instance(made: dict[str, Any]) -> None:
    assert [each.name for each in dataclasses.fields(made["Named"])] == ["x", "y", "tags", "note", "name"]
    assert dataclasses.is_dataclass(made["Point"])
    assert made["Point"].__slots__ == ("x", "y", "tags", "note")
    assert made["Named"].__slots__ == ("name",)
    assert made["Empty"].__match_args__ == ()
    assert made["Named"].__match_args__ == ("x", "y", "tags", "note", "name")
    assert made["Keyed"].__match_args__ == ()


def test_functions_of_dataclasses(made: dict[str, Any]) -> None:
    point = made["Point"](1, tags=("t",))
    assert dataclasses.replace(point, y=5) == made["Point"](1, 5, ("t",))
    assert dataclasses.asdict(point) == {"x": 1, "y": 2, "tags": ("t",), "note": ""}
    assert dataclasses.astuple(made["Named"](1)) == (1, 7, (), "", "n")
    Point = made["Point"]
    match point:
        case Point(1, y, note=note):
            assert (y, note) == (2, "")
        case _:
            raise AssertionError
    assert copy.copy(point) == point
    assert copy.deepcopy(point) == point


@dataclass(frozen=True, slots=True)
class AtTheTop:
    a: int
    b: str = "b"


def test_each_method_may_be_the_first() -> None:
    """Whatever completes the class, the answer is that of a complete one."""
    for act in (repr, hash, copy.copy, lambda one: one == one, lambda one: one != 1, dataclasses.astuple):
        late, eager = classes(dataclass)["Named"](1), classes(dataclasses.dataclass)["Named"](1)
        first = act(late)
        assert first == act(late)
        if not isinstance(first, type(late)):
            assert first == act(eager)
    for wrong in (lambda one: setattr(one, "x", 1), lambda one: delattr(one, "x")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            wrong(classes(dataclass)["Named"](1))


def test_pickles() -> None:
    assert pickle.loads(pickle.dumps(AtTheTop(1))) == AtTheTop(1)


def test_threads_that_use_a_class_first_at_the_same_time() -> None:
    for _ in range(30):
        made = classes(dataclass)["Named"]
        start, found = threading.Barrier(4), []

        def use(made: Any = made, start: threading.Barrier = start, found: list[Any] = found) -> None:
            start.wait()
            found.append(made(1) == made(1))

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 4


def test_methods_are_made_late() -> None:
    asks = (
        "import dataclasses, sys\n"
        "made = []\n"
        "original = dataclasses._process_class\n"
        "dataclasses._process_class = lambda cls, *rest: (made.append(cls), original(cls, *rest))[1]\n"
        "import launcher.exchange as exchange\n"
        "before = len(made)\n"
        "one, another = exchange.Swept(1), exchange.Swept(1)\n"
        "few = len(made)\n"
        "assert one == another\n"
        "equal = len(made)\n"
        "for _ in range(20): exchange.GraceOver(1, exchange.Grace.FULL)\n"
        "print(before, few - before, equal - few, len(made) - equal)\n"
    )
    done = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    before, *later = map(int, done.stdout.split())
    assert before < 30
    assert later == [0, 1, 1]
