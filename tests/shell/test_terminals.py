"""Ranks that see a terminal: what libraries draw, prompts, and what a person sees of it, on a real pseudo-terminal."""

from __future__ import annotations

import os
import queue
from typing import TYPE_CHECKING

import pytest
from launched import SOON_S
from seen import SeenTerminal, kind_of_terminal, seen
from test_logs import await_drained, label, write_all

from launcher.output import live_area, logs
from launcher.output.logs import LogPump
from launcher.settings.spec import LogSpec, StreamChoice, Streams

if TYPE_CHECKING:
    from pathlib import Path


__all__ = ["kind_of_terminal", "seen"]  # fixtures


def pump_on(seen: SeenTerminal, folder: Path, log: LogSpec) -> LogPump:
    return LogPump(log, str(folder), seen.slave, seen.slave)


def size_seen_by(fd: int) -> tuple[int, int]:
    columns, rows = os.get_terminal_size(fd)
    return columns, rows


# --- what a rank gets ----------------------------------------------------------------------------------


def test_a_stream_that_is_shown_on_a_terminal_is_one(seen: SeenTerminal, tmp_path: Path) -> None:
    log = LogSpec(prefix="[{rank}] ", redirects=StreamChoice(Streams.NONE, ((1, Streams.ERR),)))
    pump = pump_on(seen, tmp_path, log)
    first, second = pump.open_rank(label(0)), pump.open_rank(label(1))
    assert [os.isatty(fd) for fd in (*first, *second)] == [True, True, True, False]
    assert size_seen_by(first[0]) == (80 - len("[0] "), 24)
    with pytest.raises(OSError, match="Inappropriate ioctl"):  # not the terminal that controls a rank
        os.tcgetpgrp(first[0])
    for fd in (*first, *second):
        os.close(fd)
    pump.close(SOON_S)


