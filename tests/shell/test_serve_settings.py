"""Flags over environment over file over defaults; and what is nonsense is told, not guessed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from authority import Authority
from serve_settings import parse_serve

from rendezvous.service.settings import SettingsUnusable

ROOT = Path(__file__).parents[2]


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    config = tmp_path / "rendezvous.toml"
    config.write_text('store = "file:a"\nhistory = 3\nlog-format = "json"\nlisten = ["127.0.0.1:1"]\n')
    environ = {
        "DDP_RENDEZVOUS_HISTORY": "4",
        "DDP_RENDEZVOUS_LOG_FORMAT": "text",
        "DDP_RENDEZVOUS_REFLECTION": "yes",
    }
    settled = parse_serve(["--config", str(config), "--history", "5"], environ)
    assert (settled["store"], settled["history"], settled["log_format"]) == ("file:a", 5.0, "text")
    assert (settled["listen"], settled["reflection"], settled["max_jobs"]) == (["127.0.0.1:1"], True, 1000)


@pytest.mark.parametrize(
    ("argv", "environ", "file", "words"),
    [
        (["--listen", "here"], {}, "", "'here' is not HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], {}, "", "is not HOST:PORT"),
        ([], {"DDP_RENDEZVOUS_HISTORY": "long"}, "", "DDP_RENDEZVOUS_HISTORY is a number, not 'long'"),
        ([], {"DDP_RENDEZVOUS_INSECURE": "perhaps"}, "", "is true or false, not 'perhaps'"),
        ([], {}, "colour = 1\n", "there is no setting colour"),
        ([], {}, "history = 'x'\n", "history is a number, not 'x'"),
        ([], {}, "=\n", "cannot read"),
        (["--history", "-1"], {}, "", "--history cannot be negative"),
        (["--history", "nan"], {}, "", "--history is a number, not nan"),
        ([], {}, "resume-grace = inf\n", "--resume-grace is a number, not inf"),
        (["--max-jobs", "inf"], {}, "", "--max-jobs is a number, not inf"),
        (["--max-agents", "0"], {}, "", "--max-agents is a whole number from 1, not 0"),
        ([], {"DDP_RENDEZVOUS_MAX_JOBS": "1.5"}, "", "--max-jobs is a whole number from 1, not 1.5"),
        (["--listen", "127.0.0.1:²"], {}, "", "is not HOST:PORT"),
        (["--listen", "http://127.0.0.1:1"], {}, "", "is not HOST:PORT"),
        (["--store", "etcd://me:s3cret@a/b"], {}, "", "--store holds a password, which everyone"),
        (["--tls-cert", "x"], {}, "", "go together"),
        (["--client-ca", "x"], {}, "", "--client-ca needs"),
        (
            ["--listen", "0.0.0.0:1", "--insecure", "--store", "etcd://a/b"],
            {},
            "",
            "--advertise HOST:PORT says",
        ),
        (["--listen", "[::]:1"], {}, "", "can be reached from other machines"),
        (["--listen", "10.0.0.1:1", "--tls-cert", "c", "--tls-key", "k"], {}, "", "no way to know who calls"),
    ],
)
def test_nonsense_is_told(
    argv: list[str], environ: dict[str, str], file: str, words: str, tmp_path: Path
) -> None:
    config = tmp_path / "rendezvous.toml"
    config.write_text(file)
    with pytest.raises(SettingsUnusable, match=words.replace("[", r"\[")):
        parse_serve(["--config", str(config), *argv], environ)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("one.pem", "other.key", ""), "the key in other.key is not that of the certificate in one.pem"),
        (("one.key", "one.key", ""), "one.key holds no certificate"),
        (("one.pem", "one.pem", ""), "one.pem holds no private key"),
        (("one.pem", "one.key", "empty"), "empty holds no certificate"),
    ],
)
def test_certificates_that_cannot_serve_are_told(
    tmp_path: Path, given: tuple[str, str, str], words: str
) -> None:
    authority = Authority(tmp_path, "authority")
    authority.issue("one")
    authority.issue("other")
    (tmp_path / "empty").touch()
    certificate, key, client_ca = given
    command = [sys.executable, "-m", "rendezvous.main", "serve", "--listen", "127.0.0.1:0"]
    command += ["--tls-cert", certificate, "--tls-key", key, "--client-ca", client_ca]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert words in done.stderr


def test_the_generated_code_is_in_step_with_the_schema(tmp_path: Path) -> None:
    subprocess.run([ROOT / "proto/generate.sh", sys.executable, tmp_path], check=True, timeout=60)
    made = sorted(path.name for path in tmp_path.iterdir())
    assert "rendezvous_pb2.py" in made
    for name in made:
        assert (tmp_path / name).read_text() == (ROOT / "rendezvous/pb" / name).read_text(), (
            f"{name}: make proto"
        )
