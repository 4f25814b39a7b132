"""The streams of a rank that was forked are those of a new interpreter, also if the zygote's were of another kind."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import os, sys
from launcher.template import loop
out, into = os.pipe()
os.dup2(into, 1)
before = repr(sys.stdout), repr(sys.stdout.buffer), sys.stdout.line_buffering, sys.stdout.write_through
loop.renew_streams()
sys.stdout.reconfigure(encoding="latin-1")
print("\u00e9")
assert os.read(out, 9) == b"\\xe9\\n"
sys.stdout.reconfigure(encoding="utf-8")
assert before == (repr(sys.stdout), repr(sys.stdout.buffer), sys.stdout.line_buffering, sys.stdout.write_through)
assert sys.stdout is sys.__stdout__ and not sys.stdout.seekable() and sys.stderr.seekable()
"""


def test_a_rank_writes_to_a_pipe_although_the_output_of_the_command_is_a_file(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        words = [sys.executable, "-u", "-X", "utf8", "-c", PROGRAM]
        code = subprocess.run(words, stdout=out, stderr=err, timeout=60, check=False).returncode
    assert code == 0, (tmp_path / "err").read_text()
