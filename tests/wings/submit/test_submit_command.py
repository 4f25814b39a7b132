"""`ddpctl submit`, the command: what it shows, and to whom it hands a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml


def submit(folder: Path, *words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rendezvous.control.ctl", "submit", *words]
    environ = os.environ | ({"PATH": f"{path}:{os.environ['PATH']}"} if path else {})
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ddp.toml").write_text(
        'name = "train"\nimage = "train:7"\nnodes = 2\n[ssh]\nhosts = ["a", "b"]\n'
    )
    return tmp_path


@pytest.mark.parametrize("target", ["kubernetes", "slurm", "ssh"])
def test_a_dry_run_shows_it_and_submits_nothing(folder: Path, target: str) -> None:
    done = submit(folder, "--target", target, "--dry-run", "--", "train.py", "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    assert "train.py" in done.stdout
    assert "0.1" in done.stdout


def play(folder: Path, program: str, ending: str) -> str:
    """A program that writes down what it was given, call by call; the folder it is in."""
    recorder = folder / "bin" / program
    recorder.parent.mkdir(exist_ok=True)
    recorder.write_text(
        f'#!/bin/sh\necho "$@" >>"{folder}/words"\ncat >>"{folder}/input"\necho "---" >>"{folder}/input"\n{ending}\n'
    )
    recorder.chmod(0o755)
    return str(recorder.parent)


def test_slurm_gets_what_the_dry_run_shows(folder: Path) -> None:
    path = play(folder, "sbatch", "exit 3")
    done = submit(folder, "--target", "slurm", "--", "train.py", path=path)
    assert done.returncode == 3
    shown = submit(folder, "--target", "slurm", "--dry-run", "--", "train.py").stdout
    assert (folder / "input").read_text() == shown + "---\n"
    assert (folder / "words").read_text() == "\n"


def test_kubernetes_makes_the_job_and_what_belongs_to_it(folder: Path) -> None:
    path = play(folder, "kubectl", "echo 7-uid")
    done = submit(folder, "--target", "kubernetes", "--", "train.py", path=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "job/train created in namespace default; its job id for ddpctl: train-7-uid\n"
    create, apply = (folder / "words").read_text().splitlines()
    assert create.startswith("create -f - ")
    assert apply.startswith("apply --server-side ")
    job, service, fence, secret = filter(None, yaml.safe_load_all((folder / "input").read_text()))
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "7-uid"}
    assert [each["metadata"]["ownerReferences"] for each in (service, fence, secret)] == [[owner]] * 3
    assert "PRIVATE KEY" in secret["stringData"]["secret"]
    shown = submit(folder, "--target", "kubernetes", "--dry-run", "--", "train.py")
    service_shown, _, job_shown = yaml.safe_load_all(shown.stdout)
    assert job_shown == job
    assert service_shown["spec"] == service["spec"]
    assert f"create secret generic {secret['metadata']['name']} --from-file=secret" in shown.stderr


def test_nothing_is_made_around_a_job_that_is_there_already(folder: Path) -> None:
    path = play(folder, "kubectl", "echo exists >&2; exit 1")
    done = submit(folder, "--target", "kubernetes", "--", "train.py", path=path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "exists\n")
    assert len((folder / "words").read_text().splitlines()) == 1


def test_a_trainjob_finds_its_runtime_there_and_the_cluster_is_the_one_named(folder: Path) -> None:
    with (folder / "ddp.toml").open("a") as file:
        file.write('[kubernetes]\nkind = "trainjob"\ncontext = "blue"\nrendezvous = "r:1"\n')
    path = play(folder, "kubectl", "echo 7-uid")
    assert submit(folder, "--target", "kubernetes", "--", "train.py", path=path).returncode == 0
    runtime, trainjob, *around = filter(None, yaml.safe_load_all((folder / "input").read_text()))
    assert [runtime["kind"], trainjob["kind"]] == ["TrainingRuntime", "TrainJob"]
    assert [each["kind"] for each in around] == ["NetworkPolicy", "TrainingRuntime"]
    assert [each["metadata"]["ownerReferences"][0]["uid"] for each in around] == ["7-uid"] * 2
    calls = (folder / "words").read_text().splitlines()
    assert [each.split()[:3] for each in calls] == [
        ["--context", "blue", "create"],
        ["--context", "blue", "create"],
        ["--context", "blue", "apply"],
    ]


def test_a_trainjob_that_is_refused_leaves_no_runtime_and_overwrites_none(folder: Path) -> None:
    with (folder / "ddp.toml").open("a") as file:
        file.write('[kubernetes]\nkind = "trainjob"\nrendezvous = "r:1"\n')
    path = play(folder, "kubectl", 'case "$*" in *jsonpath*) exit 1;; esac')
    assert submit(folder, "--target", "kubernetes", "--", "train.py", path=path).returncode == 1
    assert [each.split()[0] for each in (folder / "words").read_text().splitlines()] == [
        *("create", "create", "delete")
    ]
    (folder / "words").unlink()
    path = play(folder, "kubectl", "exit 1")
    assert submit(folder, "--target", "kubernetes", "--", "train.py", path=path).returncode == 1
    assert (folder / "words").read_text().split() == ["create", "-f", "-"]


def test_without_the_program_it_is_said_what_to_do(folder: Path) -> None:
    command = [sys.executable, "-m", "rendezvous.control.ctl", "submit", "--target", "slurm", "--", "t.py"]
    environ = {"PATH": "/nowhere", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 127
    assert "sbatch is not on PATH" in done.stderr


def test_an_option_that_the_launcher_does_not_know_is_refused_before_anybody_queues(folder: Path) -> None:
    """Written in front: keys after a table would be the table's."""
    text = (folder / "ddp.toml").read_text()
    (folder / "ddp.toml").write_text('options = ["--max-restrats", "3"]\n' + text)
    for target in ("kubernetes", "slurm", "ssh"):
        done = submit(folder, "--target", target, "--dry-run", "--", "train.py")
        assert (done.returncode, done.stdout) == (2, "")
        assert "--max-restarts?" in done.stderr


