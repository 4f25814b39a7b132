"""`ddp.log`: what a rank measures arrives, whatever it passes, and nothing happens where nobody reads."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from ddp.telemetry.contracts import ring_lines
from launcher.answers.measured import MOST_NAMES, MOST_POINTS, Measured
from launcher.error_boundary import ErrorBoundary
from rendezvous.values.questions import LoggedWanted

if TYPE_CHECKING:
    from launcher.health.pages import Pages


def run(source: str, env: dict[str, str]) -> str:
    command = [sys.executable, "-c", f"import ddp, os, sys\n{source}"]
    done = subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout + done.stderr


def logged(pages: Pages) -> list[Any]:
    before, now = pages.values()
    assert before == []
    return [(rank, json.loads(line)) for rank, line in now]


def test_numbers_arrive_and_all_else_is_left_out(pages: Pages) -> None:
    env = pages.open(0, 5)
    source = """
class Odd:
    def __float__(self): raise RuntimeError("odd")
ddp.log({"loss": 0.5, "text": "x", "none": None, "odd": Odd(), 3: True}, step=7)
ddp.log({"loss": float("nan")})
ddp.log(None); ddp.log({"loss": 1.0}, step="x"); ddp.log({"long" * 100: 2.0})
"""
    assert run(source, env) == ""
    first, second, long = logged(pages)
    assert first == (5, [7, {"loss": 0.5, "3": 1.0}])
    assert second[1][0] == 2
    assert second[1][1]["loss"] != second[1][1]["loss"]
    assert list(long[1][1].values()) == [2.0]
    assert pages.values() == ([], [])


def test_only_the_process_of_the_page_writes(pages: Pages) -> None:
    env = pages.open(0, 0)
    source = """
import subprocess
if sys.argv[1:]: ddp.log({"child": 1})
else:
    ddp.log({"mine": 1})
    if os.fork() == 0:
        ddp.log({"fork": 1}); os._exit(0)
    os.wait()
    subprocess.run([sys.executable, "-c", "import ddp; ddp.log({'program': 1})"], check=True)
"""
    run(source, env)
    assert [values for _, (_, values) in logged(pages)] == [{"mine": 1.0}]
    run("ddp.log({'a': 1})", {"DDP_STATUS_PAGE": ""})
    run("ddp.log({'a': 1})", {"DDP_STATUS_PAGE": "/not/there"})


def test_what_was_logged_before_a_restart_is_not_lost(pages: Pages) -> None:
    run("ddp.log({'loss': 1})", pages.open(0, 0))
    run("ddp.log({'loss': 2})", pages.open(0, 0))
    before, now = pages.values()
    assert [json.loads(line)[1]["loss"] for _, line in (*before, *now)] == [1.0, 2.0]
    assert len(before) == 1


def test_of_a_full_ring_the_latest_whole_lines_are_read(pages: Pages) -> None:
    run("for i in range(5000): ddp.log({'loss': i}, step=i)", pages.open(0, 0))
    found = [step for _, (step, _) in logged(pages)]
    assert found == list(range(found[0], 5000))
    assert len(found) > 1000


def test_a_ring_is_read_in_any_position() -> None:
    rng = random.Random(1)
    room, written = 256, b""
    ring = bytearray(room)
    seen: list[bytes] = []
    begin = 0
    for number in range(500):
        line = f"{number:0{rng.randrange(3, 20)}}\n".encode()
        for n, byte in enumerate(line):
            ring[(len(written) + n) % room] = byte
        written += line
        if rng.random() < 0.2:
            seen += ring_lines(bytes(ring), begin, len(written), len(written))
            begin = len(written)
    numbers = [int(line) for line in seen]
    assert numbers == sorted(set(numbers))
    assert len(numbers) > 400


class _Pages:
    def __init__(self) -> None:
        self.lines: list[tuple[int, bytes]] = []

    def values(self) -> tuple[list[Any], list[tuple[int, bytes]]]:
        lines, self.lines = self.lines, []
        return [], lines


async def _measured(alarms: list[str]) -> tuple[_Pages, Measured]:
    pages = _Pages()
    measured = Measured(pages, lambda words, rank: alarms.append(f"{rank} {words}"), ErrorBoundary(print))  # type: ignore[arg-type]
    return pages, measured


def test_lines_cover_the_job_and_stay_bounded() -> None:
    alarms: list[str] = []
    pages, measured = asyncio.run(_measured(alarms))
    for step in range(10_000):
        pages.lines = [(rank, b'[%d, {"loss": %d}]' % (step, 10 * step + rank)) for rank in (1, 0)]
        measured.look()
    points = measured.seen(LoggedWanted()).points
    assert MOST_POINTS // 2 <= len(points) <= MOST_POINTS
    assert points[0].step < 100
    assert points[-1].step > 9_900
    assert {float(point.value) % 10 for point in points} == {0.0}, "of the lowest rank"
    assert [point.number for point in measured.seen(LoggedWanted(points[-2].number)).points] == [
        points[-1].number
    ]
    assert [value.value for value in measured.latest(1)] == ["99991"]


def test_the_use_of_the_node_has_lines_of_its_own() -> None:
    _, measured = asyncio.run(_measured([]))
    for n in range(10_000):
        measured.note_use({"cpu_percent": n / 100, "received_bytes": 1e9})
    points = measured.seen(LoggedWanted(of_node=True)).points
    assert MOST_POINTS <= len(points) <= 2 * MOST_POINTS
    assert {point.name for point in points} == {"cpu_percent", "received_bytes"}
    assert measured.seen(LoggedWanted()).points == ()


def test_corrupt_lines_and_many_names_are_harmless() -> None:
    alarms: list[str] = []
    pages, measured = asyncio.run(_measured(alarms))
    bad = [
        b"",
        b"[",
        b"[1,2]",
        b'[1,{"a":"x"}]',
        b"\xff\xfe",
        b"[" * 5000,
        b'["x",{"a":1}]',
        b'[1e400,{"a":1}]',
    ]
    pages.lines = [(0, line) for line in bad]
    pages.lines += [(0, b'[1, {"name-%d": NaN}]' % n) for n in range(100)]
    measured.look()
    assert len(measured.numbers()) == MOST_NAMES
    assert measured.first()["name-0"] == "nan"
    assert alarms[0] == "0 name-0: nan"
