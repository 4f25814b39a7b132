"""The screens of `ddpctl top`: what they show, in which order, and that they fit into the terminal."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rendezvous.control.top_table import (
    COLUMNS,
    RankRow,
    Sorting,
    TableHead,
    View,
    keys_in,
    own_s,
    pressed,
    rows_of,
    screen,
    size,
    sort,
    summary,
    table,
)
from rendezvous.diagnosing.stragglers import Standing
from rendezvous.values.durations import short_duration
from rendezvous.values.questions import GpuSeen, RankSeen
from rendezvous.values.rank_view import RankPhase

HEAD = TableHead("llama-70b-pretrain", "running", 3, 128, 2)


def rows(count: int, *, gpus: bool = True) -> tuple[RankRow, ...]:
    """A job of eight ranks per node. Rank 5 is slow: the others wait for it."""
    chance = random.Random(1)
    found = []
    for rank in range(count):
        gpu = GpuSeen(rank % 8, 61 << 30, 80 << 30, 80 + chance.randrange(20)) if gpus else None
        seen = RankSeen(
            rank,
            rank % 8,
            pid=1000 + rank,
            known=True,
            phase=RankPhase.BACKWARD if rank == 5 else RankPhase.COMMUNICATE,
            quiet_s=0.03,
            step=1_234_567,
            mean_step_s=0.53,
            memory=12_345_678_901,
            gpu=gpu,
            starts=3,
        )
        own_s = 0.512 if rank == 5 else 0.4 + chance.random() / 1000
        standing = Standing(own_s, own_s / 0.4, 1 if rank == 5 else 0)
        found.append(RankRow(f"gpu-node-{rank // 8:03}", seen, 0.02 if rank == 5 else 0.24, standing))
    return tuple(found)


@pytest.mark.parametrize("count", [1, 16, 1024])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (132, 50), (40, 10)])
@pytest.mark.parametrize("gpus", [True, False])
def test_a_screen_fits_and_shows_as_many_ranks_as_there_is_room_for(
    count: int, width: int, height: int, gpus: bool
) -> None:
    drawn = screen(View(HEAD, rows(count, gpus=gpus)), width, height)
    assert len(drawn) == height
    assert max(map(len, drawn)) <= width
    assert sum("comm " in line or "backward " in line for line in drawn) == min(count, height - 4)


def test_eighty_columns_have_room_for_all_that_matters() -> None:
    head, lines = table(rows(16), Sorting(), 80)
    for title in (
        "RANK",
        "NODE",
        "PHASE",
        "STEP",
        "OWN TIME",
        "/MED",
        "COMM",
        "MEM",
        "GPU",
        "GMEM",
        "RST",
        "QUIET",
    ):
        assert title in head
    assert lines[5].split() == "5 gpu-node-000 backward 1234567 512 ms 1.28x 2% 11G 80% 61G 2 30 ms".split()


def test_narrow_screens_keep_rank_phase_and_speed() -> None:
    head, _ = table(rows(16), Sorting(), 40)
    assert head.split() == ["RANK", "PHASE", "STEP", "OWN", "TIME", "COMM", "RST"]


@pytest.mark.parametrize("column", COLUMNS)
def test_every_column_sorts_both_ways(column: str) -> None:
    upwards = sort(rows(16), Sorting(column))
    downwards = sort(rows(16), Sorting(column, is_reversed=True))
    assert {row.seen.rank for row in upwards} == {row.seen.rank for row in downwards} == set(range(16))
    key = [own_s(row) for row in upwards]
    assert column not in ("time", "median") or key == sorted(key)


def test_the_slow_rank_comes_first_when_sorted_by_time() -> None:
    view = View(HEAD, rows(1024), Sorting("time", is_reversed=True))
    assert screen(view, 80, 24)[3].split()[0] == "5"


def test_the_share_of_communication_is_that_since_the_last_look() -> None:
    rank = rows(1)[0].seen
    (first,), spent = rows_of([("a", replace(rank, spent_s=100.0, waited_s=50.0))], {})
    later = replace(rank, spent_s=102.0, waited_s=50.2, step=rank.step + 3)
    (second,), spent = rows_of([("a", later)], spent)
    (restarted,), _ = rows_of([("a", replace(rank, pid=7, spent_s=0.1, waited_s=0.0))], spent)
    assert (first.share, restarted.share) == (0.5, None)
    assert second.share == pytest.approx(0.1)


def looked_at(own_s: tuple[float, ...], steps: int, waits_for: float) -> list[tuple[str, RankSeen]]:
    """A synchronous job: all ranks take as long per step as the slowest one."""
    whole = max(own_s) + waits_for
    times = [(steps * whole, steps * (whole - own)) for own in own_s]
    seen = [
        RankSeen(
            rank, rank, 100 + rank, known=True, step=steps, mean_step_s=whole, spent_s=spent, waited_s=waited
        )
        for rank, (spent, waited) in enumerate(times)
    ]
    return [("a", rank) for rank in seen]


def test_a_rank_is_judged_by_its_own_time_because_all_steps_of_a_synchronous_job_take_as_long() -> None:
    slow, spent = rows_of(looked_at((0.02, 0.3), 10, 0.0), {})
    assert [row.standing and round(row.standing.ratio, 2) for row in slow] == [0.07, 15.0]
    assert [row.standing and row.standing.level for row in slow] == [0, 2]
    too_soon, spent = rows_of(looked_at((0.02, 0.3), 11, 0.0), spent)
    assert [row.standing for row in too_soon] == [row.standing for row in slow]
    (slightly, more), _ = rows_of(looked_at((0.001, 0.002), 10, 0.3), {})
    assert slightly.standing is not None
    assert more.standing is not None
    assert (more.standing.level, round(more.standing.ratio, 2)) == (0, 2.0)  # a millisecond of a long step
    (alone,), _ = rows_of(looked_at((0.3,), 10, 0.0), {})
    assert alone.standing == Standing(pytest.approx(0.3))
    (new, _other), _ = rows_of(looked_at((0.3, 0.3), 2, 0.0), {})
    assert new.standing is None


def test_ranks_that_ended_are_shown_and_do_not_count() -> None:
    alive, dead = (
        rows(2)[0],
        replace(rows(2)[1], seen=replace(rows(2)[1].seen, alive=False, mean_step_s=9.0), standing=None),
    )
    _, lines = table([alive, dead], Sorting(), 80)
    assert "ended" in lines[1]
    assert "9 s" not in " ".join(summary([alive, dead], HEAD))


def test_problems_are_shown_and_never_push_the_table_away() -> None:
    head = replace(HEAD, problems=tuple(f"node n{i}: no answer" for i in range(30)))
    drawn = screen(View(head, rows(1024)), 80, 24)
    assert sum("no answer" in line for line in drawn) == 3
    assert any("27 more problems" in line for line in drawn)
    assert sum("comm " in line for line in drawn) >= 14


@pytest.mark.parametrize(
    ("keys", "at", "first"),
    [
        (b"\x1b[B\x1b[B", 2, 0),
        (b"jjk", 1, 0),
        (b"\x1b[6~", 20, 1),
        (b"G", 1023, 1004),
        (b"Gg", 0, 0),
        (b"\x1b[A", 0, 0),
        (b"jjr", 0, 0),
    ],
)
def test_keys_select_a_rank_and_the_table_follows(keys: bytes, at: int, first: int) -> None:
    view = View(HEAD, rows(1024))
    for key in keys_in(keys):
        view = pressed(view, key, 24)
    assert view.at == at
    shown = screen(view, 80, 24, color=True)
    assert f"ranks {first + 1}-{first + 20} of 1,024" in shown[-1]
    assert [n for n, line in enumerate(shown) if line.startswith("\x1b[7m")][1:] == [3 + at - first]


def test_enter_shows_one_rank_which_stays_when_the_order_changes() -> None:
    use = {
        "cpu_percent": 31.2,
        "gpu_percent": 97.0,
        "gpu_celsius": 66.0,
        "received_bytes": 3.2e9,
        "sent_bytes": 0.0,
    }
    view = View(HEAD, rows(8), node_use={row.node: use for row in rows(8)})
    for key in keys_in(b"jj\r"):
        view = pressed(view, key, 24)
    shown = screen(replace(view, sorting=Sorting("rank", True)), 80, 24)
    assert "rank 2" in shown
    assert len(shown) == 24
    assert any(line.startswith("own time") for line in shown)
    assert any("CPU 31%, GPUs 97%, 66 C, network 3.0G/s received and 0/s sent" in line for line in shown)
    view = pressed(view, "down", 24)
    assert "rank 3" in screen(view, 80, 24)
    gone = replace(view, rows=view.rows[:2])
    assert any(line.startswith("RANK") for line in screen(gone, 80, 24))
    for key in keys_in(b"\x1b"):
        view = pressed(view, key, 24)
    assert any(line.startswith("RANK") for line in screen(view, 80, 24))


def test_keys_sort_pause_and_quit_and_others_do_nothing() -> None:
    view = View(HEAD, rows(4))
    for key in keys_in(b"xyz>>>p\x1b[99Z"):
        view = pressed(view, key, 24)
    assert (view.sorting.column, view.is_paused, view.is_over) == ("step", True, False)
    assert "paused" in screen(view, 80, 24)[-1]
    assert pressed(view, "quit", 24).is_over


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00085, "850 us"), (0.01234, "12.3 ms"), (1.534, "1.53 s"), (75, "75 s"), (720, "12 min")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert short_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "-"), (999, "999B"), (1024, "1.0K"), (12_345_678_901, "11G")]
)
def test_sizes_are_short(number: int, text: str) -> None:
    assert size(number) == text
