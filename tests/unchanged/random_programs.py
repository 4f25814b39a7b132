"""A small random program from a seed: its source, the flags of its launch, and what it finds on standard input.

Each program does the same in every run. Ranks that write to the same stream take turns, and a rank fails only when its
peers have reached the place where they wait; so whatever differs between two launchers comes from the launchers.
"""

from __future__ import annotations

import hashlib
import random
import textwrap
from dataclasses import dataclass, field

import endings
import pieces
from pieces import Piece

HEAD = """\
import os, sys, time
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HERE, TRY = os.environ["HERE"], os.environ["TORCHELASTIC_RESTART_COUNT"]
def told(name="end"):
    with open(f"{HERE}/met.{name}.{TRY}.{RANK}.part", "w") as file: file.write(str(os.getpid()))
    os.rename(file.name, file.name[:-5])
def my_turn(number):
    path = f"{HERE}/met.{number}.{TRY}.{RANK - 1}" if RANK else f"{HERE}/met.{number - 1}.{TRY}.{WORLD - 1}"
    while (RANK or number > 1) and not os.path.exists(path): time.sleep(0.005)
def others(leave=False):
    for each in range(WORLD):
        path = f"{HERE}/met.end.{TRY}.{each}"
        while each != RANK and not os.path.exists(path): time.sleep(0.005)
        if leave and each != RANK:
            with open(path) as file: pid = file.read()
            while os.path.exists(f"/proc/{pid}"): time.sleep(0.005)
"""
_WORDS = (
    "amber birch cedar delta ember fjord grove heron inlet jetty kelp larch maple north ochre pine".split()
)
_PYTHON = (
    "PYTHONWARNINGS=always PYTHONHASHSEED=0 LC_ALL=C PYTHONDEVMODE=1 PYTHONUTF8=0 PYTHONIOENCODING=latin-1:replace "
    "PYTHONDONTWRITEBYTECODE=1 PYTHONFAULTHANDLER=1 PYTHONOPTIMIZE=1 PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1 LANG=xx_XX "
    "PYTHONTRACEMALLOC=1 PYTHONMALLOC=debug PYTHONCOERCECLOCALE=0 TZ=Asia/Tokyo"
).split()
_ENTRIES = ("train.py",) * 6 + (
    "./train.py",
    "src/train.py",
    "-m train",
    "-m pack.train",
    "--no-python ./train.py",
)
_STREAMS = ("", "", "", "-t 3", "-t 3", "-r 3", "-r 1", "-t 2", "-r 0:3", "-t 1 -r 2", "-t 0:1")


@dataclass(frozen=True)
class Program:
    seed: int
    source: str
    nproc: int
    flags: tuple[str, ...]  # those of the launch, for both launchers
    entry: tuple[str, ...]  # flags of the entry point, and its path
    arguments: tuple[str, ...]
    stdin: str | None  # None: /dev/null
    env: dict[str, str] = field(default_factory=dict)
    is_warm: bool = True
    is_piped: bool = False
    needs_torch: bool = False

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    @property
    def path(self) -> str:
        last = self.entry[-1]
        return f"{last.replace('.', '/')}.py" if self.entry[0] == "-m" else last


def program(seed: int, torch: bool | None = None) -> Program:
    """`torch`: whether it may use torch; by default, one of eight may."""
    draw = random.Random(seed)
    uses_torch = draw.random() < 0.125 if torch is None else torch
    return _Writer(draw, seed, uses_torch).program()


