"""`ddpctl submit`: what it renders, what it refuses, and to whom it hands it."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import rules
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rendezvous.submit import kubernetes, slurm, ssh
from rendezvous.submit.job_file import BadJobFile, megabytes, read
from rendezvous.submit.yaml_text import documents

SMALL: dict[str, Any] = {"name": "train", "image": "train:7", "script": ["train.py"], "nodes": 4}
LARGE: dict[str, Any] = {
    **SMALL,
    "nodes": "2:4",
    "spares": 1,
    "rendezvous": "ddp-rendezvous.ddp-rendezvous.svc:29400",
    "resources": {"cpu": 8, "memory": "64Gi", "gpus": 8, "shm": "16Gi"},
    "env": {"NCCL_DEBUG": "WARN", "ODD": 'it\'s $HOME: "yes" #1'},
    "volumes": [{"path": "/data", "claim": "data", "read_only": True}, {"path": "/scratch", "size": "5Gi"}],
    "kubernetes": {
        "queue": "team",
        "token_secret": "train-token",
        "tls_secret": "client-tls",
        "node_selector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    },
    "slurm": {"partition": "gpu", "time": "24:00:00", "setup": ["module load python"]},
    "ssh": {"hosts": ["a", "b", "c", "d", "e"]},
}
_RENDER = Path(__file__).parents[2] / "deploy" / "jobs" / "render.py"
KINDS = ("job", "jobset", "trainjob")


def rendered(data: dict[str, Any], kind: str = "job") -> list[Any]:
    job = read({**data, "kubernetes": {**data.get("kubernetes", {}), "kind": kind}})
    return list(yaml.safe_load_all(documents(kubernetes.objects(job))))


def container(objects: list[Any]) -> Any:
    (found,) = [each for _, template, _ in rules.pods(objects) for each in rules.containers(template)]
    return found


@pytest.mark.parametrize("version", ["1.35", "1.36", "1.37"])
@pytest.mark.parametrize("data", [SMALL, LARGE])
def test_a_job_fits_the_schemas(data: dict[str, Any], version: str) -> None:
    for found in rendered(data):
        kubernetes_validate.validate(found, version, strict=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", [SMALL, LARGE])
def test_a_job_breaks_no_rule(data: dict[str, Any], kind: str) -> None:
    assert rules.broken(rendered(data, kind)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_pods_are_the_same_whoever_makes_them(kind: str) -> None:
    ours, theirs = (container(rendered(LARGE, each)) for each in ("job", kind))
    assert ours == theirs


def test_a_trainjob_asks_for_the_runtime_that_comes_with_it() -> None:
    runtime, train = rendered(LARGE, "trainjob")
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert train["spec"]["trainer"]["args"] == container([runtime])["args"]


def test_the_launcher_takes_the_words_it_is_given() -> None:
    words = container(rendered(LARGE))["args"]
    command = [sys.executable, "-m", "launcher", "--print-config", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "2:4" in done.stdout
    assert LARGE["rendezvous"] in done.stdout


BREAKAGES = {
    "no name to be found under": lambda spec: spec.update(completionMode="NonIndexed"),
    "needs restartPolicy Never": lambda spec: spec["template"]["spec"].update(restartPolicy="OnFailure"),
    "wait for others to end": lambda spec: spec.update(parallelism=2),
    "two limits": lambda spec: spec.update(backoffLimit=3),
    "which is no container": lambda spec: spec["podFailurePolicy"]["rules"][1]["onExitCodes"].update(
        containerName="trainer"
    ),
    "exit code 0": lambda spec: spec["podFailurePolicy"]["rules"][1]["onExitCodes"].update(
        operator="In", values=[0]
    ),
    "must be in order": lambda spec: spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"].reverse(),
    "without its status": lambda spec: spec["podFailurePolicy"]["rules"][0]["onPodConditions"][0].pop(
        "status"
    ),
    "once they have failed": lambda spec: spec.update(podReplacementPolicy="TerminatingOrFailed"),
    "no headless service": lambda spec: spec["template"]["spec"].update(subdomain="other"),
}


@pytest.mark.parametrize("words", BREAKAGES)
def test_a_rule_about_jobs_finds_what_it_is_for(words: str) -> None:
    objects = rendered(LARGE)
    BREAKAGES[words](objects[1]["spec"])
    assert any(words in found for found in rules.broken(objects))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"nodse": 3}, "unknown key 'nodse'; did you mean nodes?"),
    ({"nodes": "four"}, 'write "4", or "2:4"'),
    ({"nodes": "4:2"}, "the smaller number comes first"),
    ({"name": "My_Job"}, "small letters, digits and dashes"),
    ({"script": []}, "no script"),
    ({"resources": {"memory": "lots"}}, "memory is a quantity"),
    ({"resources": {"gpus": "many"}}, "gpus is a whole number, not 'many'"),
    ({"resources": 3}, "[resources] is a table"),
    ({"volumes": {"path": "/x"}}, "[[volumes]]"),
    ({"volumes": [{"claim": "x"}]}, "[[volumes]] 1: path must be given"),
    ({"env": {"A-B": "1"}}, "is no name of a variable"),
    ({"kubernetes": {"kind": "pod"}}, "write job, jobset or trainjob"),
    ({"slurm": {"requeue": "yes"}}, "requeue is true or false"),
    ({"spares": -1}, "no smaller than 0"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_job_file_that_cannot_be_meant_is_refused_in_words(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadJobFile) as refused:
        read({**SMALL, **change})
    assert words in str(refused.value)


@pytest.mark.parametrize(("text", "expected"), [("16Gi", 16384), ("1G", 954), ("1024", 1), ("512Mi", 512)])
def test_memory_in_the_units_of_slurm(text: str, expected: int) -> None:
    assert megabytes(text) == expected


def test_a_slurm_script_says_what_the_job_file_says() -> None:
    text = slurm.script(read(LARGE))
    for words in ("--nodes=5", "--mem=65536M", "--gpus-per-node=8", "--partition=gpu", "--requeue", "USR1@"):
        assert words in text
    assert text.index("module load python") < text.index("srun")
    shown = subprocess.run(
        ["bash", "-c", text.split("module load")[0] + 'printf %s "$ODD"'], capture_output=True, text=True
    )
    assert shown.stdout == LARGE["env"]["ODD"]


def test_too_few_hosts_are_refused() -> None:
    with pytest.raises(BadJobFile, match="too few"):
        ssh.command(read({**LARGE, "ssh": {"hosts": ["a", "b"]}}))


numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.text() | numbers | st.booleans() | st.none()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(st.dictionaries(st.text(), values, min_size=1, max_size=3), min_size=1, max_size=2))
def test_yaml_is_read_back_as_it_was_meant(objects: list[dict[str, Any]]) -> None:
    assert list(yaml.safe_load_all(documents(objects))) == objects


def test_the_written_examples_are_what_it_renders() -> None:
    """`python deploy/jobs/render.py` writes them anew."""
    made: dict[Any, str] = runpy.run_path(str(_RENDER))["rendered"]()
    assert len(made) == 4 * len(list(_RENDER.parent.glob("*.toml")))
    for path, text in made.items():
        assert path.read_text() == text, path
    written = {*(_RENDER.parent / "kubernetes").iterdir(), *(_RENDER.parent / "slurm").iterdir()}
    assert written == set(made)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck on this machine")
def test_the_scripts_for_slurm_have_no_trap_of_the_shell() -> None:
    for path in (_RENDER.parent / "slurm").iterdir():
        subprocess.run(["shellcheck", str(path)], check=True)


# --- the command -------------------------------------------------------------------------------------------


def submit(folder: Path, *words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rendezvous.ctl", "submit", *words]
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


@pytest.mark.parametrize(("target", "program"), [("kubernetes", "kubectl"), ("slurm", "sbatch")])
def test_it_is_handed_to_the_users_own_program(folder: Path, target: str, program: str) -> None:
    """One that writes down what it was given, and ends as it likes."""
    recorder = folder / "bin" / program
    recorder.parent.mkdir()
    recorder.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >"{folder}/words"\ncat >"{folder}/input"\nexit 3\n')
    recorder.chmod(0o755)
    done = submit(folder, "--target", target, "--", "train.py", path=str(recorder.parent))
    assert done.returncode == 3
    shown = submit(folder, "--target", target, "--dry-run", "--", "train.py").stdout
    assert (folder / "input").read_text() == shown
    assert (folder / "words").read_text().split() == (["create", "-f", "-"] if target == "kubernetes" else [])


def test_what_is_wrong_is_said_without_a_traceback(folder: Path) -> None:
    cases = {
        ("--target", "slurm"): "script must be given",
        ("--target", "slurm", "--file", "none.toml", "--", "t.py"): "there is no such file",
        ("--target", "lsf", "--", "t.py"): "invalid choice",
    }
    for words, expected in cases.items():
        done = submit(folder, *words)
        assert done.returncode == 2
        assert expected in done.stderr
        assert "Traceback" not in done.stderr
    (folder / "ddp.toml").write_text("name = ")
    assert "is no TOML" in submit(folder, "--target", "ssh", "--", "t.py").stderr
    (folder / "ddp.toml").write_text(json.dumps({}))
    assert "is no TOML" in submit(folder, "--target", "ssh", "--", "t.py").stderr
