"""A script finds itself started as `python script.py` would have started it, whoever did."""

from __future__ import annotations

import os
import shutil
import zipapp
from typing import TYPE_CHECKING, Any

import pytest
from recordings import ARGS, ARGS_OF_RANK_1, answer, differences
from side_by_side import PLAIN, PROGRAMS, WARM, ddp_launch, program, python, script, warm, written

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

# A plain start is a new interpreter, in which little of ours could show.
_BOTH = [pytest.param(WARM, id="warm"), pytest.param(PLAIN, id="plain", marks=pytest.mark.nightly)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("main facts")
    program("main_facts.py", folder)
    return folder


@pytest.fixture(scope="module")
def plain(place: Path) -> dict[str, Any]:
    python("main_facts.py", "python", *ARGS_OF_RANK_1, cwd=place).ok()
    facts: dict[str, Any] = written(place, "python")
    return facts


@pytest.fixture(scope="module")
def pool(place: Path) -> Iterator[tuple[str, ...]]:
    """The options of a command that finds a template, which was made with other arguments."""
    options = ("--warm-dir", str(place.parent / "pool"))
    warm("start", *options, "--nproc-per-node", "2", "main_facts.py", cwd=place).ok()
    yield options
    warm("stop", *options, cwd=place).ok()


@pytest.fixture(scope="module", params=["warm", "plain", "pooled"])
def ours(place: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    match request.param:
        case "pooled":
            options = request.getfixturevalue("pool")
        case kind:
            options = {"warm": WARM, "plain": PLAIN}[kind]
    ddp_launch("main_facts.py", "ours", *ARGS, cwd=place, nproc=2, options=options).ok()
    if request.param == "pooled":
        assert "started cold" not in warm("status", *options, cwd=place).out
    facts: dict[str, Any] = written(place, "ours", rank=1)
    return facts


@pytest.mark.nightly(instead=("::test_as_under_torchrun", "::test_as_under_python"))
def test_a_pooled_rank_differs_in_nothing_from_a_forked_one(place: Path, pool: tuple[str, ...]) -> None:
    ddp_launch("main_facts.py", "there", "x y", cwd=place, nproc=2).ok()
    ddp_launch("main_facts.py", "here", "x y", cwd=place, nproc=2, options=pool).ok()
    assert "started cold" not in warm("status", *pool, cwd=place).out
    forked, pooled = written(place, "there", rank=1), written(place, "here", rank=1)
    for facts in (forked, pooled):
        for name in (
            "MASTER_PORT",
            "TORCHELASTIC_RUN_ID",
            *(each for each in facts["environment"] if "DDP_" in each),
        ):
            del facts["environment"][name]
        facts["environment"].pop("TORCHELASTIC_ERROR_FILE")
        facts["command_line"].pop(2)
    assert list(pooled["environment"]) == list(forked["environment"])
    assert pooled == forked


def test_as_under_torchrun(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    parts = answer("main facts")
    assert {part: differences(ours[part], plain[part]) for part in parts} == parts


@pytest.mark.parametrize("part", ["main", "interpreter", "traces"])
def test_as_under_python(part: str, ours: dict[str, Any], plain: dict[str, Any]) -> None:
    assert ours[part] == plain[part]


def test_nothing_of_ours_shows_and_nothing_is_open(ours: dict[str, Any]) -> None:
    assert ours["traces"] == []
    assert ours["process"]["descriptors"] == [0, 1, 2]


def _entry_words(kind: str, folder: Path) -> Sequence[str | Path]:
    match kind:
        case "module":
            program("main_facts.py", folder / "package").with_name("__init__.py").touch()
            return ["-m", "package.main_facts"]
        case "package":
            package = program("main_facts.py", folder / "package")
            package.rename(package.with_name("__main__.py"))
            (folder / "package" / "__init__.py").touch()
            return ["-m", "package"]
        case "folder":
            copy = program("main_facts.py", folder / "application")
            copy.rename(copy.with_name("__main__.py"))
            return ["application"]
        case "zip":
            copy = program("main_facts.py", folder / "zipped")
            copy.rename(copy.with_name("__main__.py"))
            zipapp.create_archive(folder / "zipped", folder / "application.pyz")
            return ["application.pyz"]
        case "symlink":
            os.symlink(program("main_facts.py", folder / "elsewhere"), folder / "link.py")
            return ["link.py"]
        case "relative":
            program("main_facts.py", folder / "src")
            (folder / "runs").mkdir()
            return ["./runs/../src/main_facts.py"]
        case "spaces":
            return [program("main_facts.py", folder / "a folder é")]
        case "no ending":
            shutil.copy(PROGRAMS / "main_facts.py", folder / "train")
            return ["train"]
    raise AssertionError(kind)


_KINDS = ("module", "package", "folder", "zip", "symlink", "relative", "spaces", "no ending")
_WARM_KINDS = ("module", "folder", "symlink")
_PLAIN_KINDS = ("package", "zip", "relative", "spaces")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(pytest.param(kind, PLAIN, id=f"{kind}-plain") for kind in _PLAIN_KINDS),
        *(pytest.param(kind, WARM, id=f"{kind}-warm") for kind in _WARM_KINDS),
        *(
            pytest.param(kind, options, id=f"{kind}-{way}", marks=pytest.mark.nightly)
            for way, options, kinds in (("warm", WARM, _WARM_KINDS), ("plain", PLAIN, _PLAIN_KINDS))
            for kind in _KINDS
            if kind not in kinds
        ),
    ],
)
def test_every_kind_of_entry_point(
    kind: str, options: Sequence[str], light: dict[str, str], tmp_path: Path
) -> None:
    words = _entry_words(kind, tmp_path)
    python(*words, tmp_path / "python", "x y", cwd=tmp_path, env=light).ok()
    expected = written(tmp_path, "python")
    assert (
        ddp_launch(*words, tmp_path / "ours", "x y", cwd=tmp_path, options=options, env=light).ok().err == ""
    )
    facts = written(tmp_path, "ours")
    assert facts["main"] == expected["main"]
    assert facts["interpreter"] == expected["interpreter"]
    assert facts["traces"] == []
    words_seen = [word for word in facts["command_line"] if word != str(tmp_path / "ours")]
    assert words_seen == [word for word in expected["command_line"] if word != str(tmp_path / "python")]


@pytest.mark.parametrize("options", _BOTH)
def test_run_path(options: Sequence[str], light: dict[str, str], tmp_path: Path) -> None:
    program("main_facts.py", tmp_path)
    ddp_launch("--run-path", "main_facts.py", "facts", "x y", cwd=tmp_path, options=options, env=light).ok()
    facts = written(tmp_path, "facts")
    assert facts["main"]["name"] == "__main__"
    assert facts["main"]["is_main"]
    assert facts["main"]["file"] == facts["interpreter"]["argv0"] == "main_facts.py"
    assert facts["interpreter"]["argv"] == ["x y"]


@pytest.mark.parametrize("options", _BOTH)
def test_traceback_on_stderr_is_pythons_own(
    options: Sequence[str], light: dict[str, str], tmp_path: Path
) -> None:
    script(tmp_path, "def step():\n    raise ValueError('bad batch')\n\n\nprint('before')\nstep()\n")
    expected = python("train.py", cwd=tmp_path)
    ended = ddp_launch("train.py", cwd=tmp_path, options=options, env=light)
    assert (ended.code, ended.out) == (expected.code, expected.out) == (1, "before\n")
    assert ended.err.startswith(expected.err)


@pytest.mark.parametrize("options", _BOTH)
def test_syntax_error_is_pythons_own(options: Sequence[str], light: dict[str, str], tmp_path: Path) -> None:
    script(tmp_path, "import later\n")
    script(tmp_path, "def broken(:\n", "later.py")
    expected = python("train.py", cwd=tmp_path)
    ended = ddp_launch("train.py", cwd=tmp_path, options=options, env=light)
    assert ended.code == expected.code == 1
    assert ended.err.startswith(expected.err)