class _Writer:
    def __init__(self, draw: random.Random, seed: int, torch: bool) -> None:
        self.draw, self.seed, self.torch = draw, seed, torch
        self.nproc = draw.choice((1, 2, 2, 2, 3))
        self.streams = draw.choice(("-t 3", "-r 3") if torch else _STREAMS)
        self.entry = draw.choice(_ENTRIES).split()
        self.is_warm = draw.random() < 0.8
        self.turns = 0
        # Where all ranks write to one stream, their lines would run into each other: they take turns.
        self.shares_streams = self.streams not in ("-r 3", "-t 3")

    def program(self) -> Program:
        draw = self.draw
        chosen = self._body()
        is_main = any(piece in pieces.SPAWNING for piece in chosen) or draw.random() < 0.3
        # A store that torchrun keeps over a restart is at times still at an address of the ranks before.
        restarts = 0 if self.torch else draw.choice((0, 0, 0, 1, 2))
        body = "\n".join([*map(self._placed, chosen), self._end(restarts)])
        if is_main:
            guard = draw.choice(
                ('if __name__ == "__main__":\n    main()', 'if __name__ == "__main__": main()')
            )
            body = f"def main():\n{textwrap.indent(body, '    ')}\n{guard}"
        flags = [*self.streams.split(), *(("--max-restarts", str(restarts)) if restarts else ())]
        name, _, value = draw.choice(_PYTHON).partition("=")
        env = {name: value} if draw.random() < 0.2 else {}
        if self.entry[0] == "-m":
            env.pop("PYTHONSAFEPATH", None)  # no rank finds its module, and any of them is the first to fail
        return Program(
            self.seed,
            f"{HEAD}{body}\n",
            self.nproc,
            tuple(flags),
            tuple(self.entry),
            draw.choice(((), (), ("--lr", "0.1"), ("a b", "", "é", "-x"))),
            draw.choice((None, None, "one\ntwo\n", "")),
            env,
            self.is_warm,
            is_piped=draw.random() < 0.3,
            needs_torch=self.torch,
        )

    def _body(self) -> list[Piece]:
        draw = self.draw
        kinds = [pieces.OUTPUT] * 3 + [pieces.FACTS] * 3 + [pieces.CHILDREN] * 2
        kinds += [pieces.THREADS, pieces.SIGNALS, *[pieces.FILES] * 2, pieces.SPAWNING]
        kinds += [] if self.torch else [pieces.FACTS_BESIDE_TORCH]
        chosen = [draw.choice(draw.choice(kinds)) for _ in range(draw.randint(1, 4))]
        if self.torch and draw.random() < 0.8:
            chosen.insert(draw.randint(0, len(chosen)), draw.choice(pieces.TORCH + pieces.STORE))
        if self.streams == "-r 3" and draw.random() < 0.5:
            chosen.append(draw.choice(pieces.PARTIAL))
        if draw.random() < 0.12:
            chosen.append(draw.choice(pieces.CLOSING))
        return chosen

    def _placed(self, piece: Piece) -> str:
        """In all ranks, or in one; in turn, where ranks share a stream."""
        text = self._worded(piece.text)
        if piece.needs_torch or piece.is_alone or self.nproc == 1:
            return text
        only = self.draw.randrange(self.nproc) if self.draw.random() < 0.3 else None
        if only is not None:
            text = f"if RANK == {only}:\n{textwrap.indent(text, '    ')}"
        if not self.shares_streams:
            return text
        self.turns += 1
        return f"my_turn({self.turns})\n{text}\ntold({self.turns})"

    def _worded(self, text: str) -> str:
        return text.replace("WORD", self.draw.choice(_WORDS))

    # --- the end -------------------------------------------------------------------------------------

    def _end(self, restarts: int) -> str:
        draw = self.draw
        if draw.random() < 0.4:
            return self._all_end_well()
        if restarts and draw.random() < 0.7:
            failing = textwrap.indent(self._one_fails(), "    ")
            ended = textwrap.indent(self._all_end_well(), "    ")
            return f"if int(TRY) < {draw.randint(1, restarts)}:\n{failing}\nelse:\n{ended}"
        return self._one_fails()

    def _all_end_well(self) -> str:
        """One after the other, since their last words may share a stream."""
        is_of_torch = self.torch and self.draw.random() < 0.2
        text = self._worded(self.draw.choice(endings.WELL_WITH_TORCH if is_of_torch else endings.WELL))
        wait = "others(leave=True)" if self.nproc > 1 else ""
        if not wait or not self.shares_streams:
            return text
        only = self.draw.randrange(self.nproc)
        return f"if RANK == {only}:\n    {wait}\n{textwrap.indent(text, '    ')}\nelse:\n    told()"

    def _one_fails(self) -> str:
        draw = self.draw
        texts = endings.BADLY_WITH_TORCH if self.torch and draw.random() < 0.3 else endings.BADLY
        text = self._worded(draw.choice(texts))
        if self.nproc == 1:
            return text
        # The last words of several ranks would run into each other, also behind a line without an end.
        is_loud = not (self.shares_streams and self.nproc > 2) and text.count("stderr.write") == 0
        ways = endings.PEERS + (endings.LOUD_PEERS if is_loud else ())
        peers = self._worded(draw.choice(ways))
        leave = peers == "LEAVES"
        if leave:
            peers = "told()"
        elif "told()" not in peers:
            peers = f"told()\n{peers}"
        bad = draw.randrange(self.nproc)
        wait = f"others(leave={leave})"
        return (
            f"if RANK == {bad}:\n    {wait}\n{textwrap.indent(text, '    ')}\n"
            f"else:\n{textwrap.indent(peers, '    ')}"
        )
