"""A real etcd of three members on loopback, whose members can be killed, hung and started again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING

import pytest
from ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


_SOON_S = 60.0  # on a machine that others use as well

needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="etcd is not installed (Debian: etcd-server)"
)


@dataclass(frozen=True)
class Certificates:
    folder: Path

    @property
    def query(self) -> str:
        at = self.folder
        return f"?cacert={at}/ca.crt&cert={at}/client.crt&key={at}/client.key"


class Member:
    def __init__(self, name: str, folder: Path, ports: tuple[int, int], tls: Certificates | None) -> None:
        self.name, self.folder, self.tls = name, folder, tls
        self.client_port, self.peer_port = ports
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.client_port}"

    @property
    def peer_url(self) -> str:
        return f"http://127.0.0.1:{self.peer_port}"

    def start(self, everyone: str) -> None:
        # setpriv: no member outlives the test run, not even one that is killed.
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "etcd",
            "--name",
            self.name,
            "--data-dir",
            str(self.folder),
        ]
        command += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        command += ["--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url]
        command += ["--initial-cluster", everyone, "--initial-cluster-state", "new", "--log-level", "error"]
        command += ["--logger", "zap"]
        if self.tls is not None:
            at = self.tls.folder
            command += ["--cert-file", f"{at}/server.crt", "--key-file", f"{at}/server.key"]
            command += ["--client-cert-auth", "--trusted-ca-file", f"{at}/ca.crt"]
        with open(self.folder.with_suffix(".log"), "ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "GOMAXPROCS": "2"}
            )

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def hang(self) -> None:
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def metric(self, name: str) -> float | None:
        """None: it does not answer (yet)."""
        try:
            with urllib.request.urlopen(
                f"{self.url}/metrics", timeout=1.0, context=self._context()
            ) as answer:
                lines = answer.read().decode().splitlines()
        except (OSError, HTTPException):  # it may die in the middle of an answer
            return None
        return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)

    def post(self, path: str, **body: object) -> None:
        """Through etcd's JSON gateway: what only an administrator does."""
        request = urllib.request.Request(f"{self.url}/v3/{path}", json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=_SOON_S) as answer:
            assert answer.status == 200

    def _context(self) -> ssl.SSLContext | None:
        if self.tls is None:
            return None
        context = ssl.create_default_context(cafile=f"{self.tls.folder}/ca.crt")
        context.load_cert_chain(f"{self.tls.folder}/client.crt", f"{self.tls.folder}/client.key")
        return context


class EtcdCluster:
    def __init__(self, folder: Path, n: int = 3, tls: Certificates | None = None) -> None:
        self._folder, self._tls = folder, tls
        self.n = n
        self.members: list[Member] = []

    def start(self) -> None:
        for attempt in range(3):
            ports = free_ports(2 * self.n)
            self.members = [
                Member(f"m{i}", self._folder / f"m{attempt}{i}", (ports[2 * i], ports[2 * i + 1]), self._tls)
                for i in range(self.n)
            ]
            for member in self.members:
                self.start_member(member)
            if self._healthy():
                return
            self.stop()  # somebody else took one of the ports
        raise AssertionError(f"etcd does not start; see {self._folder}/*.log")

    def start_member(self, member: Member) -> None:
        member.start(",".join(f"{m.name}={m.peer_url}" for m in self.members))

    def stop(self) -> None:
        for member in self.members:
            member.kill()

    @property
    def hosts(self) -> str:
        return ",".join(f"127.0.0.1:{m.client_port}" for m in self.members)

    def url(self, prefix: str) -> str:
        return f"etcd://{self.hosts}/{prefix}{self._tls.query if self._tls else ''}"

    def leader(self) -> Member:
        deadline = time.monotonic() + _SOON_S
        while time.monotonic() < deadline:
            for member in self.members:
                if member.metric("etcd_server_is_leader") == 1.0:
                    return member
            time.sleep(0.05)
        raise AssertionError("etcd has no leader")

    def heal(self) -> None:
        """Everybody runs and has a leader again."""
        self.revive()
        self.await_health()

    def revive(self) -> None:
        """From the test's own thread: a member dies with the thread that started it."""
        for member in self.members:
            if member.process is None:
                self.start_member(member)
            else:
                member.go_on()

    def await_health(self) -> None:
        assert self._healthy()

    def _healthy(self) -> bool:
        deadline = time.monotonic() + _SOON_S
        while time.monotonic() < deadline:
            if all(m.metric("etcd_server_has_leader") == 1.0 for m in self.members):
                return True
            if any(m.process is not None and m.process.poll() is not None for m in self.members):
                return False
            time.sleep(0.05)
        return False


@contextmanager
def running(folder: Path, n: int = 3, tls: Certificates | None = None) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster(folder, n, tls)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def make_certificates(folder: Path) -> Certificates:
    """An authority, a server of 127.0.0.1 and a client."""
    folder.mkdir(parents=True, exist_ok=True)
    _openssl(
        folder,
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.crt",
    )
    for name in ("server", "client"):
        issue(folder, name)
    return Certificates(folder)


def issue(folder: Path, name: str) -> None:
    """Written beside the old pair and moved over it, as whoever renews certificates does."""
    (folder / "ext").write_text(
        "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    _openssl(
        folder,
        f"req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={name} -keyout new.key -out new.csr",
    )
    _openssl(
        folder,
        "x509 -req -in new.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile ext -out new.crt",
    )
    (folder / "new.key").replace(folder / f"{name}.key")
    (folder / "new.crt").replace(folder / f"{name}.crt")


def _openssl(folder: Path, arguments: str) -> None:
    subprocess.run(["openssl", *arguments.split()], cwd=folder, check=True, capture_output=True)
