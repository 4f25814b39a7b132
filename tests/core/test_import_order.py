"""Our commands find their own modules in front of those of PYTHONPATH; modules of ranks are found as a rank does."""

import os
import sys

import pytest

from _ddp_launch_entry import reordered
from launcher.settings.import_path import import_path

ZIP, LIBRARY, DYNLOAD = "/usr/lib/python312.zip", "/usr/lib/python3.12", "/usr/lib/python3.12/lib-dynload"
SITE = "/venv/lib/python3.12/site-packages"


@pytest.mark.parametrize("ours", [SITE, "/checkout", "/deps"])
def test_folders_of_the_user_come_last(ours: str) -> None:
    path = ["/venv/bin", "/project", "/deps", ZIP, LIBRARY, DYNLOAD, SITE]
    found = reordered(path, LIBRARY, ours)
    assert found[:4] == [ZIP, LIBRARY, DYNLOAD, ours]
    assert found[-2:] == ["/venv/bin", "/project"] if ours == "/deps" else found[-3:] == path[:3]
    assert set(found) == {*path, ours}
    assert len(found) == len(set(found))


def test_a_path_without_a_library_keeps_its_order() -> None:
    assert reordered(["/a", "/b"], LIBRARY, "/b") == ["/b", "/a"]


def test_this_interpreters_library_is_known() -> None:
    found = reordered(["/project", *sys.path], os.path.dirname(os.__file__), "/ours")
    assert found.index(os.path.dirname(os.__file__)) < found.index("/ours") < found.index("/project")


def test_a_rank_searches_pythonpath_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [LIBRARY, SITE, "/venv/bin", "/project"])
    assert import_path({"PYTHONPATH": "/project::/new"}) == ["/project", "/new", LIBRARY, SITE, "/venv/bin"]
    assert import_path({}) == sys.path
