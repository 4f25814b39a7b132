"""Reading the command line, merging it with variables and a file, and what comes of it."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.settings.arguments import UsageError, read_arguments
from launcher.settings.assemble import HostEnvironment, assemble, entry_point
from launcher.settings.config import ConfigFile, Settings, config_from, merge, unknown_variables
from launcher.settings.options import BY_SPELLING, OPTIONS
from launcher.settings.spec import EntryKind, LaunchSpec
from launcher.settings.usage import help_text, print_config_text, short_help_text
from rendezvous.values.types import RestartBudget, ScaleUp

HERE = HostEnvironment(nproc=2, python="/usr/bin/python3", stamp="1121-064412-3f2a")


def settle(
    argv: list[str], environ: Mapping[str, str] | None = None, table: Mapping[str, Any] | None = None
) -> tuple[Settings, tuple[str, ...]]:
    line = read_arguments(argv)
    file = config_from("ddp.toml", table) if table is not None else ConfigFile()
    return merge(line, environ or {}, file), line.words or file.words


def specify(
    argv: list[str],
    environ: Mapping[str, str] | None = None,
    table: Mapping[str, Any] | None = None,
    here: HostEnvironment = HERE,
) -> tuple[LaunchSpec, list[str]]:
    settings, words = settle(argv, environ, table)
    return assemble(settings, entry_point(settings, words), here)


def field(spec: LaunchSpec, name: str) -> Any:
    return getattr(spec if hasattr(spec, name) else spec.job, name)


def refusal(argv: list[str], environ: Mapping[str, str] | None = None, table: Any = None) -> str:
    with pytest.raises(UsageError) as raised:
        specify(argv, environ, table)
    return str(raised.value)


def test_our_prefix_of_lines_takes_precedence_over_torchruns() -> None:
    torchs = ["--log-line-prefix-template", "${hostname}:${rank}: "]
    assert specify([*torchs, "t.py"])[0].log.prefix == "{node}:{rank}: "
    assert specify([*torchs, "--log-prefix", "{rank} ", "t.py"])[0].log.prefix == "{rank} "


# --- the command line --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "dest", "value"),
    [
        (["--nproc-per-node", "4"], "nproc_per_node", "4"),
        (["--nproc_per_node=4"], "nproc_per_node", "4"),
        (["--nproc", "4"], "nproc_per_node", "4"),
        (["--max", "3"], "max_restarts", RestartBudget(3)),
        (["--no-p"], "no_python", True),
        (["--no-", "--nnodes", "1"], "no_python", True),  # torchrun's own abbreviation stays clear
        (["--ren", "a:1"], "rendezvous", "a:1"),
        (["-r3"], "redirects", None),
        (["-m"], "module", True),
        (["--no-warm-start"], "warm_start", False),
        (["--preload", "torch._dynamo, numpy"], "preload", ("torch._dynamo", "numpy")),
        (["--no-warm-start", "--warm-start"], "warm_start", True),
        (["--nnodes", "2", "--nnodes", "3"], "nnodes", (3, 3)),
        (["--log-prefix", "- {rank}"], "log_prefix", "- {rank}"),
        (["--role=-x"], "role", "-x"),
        (["--role", ""], "role", ""),
    ],
)
def test_flags_are_read(argv: list[str], dest: str, value: Any) -> None:
    settings, words = settle([*argv, "train.py"])
    assert words == ("train.py",)
    assert settings.of(dest).given
    if value is not None:
        assert settings[dest] == value


def test_short_switches_join() -> None:
    settings, words = settle(["-mr3", "-t", "1", "pkg.train"])
    assert settings["module"]
    assert int(settings["redirects"].default) == 3
    assert int(settings["tee"].default) == 1
    assert words == ("pkg.train",)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["train.py", "--nnodes", "2", "-m"], ("train.py", "--nnodes", "2", "-m")),
        (["--", "train.py", "--", "-x"], ("train.py", "--", "-x")),
        (["--standalone", "--", "--odd.py"], ("--odd.py",)),
        (["train.py", "--help"], ("train.py", "--help")),
        (["--nnodes", "1", "a b.py", ""], ("a b.py", "")),
    ],
)
def test_options_end_at_the_script(argv: list[str], words: tuple[str, ...]) -> None:
    line = read_arguments(argv)
    assert line.words == words
    assert not line.wants("help")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--nnode5", "2", "t.py"], ["--nnode5", "--nnodes"]),
        (["--lr", "0.1", "train.py"], ["--lr", "after train.py"]),
        (["-x"], ["-x", "--help"]),
        (["--n", "2"], ["--n:", "--nnodes", "--node-rank"]),
        (["--nnodes"], ["--nnodes", "--help"]),
        (["--nnodes", "--standalone"], ["--nnodes", "--nnodes=--standalone"]),
        (["--standalone=1"], ["--standalone=1", "Use --standalone alone"]),
        (["--nnodes", "3:1"], ["--nnodes '3:1'", "--nnodes 1:3"]),
        (["-r", "9"], ["-r '9'", "-r 0:3"]),
        ([], ["script.py"]),
        (["--"], ["script.py"]),
        (["--no-python", "-m", "x"], ["--no-python", "-m"]),
        (["--node-rank", "2", "--nnodes", "2", "t.py"], ["--node-rank '2'", "0 to 1"]),
        (["--node-rank", "-1", "t.py"], ["--node-rank '-1'", "--node-rank 1"]),
        (["--standalone", "--nnodes", "2", "t.py"], ["--nnodes '2'", "--standalone"]),
        (["--nnodes", "2", "--rdzv-endpoint", "a:0", "t.py"], ["--rdzv-endpoint 'a:0'", "port 0"]),
        (["--rdzv-conf", "timeout=x", "t.py"], ["--rdzv-conf 'timeout=x'", "timeout=30"]),
        (
            ["--rdzv-conf", "keep_alive_max_attempt=0", "t.py"],
            ["keep_alive_max_attempt: below the minimum 1"],
        ),
        (["--cpu-affinity", "--numa-binding", "node", "t.py"], ["--cpu-affinity", "--numa-binding 'node'"]),
        (["--start-method", "thread", "t.py"], ["--start-method 'thread'", "spawn"]),
        (["--nno\udcff\n"], ["--nno\\udcff\\n", "--help"]),
        (["--nnodes", "9" * 10_000], ["--nnodes '999"]),
    ],
)
def test_a_wrong_command_line_names_the_flag_and_the_fix(argv: list[str], parts: list[str]) -> None:
    message = refusal(argv)
    assert message.isprintable()
    assert len(message) < 500
    for part in parts:
        assert part in message


# --- where settings come from ------------------------------------------------------------------------


def test_flag_then_variable_then_file_then_default() -> None:
    table = {"nnodes": "5", "role": "file", "spares": 1}
    environ = {"PET_NNODES": "4", "DDP_LAUNCH_NNODES": "3", "PET_ROLE": "pet"}
    assert settle(["--nnodes", "2", "t.py"], environ, table)[0]["nnodes"] == (2, 2)
    settings, _ = settle(["t.py"], environ, table)
    assert settings["nnodes"] == (3, 3)
    assert settings.of("role").origin.place == "PET_ROLE"
    assert (settings["spares"], settings.of("spares").origin.place) == (1, "ddp.toml")
    assert settings.of("tee").origin.place == "default"


@pytest.mark.parametrize(
    ("environ", "dest", "value"),
    [
        ({"PET_STANDALONE": "1"}, "standalone", True),
        ({"PET_NO_PYTHON": "0"}, "no_python", False),
        ({"PET_NNODES": ""}, "nnodes", (1, 1)),
        ({"PET_NUMA_BINDING": "node"}, "numa_binding", None),  # torchrun does not read it either
        ({"DDP_LAUNCH_NUMA_BINDING": "node"}, "numa_binding", "node"),
        ({"DDP_LAUNCH_WARM_START": "0"}, "warm_start", False),
        ({"PET_SPARES": "3"}, "spares", 0),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, "shutdown_timeout", 7.0),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7", "PET_SHUTDOWN_TIMEOUT": "8"}, "shutdown_timeout", 8.0),
        (
            {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${hostname}:${rank}:"},
            "log_line_prefix_template",
            "{node}:{rank}:",
        ),
        ({"PET_LOG_LINE_PREFIX_TEMPLATE": "$rank {x}"}, "log_line_prefix_template", "{rank} {{x}}"),
    ],
)
def test_variables_are_read(environ: dict[str, str], dest: str, value: Any) -> None:
    assert settle(["t.py"], environ)[0][dest] == value


@pytest.mark.parametrize(
    ("table", "dest", "value"),
    [
        ({"nproc_per_node": 4}, "nproc_per_node", "4"),
        ({"warm-start": False}, "warm_start", False),
        ({"no-warm-start": True}, "warm_start", False),
        ({"local-ranks-filter": [0, 2]}, "local_ranks_filter", (0, 2)),
        ({"duplicate-stdout-filters": ["a,b", "c"]}, "duplicate_stdout_filters", ("a,b", "c")),
        ({"rdzv-conf": {"join_timeout": 5}}, "rdzv_conf", {"join_timeout": "5"}),
        ({"shutdown-timeout": 2.5}, "shutdown_timeout", 2.5),
    ],
)
def test_file_keys_are_read(table: dict[str, Any], dest: str, value: Any) -> None:
    assert settle(["t.py"], None, table)[0][dest] == value


def test_a_script_may_come_from_the_file_and_gives_way_to_the_command_line() -> None:
    table = {"script": "train.py", "args": ["--lr", 0.1], "module": False}
    assert settle([], None, table)[1] == ("train.py", "--lr", "0.1")
    assert settle(["other.py"], None, table)[1] == ("other.py",)


@pytest.mark.parametrize(
    ("environ", "table", "parts"),
    [
        ({"PET_NNODES": "x"}, {}, ["PET_NNODES='x'", "PET_NNODES=1:3"]),
        ({"DDP_LAUNCH_MODULE": "perhaps"}, {}, ["DDP_LAUNCH_MODULE='perhaps'", "DDP_LAUNCH_MODULE=1"]),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}, {}, ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT='x'"]),
        ({}, {"nnodes": "3:1"}, ["ddp.toml", "nnodes = '3:1'", 'nnodes = "1:3"']),
        ({}, {"nnode": 1}, ["ddp.toml", "nnode", "nnodes?"]),
        ({}, {"max_restart": 1}, ["max-restarts?"]),
        ({}, {"zzzz": 1}, ["ddp.toml", "zzzz"]),
        ({}, {"config": "x"}, ["ddp.toml", "--config"]),
        ({}, {"help": True}, ["ddp.toml", "--help"]),
        ({}, {"nnodes": 1, "n_nodes": 1}, ["n_nodes"]),
        ({}, {"max-restarts": 1, "max_restarts": 2}, ["max_restarts", "max-restarts"]),
        ({}, {"standalone": "yes"}, ["ddp.toml", "standalone = 'yes'", "standalone = true"]),
        ({}, {"nnodes": True}, ["ddp.toml", "nnodes = 'True'"]),
        ({}, {"nnodes": [[1]]}, ["ddp.toml", "nnodes = '[1]'"]),
        ({}, {"role": "a\0b"}, ["ddp.toml", "role", "NUL"]),
        ({}, {"args": ["x"]}, ["ddp.toml", "args", "script"]),
        ({}, {"script": 1.5, "args": "x"}, ["ddp.toml", "args"]),
    ],
)
def test_a_wrong_source_is_named(environ: dict[str, str], table: dict[str, Any], parts: list[str]) -> None:
    message = refusal(["t.py"], environ, table)
    assert message.isprintable()
    for part in parts:
        assert part in message


def test_a_flag_hides_a_wrong_variable() -> None:
    assert settle(["--nnodes", "2", "t.py"], {"PET_NNODES": "x"})[0]["nnodes"] == (2, 2)


def test_a_mistyped_variable_is_pointed_out() -> None:
    (warning,) = unknown_variables({"DDP_LAUNCH_NNODE": "2", "DDP_LAUNCH_ROLE": "x", "PATH": "y"})
    assert "DDP_LAUNCH_NNODE" in warning
    assert "DDP_LAUNCH_NNODES" in warning


# --- what comes of it --------------------------------------------------------------------------------


def test_without_options() -> None:
    spec, warnings = specify(["runs/train.py", "--lr", "1"])
    assert spec.entry.kind is EntryKind.SCRIPT
    assert (spec.entry.target, spec.entry.args) == ("runs/train.py", ("--lr", "1"))
    assert spec.job.job_id == "train-1121-064412-3f2a"
    assert (spec.nproc, spec.job.nproc, spec.job.min_nodes, spec.job.max_nodes) == (2, "auto", 1, 1)
    assert spec.signals == (15, 2, 1, 3)
    assert spec.forwarded_signals == (10, 12)
    assert spec.job.scale_up is ScaleUp.IMMEDIATE
    assert warnings == []


@pytest.mark.parametrize(
    ("argv", "user", "job", "run_id", "is_shared"),
    [
        ([], "alice", "", "train-1121-064412-3f2a", False),  # one node: nobody else can join
        (["--nnodes", "2"], "alice", "", "alice-train", True),
        (["--nnodes", "2"], "bob", "", "bob-train", True),
        (["--nnodes", "2"], "DOM\\eve x", "", "DOM-eve-x-train", True),
        (["--nnodes", "2"], "alice", "77", "train-77", False),  # the scheduler tells jobs apart
        (["--nnodes", "2", "--rdzv-id", "mine"], "alice", "", "mine", False),
    ],
)
def test_jobs_of_two_users_do_not_meet(
    argv: list[str], user: str, job: str, run_id: str, is_shared: bool
) -> None:
    here = replace(HERE, user=user, scheduler_job=job)
    spec, _ = specify([*argv, "runs/train.py"], here=here)
    assert (spec.job.job_id, spec.id_may_be_shared) == (run_id, is_shared)


def test_a_function_of_several_nodes_names_its_job() -> None:
    spec, _ = specify(["--nnodes", "2", "-m", "ddp.launching.rank", "fit"], here=replace(HERE, user="ann"))
    assert (spec.job.job_id, spec.entry.name) == ("ann-fit", "fit")


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        ([], {"replacement_timeout_s": 60.0, "shrink_after_s": 0.0, "isolation_timeout_s": 300.0}),
        (["--replacement-timeout", "20"], {"replacement_timeout_s": 20.0, "shrink_after_s": 20.0}),
        (["--replacement-timeout", "20", "--shrink-after", "0"], {"shrink_after_s": 0.0}),
        (["--shrink-after", "5"], {"replacement_timeout_s": 60.0, "shrink_after_s": 5.0}),
        (["--reserved-exit-codes", "143,75"], {"reserved_exit_codes": (75, 143)}),
        (["--checkpoint-signal", "USR1"], {"checkpoint_signals": (10,), "forwarded_signals": (12,)}),
        (
            ["--checkpoint-signal", "TERM,USR2", "--checkpoint-grace", "2m"],
            {"checkpoint_signals": (15, 12), "checkpoint_grace_s": 120.0, "signals": (15, 2, 1, 3)},
        ),
        (["--interface", "eth0"], {"interface": "eth0", "local_addr": ""}),
    ],
)
def test_options_for_several_machines(argv: list[str], facts: dict[str, Any]) -> None:
    spec, warnings = specify([*argv, "t.py"])
    assert {name: field(spec, name) for name in facts} == facts
    assert warnings == []


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (["-m", "pkg.train"], {"job_id": "pkg.train-1121-064412-3f2a"}),
        (["--rdzv-id", "run7", "t.py"], {"job_id": "run7"}),
        (["--nnodes", "2", "--rdzv-id", "x", "t.py"], {"job_id": "x"}),
        (["--nnodes", "2", "some dir/träin.py"], {"job_id": "tr-in"}),
        (["--nnodes", "2", "t.py"], {"rendezvous": "", "job_id": "t"}),
        (["--nnodes", "2", "--rdzv-endpoint", "a", "t.py"], {"rendezvous": "a:29400"}),
        (["--nnodes", "2", "--rendezvous", "a:1,b:2", "t.py"], {"rendezvous": "a:1,b:2"}),
        (["--nnodes", "2", "--master-addr", "a", "t.py"], {"rendezvous": "a:29500", "master_addr": "a"}),
        (
            ["--nnodes", "2", "--master-addr", "::1", "--master-port", "7", "t.py"],
            {"rendezvous": "[::1]:7", "master_port": 0},
        ),
        (["--master-port", "7", "t.py"], {"master_port": 7, "rendezvous": ""}),
        (
            ["--signals-to-handle", "SIGTERM,SIGUSR1", "t.py"],
            {"signals": (15, 10), "forwarded_signals": (12,)},
        ),
        (["--signals-to-handle", "SIGTERM,", "t.py"], None),
        (["--rdzv-conf", "timeout=9", "t.py"], {"join_timeout_s": 9.0}),
        (["--rdzv-conf", "timeout=9,join_timeout=8,last_call_timeout=7", "t.py"], {"join_timeout_s": 8.0}),
        (["--rdzv-conf", "last_call_timeout=7", "t.py"], {"last_call_s": 7.0}),
        (["t.py"], {"lease_s": 15.0}),
        (["--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=4", "t.py"], {"lease_s": 4.0}),
        (["--rdzv-conf", "keep_alive_interval=2", "t.py"], {"lease_s": 6.0}),
        (
            ["--rdzv-conf='last_call_timeout=1,timeout=5'", "t.py"],
            {"join_timeout_s": 5.0, "last_call_s": 1.0},
        ),
        (["--no-python", "prog"], {"warm_start": True}),
    ],
)
def test_options_mean_what_torchrun_means(argv: list[str], facts: dict[str, Any] | None) -> None:
    if facts is None:
        assert "SIGTERM," in refusal(argv)
        return
    spec, warnings = specify(argv)
    assert {name: field(spec, name) for name in facts} == facts
    assert warnings == []


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--rdzv-backend", "c10d"], ["--rdzv-backend 'c10d'"]),
        (["--monitor-interval", "1"], ["--monitor-interval '1'"]),
        (["--start-method", "fork"], ["--start-method 'fork'"]),
        (["--event-log-handler", "null"], ["--event-log-handler 'null'"]),
        (["--logs-specs", "x"], ["--logs-specs 'x'"]),
        (["--rdzv-endpoint", "localhost:0"], ["--rdzv-endpoint 'localhost:0'"]),
        (["--rdzv-conf", "read_timeout=5,is_host=1"], ["read_timeout, is_host"]),
        (["--rdzv-conf", "join_timout=5"], ["join_timout", "join_timeout?"]),
        (["--rdzv-conf", "timeout=5", "--join-timeout", "6"], ["--rdzv-conf 'timeout=5'"]),
        (["--run-path", "--no-python"], ["--no-python", "--run-path"]),
        (["--standalone", "--rdzv-id", "x"], ["--rdzv-id 'x'", "--standalone"]),
        (["--standalone", "--nnodes", "1:4"], ["--nnodes '1:4'", "--standalone"]),
        (["--nnodes", "2", "--rendezvous", "a:1", "--rdzv-endpoint", "b:2"], ["--rdzv-endpoint 'b:2'"]),
        (["--nnodes", "2", "--master-port", "5"], ["--master-port '5'", "--master-addr"]),
        (["--preload", "numpy", "--no-warm-start"], ["--preload 'numpy'", "--no-warm-start"]),
    ],
)
def test_an_option_without_effect_adds_one_warning(argv: list[str], parts: list[str]) -> None:
    _, warnings = specify([*argv, "t.py"])
    assert len(warnings) == 1
    assert all(part in warnings[0] for part in parts)
    assert warnings[0].isprintable()


def test_an_etcd_server_is_not_taken_for_a_rendezvous() -> None:
    argv = ["--nnodes", "2", "--rdzv-backend", "etcd-v2", "--rdzv-endpoint", "etcd:2379", "t.py"]
    spec, warnings = specify(argv)
    assert spec.rendezvous == ""
    assert len(warnings) == 2


def test_run_path_comes_before_module_and_program() -> None:
    spec, _ = specify(["--run-path", "-m", "/abs/t.py"])
    assert spec.entry.kind is EntryKind.RUN_PATH


# --- the table ---------------------------------------------------------------------------------------


def test_every_default_is_a_right_value() -> None:
    settings, _ = settle(["t.py"])
    assert len(settings.by_dest) == len(OPTIONS)


def test_torchrun_has_every_flag_that_is_marked_as_its_own() -> None:
    """Read from torch's source text: importing torch costs seconds."""
    import importlib.util

    spec = importlib.util.find_spec("torch")
    assert spec
    assert spec.origin
    source = Path(spec.origin).with_name("distributed").joinpath("run.py").read_text()
    theirs = {flag for flag in re.findall(r'^        "(--[a-z-]+)",$', source, re.MULTILINE)}
    ours = {option.flag for option in OPTIONS if option.torchrun and option.flag != "--help"}
    assert ours == theirs | {"--log-line-prefix-template", "--print-completion"}  # since torch 2.15
    shorts = sorted(re.findall(r'^        "(-[a-z])",$', source, re.MULTILINE))
    assert shorts == sorted(option.short for option in OPTIONS if option.short and option.flag != "--help")


