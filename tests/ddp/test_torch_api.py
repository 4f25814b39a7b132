"""What a torch of another release lacks is reported once, and the rest works. Stand-ins for the oldest and newest."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ddp.telemetry import collective_marks, guard, status_page, torch_api, torch_marks, torch_names
from ddp.telemetry.torch_names import NAMES, Name, Use

if TYPE_CHECKING:
    from collections.abc import Callable

# Those that the marks replace; a process that joins survivors replaces more (tests/ddp_reform).
PATCHED = [name for name in NAMES if name.use is Use.PATCHED and name.loses != "healing in place"]
REPLACED = [name for name in NAMES if name.takes and name.use in (Use.PATCHED, Use.OVERRIDDEN)]


def owner_of(name: Name) -> Any:
    return torch_api.resolve_name(name.owner)


def put(monkeypatch: pytest.MonkeyPatch, name: Name, function: Callable[..., Any]) -> None:
    monkeypatch.setattr(owner_of(name), name.name, function)


@pytest.fixture
def own_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks of this test, which leave torch as it was."""
    for name in PATCHED:
        monkeypatch.setattr(owner_of(name), name.name, vars(owner_of(name))[name.name])
    monkeypatch.setattr(torch, "save", torch.save)
    monkeypatch.setattr(torch.serialization, "save", torch.serialization.save)


def put_marks() -> list[str]:
    """Install each mark; return the names that are patched now."""
    before = {name.path: getattr(owner_of(name), name.name, None) for name in PATCHED}
    page = status_page.page()
    for mark in (
        *torch_marks._MARKS[1:],
        torch_marks.mark_group_creation,
    ):
        with contextlib.suppress(ImportError, AttributeError):
            mark(page)
    collective_marks._watch_names()
    after = {name.path: getattr(owner_of(name), name.name, None) for name in PATCHED}
    return [path for path, value in after.items() if value is not before[path]]


@pytest.mark.parametrize("name", PATCHED, ids=[name.name for name in PATCHED])
@pytest.mark.usefixtures("own_marks")
def test_a_mark_whose_place_is_gone_is_reported_and_breaks_nothing(
    name: Name, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner_of(name), name.name)
    assert torch_api.problems() == {name.loses: [f"{name.path} is missing"]}
    others = {each.path for each in PATCHED if each.loses != name.loses}
    assert others <= set(put_marks()) <= {each.path for each in PATCHED} - {name.path}
    with pytest.raises(AttributeError, match=f"has no {name.path}"):
        torch_api.get(name)


@pytest.mark.parametrize("name", REPLACED, ids=[name.name for name in REPLACED])
def test_other_parameters_are_reported(name: Name, monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(_self: Any, _another: Any) -> None: ...

    put(monkeypatch, name, renamed)
    (problem,) = torch_api.problems()[name.loses]
    assert problem == f"{name.path} takes (_self, _another)"


@pytest.mark.parametrize("name", REPLACED, ids=[name.name for name in REPLACED])
def test_further_parameters_are_not_reported(name: Name, monkeypatch: pytest.MonkeyPatch) -> None:
    scope: dict[str, Any] = {}
    exec(f"def longer({', '.join(name.takes)}, and_more=None): ...", scope)
    put(monkeypatch, name, scope["longer"])
    assert not torch_api.problems()


def test_a_module_that_is_not_loaded_is_not_missed() -> None:
    assert not torch_api.problems([Name("torch.not_loaded", "_name", Use.CALLED, "something")])
    assert torch_api.problems([Name("torch.nn:Gone", "_name", Use.CALLED, "something")]) == {
        "something": ["torch.nn.Gone._name is missing"]
    }


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_one_warning_of_rank_0_lists_everything(
    rank: str, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(status_page._first, "_kept", {})
    for name in (torch_names.PRE_FORWARD, torch_names.RUN_BACKWARD):
        monkeypatch.delattr(owner_of(name), name.name)
    with caplog.at_level(logging.WARNING, "ddp"):
        torch_api.warn_once()
        torch_api.warn_once()
    assert len(caplog.records) == lines
    for name in (torch_names.PRE_FORWARD, torch_names.RUN_BACKWARD):
        assert (name.loses in caplog.text and name.path in caplog.text) == bool(lines)


class OnGpu:
    """A group for GPUs, over a backend of either kind."""

    def __init__(self, backend: Any) -> None:
        self._device_types = [torch.device("cpu"), torch.device("cuda")]
        self._backend = backend

    def _get_backend(self, _device: torch.device) -> Any:
        return self._backend


class Reporting:
    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name

    def get_error(self) -> Any:
        raise AssertionError("only NCCL detects errors asynchronously")


def test_gloo_with_get_error_is_not_taken_for_nccl() -> None:
    """As from 2.14 on."""
    assert not guard._asynchronous_backends(OnGpu(Reporting("gloo")))
    nccl = Reporting("nccl")
    assert guard._asynchronous_backends(OnGpu(nccl)) == [nccl]


@pytest.mark.parametrize(
    ("release", "has_nccl", "backends", "read"),
    [
        ((2, 13), True, {"nccl"}, ["nccl"]),
        ((2, 13), True, {"gloo"}, ["all"]),
        ((2, 13), False, {"nccl"}, ["all"]),
        ((2, 15), True, {"nccl2"}, ["nccl2"]),
        ((2, 15), True, {"nccl", "nccl2"}, ["nccl", "nccl2"]),
        ((2, 15), True, {"gloo"}, ["gloo"]),
    ],
)
def test_each_backend_has_its_recorder(
    release: torch_names.Version,
    has_nccl: bool,
    backends: set[str],
    read: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def recorded(_collectives: bool, _active: bool, name: str = "all") -> str:
        return json.dumps({"entries": [name], "pg_config": {name: {}}})

    bindings = torch_api.sys.modules[torch_names.RECORD_OF_ALL.owner]
    monkeypatch.setattr(torch_api, "version", lambda: release)
    monkeypatch.setattr(bindings, "_dump_fr_trace_json", recorded)
    monkeypatch.delattr(bindings, "_dump_nccl_trace_json", raising=False)
    if has_nccl:
        of_nccl = functools.partial(recorded, name="nccl")
        monkeypatch.setattr(bindings, "_dump_nccl_trace_json", of_nccl, raising=False)
    whole = json.loads(torch_api.record_of_collectives(backends))
    assert whole == {"entries": read, "pg_config": {name: {} for name in read}}


@pytest.mark.parametrize(
    ("release", "given", "size"),
    [
        ((2, 8), {}, "2000"),
        ((2, 10), {}, "2000"),
        ((2, 10), {"TORCH_FR_BUFFER_SIZE": "7"}, "7"),
        ((2, 10), {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}, None),
        ((2, 11), {}, None),
    ],
)
def test_the_recorder_is_switched_on_where_torch_has_it_off(
    release: torch_names.Version, given: dict[str, str], size: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(torch_api, "version", lambda: release)
    torch_api.switch_recorder_on()
    assert os.environ.get("TORCH_FR_BUFFER_SIZE") == size


def test_a_torch_without_a_recorder_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = torch_api.sys.modules[torch_names.RECORD_OF_ALL.owner]
    monkeypatch.delattr(bindings, "_dump_fr_trace_json")
    monkeypatch.delattr(bindings, "_dump_nccl_trace_json", raising=False)
    with pytest.raises(RuntimeError, match="no flight recorder"):
        torch_api.record_of_collectives({"gloo"})
