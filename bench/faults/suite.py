"""All cases, several at a time: `python bench/faults/suite.py [NAME ...] [--jobs N] [--recover HOW] [--write-docs]`."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(_ROOT / "tests" / folder) for folder in ("shell", "lab")] + [
    str(_ROOT),
    str(_ROOT / "bench"),
]

import fault_table  # noqa: E402
from deaths import DEATHS  # noqa: E402
from fault_play import JOBS_AT_ONCE, LENIENT, Played, play  # noqa: E402
from hangs import HANGS  # noqa: E402
from nccl_cases import NCCL  # noqa: E402
from networks import NETWORKS  # noqa: E402
from nodes import NODES  # noqa: E402

CASES = (*DEATHS, *HANGS, *NODES, *NETWORKS, *NCCL)
HOW = {"restart": False, "in-place": True}
# Those that `make test` plays. `make nightly` plays the others, `make faults` all of them.
QUICK = frozenset(("killed-ours-shm", "stopped-two-nodes"))


def _show(played: Played) -> None:
    in_time = played.is_in_time or played.in_place  # the limits are those of restarts
    good = (
        played.is_right and not played.replay and in_time and (played.keeps_survivors or not played.in_place)
    )
    mark = "skip" if played.skipped else "ok" if good else "WRONG"
    how = "in place" if played.in_place else "restart"
    print(
        mark,
        played.case.name,
        how,
        sorted(played.kept),
        played.took_s,
        played.step_s,
        played.verdict,
        flush=True,
    )
    if mark == "WRONG":
        print(played, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of cases; default: all")
    parser.add_argument("--part", metavar="N/OF", help="every OFth case, beginning with the Nth")
    parser.add_argument("--jobs", type=int, default=JOBS_AT_ONCE)
    parser.add_argument("--recover", choices=[*HOW, "both"], default="both", help="default: both, in turns")
    parser.add_argument("--write-docs", action="store_true", help="put what was found into docs/faults.md")
    asked = parser.parse_args()
    from shown import machine  # of bench, which is on the path of this script alone

    chosen = [case for case in CASES if not asked.names or case.name in asked.names]
    if asked.part:
        number, of = map(int, asked.part.split("/"))
        chosen = chosen[number - 1 :: of]
    ways = [HOW[asked.recover]] if asked.recover in HOW else list(HOW.values())
    plays = [(case, way) for case in chosen for way in ways if case.is_played_in_place or not way]
    found = []
    with ThreadPoolExecutor(asked.jobs) as pool:
        for played in pool.map(
            lambda each: play(each[0], LENIENT if each[1] else 1.0, in_place=each[1]), plays
        ):
            _show(played)
            found.append(played)
            if asked.write_docs:
                fault_table.write([played], CASES, machine())
    print(fault_table.summary(fault_table.results_of(found)))


if __name__ == "__main__":
    main()