@pytest.mark.parametrize("width", [72, 80, 100])
def test_help_names_everything_and_fits(width: int) -> None:
    text = help_text(width)
    assert text.isascii()
    assert max(len(line) for line in text.splitlines()) <= width
    for option in OPTIONS:
        assert option.flag.removeprefix("--") in text
    for code in ("75", "77", "78", "128+S"):
        assert code in text


@pytest.mark.parametrize("width", [72, 80, 100])
def test_short_help_has_a_dozen_options_and_three_examples(width: int) -> None:
    text = short_help_text(width)
    assert text.isascii()
    assert max(len(line) for line in text.splitlines()) <= width
    examples, _, options = text.partition("Examples:\n")[2].partition("Common options")
    assert len(re.findall(r"^  ddp-launch ", examples, re.MULTILINE)) == 3
    shown = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", options, re.MULTILINE)
    assert len(shown) == 12
    assert set(shown) <= set(BY_SPELLING)
    assert "ddp-launch --help all" in text


@pytest.mark.parametrize("argv", [["--help", "all"], ["-h", "all"], ["--nnodes", "2", "--help", "all"]])
def test_help_remembers_what_it_is_wanted_about(argv: list[str]) -> None:
    line = read_arguments(argv)
    assert line.wants("help")
    assert line.words == ("all",)


def test_print_config_has_one_line_per_option_and_says_where_from() -> None:
    settings, words = settle(["--nnodes", "1:3", "t.py", "a b"], {"PET_ROLE": "x"}, {"spares": 2})
    lines = print_config_text(settings, words, "command line").splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["nnodes"] == ["1:3", "flag"]
    assert rows["role"] == ["x", "PET_ROLE"]
    assert rows["spares"] == ["2", "ddp.toml"]
    assert rows["warm-start"] == ["on", "default"]
    assert rows["script"] == ["t.py", "command", "line"]
    assert len(lines) == len([option for option in OPTIONS if option.reach]) + 2