@pytest.mark.parametrize("why", ["option", "dumb terminal", "limit", "system"])
def test_a_stream_is_a_pipe_if_it_cannot_be_a_terminal(
    seen: SeenTerminal, tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left() -> tuple[int, int]:
        raise OSError(28, "No space left on device")

    if why == "dumb terminal":
        monkeypatch.setenv("TERM", "dumb")
    if why == "limit":
        monkeypatch.setattr(logs, "TERMINALS_LIMIT", 0)
    if why == "system":
        monkeypatch.setattr(os, "openpty", none_left)
    pump = pump_on(seen, tmp_path, LogSpec(prefix="", terminal="never" if why == "option" else "auto"))
    fds = pump.open_rank(label())
    assert not any(os.isatty(fd) for fd in fds)
    os.write(fds[0], b"written to a pipe\n")
    for fd in fds:
        os.close(fd)
    await_drained(pump, 0)
    pump.close(SOON_S)
    assert seen.end() == ["written to a pipe"]
    assert (tmp_path / "generation_0/rank_0/stdout.log").read_bytes() == b"written to a pipe\n"


def test_terminals_are_given_back(
    seen: SeenTerminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "TERMINALS_LIMIT", 2)
    pump = pump_on(seen, tmp_path, LogSpec())
    for generation in range(5):
        fds = pump.open_rank(label(0, generation))
        assert all(os.isatty(fd) for fd in fds)
        for fd in fds:
            os.close(fd)
        await_drained(pump, generation)
    pump.close(SOON_S)


def test_the_last_bytes_of_a_rank_are_not_lost(seen: SeenTerminal, tmp_path: Path) -> None:
    pump = pump_on(seen, tmp_path, LogSpec(prefix=""))
    fds = pump.open_rank(label())
    text = b"".join(b"%06d\n" % i for i in range(30_000)) + b"y" * 200_000 + b"\nno newline"
    write_all(fds[0], text)
    for fd in fds:
        os.close(fd)
    pump.close(SOON_S)
    assert (tmp_path / "generation_0/rank_0/stdout.log").read_bytes() == text + b"\n"


def test_the_log_has_the_lines_without_colours_and_so_has_a_filter(
    seen: SeenTerminal, tmp_path: Path
) -> None:
    pump = pump_on(seen, tmp_path, LogSpec(prefix="", stderr_filters=("loss",)))
    fds = pump.open_rank(label())
    os.write(
        fds[1],
        b"\r  0%\r 50%\r100%\n\x1b[32mloss\x1b[0m 0.5 \x1b[1;31mNaN\x1b[0m\nlong " + b"x" * 1000 + b"\n",
    )
    for fd in fds:
        os.close(fd)
    await_drained(pump, 0)
    assert b"\x1b" not in pump.stderr_tail(0, 0)
    pump.close(SOON_S)
    folder = tmp_path / "generation_0"
    assert (folder / "rank_0/stderr.log").read_bytes() == b"100%\nloss 0.5 NaN\nlong " + b"x" * 1000 + b"\n"
    assert (folder / "filtered_stderr.log").read_bytes() == b"loss 0.5 NaN\n"
    seen.end()
    assert b"\x1b[1;31mNaN\x1b[0m" in seen.raw


@pytest.mark.parametrize("how", ["option", "variable"])
def test_colours_of_ranks_can_be_switched_off(
    seen: SeenTerminal, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "variable":
        monkeypatch.setenv("NO_COLOR", "1")
    pump = pump_on(seen, tmp_path, LogSpec(color="never" if how == "option" else "auto"))
    fds = pump.open_rank(label())
    os.write(fds[0], b"\x1b[31mred\x1b[0m\n\r\x1b[32m50%\x1b[0m")
    seen.wait_for("50%")
    for fd in fds:
        os.close(fd)
    pump.close(SOON_S)
    seen.end()
    assert b"m" not in seen.raw.replace(b"[n0:0]", b"")  # the end of every colour


# --- the live area -------------------------------------------------------------------------------------


def test_bars_of_the_chosen_ranks_stay_below_all_lines(seen: SeenTerminal, tmp_path: Path) -> None:
    pump = pump_on(seen, tmp_path, LogSpec(prefix="[{rank}] ", bars=(0, 2)))
    pump.progress("the status")
    ranks = [pump.open_rank(label(rank)) for rank in range(3)]
    for percent in (10, 20):
        for rank, (_, err) in enumerate(ranks):
            os.write(err, b"\r%d%% of %d" % (percent, rank))
    for rank, (out, _) in enumerate(ranks):
        os.write(out, b"line of %d\n" % rank)
    below = ["[0] 20% of 0", "[2] 20% of 2", "the status"]
    seen.wait_until(lambda: seen.rows[-3:] == below and len(seen.rows) == 6)
    assert sorted(seen.rows[:3]) == [f"[{rank}] line of {rank}" for rank in range(3)]
    os.write(ranks[2][1], b"\r100% of 2\n")
    seen.wait_until(lambda: seen.rows[3:] == ["[2] 100% of 2", *below[::2]])
    for fd in (fd for fds in ranks for fd in fds):
        os.close(fd)
    await_drained(pump, 0)
    pump.close(SOON_S)
    assert sorted(seen.end()[4:]) == ["[0] 20% of 0", "[1] 20% of 1"]


def test_a_new_size_reaches_the_ranks_and_the_live_area(seen: SeenTerminal, tmp_path: Path) -> None:
    pump = pump_on(seen, tmp_path, LogSpec(prefix=""))
    fds = pump.open_rank(label())
    os.write(fds[0], b"\r" + b"=" * 70)
    seen.wait_for("=" * 70)
    seen.resize(40, 10)
    sizes: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    pump.resized(lambda: sizes.put(size_seen_by(fds[0])))
    assert sizes.get(timeout=SOON_S) == (40, 10)
    os.write(fds[0], b"\r" + b"#" * 70)
    seen.wait_for("#" * 35)
    assert "#" * 36 not in "".join(seen.rows)
    for fd in fds:
        os.close(fd)
    pump.close(SOON_S)


def test_after_a_stop_the_area_is_drawn_below_what_others_have_written(
    seen: SeenTerminal, tmp_path: Path
) -> None:
    pump = pump_on(seen, tmp_path, LogSpec())
    pump.progress("the status")
    seen.wait_for("the status")
    os.write(seen.slave, b"\r\n$ fg\r\n")
    pump.resumed()
    pump.say("a line")
    seen.wait_until(lambda: seen.rows == ["the status", "$ fg", "a line", "the status"])
    pump.close(SOON_S)


def test_a_defect_in_the_interpretation_does_not_stop_the_output(
    seen: SeenTerminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        monkeypatch.undo()
        raise IndexError("a defect")

    pump = pump_on(seen, tmp_path, LogSpec(prefix="[{rank}] "))
    fds = pump.open_rank(label())
    monkeypatch.setattr(live_area, "feed", fails)
    os.write(fds[0], b"one\x1b[31m")
    seen.wait_for("one")
    os.write(fds[0], b"two\n")
    for fd in fds:
        os.close(fd)
    pump.close(SOON_S)
    rows = seen.end()
    assert "is a defect" in rows[0]
    assert rows[-2:] == ["[0] one", "[0] two"]


# --- whole jobs ----------------------------------------------------------------------------------------


# --- equal lines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("collapse", [True, False])
def test_equal_lines_of_many_ranks_are_shown_once_and_logged_in_full(
    seen: SeenTerminal, tmp_path: Path, collapse: bool
) -> None:
    pump = pump_on(seen, tmp_path, LogSpec(prefix="[{rank}] ", collapse=collapse, merged_log=True))
    fds = [pump.open_rank(label(rank)) for rank in range(64)]
    for rank, (out, _) in enumerate(fds):
        os.write(out, b"loading\nrank %d\n" % rank)
    os.write(fds[7][1], b"the last line before an end\n")
    for pair in fds:
        for fd in pair:
            os.close(fd)
    pump.close(SOON_S)
    rows = seen.end()
    assert (rows.count("[0] loading (x 64 ranks)"), rows.count("[0] loading")) == (
        (1, 0) if collapse else (0, 1)
    )
    own = {f"[{rank}] rank {rank}" for rank in range(64)} | {"[7] the last line before an end"}
    assert own <= set(rows)
    assert len(rows) == (66 if collapse else 129)
    logs_of = [tmp_path / f"generation_0/rank_{rank}/stdout.log" for rank in range(64)]
    assert [each.read_bytes() for each in logs_of] == [b"loading\nrank %d\n" % rank for rank in range(64)]
    merged = [line.split(" ", 1) for line in (tmp_path / "merged.log").read_text().splitlines()]
    assert len(merged) == 129
    assert [text for _, text in merged].count("[5] loading") == 1
    assert sorted(merged, key=lambda line: line[0]) == merged


def test_a_line_alone_is_shown_soon_and_before_the_launcher_speaks(
    seen: SeenTerminal, tmp_path: Path
) -> None:
    pump = pump_on(seen, tmp_path, LogSpec(prefix="[{rank}] "))
    fds = [pump.open_rank(label(rank)) for rank in range(2)]
    os.write(fds[1][0], b"alone\n")
    seen.wait_for("[1] alone")
    os.write(fds[0][0], b"its end\n")
    pump.catch_up(0, 0, lambda: pump.say("ddp-launch: rank 0 failed"))
    seen.wait_for("rank 0 failed")
    assert seen.rows == ["[1] alone", "[0] its end", "ddp-launch: rank 0 failed"]
    for pair in fds:
        for fd in pair:
            os.close(fd)
    pump.close(SOON_S)


def test_in_a_pipe_equal_lines_stay(tmp_path: Path) -> None:
    source, sink = os.pipe()
    pump = LogPump(LogSpec(prefix="[{rank}] "), str(tmp_path), sink, sink)
    fds = [pump.open_rank(label(rank)) for rank in range(2)]
    for pair in fds:
        os.write(pair[0], b"loading\n")
        for fd in pair:
            os.close(fd)
    pump.close(SOON_S)
    os.close(sink)
    with open(source, "rb") as reader:
        assert sorted(reader.read().splitlines()) == [b"[0] loading", b"[1] loading"]
