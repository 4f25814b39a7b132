"""Texts of options and the values they stand for."""

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from launcher.settings import options, values
from launcher.settings.spec import StreamChoice, Streams
from launcher.settings.values import BadValue
from rendezvous.values.types import (
    UNLIMITED,
    CrashLoop,
    FailureClass,
    PolicyAction,
    PolicyRule,
    RestartBudget,
)

LOCAL_RANKS = partial(values.numbers, what="local ranks", below=values.MAX_RANKS_PER_NODE)

GOOD: list[tuple[Callable[[str], Any], str, Any]] = [
    (values.nnodes, "3", (3, 3)),
    (values.nnodes, "1:4", (1, 4)),
    (values.nnodes, " 2 ", (2, 2)),
    (values.nproc, "auto", "auto"),
    (values.resume_arg, "--ckpt {path}", "--ckpt {path}"),
    (values.nproc, "08", "8"),
    (values.port, "0", 0),
    (values.port, "65535", 65535),
    (values.host, "[::1]", "::1"),
    (values.host, "node0.cluster.", "node0.cluster."),
    (values.endpoints, "a:1,[::1]:2", "a:1,[::1]:2"),
    (values.endpoints, "node0", "node0:29400"),
    (values.torch_endpoint, "node0", "node0:29400"),
    (values.torch_endpoint, "localhost:0", "localhost:0"),
    (values.duration, "30", 30.0),
    (values.duration, "0", 0.0),
    (values.duration, "500ms", 0.5),
    (values.duration, "1.5h", 5400.0),
    (values.budget, "3", RestartBudget(3)),
    (values.budget, "5/1h", RestartBudget(5, 3600.0)),
    (values.budget, "3/10m", RestartBudget(3, 600.0)),
    (values.budget, "2/30s", RestartBudget(2, 30.0)),
    (values.budget, "4/d", RestartBudget(4, 86400.0)),
    (values.heals, "unlimited", RestartBudget(UNLIMITED)),
    (values.heals, "3/10m", RestartBudget(3, 600.0)),
    (values.crash_loop, "5/2s", CrashLoop(5, 2.0, 0)),
    (values.crash_loop, "7/step", CrashLoop(0, 1.0, 7)),
    (values.crash_loop, "5/2s, 7/step", CrashLoop(5, 2.0, 7)),
    (values.crash_loop, "0/step,5/2s", CrashLoop(5, 2.0, 0)),
    (values.crash_loop, "off", CrashLoop(times=0)),
    (
        values.rules,
        "hang=restart, exit-code:3=ignore",
        (
            PolicyRule(FailureClass.HANG, PolicyAction.RESTART),
            PolicyRule(FailureClass.EXIT_CODE, PolicyAction.IGNORE, 3),
        ),
    ),
    (values.streams, "3", StreamChoice(Streams.ALL)),
    (values.streams, "0:1,12:2", StreamChoice(Streams.NONE, ((0, Streams.OUT), (12, Streams.ERR)))),
    (LOCAL_RANKS, "2,0,2", (0, 2)),
    (values.filters, "apple,or,,ange", ("apple", "or,ange")),
    (values.signals, "SIGTERM, usr1", (signal.SIGTERM, signal.SIGUSR1)),
    (values.prefix, "{node}/{rank:>3} {{", "{node}/{rank:>3} {{"),
    (values.prefix, "", ""),
    (values.pairs, "join_timeout=5, is_host=1", {"join_timeout": "5", "is_host": "1"}),
    (values.switch, "1", True),
    (values.switch, "0", False),
    (values.switch, "Yes", True),
    (values.switch, "2", True),
]


@pytest.mark.parametrize(("parse", "text", "value"), GOOD)
def test_a_text_has_its_value(parse: Callable[[str], Any], text: str, value: Any) -> None:
    assert parse(text) == value


