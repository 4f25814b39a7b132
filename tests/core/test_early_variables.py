"""Which scripts set variables that torch reads when it is imported, themselves or in modules of their own folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from launcher.ranks.zygote import early_variable
from launcher.settings.spec import EntryKind, EntryPoint

if TYPE_CHECKING:
    from pathlib import Path

_SETS = "import os\nos.environ['TORCH_DISTRIBUTED_DEBUG'] = 'DETAIL'\n"
_NAME = "TORCH_DISTRIBUTED_DEBUG"


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"train.py": _SETS}, _NAME),
        ({"train.py": "import torch\n"}, ""),
        ({"train.py": "import envs\nimport torch\n", "envs.py": _SETS}, _NAME),
        ({"train.py": "import torch, envs as e\n", "envs.py": _SETS}, _NAME),
        ({"train.py": "from conf import env\n", "conf/env.py": _SETS}, _NAME),
        ({"train.py": "from conf.env import A\n", "conf/env.py": "from . import b\n", "conf/b.py": _SETS}, _NAME),
        ({"train.py": "import other\n", "other.py": "import train\n"}, ""),
        ({"train.py": "import torch\n", "unused.py": _SETS}, ""),
        ({"train.py": "import os\nprint(os.environ.get('HOME'))\n"}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_a_script(tmp_path: Path, files: dict[str, str], found: str) -> None:
    _write(tmp_path, files)
    assert early_variable(EntryPoint(EntryKind.SCRIPT, str(tmp_path / "train.py"), ())) == found


@pytest.mark.parametrize(
    "files",
    [
        {"pkg/__init__.py": "", "pkg/train.py": "from . import envs\n", "pkg/envs.py": _SETS},
        {"pkg/__init__.py": _SETS, "pkg/train.py": ""},
        {"pkg/train/__main__.py": _SETS, "pkg/train/__init__.py": ""},
    ],
)
def test_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    _write(tmp_path, files)
    monkeypatch.chdir(tmp_path)
    assert early_variable(EntryPoint(EntryKind.MODULE, "pkg.train", ())) == _NAME


def test_a_program_is_not_searched() -> None:
    assert early_variable(EntryPoint(EntryKind.PROGRAM, "/bin/true", ())) == ""
