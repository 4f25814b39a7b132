"""Who gets in: tokens, roles, jobs, certificates. Against a real service with real TLS."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from authority import Authority
from served import LOST_ANSWER, Service, agents, join_bytes, serving, soon

from rendezvous.access.auth import Grant, Role, add_key, new_grant_id, read_keys, sign
from rendezvous.client.channel import open_channel
from rendezvous.client.credential_files import ClientOptions
from rendezvous.codec import answer_message
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.events import Refused, Waiting
from rendezvous.values.questions import Present
from rendezvous.values.types import AgentId, JobSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

JOB = JobSpec("team-a-1", 2, 2, "train.py")
OTHER = JobSpec("team-b-1", 2, 2, "train.py")
ALL_METHODS = [(s.full_name, m.name) for s in pb.DESCRIPTOR.services_by_name.values() for m in s.methods]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "rendezvous.main", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("keys") / "keys")
    add_key(path)
    return path


def token(keys: str, role: str, job: str = "team-a-*", for_s: float = 3600.0) -> str:
    return sign(Grant(new_grant_id(), job, Role(role), time.time() + for_s), read_keys(keys)[-1])


def test_a_token_names_its_jobs(keys: str) -> None:
    made = command("token", "--token-keys", keys, "--role", "agent", "--job", "")
    assert made.returncode == 2
    assert "--job is empty" in made.stderr


@pytest.fixture(scope="module")
def service(keys: str) -> Iterator[Service]:
    with serving("--token-keys", keys) as started:
        yield started


async def outcome(
    endpoint: str, service: str, method: str, options: ClientOptions, job_id: str
) -> grpc.StatusCode:
    """Of one call, whatever its kind; OK as soon as it gets past the gate."""
    data = b""
    if method == "Attend":
        data = join_bytes(JobSpec(job_id, 2, 2, "train.py"), "a")
    elif method == "Converse":
        data = answer_message(0, Present(AgentId("a", "1"), job_id)).SerializeToString()
    elif "job_id" in (request := getattr(pb, f"{method}Request"))().DESCRIPTOR.fields_by_name:
        data = request(job_id=job_id).SerializeToString()
    authorization = (("authorization", f"Bearer {options.token}"),) if options.token else ()
    async with open_channel(endpoint, options) as channel:
        call: Any = channel.stream_stream(f"/{service}/{method}")(metadata=authorization, timeout=60)
        try:
            await call.write(data)
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass
        found: grpc.StatusCode = await call.code()
    if await call.details() == LOST_ANSWER:
        return await outcome(endpoint, service, method, options, job_id)
    return found


GATE = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


@pytest.mark.parametrize("bad", ["", "nonsense", "a.b.c"])
def test_no_call_passes_without_a_good_token(service: Service, bad: str) -> None:
    async def story() -> None:
        for name, method in ALL_METHODS:
            code = await outcome(service.endpoint, name, method, ClientOptions(token=bad), JOB.job_id)
            assert code is grpc.StatusCode.UNAUTHENTICATED, method

    soon(story())


def test_each_role_may_do_what_it_is_for_and_nothing_else(service: Service, keys: str) -> None:
    look = {"ListJobs", "GetJob", "WatchEvents", "Ask", "GetRestarts"}
    order = {"DrainNode", "ResumeNode", "ResizeJob", "RestartJob", "AbortJob"}
    script = {"GetValue", "PutValue", "DeleteValue", "EnterBarrier"}
    may = {"agent": {"Attend", "Converse"} | look | script, "operator": look | order | script, "viewer": look}

    async def story() -> None:
        for role, allowed in may.items():
            options = ClientOptions(token=token(keys, role))
            for name, method in ALL_METHODS:
                code = await outcome(service.endpoint, name, method, options, JOB.job_id)
                assert (code not in GATE) == (method in allowed), (role, method, code)

    soon(story())


def test_a_token_is_for_its_jobs(keys: str) -> None:
    async def story(service: Service) -> None:
        options = ClientOptions(token=token(keys, "agent"))
        async with agents(service.endpoint, JOB, ["a"], options) as (a,):
            await a.expect(Waiting)
            for name, method in ALL_METHODS:
                if method != "ListJobs":
                    code = await outcome(service.endpoint, name, method, options, OTHER.job_id)
                    assert code is grpc.StatusCode.PERMISSION_DENIED, method
        stranger = ClientOptions(token=token(keys, "viewer", job="team-b-*"))
        async with open_channel(service.endpoint, stranger) as channel:
            call: Any = channel.unary_unary("/rendezvous.v1.Operations/ListJobs")
            listed = await call(b"", metadata=(("authorization", f"Bearer {stranger.token}"),), timeout=60)
            assert listed == b""  # it does not even learn that there are others

    with serving("--token-keys", keys) as started:  # where no other test has left an agent
        soon(story(started))


def test_secrets_are_in_no_log(keys: str) -> None:
    async def story(good: str) -> None:
        async with agents(service.endpoint, JOB, ["a"], ClientOptions(token=good)) as (a,):
            await a.expect(Waiting)

    good = token(keys, "agent")
    with open(keys) as file:
        secret = file.read().split()[1]
    with serving("--token-keys", keys) as service:
        soon(story(good))
        assert service.end() == 0
    said = "".join(service.log)
    assert "a joined" in said
    assert secret not in said
    assert good not in said


def test_a_key_in_a_file_that_others_may_read_is_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    assert command("key", str(path)).stderr == ""
    path.chmod(0o640)
    assert f"chmod 600 {path}" in command("key", str(path)).stderr


def test_a_token_is_never_sent_unencrypted() -> None:
    """Not even a connection is tried: who listens there could be anybody."""

    async def story(options: ClientOptions) -> Refused:
        async with agents("192.0.2.1:9", JOB, ["a"], options) as (a,):
            return await a.expect(Refused)

    refused = soon(story(ClientOptions(token="a.b.c")))
    assert refused.exit_code == 78
    assert "the token to 192.0.2.1:9 without encryption" in refused.reason


# --- exposure ----------------------------------------------------------------------------------------------


def test_other_machines_are_served_only_with_tls_and_tokens_or_on_purpose(keys: str) -> None:
    for extra in ((), ("--token-keys", keys)):
        refused = Service("--listen", "0.0.0.0:0", *extra)
        assert refused.wait() == 2
        assert "--tls-cert" in "".join(refused.log)
        assert "--insecure" in "".join(refused.log)
    with serving("--insecure", listen="0.0.0.0:0") as service:
        said = "".join(service.log)
        assert "not encrypted" in said
        assert "not authenticated" in said


def test_a_key_file_open_to_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    add_key(str(path))
    path.chmod(0o644)
    refused = Service("--listen", "127.0.0.1:0", "--token-keys", str(path))
    assert refused.wait() == 2
    assert "chmod 640" in "".join(refused.log)


def test_a_key_is_added_to_a_file_whose_last_line_does_not_end(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    add_key(str(path))
    path.write_text(path.read_text().rstrip("\n"))
    before = token(str(path), "viewer")
    add_key(str(path))
    assert [token(str(path), "viewer").split(".")[0], before.split(".")[0]] == [
        line.split()[0] for line in reversed(path.read_text().splitlines())
    ]


@pytest.mark.parametrize("content", [b"hello = 1\n", b"Bonjour ! \xc3\xa7a va\n"])
def test_a_key_is_added_to_no_file_of_another_kind(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    refused = command("key", str(path))
    assert (refused.returncode, refused.stdout, len(refused.stderr.splitlines())) == (2, "", 1), refused
    assert path.read_bytes() == content
    path.write_text("# since spring\n\n")
    assert command("key", str(path)).returncode == 0


# --- certificates --------------------------------------------------------------------------------------------

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """And an agent that looks for what is wrong with certificates as long as it takes a busy machine to answer."""
    for limit in ("_WITHIN_S", "_ANSWER_S"):
        monkeypatch.setattr(f"rendezvous.client.channel.{limit}", 60.0)
    return Authority(tmp_path, "authority")


async def attempt(endpoint: str, options: ClientOptions) -> Any:
    """The first word that an agent hears."""
    async with agents(endpoint, JOB, ["a"], options) as (a,):
        async with asyncio.timeout(60):
            return await a.session.receive()


@needs_openssl
def test_tls_and_tokens_together(authority: Authority, keys: str) -> None:
    certificate, key = authority.issue("server")
    with serving("--tls-cert", certificate, "--tls-key", key, "--token-keys", keys) as service:
        good = ClientOptions(token=token(keys, "agent"), tls=True, ca_file=authority.certificate)
        assert isinstance(soon(attempt(service.endpoint, good)), Waiting)
        other = Authority(authority.folder, "stranger")
        stranger = ClientOptions(token="a.b.c", tls=True, ca_file=other.certificate, give_up_s=0.3)
        refused = soon(attempt(service.endpoint, stranger))
        assert refused.exit_code == 77
        assert "set DDP_RENDEZVOUS_CA_FILE" in refused.reason
        nobody = ClientOptions(token="a.b.c", tls=True, ca_file=keys, give_up_s=0.3)
        assert "does not contain a certificate" in soon(attempt(service.endpoint, nobody)).reason
        plain = soon(attempt(service.endpoint, ClientOptions(token="a.b.c", give_up_s=0.3)))
        assert plain.exit_code == 77
        assert "uses TLS and this client does not" in plain.reason


@needs_openssl
def test_a_service_whose_certificate_has_expired_is_not_trusted(authority: Authority) -> None:
    certificate, key = authority.issue("server", days=-1)
    with serving("--tls-cert", certificate, "--tls-key", key) as service:
        options = ClientOptions(tls=True, ca_file=authority.certificate, give_up_s=0.3)
        refused = soon(attempt(service.endpoint, options))
        assert refused.exit_code == 77
        assert "certificate has expired" in refused.reason


@needs_openssl
def test_a_new_certificate_is_served_without_a_restart(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("server")
    second = Authority(tmp_path, "second")
    with serving("--tls-cert", certificate, "--tls-key", key) as service:
        before = ClientOptions(tls=True, ca_file=authority.certificate, give_up_s=60.0)
        after = ClientOptions(tls=True, ca_file=second.certificate, give_up_s=60.0)
        assert isinstance(soon(attempt(service.endpoint, before)), Waiting)
        new_certificate, new_key = second.issue("renewed")
        os.replace(new_certificate, certificate)
        # The pair does not fit together now: the one before is served on.
        assert isinstance(soon(attempt(service.endpoint, before)), Waiting)
        os.replace(new_key, key)
        assert isinstance(soon(attempt(service.endpoint, after)), Waiting)
