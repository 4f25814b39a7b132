"""Runs one script under `python`, torchrun and ddp-launch, so that a test can hold the results side by side."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROGRAMS = Path(__file__).parent / "programs"
_BIN = Path(sys.executable).parent  # started as this interpreter: an installer may choose another name of it
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "SSL_CERT_FILE")
_TIMEOUT_S = 200

# What the agent finds wrong with the machine (a slow disk, little memory) is said under any script.
_OF_THE_MACHINE = re.compile(
    rf"^ddp-launch: (?:pre-flight|{re.escape(socket.gethostname())}(?:#\d+)?): .*\n", re.M
)

WARM: tuple[str, ...] = ()
PLAIN = ("--no-warm-start",)


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    def ok(self) -> Ended:
        assert self.code == 0, f"exit code {self.code}\n{self.out}\n{self.err}"
        return self


def clean_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a user's shell would hand on, whatever this test run itself was started with."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ} | dict(extra or {})


def run(
    words: Sequence[str | Path], cwd: Path, env: Mapping[str, str] | None = None, stdin: str = ""
) -> Ended:
    with open(os.devnull) as left_open:  # as shells and job systems do
        done = subprocess.run(
            [str(word) for word in words],
            cwd=cwd,
            env=clean_env(env),
            input=stdin.encode(),
            capture_output=True,
            timeout=_TIMEOUT_S,
            pass_fds=(left_open.fileno(),),
        )
    return Ended(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def python(*words: str | Path, cwd: Path, env: Mapping[str, str] | None = None, stdin: str = "") -> Ended:
    return run([sys.executable, "-u", *words], cwd, env, stdin)


def torchrun(
    *words: str | Path,
    cwd: Path,
    nproc: int = 1,
    options: Sequence[str] = ("--standalone",),
    env: Mapping[str, str] | None = None,
) -> Ended:
    return run(
        [sys.executable, _BIN / "torchrun", "--nproc-per-node", str(nproc), *options, *words], cwd, env
    )


def ddp_launch(
    *words: str | Path,
    cwd: Path,
    nproc: int = 1,
    options: Sequence[str] = WARM,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
) -> Ended:
    """Without prefixes and words about the machine, so that what one rank wrote can be compared to the letter."""
    command = [
        sys.executable,
        _BIN / "ddp-launch",
        "--nproc-per-node",
        str(nproc),
        "--log-prefix",
        "",
        *options,
        *words,
    ]
    ended = run(command, cwd, env, stdin)
    return replace(ended, err=_OF_THE_MACHINE.sub("", ended.err))


def warm(*words: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> Ended:
    """`ddp-launch warm`."""
    return run([sys.executable, _BIN / "ddp-launch", "warm", *words], cwd, env)


def written(folder: Path, stem: str, rank: int = 0) -> Any:
    """What a program left in `stem.RANK.json`."""
    return json.loads((folder / f"{stem}.{rank}.json").read_text())


def program(name: str, folder: Path) -> Path:
    """A copy of one of our programs, alone in its folder as a user's script would be."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(PROGRAMS / name, folder / name))


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path
