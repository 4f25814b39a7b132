"""Runs random programs under torch's DDP and under ours, and says where the two differ.

    python tests/differential/differ.py --cases 20000
    python tests/differential/differ.py --seed 4711 [--keep 0,2 --without local,touch]

A case follows from its seed. What differs is tried again with more patience, because a busy machine may make a rank
look stuck. Then it is shrunk: operations and their details are left out as long as the two still differ.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from differences import Difference, differences
from drawn_program import draw
from rank_crew import Crew, Stuck

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from drawn_program import Program

PATIENCE_S = 3.0
_MOST_TRIALS = 60


@dataclass(frozen=True)
class Outcome:
    found: tuple[Difference, ...]
    compared: bool  # torch's class has completed the program, or raised

    @property
    def new(self) -> list[Difference]:
        return [each for each in self.found if not each.page]


class Pairs:
    """A crew under each class, for each size of the world. `kind`: of the second crew."""

    def __init__(self, kind: str = "ours") -> None:
        self._kind = kind
        self._crews: dict[tuple[str, int], Crew] = {}

    def _crew(self, kind: str, world: int) -> Crew:
        if (kind, world) not in self._crews:
            self._crews[kind, world] = Crew(kind, world)
        return self._crews[kind, world]

    def compare(self, program: Program, patience: float = PATIENCE_S) -> Outcome:
        torchs, ours = self._crew("torch", program.world), self._crew(self._kind, program.world)
        torchs.begin(program)
        ours.begin(program)
        seen = torchs.end(patience)
        found = differences(program, seen, ours.end(patience))
        return Outcome(tuple(found), not any(isinstance(each, Stuck) for each in seen))

    def confirm(self, program: Program) -> Outcome:
        """Compare once more, and with patience: a rank may just have been slow."""
        outcome = self.compare(program)
        return self.compare(program, 5 * PATIENCE_S) if outcome.new else outcome

    def close(self) -> None:
        for crew in self._crews.values():
            crew.close()


def shrunk(pairs: Pairs, program: Program) -> tuple[list[int], list[str]]:
    """-> the operations that are kept, and the details that no operation has."""
    kept, without, trials = list(range(len(program.ops))), [], 0
    chances = [("op", i) for i in reversed(kept)]
    chances += [("detail", name) for name in sorted({name for op in program.ops for name in op} - _NEEDED)]
    for what, which in chances:
        less = [i for i in kept if (what, i) != ("op", which)]
        more = [*without, which] if what == "detail" else without
        trials += 1
        if trials <= _MOST_TRIALS and pairs.compare(reduced(program, less, more)).new:
            kept, without = less, more
    return kept, without


_NEEDED = {"kind", "layers", "how", "ranks", "rank", "of", "kept", "inputs", "initial", "train"}


def reduced(program: Program, kept: Iterable[int], without: Sequence[str]) -> Program:
    ops = tuple({k: v for k, v in program.ops[i].items() if k not in without} for i in kept)
    return replace(program, ops=ops)


def run(
    pairs: Pairs, seeds: Iterable[int], shrinks: bool, on_page: dict[str, list[int]] | None = None
) -> list[str]:
    """-> what differs and is not on the page, with the command that repeats it. `on_page` gets the other seeds."""
    reports = []
    for seed in seeds:
        program = draw(seed)
        outcome = pairs.compare(program)
        if on_page is not None:
            for words in {each.page for each in outcome.found if each.page}:
                on_page.setdefault(words, []).append(seed)
        if not outcome.new or not (outcome := pairs.confirm(program)).new:
            continue
        kept, without = shrunk(pairs, program) if shrinks else (range(len(program.ops)), [])
        small = reduced(program, kept, without)
        outcome = pairs.compare(small)
        reports.append(report(small, outcome, command(seed, kept, without)))
        print(reports[-1], flush=True)
    return reports


def command(seed: int, kept: Iterable[int], without: Sequence[str]) -> str:
    less = f" --without {','.join(without)}" if without else ""
    return f"python tests/differential/differ.py --seed {seed} --keep {','.join(map(str, kept))}{less}"


def report(program: Program, outcome: Outcome, how: str) -> str:
    options = {name: value for name, value in program.options.items() if value}
    about = f"{program.world} ranks, {program.backend}, {program.dtype}, {options}"
    about += "".join(
        f", {name}" for name in ("wild", "shared", "in_backward", "hook") if getattr(program, name)
    )
    layers = " ".join(
        f"{each.kind}{'' if each.trained else '(frozen)'}{'(sparse)' if each.sparse else ''}"
        for each in program.layers
    )
    ops = "\n".join(f"  {i}: {op}" for i, op in enumerate(program.ops))
    differs = "\n".join(f"- {each}" for each in outcome.found)
    return f"{how}\n  {about}; {program.wrappers} wrapper(s) of {layers}\n{ops}\n{differs}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, help="run this case only, and show it")
    parser.add_argument("--keep", help="with --seed: the operations to run, for example 0,2")
    parser.add_argument("--without", default="", help="with --seed: details to leave out of all operations")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--no-shrink", action="store_true", help="show what differs as it was drawn")
    parser.add_argument(
        "--against", default="ours", choices=["ours", "again"], help="again: torch's class twice"
    )
    chosen = parser.parse_args()
    pairs, began = Pairs(chosen.against), time.monotonic()
    try:
        if chosen.seed is not None:
            return show(pairs, chosen)
        seeds, on_page = range(chosen.start, chosen.start + chosen.cases), dict[str, list[int]]()
        reports = run(pairs, seeds, not chosen.no_shrink, on_page)
    finally:
        pairs.close()
    took = time.monotonic() - began
    rate = chosen.cases / took
    for words, of in sorted(on_page.items()):
        print(f"on the page, {len(of)} cases: {words} (seeds {', '.join(map(str, of[:5]))})")
    print(
        f"{chosen.cases} cases, {len(reports)} differ; {took:.0f} s, {rate:.1f} cases/s, {os.cpu_count()} CPUs"
    )
    return int(bool(reports))


def show(pairs: Pairs, chosen: argparse.Namespace) -> int:
    program = draw(chosen.seed)
    kept = [int(i) for i in chosen.keep.split(",")] if chosen.keep else range(len(program.ops))
    without = chosen.without.split(",")
    outcome = pairs.confirm(small := reduced(program, kept, without))
    print(report(small, outcome, command(chosen.seed, kept, [each for each in without if each])))
    if not outcome.compared:
        print("under torch's class, ranks wait for each other for ever: nothing to compare")
    return int(bool(outcome.new))


if __name__ == "__main__":
    raise SystemExit(main())