def test_what_is_wrong_is_said_without_a_traceback(folder: Path) -> None:
    cases = {
        ("--target", "slurm"): "script",
        ("--target", "slurm", "--file", "none.toml", "--", "t.py"): "none.toml",
        ("--target", "slurm", "--file", "/dev/zero", "--", "t.py"): "16777216",
        ("--target", "lsf", "--", "t.py"): "lsf",
    }
    for words, expected in cases.items():
        done = submit(folder, *words)
        assert done.returncode == 2
        assert expected in done.stderr
        assert "Traceback" not in done.stderr
    (folder / "ddp.toml").write_text("name = ")
    assert "TOML" in submit(folder, "--target", "ssh", "--", "t.py").stderr
    (folder / "ddp.toml").write_text(json.dumps({}))
    assert "TOML" in submit(folder, "--target", "ssh", "--", "t.py").stderr


@pytest.mark.parametrize(("words", "code"), [((), 137), (("--reserved-exit-codes", "71,137"), 1)])
def test_a_job_that_failed_does_not_end_like_a_machine_that_was_lost(
    tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    (tmp_path / "t.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    command = [sys.executable, "-m", "launcher", "--nproc-per-node", "1", "--no-warm-start", *words, "t.py"]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stderr
    assert "SIGKILL" in done.stderr


def test_who_stops_reading_or_has_no_room_sees_no_traceback(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "rendezvous.control.ctl",
        "submit",
        "--dry-run",
        "--target",
        "kubernetes",
    ]
    reading, writing = os.pipe()
    os.close(reading)
    unread = subprocess.run(
        [*command, "--", "t.py"], cwd=folder, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writing)
    assert (unread.returncode, unread.stderr) == (141, "")
    with open("/dev/full", "w") as full:
        unwritten = subprocess.run(
            [*command, "--", "t.py"], cwd=folder, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert unwritten.returncode == 1
    assert unwritten.stderr.endswith(": No space left on device [DDP-1021]\n")
    assert unwritten.stderr.count("\n") == 1


def test_more_words_than_a_program_can_be_given_are_told(folder: Path) -> None:
    words = json.dumps(["t.py", *["x" * 100_000] * 100])
    (folder / "ddp.toml").write_text(f'name = "train"\nimage = "train:7"\nscript = {words}\n')
    done = submit(folder, "--target", "kubernetes", "--dry-run")
    assert done.returncode == 1
    assert done.stderr.startswith("ddpctl: ")
    assert "Argument list too long" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("target", "lines", "words"),
    [
        ("kubernetes", '[kubernetes]\nrendezvous = "foo bar"', "--rendezvous 'foo bar': not HOST:PORT"),
        ("slurm", 'rendezvous = "foo:bar"', "not HOST:PORT"),
        ("ssh", '[ssh]\nhosts = ["$(x)"]', "invalid --hosts '$(x)'"),
    ],
)
def test_places_that_no_machine_can_reach_are_refused(
    tmp_path: Path, target: str, lines: str, words: str
) -> None:
    (tmp_path / "ddp.toml").write_text(f'name = "train"\nimage = "train:7"\nscript = ["t.py"]\n{lines}\n')
    done = submit(tmp_path, "--target", target, "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
