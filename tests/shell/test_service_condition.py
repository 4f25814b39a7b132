"""The service shows in its metrics whether it is well."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
import urllib.request
from pathlib import Path

import pytest
from authority import Authority
from served import Service, agents, serving, soon

from rendezvous.access.secret import ends_of
from rendezvous.client.credential_files import ClientOptions
from rendezvous.service.condition import Delay, left_s
from rendezvous.values.events import Waiting
from rendezvous.values.types import JobSpec

_DAY_S = 86_400.0
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl on this machine")


def shown(service: Service) -> dict[str, float]:
    where = next(line for line in service.log if "metrics at" in line).split("metrics at ")[1].strip()
    with urllib.request.urlopen(f"http://{where}/metrics", timeout=60) as got:
        return {
            name: float(value) for name, value in re.findall(r"^(\w+\S*) (\S+)$", got.read().decode(), re.M)
        }


@needs_openssl
def test_a_certificate_that_ends_is_seen_before_and_replaced_while_a_job_runs(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    certificate, key = authority.issue("server", days=3)
    new_certificate, new_key = authority.issue("new", days=60)
    options = ClientOptions(tls=True, ca_file=authority.certificate)
    left = 'ddp_rendezvous_certificate_seconds_left{file="tls_cert"}'

    async def story(service: Service) -> None:
        two = JobSpec("job", 1, 2)
        async with agents(service.endpoint, two, ["a"], options) as (a,):
            assert await a.run() == 1
            assert 2 * _DAY_S < (await asyncio.to_thread(shown, service))[left] <= 3 * _DAY_S
            os.replace(new_certificate, certificate)
            os.replace(new_key, key)
            assert (await asyncio.to_thread(shown, service))[left] > 59 * _DAY_S
            async with agents(service.endpoint, two, ["b"], options) as (b,):  # by the new one
                await b.expect(Waiting)
            os.unlink(certificate)
            assert (await asyncio.to_thread(shown, service))[left] == 0.0

    with serving("--http", "127.0.0.1:0", "--tls-cert", certificate, "--tls-key", key) as service:
        soon(story(service))


@needs_openssl
def test_the_first_of_a_chain_and_the_last_of_several_authorities_count(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    both = tmp_path / "both.pem"
    pair = [authority.issue(name, days=days)[0] for name, days in (("a", 5), ("b", 30))]
    both.write_text("a text before\n" + "".join(Path(path).read_text() for path in pair))
    assert len(ends_of(str(both))) == 2
    assert left_s("tls_cert", str(both)) < 6 * _DAY_S < 29 * _DAY_S < left_s("client_ca", str(both))
    far = authority.issue("far", days=365 * 40)[0]  # a date of the other kind
    assert left_s("tls_cert", far) > 364 * 40 * _DAY_S
    for content in ("", "no PEM", "-----BEGIN CERTIFICATE-----\nMAMCAQU=\n-----END CERTIFICATE-----\n"):
        both.write_text(content)
        with pytest.raises(ValueError, match="certificate"):
            ends_of(str(both))


def test_an_event_loop_that_is_held_up_is_late() -> None:
    async def story() -> None:
        delay = Delay()
        measuring = asyncio.create_task(delay.measure())
        try:
            while delay.seconds < 0.3:
                asyncio.get_running_loop().call_soon(time.sleep, 0.7)
                await asyncio.sleep(0.01)
        finally:
            measuring.cancel()

    soon(story())
