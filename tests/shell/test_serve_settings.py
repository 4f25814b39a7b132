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
        (["--listen", "here"], {}, "", "invalid address 'here'"),
        (["--listen", "127.0.0.1:99999"], {}, "", "invalid address"),
        (
            ["--http", "unix:/tmp/x"],
            {},
            "",
            "invalid --http 'unix:/tmp/x': a Unix socket is possible only",
        ),
        ([], {"DDP_RENDEZVOUS_HTTP": "unix:x"}, "", "Use HOST:PORT, for example 127.0.0.1:29410"),
        ([], {}, "web = 'unix:/tmp/x'\n", "invalid --web 'unix:/tmp/x'"),
        ([], {"DDP_RENDEZVOUS_HISTORY": "long"}, "", "invalid DDP_RENDEZVOUS_HISTORY 'long'"),
        ([], {"DDP_RENDEZVOUS_INSECURE": "perhaps"}, "", "invalid DDP_RENDEZVOUS_INSECURE 'perhaps'"),
        ([], {}, "colour = 1\n", "unknown setting colour"),
        ([], {}, "history = 'x'\n", "invalid history 'x'"),
        ([], {}, "=\n", "cannot read"),
        (["--history", "-1"], {}, "", "invalid --history -1"),
        (["--history", "nan"], {}, "", "invalid --history nan"),
        ([], {}, "resume-grace = inf\n", "invalid --resume-grace inf"),
        (["--max-jobs", "inf"], {}, "", "invalid --max-jobs inf"),
        (["--max-agents", "0"], {}, "", "invalid --max-agents 0"),
        ([], {"DDP_RENDEZVOUS_MAX_JOBS": "1.5"}, "", "invalid --max-jobs 1.5"),
        (
            ["--journal-dir", "j", "--journal-space", "15"],
            {},
            "",
            "--journal-space 15 has no room for one journal",
        ),
        (["--listen", "127.0.0.1:²"], {}, "", "invalid address"),
        (["--listen", "http://127.0.0.1:1"], {}, "", "invalid address"),
        (["--store", "etcd://me:s3cret@a/b"], {}, "", "--store contains a password"),
        (["--tls-cert", "x"], {}, "", "--tls-cert and --tls-key"),
        (["--client-ca", "x"], {}, "", "--client-ca needs"),
        (
            ["--listen", "0.0.0.0:1", "--insecure", "--store", "etcd://a/b"],
            {},
            "",
            "--advertise HOST:PORT",
        ),
        (["--listen", "[::]:1"], {}, "", "without TLS"),
        (
            ["--listen", "10.0.0.1:1", "--tls-cert", "c", "--tls-key", "k"],
            {},
            "",
            "--token-keys or --client-ca",
        ),
    ],
)
def test_invalid_settings_are_reported(
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
        (("one.pem", "other.key", ""), "other.key cannot be used with the certificate in one.pem"),
        (("one.key", "one.key", ""), "one.key does not contain a certificate"),
        (("one.pem", "one.pem", ""), "one.pem does not contain a private key"),
        (("one.pem", "one.key", "empty"), "empty does not contain a certificate"),
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
