"""Runs programs in a pseudo-terminal, and draws the content of that terminal.

    python examples/capture.py              # docs/img/demo.svg: `make demo`
    python examples/capture.py box          # docs/img/box.svg: a job that fails

The terminal implements only what the demo and ddp-launch use: new lines, carriage returns, erasing a row, colours. It
rejects everything else, so the picture shows exactly what was printed.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
import termios
import unicodedata
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
ROWS, COLUMNS = 40, 112
CELL_W, CELL_H, MARGIN = 8.4, 19, 16
BACKGROUND, FOREGROUND = "#16181d", "#d5d8de"
COLORS = {31: "#f0716b", 32: "#7bc77e", 33: "#e2b55a", 34: "#6ea8fe", 35: "#c792ea", 36: "#5cc8d7"}
SEQUENCE = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])|\r|\n|[^\x00-\x1f]")


@dataclass(frozen=True)
class Style:
    color: str = FOREGROUND
    bold: bool = False
    dim: bool = False

    def changed(self, code: int) -> Style:
        match code:
            case 0:
                return Style()
            case 1:
                return Style(self.color, True, self.dim)
            case 2:
                return Style(self.color, self.bold, True)
            case _:
                return Style(COLORS[code], self.bold, self.dim)

    def attributes(self) -> str:
        weight = ' font-weight="bold"' if self.bold else ""
        return f'fill="{self.color}"{weight}' + (' opacity="0.6"' if self.dim else "")


@dataclass
class Screen:
    """Rows of cells. It grows downwards, as the history of a terminal does."""

    rows: list[list[tuple[str, Style]]] = field(default_factory=lambda: [[]])
    column: int = 0
    style: Style = Style()

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            found = SEQUENCE.match(text, at)
            if found is None:
                raise ValueError(f"unknown to this terminal: {text[at : at + 12]!r}")
            self._apply(found)
            at = found.end()

    def _apply(self, found: re.Match[str]) -> None:
        if found[0] == "\n":
            self.rows.append([])
        elif found[0] == "\r":
            self.column = 0
        elif found[2] == "K":
            del self.rows[-1][self.column :]
        elif found[2] == "m":
            for code in (found[1] or "0").split(";"):
                self.style = self.style.changed(int(code))
        elif found[2]:
            raise ValueError(f"unknown to this terminal: {found[0]!r}")
        else:
            self._put(found[0])

    def _put(self, character: str) -> None:
        if unicodedata.east_asian_width(character) in "WF":
            raise ValueError(f"this terminal has no wide characters: {character!r}")
        if self.column == COLUMNS:
            self.rows.append([])
            self.column = 0
        row = self.rows[-1]
        row += [(" ", Style())] * (self.column - len(row))
        row[self.column : self.column + 1] = [(character, self.style)]
        self.column += 1


def record(argv: list[str], cwd: Path = ROOT, exit_code: int = 0) -> str:
    """Run the program, and return what it wrote to its terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (ROWS, COLUMNS))
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    job = subprocess.Popen(
        argv, stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, env=os.environ | {"PATH": path}
    )
    os.close(theirs)
    pieces = []
    while True:
        try:
            pieces.append(os.read(ours, 1 << 16))
        except OSError:  # EIO: no process has the terminal open any more
            break
    os.close(ours)
    if job.wait() != exit_code:
        sys.exit(f"{argv} ended with exit code {job.returncode}")
    return b"".join(pieces).decode()


def svg(screen: Screen, title: str) -> str:
    width = 2 * MARGIN + COLUMNS * CELL_W
    height = 2 * MARGIN + len(screen.rows) * CELL_H
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
        '<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace" '
        'font-size="14" xml:space="preserve">',
    ]
    for number, row in enumerate(screen.rows):
        y = MARGIN + (number + 0.75) * CELL_H
        parts += (_run(cells, y) for cells in _runs(row))
    return "\n".join([*(part for part in parts if part), "</g>", "</svg>", ""])


def _runs(row: list[tuple[str, Style]]) -> list[tuple[int, str, Style]]:
    runs, column = [], 0
    for style, cells in groupby(row, key=lambda cell: cell[1]):
        text = "".join(character for character, _ in cells)
        runs.append((column, text, style))
        column += len(text)
    return runs


def _run(run: tuple[int, str, Style], y: float) -> str:
    column, text, style = run
    if not text.strip():
        return ""
    x, length = MARGIN + column * CELL_W, len(text) * CELL_W
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" textLength="{length:.1f}" {style.attributes()}>{escape(text)}</text>'
    )


FAILS = """
import torch
import torch.distributed as dist

def load(step):
    if rank == 1 and step == 60:
        raise ValueError("samples/0060.pt has 48 features, and the model expects 64")
    return torch.randn(32, 64)

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 1))
for step in range(1, 101):
    model(load(step)).sum().backward()
    if rank == 0 and step % 25 == 0:
        print("step", step, flush=True)
"""


def demo() -> tuple[str, str]:
    """What the terminal shows, and the title of the picture."""
    shown = "$ make demo\r\n" + record(["make", "-s", "demo"])
    return shown, "make demo: a rank is killed half-way, and the job recovers"


def box() -> tuple[str, str]:
    words = "ddp-launch --nproc-per-node 2 --progress never -r 2 train.py"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(FAILS)
        shown = record(words.split(), Path(folder), exit_code=1).replace(f"{folder}/", "")
    return f"$ {words}\r\n{shown}", "A job fails: a box names the rank that failed first, and the reason"


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "demo"
    shown, title = {"demo": demo, "box": box}[name]()
    screen = Screen()
    screen.feed(shown)
    while screen.rows and not screen.rows[-1]:
        screen.rows.pop()
    (ROOT / "docs" / "img" / f"{name}.svg").write_text(svg(screen, title))


if __name__ == "__main__":
    main()