BAD: list[tuple[Callable[[str], Any], tuple[str, ...]]] = [
    (values.nnodes, ("", "0", "3:1", "1:", ":2", "1:2:3", "-1", "1.5", "x", "٣", "9" * 5000, "200000")),
    (values.nproc, ("", "0", "-1", "1.5", "gpu:0", "2 gpus", "5000")),
    (values.resume_arg, ("", "--ckpt", "--ckpt '{path}")),
    (values.port, ("", "-1", "65536", "http", "٣")),
    (values.host, ("", "a b", "a/b", "ü", "[]", "a..b", "..", "a" * 64)),
    (values.endpoints, ("", "a:1,", ":1", "a:b", "a:70000", "a:0", "::1:5", "a b:1")),
    (values.duration, ("", "-1", "abc", "nan", "inf", "1e400", "5 weeks", "9" * 39, "1" * 5000)),
    (values.positive_duration, ("0", "0s", "-1")),
    (values.budget, ("", "-1", "5/", "/1h", "5/0s", "5/x", "5/-1s", "1.5", "3/1h/2")),
    (values.heals, ("", "-1", "5/", "none")),
    (values.crash_loop, ("", "3", "x/1s", "-1/1s", "3/", "3/-1s", "3/steps", "x/step", "-1/step")),
    (values.crash_loop, ("3/1s,4/2s", "3/step,4/step", "3/1s,3/step,3/1s", "3/1s,", "3/1s,off")),
    (
        values.rules,
        ("", "hang", "hang=", "hung=fail", "hang=stop", "exit-code:0=fail", "hang:1=fail"),
    ),
    (values.rules, ("hang=fail,hang=restart",)),
    (values.streams, ("", "4", "-1", "0:4", "0:1,", "a:1", "0;1")),
    (LOCAL_RANKS, ("", "-1", "0,", "a", "0 1", "4096")),
    (values.signals, ("", "SIGFOO", "SIGKILL", "STOP", "CHLD", "9", "SIGTERM,")),
    (values.prefix, ("{world}", "{", "}", "{0}", "{}", "{rank!z}", "{node.x}", "{rank:z}", "\udcff")),
    (values.pairs, ("a", "a=", "=b", "a=1,,b=2")),
    (values.run_id, ("", " ", "a/b", "..", "a\nb", "x" * 200, "\udcff")),
    (values.switch, ("maybe", "1.5")),
    (values.text, ("", "  ", "\udcff", "a\0b")),
    (values.path, ("", " ", "a\0b")),
    (options.modules, ("", "a,", "a..b", "1a", "a b", "torch-vision")),
    (values.choice("auto", "never"), ("", "Auto", "nevr")),
]


@pytest.mark.parametrize(("parse", "text"), [(parse, text) for parse, texts in BAD for text in texts])
def test_a_wrong_text_is_told_apart(parse: Callable[[str], Any], text: str) -> None:
    with pytest.raises(BadValue) as raised:
        parse(text)
    message = f"{raised.value.problem} {raised.value.form} {raised.value.example}"
    assert message.isprintable()
    assert len(message) < 400


@pytest.mark.parametrize("text", ["-1", "many", "3/1h/2"])
def test_a_wrong_number_of_heals_is_not_called_one_of_restarts(text: str) -> None:
    with pytest.raises(BadValue) as raised:
        values.heals(text)
    assert "restarts" not in raised.value.problem


@pytest.mark.parametrize(("parse", "text"), [(parse, texts[-1]) for parse, texts in BAD])
def test_the_example_is_right_itself(parse: Callable[[str], Any], text: str) -> None:
    with pytest.raises(BadValue) as raised:
        parse(text)
    if raised.value.form:
        parse(raised.value.example)


@pytest.mark.parametrize(
    ("template", "ours"),
    [
        ("[${role_name}${local_rank}]: ", "[{role}{local_rank}]: "),
        ("$rank|", "{rank}|"),
        ("$$5 {x} ${other} $", "$5 {{x}} ${{other}} $"),
    ],
)
def test_a_prefix_of_torch_reads_the_same(template: str, ours: str) -> None:
    from string import Template

    assert values.prefix_from_torch(template) == ours
    facts = {"node": "n", "rank": 3, "local_rank": 1, "role": "trainer", "generation": 0}
    theirs = Template(template).safe_substitute(role_name="trainer", rank=3, local_rank=1)
    assert ours.format(**facts) == theirs


@pytest.mark.parametrize("text", ["", "a\nb", "\x1b[31m", "\udcff", "x" * 10_000, "é", "a b"])
def test_what_is_quoted_is_one_printable_line(text: str) -> None:
    for in_message in (values.printable(text), values.quote(text)):
        assert in_message.isprintable()
        assert 0 < len(in_message) < 500
