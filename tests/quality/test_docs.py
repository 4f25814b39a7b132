"""What the documents say is there, is there."""

from __future__ import annotations

import ast
import functools
import re
import runpy
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import tidy
from tidy import ROOT

import _ddp_launch_entry as doors
from ddp_launch_wings.plan.command import parser as scaling_plan
from launcher import manual
from launcher.settings import usage
from launcher.settings.options import OPTIONS
from rendezvous.control.commands import parser as ddpctl
from rendezvous.service.settings import SETTINGS
from rendezvous.values import contracts

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("[a-z]*/README.md")])


def targets():
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def broken_links(page, text):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    return [link for link in links if "://" not in link and not (page.parent / link).exists()]


def unknown_commands(text):
    """`make x` where it is a command: in backticks, or at the start of a line of a code block."""
    quoted = re.findall(r"`make ([a-z-]+)`", text)
    blocks = "".join(re.findall(r"```\n(.*?)```", text, re.DOTALL))
    return {*quoted, *re.findall(r"^make ([a-z-]+)", blocks, re.MULTILINE)} - targets()


@functools.cache
def options_of_the_service():
    """As `ddp-rendezvous`, `ddpctl` and `ddp-launch plan` explain themselves."""
    helps = [
        subprocess.run(
            [sys.executable, "-m", "rendezvous.main", word, "--help"], capture_output=True, text=True
        ).stdout
        for word in ("serve", "token")
    ]
    (commands,) = (each.choices for each in ddpctl()._actions if isinstance(each.choices, dict))
    helps += [command.format_help() for command in (*commands.values(), scaling_plan())]
    assert all(helps)
    return set(re.findall(r"--[a-z][a-z-]+", "".join(helps)))


OTHERS_PROGRAMS = (
    "apt-get|pip|docker|kubectl|systemctl|helm |srun|squeue|#SBATCH|"
    "etcdctl|etcdutl|nvidia-smi|bench/|ruff|mypy|pytest"
)


def unknown_options(text):
    """Flags of ours that a page names; those of other programs stand in lines that name these."""
    lines = [line for line in text.splitlines() if not re.search(OTHERS_PROGRAMS, line)]
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", "\n".join(lines)))
    known = {spelling for option in OPTIONS for spelling in option.spellings} | options_of_the_service()
    commands = [
        *(ROOT / "bench").glob("*.py"),
        ROOT / "ddp_launch_wings" / "inspection" / "elastic_command.py",
        ROOT / "ddp_launch_wings" / "rehearse" / "rehearsal.py",
    ]
    known |= set(re.findall(r'"(--[a-z][a-z-]+)"', "".join(path.read_text() for path in commands)))
    known |= set(doors.names(doors.COMMAND))
    return named - known - {"--epochs", "--checkpoint", "--metrics", "--lr"}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_commands_and_options_exist(page):
    text = page.read_text()
    assert not broken_links(page, text)
    assert not unknown_commands(text)
    assert not unknown_options(text)


def texts_of_messages():
    """String constants of the packages that are not docstrings."""
    for module in (each for each in tidy.modules() if "docs" in each.source):
        documented = {
            id(node.body[0].value)
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                yield node.value


def test_pages_that_messages_name_are_installed():
    """A message may come from another node, and a wheel has no checkout: it names a page for `ddp-launch docs`."""
    found = [text for text in texts_of_messages() if "docs" in text]
    named = {name for text in found for name in re.findall(r"ddp-launch docs ([a-z][a-z-]+)", text)}
    assert "hangs" in named
    assert named <= set(manual.names())
    assert [text for text in found if re.search(r"docs/[\w-]+\.md", text)] == []


def test_options_page_is_made_from_the_table():
    """On the site; the repository has its head only, because `--help all` prints the same texts."""
    source = runpy.run_path(str(ROOT / "docs" / "options.py"))
    made = source["page"]()
    assert (ROOT / "docs" / "options.md").read_text() == source["HEAD"], "run `make options`"
    for option in OPTIONS:
        assert all(f"`{spelling}`" in made for spelling in option.spellings)
        rule = f"DDP_LAUNCH_{option.spellings[0].lstrip('-').replace('-', '_').upper()}"
        assert option.variables in ((), (rule,), (rule, rule.replace("DDP_LAUNCH", "PET"))), (
            "as the page says"
        )


def test_exit_codes_are_those_of_the_command():
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    names = re.findall(r"\b[A-Z_]{5,}\b", (ROOT / "rendezvous/control/ctl.py").read_text())
    ours = {str(code) for name in names if type(code := getattr(contracts, name, None)) is int}
    shown = re.findall(r"^\| (\d+) \| (?!-)", page, re.MULTILINE)
    assert ours | {"0", "1"} == set(shown)
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    shown = re.findall(
        r"^  (\d+|N) +(.*(?:\n {8}.*)*)", usage.help_text(200).partition("Exit codes:")[2], re.MULTILINE
    )
    assert len(shown) == 9
    for code, meaning in shown:
        assert rows[code] == meaning.partition("; 128+S")[0]


def test_diagrams_are_committed_pictures_that_are_shown():
    """The site shows a diagram in mermaid as its source, since nothing on it is loaded from elsewhere."""
    pages = {page: page.read_text() for page in PAGES}
    assert [page for page, text in pages.items() if "```mermaid" in text] == []
    shown = "".join(pages.values())
    for picture in (ROOT / "docs" / "img").glob("*.svg"):
        assert f"img/{picture.name})" in shown, picture
        root = ElementTree.parse(picture).getroot()
        assert root.find("{http://www.w3.org/2000/svg}title") is not None, picture


def test_every_decision_has_its_number():
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [int(page.name.partition("-")[0]) for page in pages]
    assert len(set(numbers)) == len(numbers) > 10
    for number, page in zip(numbers, pages, strict=True):
        assert page.name.startswith(f"{number:04d}-")
        assert page.read_text().startswith(f"# {number}. ")


def test_what_happens_by_itself_is_on_its_page():
    """Each option with a default that acts. Those of `ddpctl` concern its own command."""
    page = (ROOT / "docs/decisions/0030-what-happens-by-itself.md").read_text()
    service = {each.flag for each in SETTINGS if type(each.default) is int or type(each.default) is float}
    acting = {each.flag for each in OPTIONS if each.default not in (None, "", "0", "off")} | service
    assert {each for each in acting if f"`{each}" not in page} == set()
    assert {"--collapse", "--max-jobs"} <= acting


def test_what_the_ci_runs_is_make_test():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if re.search(r"\bmake\b", line)] == ["exec make test"]
    assert {"demo", "test", "install", "quick", "lint", "types", "nightly"} <= targets()
    plan = subprocess.run([shutil.which("make"), "-n", "test"], cwd=ROOT, capture_output=True, text=True)
    assert plan.returncode == 0, plan.stderr


def test_the_checks_can_fail():
    page = ROOT / "README.md"
    assert broken_links(page, "see [this](docs/nowhere.md)")
    assert unknown_commands("say `make coffee`")
    assert unknown_commands("```\nmake coffee  # hot\n```")
    assert unknown_options("`--no-such-flag`")
