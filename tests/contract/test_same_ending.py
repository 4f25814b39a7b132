"""A warm rank ends as a fresh interpreter does: the same exit code, the same output to the letter, and no crash.

It leaves out the destructors of libtorch on the way (launcher/template/forking.py), which must not show.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from side_by_side import PROGRAMS, Ended, program, python, script
from warm_node import WarmNode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ENDINGS = re.findall(r"^@ending\ndef (\w+)", (PROGRAMS / "endings.py").read_text(), re.M)
_TORCH_ENDINGS = {
    "group_left_open": 7,
    "group_destroyed": 0,
    "group_in_a_global_and_failure": 1,
    "loader_left_running": 7,
    "intra_op_threads": 7,
    "autograd_and_a_computing_thread": 7,
    "own_store_left_open": 7,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("endings")


@pytest.fixture(scope="module")
def node(folder: Path) -> Iterator[WarmNode]:
    node = WarmNode(program("endings.py", folder))
    yield node
    node.close()


@pytest.fixture(scope="module")
def torch_node(folder: Path) -> Iterator[WarmNode]:
    node = WarmNode(program("torch_endings.py", folder))
    yield node
    node.close()


@pytest.mark.parametrize("ending", _ENDINGS)
def test_as_a_fresh_interpreter(ending: str, node: WarmNode, folder: Path) -> None:
    env = {"ENDING": ending}
    fresh = python(folder / "endings.py", cwd=folder, env=env)
    assert _without_addresses(node.run(env)) == _without_addresses(fresh)


def _without_addresses(ended: Ended) -> Ended:
    return replace(ended, err=re.sub(r"0x[0-9a-f]+", "0x", ended.err))


@pytest.mark.parametrize("ending", _TORCH_ENDINGS)
def test_with_torch_at_work(ending: str, torch_node: WarmNode) -> None:
    ended = torch_node.run({"ENDING": ending})
    assert ended.code == _TORCH_ENDINGS[ending], ended.err
    assert ended.out == ""
    assert "Exception ignored" not in ended.err


_REGISTERS_EARLY = """
import ctypes
libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
libc.__cxa_atexit(libc.puts, ctypes.c_void_p(libc.strdup(b"registered before the script")), None)
"""


def test_only_tools_that_write_at_exit_pay_for_the_full_exit(tmp_path: Path) -> None:
    script(tmp_path / "site", _REGISTERS_EARLY, "early.py")
    node = WarmNode(program("endings.py", tmp_path), {"PYTHONPATH": str(tmp_path / "site")}, ("early",))
    try:
        short = node.run({"ENDING": "c_output_is_flushed"})
        full = node.run({"ENDING": "c_output_is_flushed", "LLVM_PROFILE_FILE": "/dev/null"})
    finally:
        node.close()
    assert short == Ended(7, "from C, without a newline", "")
    assert full == Ended(7, "from C, without a newlineregistered before the script\n", "")
