"""The service inside an agent serves nobody beyond loopback, unless those who come can show that they belong."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from authority import Authority
from ports import free_port
from strangers import ddp_launch, ddpctl, made

from rendezvous.access.secret import SecretUnusable, make, parse, read, write_new

if TYPE_CHECKING:
    from launched import Launch, Launched

EVERYWHERE = "0.0.0.0"
SCRIPT = str(Path(__file__).parent / "programs" / "who_am_i.py")


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("secret") / "secret.pem")
    made("secret", path)
    return path


def node(launch: Launch, endpoint: str, *words: str, **env: str) -> Launched:
    where = ("--nnodes", "2", "--nproc-per-node", "1", "--preflight", "off", "--no-warm-start")
    met = ("--rendezvous", endpoint, "--rdzv-id", "guarded") if endpoint else ()
    return launch(*where, *met, *words, SCRIPT, env=env)


@pytest.mark.parametrize("how", ["an address", "Slurm", "keys without TLS"])
def test_without_a_secret_only_loopback_is_served(launch: Launch, tmp_path: Path, how: str) -> None:
    port, where, env = free_port(), f"{EVERYWHERE}:{free_port()}", {}
    if how == "Slurm":
        where, env = "", {"SLURM_JOB_ID": str(port), "SLURM_JOB_NODELIST": EVERYWHERE}
    if how == "keys without TLS":
        made("key", str(tmp_path / "keys"))
        env = {"DDP_RENDEZVOUS_TOKEN_KEYS": str(tmp_path / "keys")}
    refused = node(launch, where, **env)
    assert refused.wait() == 2
    said = refused.stderr()
    why = "the first node of the Slurm job" if how == "Slurm" else "--rendezvous"
    for words in (why, "--secret-file FILE", "--insecure"):
        assert words in said, said


@pytest.mark.parametrize("words", [("--insecure",), ()], ids=["insecure", "loopback"])
def test_on_purpose_and_on_loopback_it_serves_anyone(launch: Launch, words: tuple[str, ...]) -> None:
    host = EVERYWHERE if words else "127.0.0.1"
    endpoint = f"{host}:{free_port()}"
    first = node(launch, endpoint, *words)
    first.await_listening(int(endpoint.rpartition(":")[2]))
    assert ddpctl(endpoint, {}).told() == (0, "")
    second = node(launch, endpoint, *words)
    assert [first.wait(), second.wait()] == [0, 0], (first.stderr(), second.stderr())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
def test_certificates_it_cannot_serve_with_are_told_at_once(launch: Launch, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    (certificate, _), (_, key) = authority.issue("one"), authority.issue("other")
    env = {"DDP_RENDEZVOUS_TLS_CERT": certificate, "DDP_RENDEZVOUS_TLS_KEY": key}
    refused = node(launch, f"127.0.0.1:{free_port()}", **env)
    assert refused.wait() == 2
    assert "cannot be used with the certificate in" in refused.stderr()


def test_only_nodes_with_the_secret_are_admitted(launch: Launch, tmp_path: Path, secret: str) -> None:
    """By option, or in the environment itself as srun hands it on."""
    port = free_port()
    everywhere, here = f"{EVERYWHERE}:{port}", f"127.0.0.1:{port}"
    first = node(launch, everywhere, "--secret-file", secret)
    first.await_listening(port)
    other = str(tmp_path / "other.pem")
    write_new(other)
    with_it, with_another = {"DDP_RENDEZVOUS_SECRET_FILE": secret}, {"DDP_RENDEZVOUS_SECRET_FILE": other}
    knocks = [ddpctl(here, {}), ddpctl(here, with_another), ddp_launch(here, {}, "guarded"),
              ddp_launch(here, {}, "guarded", "--secret-file", other)]  # fmt: skip
    for knock, words in zip(knocks, ("uses TLS", "a different secret") * 2, strict=True):
        knock.told_no(words, "SECRET_FILE")
    assert ddpctl(here, with_it, "status", "guarded").told() == (0, "")
    with open(secret) as file:
        second = node(launch, everywhere, DDP_RENDEZVOUS_SECRET=file.read())
    assert [first.wait(), second.wait()] == [0, 0], (first.stderr(), second.stderr())
    assert sorted(first.stdout().split("rank")[1:] + second.stdout().split("rank")[1:]) == [
        " 0 of 2\n",
        " 1 of 2\n",
    ]


def test_a_secret_is_not_in_command_lines_or_logs(launch: Launch, tmp_path: Path, secret: str) -> None:
    logs, text = tmp_path / "logs", Path(secret).read_text()
    key = text.splitlines()[1]
    endpoint = f"127.0.0.1:{free_port()}"
    job = node(launch, endpoint, "--log-dir", str(logs), "-t", "3", DDP_RENDEZVOUS_SECRET=text)
    rest = node(launch, endpoint, "--secret-file", secret)
    seen = [word for each in (job, rest) for word in each.processes().values()]
    assert [job.wait(), rest.wait()] == [0, 0], (job.stderr(), rest.stderr())
    told = [path.read_text(errors="replace") for path in logs.rglob("*") if path.is_file()]
    assert any("rank" in each for each in told)
    assert key not in "".join((*seen, *told, job.stderr(), job.stdout(), rest.stderr(), rest.stdout()))


def test_a_secret_cannot_be_two_things_at_once(launch: Launch, secret: str) -> None:
    refused = node(launch, "127.0.0.1:9", "--secret-file", secret, DDP_RENDEZVOUS_CA_FILE=secret)
    assert refused.wait() == 2
    assert "conflicts with DDP_RENDEZVOUS_CA_FILE" in refused.stderr()


# --- the file ----------------------------------------------------------------------------------------------


def test_a_secret_file_is_private_whatever_the_umask_and_is_not_overwritten(tmp_path: Path) -> None:
    path = str(tmp_path / "secret.pem")
    before = os.umask(0)
    try:
        write_new(path)
    finally:
        os.umask(before)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert read(path).key
    with pytest.raises(SecretUnusable, match="already exists"):
        write_new(path)
    os.chmod(path, 0o644)
    with pytest.raises(SecretUnusable, match="chmod 600"):
        read(path)


def test_no_two_secrets_are_alike_and_none_shows_its_key() -> None:
    one, other = (parse(make(), "a test") for _ in range(2))
    assert one.key != other.key
    assert one.certificate != other.certificate
    assert "PRIVATE" not in repr(one)
    with pytest.raises(SecretUnusable, match="is damaged"):
        parse((one.key + other.certificate).decode(), "a mixture")


@pytest.mark.parametrize(
    "text", ["", "nonsense", "-----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY-----\n"]
)
def test_what_is_no_secret_is_told_without_being_shown(text: str) -> None:
    with pytest.raises(SecretUnusable, match="is not a job secret") as refused:
        parse(text, "DDP_RENDEZVOUS_SECRET")
    assert not text or text not in str(refused.value)
