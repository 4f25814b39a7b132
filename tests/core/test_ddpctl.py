"""Every command of ddpctl is handled, and each order sends its own request and no other."""

from __future__ import annotations

import argparse
import asyncio
import re
from typing import TYPE_CHECKING

import pytest

import _ddp_launch_entry as doors
from rendezvous import main as service
from rendezvous.client.credential_files import ClientOptions
from rendezvous.control import commands as control
from rendezvous.control.commands import ALIASES, COMPLETION, EXPLAIN, Command, Order, parser
from rendezvous.control.ctl import main
from rendezvous.control.ctl_calls import carry_out, request_of
from rendezvous.control.ctl_text import lines_of, on_terminal
from rendezvous.control.service import Service
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.questions import LogPiece, LogStream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from google.protobuf.message import Message

REQUESTS: dict[Order, tuple[list[str], str, Message]] = {
    Command.DRAIN: (
        ["j", "n", "--reason", "r"],
        "DrainNode",
        pb.DrainNodeRequest(job_id="j", node="n", reason="r"),
    ),
    Command.RESUME: (["j", "n"], "ResumeNode", pb.ResumeNodeRequest(job_id="j", node="n")),
    Command.RESIZE: (["j", "2:4"], "ResizeJob", pb.ResizeJobRequest(job_id="j", min_nodes=2, max_nodes=4)),
    Command.RESTART: (["j"], "RestartJob", pb.RestartJobRequest(job_id="j")),
    Command.ABORT: (["j", "--reason", "r"], "AbortJob", pb.AbortJobRequest(job_id="j", reason="r")),
}
LOOKS = {Command.LIST, Command.STATUS, Command.GET, Command.EVENTS, Command.WATCH}
QUESTIONS = {
    Command.TOP,
    Command.LOGS,
    Command.STACKS,
    Command.WHY,
    Command.CHECKPOINT,
    Command.PROFILE,
    Command.DRILL,
}


@pytest.mark.parametrize("order", REQUESTS)
def test_an_order_sends_its_own_request(order: Order) -> None:
    words, method, request = REQUESTS[order]
    assert request_of(order, parser().parse_args([order, *words])) == (method, request)


def test_every_command_of_the_parser_is_an_order_a_look_a_question_or_of_a_wing() -> None:
    (commands,) = (each for each in parser()._actions if isinstance(each, argparse._SubParsersAction))
    local = {COMPLETION, EXPLAIN, *doors.names(doors.CTL_COMMAND)}
    assert set(commands.choices) == {*LOOKS, *QUESTIONS, *REQUESTS, *ALIASES, *local}
    assert set(Command) == {*LOOKS, *QUESTIONS, *REQUESTS}


def test_an_unknown_command_is_told_which_ones_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["explode"])
    assert "Command." not in capsys.readouterr().err


def test_a_command_that_nothing_handles_asks_nothing_of_the_service() -> None:
    """An attempt to reach it would end in an RpcError."""
    arguments = argparse.Namespace(command="explode", job="j", reason="", output="text")
    with pytest.raises(ValueError, match="explode"):
        asyncio.run(carry_out(Service(("127.0.0.1:1",), ClientOptions(), 1.0), arguments))


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot read"), ("hello", "not a failure.json"), ('{"version": 9}', "version 9")],
)
def test_a_file_that_tells_no_story_is_a_wrong_argument(
    content: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "failure.json"
    if content is not None:
        path.write_text(content)
    assert main(["why", "--file", str(path)]) == 2
    err = capsys.readouterr().err
    assert (words in err, str(path) in err, err.count("\n")) == (True, True, 1)


# --- the help of ddp-rendezvous, ddpctl and all their commands fits a terminal of 80 columns ----------


def parsers(top: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield top
    for action in top._actions:
        if isinstance(action.choices, dict):
            yield from action.choices.values()


@pytest.mark.parametrize("top", [service.command_line, control.parser])
def test_help_fits_80_columns_and_names_values(top, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = list(parsers(top()))
    assert len(found) > 5
    for each in found:
        text = each.format_help()
        assert max(map(len, text.splitlines())) <= 80, text
        for action in each._actions:
            if action.option_strings and action.nargs != 0:
                assert action.metavar or action.choices, f"{action.option_strings}: name its value"
    assert len(re.findall(r"^  \S", found[0].format_help().partition("examples:")[2], re.MULTILINE)) >= 3


# --- output of ranks as lines: in the order of time, and nothing in them controls the terminal --------


def piece(rank: int, at: float, data: bytes, lost: int = 0) -> LogPiece:
    return LogPiece(1, rank, LogStream.STDOUT, at, data, lost)


def test_lines_of_several_ranks_are_in_the_order_of_time() -> None:
    pieces = [
        ("a", piece(0, 1.0, b"one\n")),
        ("a", piece(0, 3.0, b"four\nfive")),
        ("b", piece(1, 2.0, b"two\n\nthree\n")),
    ]
    assert [(line.rank, line.text) for line in lines_of(pieces)] == [
        (0, "one"),
        (1, "two"),
        (1, ""),
        (1, "three"),
        (0, "four"),
        (0, "five"),
    ]


def test_bytes_that_are_gone_are_reported_before_the_line() -> None:
    (gone, line) = lines_of([("a", piece(0, 1.0, b"\xff\n", 12))])
    assert gone.text.startswith("[12 bytes are gone")
    assert line.text == "\ufffd"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("10%\r20%\r30%\r", "30%"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m"),
        ("\x1b]0;title\x07x\x1b[2J\x1b[10;10Hy\x1bc\x08", "xy"),
        ("\x9b31mC1\x85", "31mC1"),
        ("a\tb", "a\tb"),
    ],
)
def test_only_colours_and_tabs_reach_a_terminal(text: str, shown: str) -> None:
    assert on_terminal(text, color=True) == shown


def test_without_colours_there_is_no_escape_sequence_at_all() -> None:
    assert on_terminal("\x1b[31mred\x1b[0m", color=False) == "red"
