"""Each command of docs/deploy.md: run here as far as it can be, and none that nobody looks at.

What kubectl asks a cluster is not run: there is none.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from charts import needs_kubectl
from deploy_page import PAGE, blocks, commands
from served import serving

_ROOT = Path(__file__).parents[2]
_BIN = Path(sys.executable).parent
_JOB_FILE = 'name = "train"\nimage = "train:7"\nscript = ["train.py"]\nnodes = 2\n[ssh]\nhosts = ["a", "b"]\n'
_UNIT = _ROOT / "deploy" / "systemd" / "ddp-rendezvous.service"
# Asked of a cluster, in the blocks of an overlay, or of what only root of a machine may change.
_OF_A_CLUSTER = ("rollout status", "wait --for", "get secret", "apply -f")
_OF_A_MACHINE = ("systemctl", "systemd-sysusers", "install", "chgrp", "chmod", "podman push")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deploy").symlink_to(_ROOT / "deploy")
    (tmp_path / "Makefile").symlink_to(_ROOT / "Makefile")
    (tmp_path / "ddp.toml").write_text(_JOB_FILE)
    (tmp_path / "token").write_text("a.b")
    subprocess.run(
        [_BIN / "ddp-rendezvous", "key", "token-keys"], cwd=tmp_path, check=True, capture_output=True
    )
    return tmp_path


def run(folder: Path, command: str, **env: str) -> str:
    environ = os.environ | {"PATH": f"{_BIN}:{os.environ['PATH']}"} | env
    words = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(
        words, cwd=folder, env=environ, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def starting(*words: str) -> list[str]:
    return [command for command in commands() if command.startswith(words)]


def test_every_command_is_somebodys() -> None:
    known = ("ddp-rendezvous ", "ddpctl ", "kubectl apply -k ", "make ", "sbatch ", *_OF_A_MACHINE)
    for command in commands():
        ours = command.startswith(known) or "create secret generic" in command
        of_a_cluster = any(words in command for words in _OF_A_CLUSTER)
        played = any(command in block for block in blocks() if "deploy/kubernetes/overlays/" in block[0])
        assert ours or (of_a_cluster and played), command


@pytest.mark.parametrize("path", sorted(set(re.findall(r"deploy/[\w./-]*\w", PAGE.read_text()))))
def test_every_file_that_is_named_is_there(path: str) -> None:
    assert (_ROOT / path).exists()


@needs_kubectl
@pytest.mark.parametrize("command", starting("kubectl apply -k"))
def test_an_overlay_is_built(folder: Path, command: str) -> None:
    assert "StatefulSet" in run(folder, command.replace("apply -k", "kustomize"))


@needs_kubectl
@pytest.mark.parametrize("command", [each for each in commands() if "create secret" in each])
def test_a_secret_has_what_is_read_from_it(folder: Path, command: str) -> None:
    made = run(folder, command.partition(" --dry-run")[0] + " --dry-run=client -o yaml")
    assert re.search(r"^  (keys|token): \S", made, re.MULTILINE)


@pytest.mark.parametrize("command", starting("ddp-rendezvous"))
def test_keys_and_tokens(folder: Path, command: str) -> None:
    run(folder, command.replace("/etc/ddp-rendezvous/", ""))
    if ">" in command:
        assert (folder / command.rpartition(">")[2]).read_text().strip()


@pytest.mark.parametrize("command", starting("ddpctl submit"))
def test_what_would_be_submitted(folder: Path, command: str) -> None:
    shown = command if "--dry-run" in command else f"{command} --dry-run"
    assert "ddp-launch" in run(folder, shown)


@pytest.mark.parametrize("command", starting("make"))
def test_the_images_target_takes_these_words(folder: Path, command: str) -> None:
    assert "sha256:DIGEST" in run(folder, command.replace("make ", "make -n "))


@pytest.mark.parametrize("command", starting("sbatch"))
def test_a_batch_script_can_be_read_by_the_shell(folder: Path, command: str) -> None:
    run(folder, command.replace("sbatch ", "bash -n "))


def test_jobs_are_looked_at(folder: Path) -> None:
    looks = [command for command in starting("ddpctl") if "submit" not in command]
    assert len(looks) >= 3
    (folder / "train.py").write_text("print('trained')\n")
    with serving() as service:
        at = service.endpoint
        run(folder, f"ddp-launch --rendezvous {at} --rdzv-id JOB --nproc-per-node 1 train.py")
        for command in looks:
            assert re.search("JOB|ended", run(folder, command, DDP_RENDEZVOUS=at)), command


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")
def test_the_unit_is_sound_and_confined(folder: Path) -> None:
    """With a command that there is; 15: an exposure of 1.5 of 10."""
    unit = folder / "ddp-rendezvous.service"
    unit.write_text(_UNIT.read_text().replace("/opt/ddp-launch/bin/ddp-rendezvous", "/bin/true"))
    run(folder, f"systemd-analyze verify {unit} 2>&1")
    run(folder, f"systemd-analyze security --offline=true --threshold=15 {unit}")
    said = dict(line.split("=", 1) for line in _UNIT.read_text().splitlines() if re.match(r"\w+=", line))
    users = (_UNIT.parent / "ddp-rendezvous.sysusers").read_text()
    assert f"u {said['User']} " in users
    assert said["User"] == said["Group"]
