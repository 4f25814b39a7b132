"""The real command, fed what cannot work: exit code 2, one clear line, no traceback."""

import os
import socket
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from launcher import cli
from launcher.machine.devices import NoDevices, count_ranks, cpu_quota, usable_cpus, visible_of
from launcher.settings import checks
from launcher.settings.arguments import UsageError
from launcher.settings.config import unknown_variables

COMMAND = Path(sys.executable).with_name("ddp-launch")


def ddp_launch(
    *argv: str | bytes, cwd: Path, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PET_", "DDP_"))}
    return subprocess.run(
        [COMMAND, *argv],
        cwd=cwd,
        env={**clean, **(environ or {})},
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=100,
        check=False,
    )


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder with what people point the command at by mistake."""
    (tmp_path / "train.py").write_text("print('trained')\n")
    (tmp_path / "broken.py").write_text("x = 1\nprint(x\n")
    (tmp_path / "binary.py").write_bytes(b"\x7fELF\0\0\1" * 100)
    (tmp_path / "latin.py").write_bytes(b"name = '\xe9'\n")
    (tmp_path / "run.sh").write_text("#!/bin/sh\ntrue\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "three.toml").write_text('nnodes = "3:1"\n')
    (tmp_path / "typo.toml").write_text("nproc = 2\nmax-restart = 3\n")
    (tmp_path / "bad.toml").write_text("nnodes = 1\nrole = \n")
    (tmp_path / "latin.toml").write_bytes(b"\n# \xe9\n")
    return tmp_path


WRONG: list[tuple[list[str | bytes], dict[str, str], list[str]]] = [
    (["--bogus"], {}, ["--bogus", "--help"]),
    (["--nnods", "1", "train.py"], {}, ["--nnods", "--nnodes"]),
    ([], {}, ["script.py", "--help"]),
    ([""], {}, ["empty"]),
    (["trian.py"], {}, ["trian.py", "train.py"]),
    (["nowhere/train.py"], {}, ["nowhere/train.py", "directory nowhere"]),
    (["train.py/x.py"], {}, ["train.py/x.py"]),
    (["x" * 300], {}, ["File name too long"]),
    (["broken.py"], {}, ["broken.py", "line 2"]),
    (["binary.py"], {}, ["binary.py", "binary"]),
    (["latin.py"], {}, ["latin.py"]),
    (["run.sh"], {}, ["run.sh", "--no-python"]),
    (["--no-python", "--run-path", "run.sh"], {}, ["run.sh", "--no-python without --run-path"]),
    (["--no-python", "--run-path", "binary.py"], {}, ["binary", "--no-python without --run-path"]),
    (["empty"], {}, ["empty", "__main__.py"]),
    (["-"], {}, ["standard input"]),
    ([b"no\xff\n.py"], {}, ["no\\udcff\\n.py"]),
    (["--nnodes", "3:1", "train.py"], {}, ["--nnodes '3:1'", "--nnodes 1:3"]),
    (["train.py"], {"PET_NNODES": "3:1"}, ["PET_NNODES='3:1'", "PET_NNODES=1:3"]),
    (["train.py"], {"DDP_LAUNCH_CONFIG": "three.toml"}, ["three.toml", "nnodes = '3:1'"]),
    (["--config", "typo.toml", "train.py"], {}, ["typo.toml", "nproc"]),
    (["--config", "bad.toml", "train.py"], {}, ["bad.toml", "line 2"]),
    (["--config", "latin.toml", "train.py"], {}, ["latin.toml", "line 2", "UTF-8"]),
    (["--config", "none.toml", "train.py"], {}, ["--config 'none.toml'"]),
    (["--config", "empty", "train.py"], {}, ["--config 'empty'", "directory"]),
    (["--nproc-per-node", "0", "train.py"], {}, ["--nproc-per-node '0'"]),
    (
        ["--nproc-per-node", "gpu", "train.py"],
        {"CUDA_VISIBLE_DEVICES": ""},
        ["--nproc-per-node 'gpu'", "GPU"],
    ),
    (["--master-port", "70000", "train.py"], {}, ["--master-port '70000'"]),
    (["--log-dir", "train.py", "train.py"], {}, ["--log-dir 'train.py'", "file"]),
    (["--log-dir", "train.py/logs", "train.py"], {}, ["--log-dir 'train.py/logs'", "file"]),
    (["--log-dir", "x" * 300, "train.py"], {}, ["--log-dir", "too long"]),
    (["-m", "no_such_module_at_all"], {}, ["-m no_such_module_at_all", "PYTHONPATH"]),
    (["-m", "train.py"], {}, ["-m train.py", "-m train, or"]),
    (["-m", "package"], {}, ["-m package", "__main__"]),
    (["--no-python", "no-such-program"], {}, ["--no-python no-such-program", "PATH"]),
    (["--no-python", "run.sh"], {}, ["--no-python run.sh", "./run.sh"]),
    (["--no-python", "./run.sh"], {}, ["chmod +x ./run.sh"]),
    (["--no-python", "./empty"], {}, ["./empty", "directory"]),
    (["train.py"], {"PYTHON_EXEC": "/no/python"}, ["PYTHON_EXEC=/no/python"]),
]


@pytest.mark.parametrize(("argv", "environ", "parts"), WRONG)
def test_a_wrong_command_ends_with_one_clear_line(
    desk: Path,
    argv: list[str | bytes],
    environ: dict[str, str],
    parts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(desk)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli.main([os.fsdecode(word) for word in argv]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("ddp-launch: error: ")
    assert line.isprintable()
    for part in parts:
        assert part in line


def test_a_port_in_use_is_seen(desk: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ended = ddp_launch("--master-port", str(port), "train.py", cwd=desk)
    assert ended.returncode == 2
    assert f"--master-port '{port}'" in ended.stderr


def test_a_vanished_folder_is_seen(desk: Path) -> None:
    script = f"import os; os.chdir({str(desk)!r}); os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); "
    script += f"os.execv({str(COMMAND)!r}, ['ddp-launch', '--config', '/dev/null', 'train.py'])"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "current directory" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_what_may_not_be_read_or_written_is_seen(desk: Path) -> None:
    (desk / "train.py").chmod(0)
    assert "Permission denied" in ddp_launch("train.py", cwd=desk).stderr
    (desk / "empty").chmod(0o500)
    assert (
        "--log-dir 'empty/logs'"
        in ddp_launch("--log-dir", "empty/logs", "--no-python", "true", cwd=desk).stderr
    )


def test_python_m_launcher_is_the_same_command(desk: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "launcher", "--bogus"], cwd=desk, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr[:18]) == (2, "ddp-launch: error:")


@pytest.mark.parametrize("flag", ["--help", "-h", "--version", "--print-config", "--vers"])
def test_questions_are_answered(desk: Path, flag: str) -> None:
    ended = ddp_launch(flag, cwd=desk)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout


def test_print_config_shows_every_source(desk: Path) -> None:
    (desk / "ddp.toml").write_text('spares = 1\nscript = "train.py"\nargs = ["--lr", 0.1]\n')
    argv = ["--config", "ddp.toml", "--nnodes", "1:3", "--print-config"]
    environ = {"DDP_LAUNCH_ROLE": "x", "PET_TEE": "3"}
    ended = ddp_launch(*argv, cwd=desk, environ=environ)
    rows = {line.split()[0]: line.split()[1:] for line in ended.stdout.splitlines()}
    assert rows["nnodes"] == ["1:3", "flag"]
    assert rows["role"] == ["x", "DDP_LAUNCH_ROLE"]
    assert rows["tee"] == ["3", "PET_TEE"]
    assert rows["spares"] == ["1", "ddp.toml"]
    assert rows["args"] == ["--lr", "0.1", "ddp.toml"]


def test_print_config_survives_a_reader_that_leaves_and_a_terminal_without_letters(desk: Path) -> None:
    argv = ["--role", "träiner", "--print-config"]
    ended = ddp_launch(*argv, cwd=desk, environ={"PYTHONIOENCODING": "ascii"})
    assert (ended.returncode, ended.stderr) == (0, "")
    with open("/dev/full", "w") as full:
        refused = subprocess.run(
            [COMMAND, *argv], cwd=desk, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1


# --- checks that let through what python would run -----------------------------------------------------


def test_an_address_where_the_script_should_be(desk: Path) -> None:
    """`ddp-rendezvous serve --web` takes one, and `ddp-launch --web` does not."""
    with pytest.raises(UsageError, match=r"--web takes none, .* use --rendezvous 127\.0\.0\.1:8080"):
        checks.check_script("127.0.0.1:8080")


def test_what_python_runs_passes(desk: Path) -> None:
    import py_compile

    (desk / "warns.py").write_text("x = 1\nassert (x, 'always')\nx is 1\n")
    (desk / "folder").mkdir()
    (desk / "folder" / "__main__.py").write_text("pass\n")
    with zipfile.ZipFile(desk / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", "pass\n")
    with zipfile.ZipFile(desk / "data.zip", "w") as archive:
        archive.writestr("data.txt", "nothing to run")
    compiled = py_compile.compile(str(desk / "train.py"), cfile=str(desk / "train.pyc"))
    assert compiled
    for name in ("train.py", "warns.py", "folder", "app.pyz", "train.pyc"):
        checks.check_script(str(desk / name))
    with pytest.raises(UsageError, match="binary"):
        checks.check_script(str(desk / "data.zip"))
    checks.check_script(str(desk / "broken.py"), python="/usr/bin/python2")  # it may know that language


def test_a_module_is_found_without_being_imported(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    (desk / "package" / "__main__.py").write_text("pass\n")
    for name in ("train", "package", "package.anything", "json.tool", "this"):
        checks.check_module(name, "", f"-m {name}", {})
    assert "package" not in sys.modules
    assert "this" not in sys.modules


# --- devices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("0,1,2,3", 4),
        ("1", 1),
        ("", 0),
        ("0,9,1", 1),
        ("-1,0", 0),
        ("0,0", 0),
        ("GPU-1a,GPU-2b", 2),
        (" 2 , 3 ", 2),
        ("x", 0),
        ("9" * 5000, 0),
    ],
)
def test_visible_devices_are_counted_as_cuda_does(visible: str, count: int) -> None:
    assert visible_of(4, visible) == count


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


_EXTENSION = """
import types

def load():
    import torch
    torch.utils.rename_privateuse1_backend("fancy")
    devices = types.ModuleType("fancy")
    devices.is_available, devices.device_count = lambda: True, lambda: 3
    torch._register_device_module("fancy", devices)
"""


@pytest.mark.nightly(instead="::test_gpus_are_counted_from_the_drivers")
def test_devices_of_an_extension_are_counted_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoDevices, match="no installed extension"):
        count_ranks("fancy", {})
    write(tmp_path / "fancy_device.py", _EXTENSION)
    folder = tmp_path / "fancy_device-1.0.dist-info"
    write(folder / "METADATA", "Metadata-Version: 2.1\nName: fancy-device\nVersion: 1.0\n")
    write(folder / "entry_points.txt", "[torch.backends]\nfancy = fancy_device:load\n")
    monkeypatch.syspath_prepend(tmp_path)
    environ = {"PYTHONPATH": str(tmp_path)}
    assert count_ranks("fancy", environ) == 3
    with pytest.raises(NoDevices, match="no device type 'fanciful'"):
        count_ranks("fanciful", environ)


def test_gpus_are_counted_from_the_drivers(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert count_ranks("auto", {}, root) == usable_cpus(root)
    with pytest.raises(NoDevices, match="GPU"):
        count_ranks("gpu", {"CUDA_VISIBLE_DEVICES": "0"}, root)
    for node, gpu_id in enumerate(("0", "1234", "5678")):
        write(tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}/gpu_id", f"{gpu_id}\n")
    assert count_ranks("auto", {}, root) == 2
    assert count_ranks("gpu", {"HIP_VISIBLE_DEVICES": "1"}, root) == 1
    for bus in ("01", "02", "03"):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:{bus}:00.0").mkdir(parents=True)
    assert count_ranks("gpu", {}, root) == 3
    assert count_ranks("gpu", {"CUDA_VISIBLE_DEVICES": "0,2"}, root) == 2
    write(tmp_path / "sys/class/drm/renderD128/device/vendor", "0x8086\n")
    assert count_ranks("xpu", {}, root) == 1
    assert count_ranks("7", {}, root) == 7


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        ({"proc/self/cgroup": "1:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"}, None),
        ({"proc/self/cgroup": "garbage\n"}, None),
    ],
)
def test_control_groups_limit_the_cpus(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    mounts = (("", "cgroup2", ""), ("/cpu,cpuacct", "cgroup", ",cpu,cpuacct"), ("/cpu", "cgroup", ",cpu"))
    lines = [f"3 1 0:6 / /sys/fs/cgroup{at} rw - {kind} cgroup rw{names}\n" for at, kind, names in mounts]
    write(tmp_path / "proc/self/mountinfo", "".join(lines))
    for name, text in files.items():
        write(tmp_path / name, text)
        write((tmp_path / name).parent / "cgroup.procs", "")
    assert cpu_quota(str(tmp_path)) == quota
    assert 1 <= usable_cpus(str(tmp_path)) <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize("folder", ["/nowhere", "relative"])
def test_an_odd_folder_for_temporary_files_is_no_obstacle(desk: Path, folder: str) -> None:
    (desk / "relative").mkdir()
    script = "import os; os.chdir('/'); print(os.path.isabs(os.environ['TORCHELASTIC_ERROR_FILE']))"
    (desk / "where.py").write_text(script)
    ran = ddp_launch(
        "--no-warm-start", "--nproc-per-node", "1", "where.py", cwd=desk, environ={"TMPDIR": folder}
    )
    assert ran.returncode == 0
    assert not [line for line in ran.stderr.splitlines() if "a faster disk" not in line]  # others may use it
    assert ran.stdout.endswith("True\n")


def test_a_log_folder_that_cannot_be_made_is_one_line(desk: Path) -> None:
    ran = ddp_launch("--log-dir", "/proc/logs", "--nproc-per-node", "1", "train.py", cwd=desk)
    assert ran.returncode == 2
    assert ran.stderr.startswith("ddp-launch: error: invalid --log-dir '/proc/logs': ")
    assert ran.stderr.count("\n") == 1


def test_a_misspelt_variable_is_told_what_it_resembles() -> None:
    (warning,) = unknown_variables({"DDP_LAUNCH_NPROC": "2"})
    assert "DDP_LAUNCH_NPROC " in warning
    assert "DDP_LAUNCH_NPROC_PER_NODE?" in warning


def test_a_binding_that_cannot_be_had_is_one_line_that_names_its_flag_once() -> None:
    ranks = str(len(os.sched_getaffinity(0)) + 1)
    words = ("--numa-binding", "exclusive", "--nproc-per-node", ranks, "--no-python", "true")
    ended = subprocess.run([sys.executable, "-m", "launcher", *words], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("ddp-launch: error: --numa-binding exclusive: ")


@pytest.mark.parametrize(("files", "code"), [(370, 0), (369, 71)])
def test_ranks_that_the_limit_on_open_files_cannot_carry(desk: Path, files: int, code: int) -> None:
    """Before any of them starts; and what is said to be enough is enough."""
    command = f"ulimit -n {files} && exec {COMMAND} --preflight off --nproc-per-node 30 --no-python /bin/true"
    done = subprocess.run(
        ["bash", "-c", command], cwd=desk, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == code, done.stderr
    assert ("--nproc-per-node" in done.stderr and "370" in done.stderr) == (code == 71)


def test_the_version_names_what_it_works_with_and_loads_nothing_large() -> None:
    heavy = "asyncio grpc torch ddp importlib.metadata socket ssl subprocess".split()
    ask = f"import sys; from launcher.cli import main; main(['--version']); print({{*{heavy}}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-P", "-c", ask], capture_output=True, text=True, check=True)
    *lines, loaded = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ddp-launch", "torch", "core", "protocol", "python"]
    assert f"torch {metadata.version('torch')}" in lines
    assert loaded == "set()"


@pytest.mark.parametrize(
    ("attribute", "value", "says"), [("abiflags", "t", "free-threaded"), ("platform", "darwin", "Linux only")]
)
def test_where_it_cannot_run(
    attribute: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, attribute, value)
    assert cli.main(["train.py"]) == 2
    assert says in capsys.readouterr().err
    assert cli.main(["--help"]) == 0


def test_help_all_has_every_option_and_help_the_common_ones(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help", "all"], ["-h", "all"], ["doctor", "--help", "all"], ["warm", "--help", "all"]):
        assert cli.main(argv) == 0
        text = capsys.readouterr().out
        assert "--rdzv-backend" in text
        assert "Exit codes" in text
    for argv in (["--help"], ["-h"], ["docs", "-h"], ["warm", "start", "--help"], ["--help", "train.py"]):
        assert cli.main(argv) == 0
        text = capsys.readouterr().out
        assert "Examples" in text
        assert "--rdzv-backend" not in text
