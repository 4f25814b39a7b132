"""Codes of errors: they never change, each has a page, and every error that a person sees has one."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest

from launcher import cli
from launcher.settings.arguments import UsageError
from launcher.template import messages
from rendezvous import main as service
from rendezvous.control import ctl
from rendezvous.values import contracts
from rendezvous.values.cause_text import code_of_cause, code_of_outcome
from rendezvous.values.contracts import VERSION, VERSION_METADATA
from rendezvous.values.error_codes import Code, with_code
from rendezvous.values.types import Cause, Decision, DecisionKind, FailureClass, Outcome

ROOT = Path(__file__).parents[2]
KEPT = dict(line.split() for line in Path(__file__).with_name("error_codes.txt").read_text().splitlines())
ENDS_WITH_A_CODE = re.compile(r"\[(DDP-\d{4})\]$")


def test_no_code_was_removed_or_given_to_something_else() -> None:
    """error_codes.txt is the promise: a line is added for a new code, and none is changed."""
    assert {code.value: code.name for code in Code} == KEPT
    assert len(set(KEPT)) == len(Code.__members__), "two names have the same code"


def test_each_code_has_one_section_with_all_its_parts() -> None:
    """Each error that is raised has a code of the table, so each has a section, and no section is of something else."""
    assert re.findall(r"^### (.*)", ctl.page(), re.MULTILINE) == [f"{code}: {code.phrase}" for code in Code]
    for code in Code:
        text = ctl.explanation(code)
        assert text is not None
        parts = r"(.+\.)\n\nWhat to do:\n- .+?(\n\nMore: .*)?"
        found = re.fullmatch(rf"{code}: .*?\n\n{parts}", text, re.DOTALL)
        assert found, text
        assert text.isascii()
        page = (found[2] or "").removeprefix("\n\nMore: ddp-launch docs ")
        assert page == "" or (ROOT / "docs" / f"{page}.md").exists(), page


def test_codes_are_in_the_area_of_their_digit() -> None:
    areas = re.split(r"^## .*", ctl.page(), flags=re.MULTILINE)[1:]
    digits = [set(re.findall(r"^### DDP-(\d)", area, re.MULTILINE)) for area in areas]
    assert digits == [{str(digit)} for digit in range(1, 9)]


def test_explain_reads_the_page_of_an_installed_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "launcher" / "pages"
    installed.mkdir(parents=True)
    (installed / "errors.md").write_text("## A\n\n### DDP-1001: unknown option\n\nAs it is there.\n")
    monkeypatch.setattr(ctl, "_INSTALLED", tmp_path)
    assert ctl.explanation("1001") == "DDP-1001: unknown option\n\nAs it is there."
    assert ctl.explanation("1002") is None
    assert ctl.contents().startswith("A:\n  DDP-1001  unknown option\n")


@pytest.mark.parametrize("word", ["DDP-5004", "ddp-5004", "5004", "[DDP-5004]"])
def test_explain_prints_the_page_of_a_code(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["explain", word]) == 0
    said = capsys.readouterr().out
    assert said.startswith("DDP-5004: rank exception\n")
    assert "What to do:" in said
    assert said.rstrip("\n") == ctl.explanation("5004")


def test_explain_without_a_code_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["explain"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == ctl.contents()
    assert all(code in ctl.contents() for code in Code)


def test_explain_of_an_unknown_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["explain", "DDP-9999"]) == 2
    assert code_at_the_end(capsys.readouterr().err) is Code.UNKNOWN_CODE


# --- classes of errors -----------------------------------------------------------------------------------


def bases_of(tree: ast.Module) -> dict[str, set[str]]:
    return {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


# They never reach a person as they are: another error, an answer on the wire or a line of a log is made of each.
INTERNAL = {
    "launcher": "BadValue NoDevices NvmlError _TooLate _Aborted NoRendezvous BindingError NotADump SourceFailed "
    "NotUnderstood NotServed Broken Unusable ScriptUnreadable BadProfile",
    "rendezvous": "BadMessage JobOver BadToken Denied NotAStory LimitReached ValuesFull OwnedByOther StreamAborted "
    "NotFound NotNow RecordUnreadable BadChange "
    "SnapshotUnreadable Conflict OwnershipLost _Compacted Unreachable CallFailed _NoAnswer BadRequest Refused Crowded",
    "ddp": "_Unable NoRoom PeerError Stopped",
}


def test_every_class_of_errors_has_a_code_or_is_internal() -> None:
    for package, internal in INTERNAL.items():
        classes: dict[str, set[str]] = {}
        for path in (ROOT / package).rglob("*.py"):
            classes |= bases_of(ast.parse(path.read_text()))
        errors, before = {"Exception", "ValueError", "RuntimeError", "OSError", "Coded", "CodedError"}, 0
        coded = {"Coded", "CodedError"}
        while before != len(errors) + len(coded):
            before = len(errors) + len(coded)
            errors |= {name for name, bases in classes.items() if bases & errors}
            coded |= {name for name, bases in classes.items() if bases & coded}
        found = {name for name in errors & classes.keys() if name not in coded}
        assert found <= set(internal.split()), (
            f"{package}: give these a code: {found - set(internal.split())}"
        )


def test_codes_in_ddp_are_in_the_table() -> None:
    named = set()
    for path in [*(ROOT / "ddp").rglob("*.py"), ROOT / "_ddp_launch_entry.py"]:
        named |= set(re.findall(r"DDP-\d{4}", path.read_text()))
    assert len(named) > 8
    assert named <= set(KEPT)


def test_every_code_is_used() -> None:
    source = "".join(
        path.read_text()
        for package in ("launcher", "rendezvous", "ddp", "ddp_launch_wings")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "error_codes.py"
    )
    source += (ROOT / "_ddp_launch_entry.py").read_text()
    unused = [code.name for code in Code if f"Code.{code.name}" not in source and code.value not in source]
    assert unused == []


# Decoders of bytes, and checks of torch itself: what calls them makes another error of theirs.
PLAIN_IN_DDP = {"ddp/telemetry/torch_api.py"}


def test_ddp_raises_no_plain_error() -> None:
    plain = set()
    for path in (ROOT / "ddp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            error = node.exc if isinstance(node, ast.Raise) else None
            name = ast.unparse(error.func) if isinstance(error, ast.Call) else ""
            if name in ("ValueError", "TypeError", "RuntimeError", "Exception"):
                plain.add(str(path.relative_to(ROOT)))
    assert plain == PLAIN_IN_DDP


def test_errors_of_ddp_have_their_code_in_the_message() -> None:
    from ddp.groups.rank_info import InitError

    error = InitError("RANK is not set")
    assert str(error) == "RANK is not set [DDP-7002]"
    assert error.code == Code.CANNOT_FORM_GROUP


# --- real mistakes -----------------------------------------------------------------------------------------


def code_at_the_end(said: str) -> Code:
    found = ENDS_WITH_A_CODE.search(said.rstrip("\n"))
    assert found, said
    return Code(found[1])


def end_of(main, argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    try:
        exit_code = main(argv)
    except SystemExit as end:  # argparse
        exit_code = end.code
    return exit_code, capsys.readouterr().err


MISTAKES = [
    (["--nnode5", "2", "t.py"], Code.UNKNOWN_OPTION),
    (["-x"], Code.UNKNOWN_OPTION),
    (["--n", "2"], Code.AMBIGUOUS_OPTION),
    (["--nnodes"], Code.MISSING_VALUE),
    (["--nnodes", "--standalone"], Code.MISSING_VALUE),
    (["--standalone=1"], Code.INVALID_VALUE),
    (["--nnodes", "3:1", "ok.py"], Code.INVALID_VALUE),
    (["--nproc-per-node", "0", "ok.py"], Code.INVALID_VALUE),
    (["--max-restarts", "x", "ok.py"], Code.INVALID_VALUE),
    (["--standalone", "--nnodes", "2", "ok.py"], Code.CONTRADICTING_OPTIONS),
    (["--no-python", "-m", "x"], Code.CONTRADICTING_OPTIONS),
    (["--hosts", "a", "--standalone", "ok.py"], Code.CONTRADICTING_OPTIONS),
    ([], Code.MISSING_SCRIPT),
    ([""], Code.MISSING_SCRIPT),
    (["nowhere.py"], Code.SCRIPT_NOT_FOUND),
    (["--web", "127.0.0.1:8080", "train.py"], Code.SCRIPT_NOT_FOUND),
    (["no/such/folder/t.py"], Code.SCRIPT_NOT_FOUND),
    (["-"], Code.NOT_A_SCRIPT),
    (["."], Code.NOT_A_SCRIPT),
    (["syntax.py"], Code.NOT_A_SCRIPT),
    (["binary.py"], Code.NOT_A_SCRIPT),
    (["-m", "no_such_module"], Code.MODULE_NOT_FOUND),
    (["-m", "ok.py"], Code.MODULE_NOT_FOUND),
    (["--no-python", "no-such-program"], Code.PROGRAM_NOT_RUNNABLE),
    (["--no-python", "./ok.py"], Code.PROGRAM_NOT_RUNNABLE),
    (["--config", "nowhere.toml", "ok.py"], Code.FILE_UNREADABLE),
    (["--config", "bad.toml", "ok.py"], Code.CONFIG_FILE_INVALID),
    (["--config", "unknown.toml", "ok.py"], Code.UNKNOWN_OPTION),
    (["--log-dir", "ok.py", "ok.py"], Code.FOLDER_UNUSABLE),
    (["--nproc-per-node", "xpu", "ok.py"], Code.NO_DEVICES),
    (["doctor", "ok.py"], Code.INVALID_COMMAND_LINE),
    (["warm"], Code.INVALID_COMMAND_LINE),
    (["completion", "ksh"], Code.INVALID_COMMAND_LINE),
    (["docs", "hang"], Code.MANUAL_PAGE_UNKNOWN),
    (["docs", "hangs", "x"], Code.INVALID_COMMAND_LINE),
]


@pytest.mark.parametrize(
    ("argv", "code"), MISTAKES, ids=[" ".join(argv) or "nothing" for argv, _ in MISTAKES]
)
def test_mistakes_with_ddp_launch(
    argv: list[str],
    code: Code,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {"ok.py": "pass\n", "syntax.py": "(\n", "bad.toml": "nnodes 2\n", "unknown.toml": "nnode5 = 2\n"}
    for name, words in files.items():
        (tmp_path / name).write_text(words)
    (tmp_path / "binary.py").write_bytes(b"\x7fELF\0\0")
    monkeypatch.chdir(tmp_path)
    exit_code, said = end_of(cli.main, argv, capsys)
    assert exit_code == 2
    assert said.startswith("ddp-launch: error: ")
    assert code_at_the_end(said) is code


@pytest.mark.parametrize(
    ("attribute", "value"), [("abiflags", "t"), ("platform", "darwin")], ids=["free-threaded", "not Linux"]
)
def test_where_it_cannot_run(
    attribute: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, attribute, value)
    assert code_at_the_end(end_of(cli.main, ["t.py"], capsys)[1]) is Code.UNSUPPORTED_SYSTEM


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        ([], Code.INVALID_COMMAND_LINE),
        (["serv"], Code.INVALID_COMMAND_LINE),
        (["serve", "--history", "x"], Code.INVALID_VALUE),
        (["serve", "--history"], Code.MISSING_VALUE),
        (["serve", "--histori", "1"], Code.UNKNOWN_OPTION),
        (["serve", "--t", "1"], Code.AMBIGUOUS_OPTION),
        (["serve", "now"], Code.INVALID_COMMAND_LINE),
        (["serve", "--history", "-1"], Code.SERVICE_SETTING_INVALID),
        (["serve", "--listen", "nowhere"], Code.SERVICE_SETTING_INVALID),
        (["serve", "--listen", "0.0.0.0:29400"], Code.SERVICE_UNPROTECTED),
        (["serve", "--config", "nowhere.toml"], Code.FILE_UNREADABLE),
        (["serve", "--store", "redis://a"], Code.STORE_URL_INVALID),
        (["serve", "--store", "file:/no/such/folder/db"], Code.STORE_UNUSABLE),
        (["serve", "--token-keys", "nowhere"], Code.KEY_FILE_UNUSABLE),
        (["serve", "--listen", "127.0.0.1:0", "--http", "203.0.113.1:1"], Code.CANNOT_LISTEN),
        (["secret", "/no/such/folder/secret"], Code.SECRET_UNUSABLE),
        (["token", "--job", "*", "--role", "agent"], Code.SERVICE_SETTING_INVALID),
    ],
)
def test_mistakes_with_ddp_rendezvous(
    argv: list[str], code: Code, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DDP_RENDEZVOUS_TOKEN_KEYS", raising=False)
    exit_code, said = end_of(service.main, argv, capsys)
    assert exit_code in (1, 2)
    assert code_at_the_end(said) is code


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        ([], Code.INVALID_COMMAND_LINE),
        (["lst"], Code.INVALID_COMMAND_LINE),
        (["top", "--sort", "x"], Code.INVALID_VALUE),
        (["top", "--interval", "0"], Code.INVALID_VALUE),
        (["stacks", "x"], Code.INVALID_VALUE),
        (["stacks"], Code.INVALID_COMMAND_LINE),
        (["top", "--interval"], Code.MISSING_VALUE),
        (["top", "--colour"], Code.UNKNOWN_OPTION),
        (["logs", "--t", "3"], Code.AMBIGUOUS_OPTION),
        (["list", "list"], Code.INVALID_COMMAND_LINE),
        (["--timeout", "0", "list"], Code.INVALID_VALUE),
        (["--rendezvous", "a:b:c", "list"], Code.CLIENT_SETTINGS_INVALID),
        (["--timeout", "1", "--rendezvous", "127.0.0.1:1", "list"], Code.SERVICE_UNREACHABLE),
        (["--rendezvous", "127.0.0.1:1", "why", "--file", "nowhere"], Code.FILE_UNREADABLE),
        (["submit", "--target", "slurm", "--file", "nowhere.toml"], Code.JOB_FILE_INVALID),
    ],
)
def test_mistakes_with_ddpctl(argv: list[str], code: Code, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, said = end_of(ctl.main, argv, capsys)
    assert exit_code in (1, 2, 75)
    assert code_at_the_end(said) is code


@pytest.mark.parametrize(
    ("status", "answered", "words", "code"),
    [
        (grpc.StatusCode.UNAVAILABLE, False, "connection refused", Code.SERVICE_UNREACHABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, False, "", Code.SERVICE_UNREACHABLE),
        (grpc.StatusCode.UNAVAILABLE, True, "no answer from etcd at 10.0.0.1:2379", Code.SERVICE_FAILED),
        (grpc.StatusCode.DEADLINE_EXCEEDED, True, "the call did not finish", Code.SERVICE_FAILED),
        (grpc.StatusCode.NOT_FOUND, True, "job 'a' does not exist: `ddpctl list` ...", Code.NO_SUCH_JOB),
        (grpc.StatusCode.NOT_FOUND, True, "job 'a' has no rank 7: its ranks are 0 to 1", Code.NOT_FOUND),
        (grpc.StatusCode.UNIMPLEMENTED, True, "", Code.NOT_SUPPORTED_BY_SERVICE),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, True, "too many calls", Code.LIMIT_REACHED),
    ],
)
def test_errors_of_calls(status: grpc.StatusCode, answered: bool, words: str, code: Code) -> None:
    """Whether the service itself has answered decides where to look: at the network, or at the service."""
    trailing = grpc.aio.Metadata(*([(VERSION_METADATA, VERSION)] if answered else []))
    error = grpc.aio.AioRpcError(status, grpc.aio.Metadata(), trailing, details=words)
    said, _, found = ctl._explain(error, "node1:29400")
    assert found is code
    assert ("no answer from node1:29400" in said) == (code is Code.SERVICE_UNREACHABLE)


# --- failures ----------------------------------------------------------------------------------------------


def test_every_class_of_failures_has_a_code_of_its_own() -> None:
    codes = {code_of_cause(Cause("n", 0, 0, failure, "x", 1)) for failure in FailureClass}
    assert len(codes) == len(FailureClass)
    assert all(code[4] == "5" for code in codes)


def test_the_end_of_a_job_has_the_code_of_its_first_cause() -> None:
    cause = Cause("n", 0, 0, FailureClass.HANG, "stuck", 124)
    lost = Cause("n", 1, 1, FailureClass.CONSEQUENCE, "connection lost", 1)
    assert code_of_outcome(Outcome(True, "", 0)) is None
    assert code_of_outcome(Outcome(False, "", 124, lost, (lost, cause))) is Code.RANK_HANG
    assert code_of_outcome(Outcome(False, "", 1, lost, (lost,))) is Code.ONLY_CONSEQUENCES
    assert code_of_outcome(Outcome(False, "only 1 of 2 nodes", 75)) is not None
    failed = Decision(DecisionKind.FAIL, "gone", 1, cause)
    assert code_of_outcome(Outcome(False, "x", 1, decisions=(failed,))) is Code.JOB_FAILED


def test_a_code_comes_last() -> None:
    assert with_code("unknown option. Did you mean --x? ", Code.UNKNOWN_OPTION).endswith("--x? [DDP-1001]")
    assert UsageError("x").code is Code.INVALID_VALUE
    assert UsageError("x", code=Code.MISSING_SCRIPT).code is Code.MISSING_SCRIPT


def test_exit_codes_are_those_of_the_page_and_of_the_zygote() -> None:
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    codes = {
        value
        for name, value in vars(contracts).items()
        if name[0].isupper() and name.isupper() and type(value) is int
    }
    for code in codes - {contracts.PORT}:
        assert re.search(rf"^\| `?{code}`? \|", page, re.M) or f"`{code}`" in page
    assert messages.CANNOT_START == contracts.CANNOT_RUN  # the zygote imports nothing of rendezvous
