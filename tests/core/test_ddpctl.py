"""Every command of ddpctl is handled, and each order sends its own request and no other."""

import argparse
import asyncio
from pathlib import Path

import pytest
from google.protobuf.message import Message

from rendezvous.client.options import ClientOptions
from rendezvous.control.commands import (
    ALIASES,
    COMPLETION,
    EXPLAIN,
    REPLAY,
    Command,
    Order,
    parser,
)
from rendezvous.control.ctl import main
from rendezvous.control.ctl_calls import carry_out, request_of
from rendezvous.control.service import Service
from rendezvous.pb import rendezvous_pb2 as pb

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
    Command.RELOAD,
}


@pytest.mark.parametrize("order", REQUESTS)
def test_an_order_sends_its_own_request(order: Order) -> None:
    words, method, request = REQUESTS[order]
    assert request_of(order, parser().parse_args([order, *words])) == (method, request)


def test_every_command_of_the_parser_is_an_order_a_look_a_question_or_submit() -> None:
    (commands,) = (each for each in parser()._actions if isinstance(each, argparse._SubParsersAction))
    local = ("submit", COMPLETION, EXPLAIN, REPLAY)
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
