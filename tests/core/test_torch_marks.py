"""Which modules of a script are our library's own."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from ddp.telemetry import comm_error, torch_marks
from ddp.telemetry.status_page import BACKWARD, IDLE


def at(path: str | None) -> ModuleType:
    module = ModuleType("ddp.telemetry.comm_error")
    module.__file__ = path
    return module


@pytest.mark.parametrize("folder", ["words", "telemetry", "a b"])
def test_the_library_is_known_by_its_folder_whatever_that_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """A folder called words, say: /srv/words/ddp."""
    here = tmp_path / folder
    monkeypatch.setattr(torch_marks, "__file__", str(here / "torch_marks.py"))
    assert torch_marks.is_in_this_folder(at(str(here / "comm_error.py")))
    (tmp_path / "link").symlink_to(here)
    assert torch_marks.is_in_this_folder(at(str(tmp_path / "link" / "comm_error.py")))
    assert not torch_marks.is_in_this_folder(at(str(tmp_path / "comm_error.py")))
    assert not torch_marks.is_in_this_folder(at(None))


def test_the_library_that_is_imported_here_is_ours() -> None:
    assert torch_marks.is_in_this_folder(comm_error)


class Page:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def mark(self, phase: int) -> int:
        self.seen.append(phase)
        return IDLE

    def back(self, before: int) -> None:
        self.seen.append(before)


def test_a_replayed_graph_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        replays = 0

        def replay(self) -> None:
            self.replays += 1

    class Broken:
        def replay(self) -> None:
            raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.accelerator, "Graph", Broken, raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    page = Page()
    torch_marks._mark_replays(page)  # type: ignore[arg-type]
    graph = Graph()
    graph.replay()
    assert graph.replays == 1
    with pytest.raises(RuntimeError, match="CUDA error"):
        Broken().replay()
    assert page.seen == [BACKWARD, IDLE] * 2
