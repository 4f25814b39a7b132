from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from ddp_launch_wings.hosts import command_lines
from ddp_launch_wings.hosts.command_lines import SharedSettings
from launcher.settings.arguments import UsageError, read_arguments
from launcher.settings.config import ConfigFile, Settings, merge
from launcher.settings.values import BadValue, Host, read_hostfile
from launcher.settings.values import hosts as parse_hosts


def settings_of(*argv: str, **environ: str) -> Settings:
    return merge(read_arguments([*argv, "train.py"]), environ, ConfigFile())


def shared(**more: object) -> SharedSettings:
    settled = {
        "program": "/opt/env/bin/ddp-launch",
        "folder": "/home/ada/my work",
        "run_id": "train-1",
        "nnodes": (2, 2),
        "rendezvous": "",
        "color": "never",
        "words": ("train.py", "--lr", "0.1 * 2"),
    }
    return SharedSettings(**{**settled, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a,b", (Host("a"), Host("b"))),
        ("a:4,ada@b:2", (Host("a", 4), Host("ada@b", 2))),
        ("fd77::1", (Host("fd77::1"),)),
        ("[fd77::1]:8,10.0.0.2", (Host("fd77::1", 8), Host("10.0.0.2"))),
    ],
)
def test_hosts_and_their_ranks(text: str, found: tuple[Host, ...]) -> None:
    assert parse_hosts(text) == found


@pytest.mark.parametrize(
    "text", ["", "a,,b", "a,a:2", "a,ada@a", "-oProxyCommand=x", "a b", "a:0", "a:many", "a;reboot"]
)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(BadValue):
        parse_hosts(text)


def test_a_hostfile_as_mpi_writes_it() -> None:
    text = "# rack 1\nnode1 slots=8 max_slots=8\n\n  ada@node2   # no number\nnode3:4\n"
    assert read_hostfile(text) == (Host("node1", 8), Host("ada@node2"), Host("node3", 4))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "one host per line"),
        ("node1\nnode2 solts=3", "line 2: unexpected 'solts=3'"),
        ("node1 slots=x", "line 1: "),
        ("node1\nnode1", "node1 "),
    ],
)
def test_a_hostfile_that_is_wrong_names_the_line(text: str, words: str) -> None:
    with pytest.raises(BadValue) as error:
        read_hostfile(text)
    assert words.replace("'", "") in str(error.value).replace("'", "")


def test_the_world_is_all_hosts_but_the_spares_unless_said_otherwise() -> None:
    three = parse_hosts("a,b,c")
    assert command_lines.world_of(settings_of(), three) == (3, 3)
    assert command_lines.world_of(settings_of("--spares", "1"), three) == (2, 2)
    assert command_lines.world_of(settings_of("--nnodes", "1:3"), three) == (1, 3)
    with pytest.raises(UsageError, match="--nnodes '4'"):
        command_lines.world_of(settings_of("--nnodes", "4"), three)
    with pytest.raises(UsageError, match="--spares '3'"):
        command_lines.world_of(settings_of("--spares", "3"), three)


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        (("--standalone",), {}, "--standalone: contradicts --hosts 'a'"),
        (("--local-addr", "10.0.0.1"), {}, "--local-addr '10.0.0.1'.*--interface"),
        ((), {"SLURM_STEP_NUM_TASKS": "4"}, "--hosts 'a': srun.* 4 copies"),
    ],
)
def test_what_cannot_be_meant_of_several_hosts_is_refused(
    words: tuple[str, ...], environ: dict[str, str], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        command_lines.check(settings_of("--hosts", "a", *words), environ)


def test_an_option_that_the_hosts_set_adds_a_warning() -> None:
    given = settings_of("--hostfile", "x", "--node-rank", "1", PET_MASTER_ADDR="b")
    warnings = command_lines.check(given, {"SLURM_STEP_NUM_TASKS": "1"})
    assert [warning.partition(":")[0] for warning in warnings] == ["--node-rank '1'", "PET_MASTER_ADDR='b'"]


def test_a_host_is_told_all_that_was_asked_for_wherever_that_was_said() -> None:
    asked = settings_of("--max-restarts", "3", "--no-warm-start", "-m", DDP_LAUNCH_CRASH_LOOP="5/2s")
    words = command_lines.argv_for(asked, shared(), "127.0.0.1:20001", Host("b", 4), 1)
    assert words[0] == "/opt/env/bin/ddp-launch"
    assert words[words.index("--") :] == ["--", "train.py", "--lr", "0.1 * 2"]
    line = read_arguments(words[1:])
    understood = merge(line, {}, ConfigFile())
    assert understood["rendezvous"] == "127.0.0.1:20001"
    assert understood["nnodes"] == (2, 2)
    assert understood["nproc_per_node"] == "4"
    assert understood["node_rank"] == 1
    assert understood["module"] is True
    assert understood["warm_start"] is False
    assert understood["max_restarts"].limit == 3
    assert understood["crash_loop"] == asked["crash_loop"]
    assert line.words == ("train.py", "--lr", "0.1 * 2")


def test_the_remote_command_survives_a_shell() -> None:
    text = command_lines.remote_command("/home/ada/my work", ["/bin/ddp-launch", "--", "a b", "$HOME"])
    assert text == "cd '/home/ada/my work' && exec env DDP_SSH_CONTROL=1 /bin/ddp-launch -- 'a b' '$HOME'"


def test_secrets_never_stand_in_the_command_line() -> None:
    asked = settings_of("--send-env", "WANDB_API_KEY,MODE=fast")
    environ = {
        "WANDB_API_KEY": "s3cret",
        "NCCL_DEBUG": "INFO",
        "HOME": "/root",
        "PATH": str(PurePosixPath("/bin")),
    }
    assert command_lines.sent_environment(environ, asked["send_env"]) == {
        "WANDB_API_KEY": "s3cret",
        "NCCL_DEBUG": "INFO",
        "MODE": "fast",
    }
    assert "s3cret" not in " ".join(command_lines.argv_for(asked, shared(), "x:1", Host("b"), None))
