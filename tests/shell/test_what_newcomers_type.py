"""Words that newcomers type, and what they are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from launcher.settings.arguments import UsageError, read_arguments
from launcher.settings.checks import check_script, misplaced_option
from launcher.settings.spec import EntryKind, EntryPoint
from rendezvous.grpc_io import reason_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("source", "word", "is_told"),
    [
        ("print(1)", "--nproc-per-node", True),
        ("print(1)", "--nproc-per-node=2", True),
        ("parser.add_argument('--nproc_per_node')", "--nproc-per-node", False),
        ("import sys; print(sys.argv)", "--nnodes", True),
        ("print(1)", "--verbose", False),  # scripts have such options, in modules that are not read
        ("print(1)", "2", False),
    ],
)
def test_an_option_of_the_launcher_after_the_script(
    tmp_path: Path, source: str, word: str, is_told: bool
) -> None:
    script = tmp_path / "hello.py"
    script.write_text(source)
    told = misplaced_option(EntryPoint(EntryKind.SCRIPT, str(script), (word, "2")))
    assert told.startswith(f"{word.partition('=')[0]} stands after") is is_told


def test_an_option_of_another_launcher_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match="Did you mean --nproc-per-node"):
        read_arguments(["--nprocs", "2", "train.py"])


@pytest.mark.parametrize(
    ("there", "hint"), [("slow.py", "Check the path"), ("hallo.py", "Did you mean .*hallo.py")]
)
def test_a_script_that_does_not_exist_gets_a_suggestion_only_if_it_is_alike(
    tmp_path: Path, there: str, hint: str
) -> None:
    (tmp_path / there).touch()
    with pytest.raises(UsageError, match=hint):
        check_script(str(tmp_path / "hello.py"))


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: Failed to connect to remote "
            "host: connect: Connection refused (111)",
            "connection refused",
        ),
        (
            "errors resolving node7:9: [field:hostname lookup error:Domain name not found]",
            "there is no host node7",
        ),
        ("job 'x' does not exist", "job 'x' does not exist"),
        ("", "the service gave no reason (gRPC status UNAVAILABLE)"),
    ],
)
def test_a_failed_call_is_not_told_in_the_words_of_grpc(details: str, reason: str) -> None:
    empty = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, empty, empty, details)
    assert reason_of(error) == reason
