"""Completion in real shells: what is offered after some words, for each of our commands."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from launcher.cli import main as ddp_launch
from rendezvous.coded_parser import SHELLS
from rendezvous.control.ctl import main as ddpctl
from rendezvous.main import main as ddp_rendezvous

if TYPE_CHECKING:
    from pathlib import Path

MAINS = {"ddp-launch": ddp_launch, "ddpctl": ddpctl, "ddp-rendezvous": ddp_rendezvous}

CASES = [
    ("ddpctl", ["ddpctl", "to"], {"top"}),
    ("ddpctl", ["ddpctl", "-o", "json", "to"], {"top"}),
    ("ddpctl", ["ddpctl", "top", "--so"], {"--sort"}),
    ("ddpctl", ["ddpctl", "top", "ll"], {"llama"}),
    ("ddpctl", ["ddpctl", "top", "--sort", "gp"], {"gpu", "gpu-memory"}),
    ("ddpctl", ["ddpctl", "completion", "fi"], {"fish"}),
    ("ddpctl", ["ddpctl", "-o", "y"], {"yaml"}),
    ("ddp-rendezvous", ["ddp-rendezvous", "ser"], {"serve"}),
    ("ddp-rendezvous", ["ddp-rendezvous", "serve", "--list"], {"--listen"}),
    ("ddp-launch", ["ddp-launch", "doc"], {"doctor", "docs"}),
    ("ddp-launch", ["ddp-launch", "--standal"], {"--standalone"}),
    ("ddp-launch", ["ddp-launch", "--max-restarts", "3", "--standal"], {"--standalone"}),
    ("ddp-launch", ["ddp-launch", "docs", "exit"], {"exit-codes"}),
]


@pytest.fixture(autouse=True)
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ddpctl list`, which the scripts ask for the ids of jobs."""
    program = tmp_path / "ddpctl"
    program.write_text("#!/bin/sh\nprintf 'JOB    PHASE\\nllama  running\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def script_of(name: str, shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert MAINS[name](["completion", shell]) == 0
    return capsys.readouterr().out


def offered(shell: str, name: str, words: list[str], script: str) -> set[str]:
    if shell == "bash":
        function = f"_{name.replace('-', '_')}_completion"
        array = " ".join(f"'{word}'" for word in words)
        text = f"{script}\nCOMP_WORDS=({array}); COMP_CWORD={len(words) - 1}\n{function}\n"
        command = ["bash", "-c", text + 'printf "%s\\n" "${COMPREPLY[@]}"']
    else:
        command = ["fish", "--no-config", "-c", f"{script}\ncomplete -C '{' '.join(words)}'"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return {line.split("\t")[0] for line in done.stdout.splitlines()}


@pytest.mark.parametrize("shell", ["bash", "fish"])
@pytest.mark.parametrize(("name", "words", "wanted"), CASES, ids=[" ".join(words) for _, words, _ in CASES])
def test_a_shell_offers_what_can_follow(
    shell: str, name: str, words: list[str], wanted: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    found = offered(shell, name, words, script_of(name, shell, capsys))
    assert wanted <= found
    assert all(word.startswith(words[-1]) for word in found)


def test_arguments_of_a_script_are_not_options_of_the_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["ddp-launch", "train.py", "--standal"]
    assert offered("bash", "ddp-launch", words, script_of("ddp-launch", "bash", capsys)) <= {""}


@pytest.mark.parametrize("name", MAINS)
def test_zsh_accepts_its_script(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("no zsh")
    begin, end = "autoload -Uz compinit; compinit -D -u", f"print ${{_comps[{name}]}}"
    text = "\n".join((begin, script_of(name, "zsh", capsys), end))
    done = subprocess.run(["zsh", "-f", "-c", text], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == f"_{name.replace('-', '_')}_completion"


@pytest.mark.parametrize(
    ("name", "typed", "wanted"),
    [
        ("ddpctl", "ddpctl to", "ddpctl top"),
        ("ddpctl", "ddpctl top ll", "ddpctl top llama"),
        ("ddpctl", "ddpctl top --sort gpu-", "ddpctl top --sort gpu-memory"),
        ("ddp-launch", "ddp-launch --standal", "ddp-launch --standalone"),
        ("ddp-launch", "ddp-launch completion fi", "ddp-launch completion fish"),
    ],
)
def test_tcsh_completes(
    name: str, typed: str, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("tcsh") is None:
        pytest.skip("no tcsh")
    script = tmp_path / "completion.tcsh"
    script.write_text(script_of(name, "tcsh", capsys) + "\n")
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "vt100", "HOME": str(tmp_path)}
    shell = subprocess.Popen(
        ["setsid", "--ctty", "tcsh", "-f"], stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=tmp_path
    )
    try:
        os.write(ours, f"set prompt='ready> '; source {script}; echo so''urced\n".encode())
        wait_for(ours, "sourced\nready> ")
        os.write(ours, f"{typed}\t".encode())
        wait_for(ours, wanted)
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)
        os.close(theirs)


def wait_for(terminal: int, text: str) -> None:
    seen, deadline = "", time.monotonic() + 60
    while text not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, seen
        seen += os.read(terminal, 4096).decode(errors="replace").replace("\r", "")


@pytest.mark.parametrize("name", MAINS)
def test_an_unknown_shell_is_refused_with_the_known_ones(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = MAINS[name](["completion", "ksh"])
    except SystemExit as error:  # argparse
        code = error.code  # type: ignore[assignment]
    err = capsys.readouterr().err
    assert (code, all(shell in err for shell in SHELLS)) == (2, True)
