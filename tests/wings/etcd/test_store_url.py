from __future__ import annotations

import asyncio

import grpc
import pytest

from ddp_launch_wings.etcd.client import TlsFiles, _Reaction, _reaction
from ddp_launch_wings.etcd.store import PASSWORD_VARIABLE, parse_etcd
from rendezvous.store.open import open_store
from rendezvous.store.protocol import StoreError


def test_a_whole_url() -> None:
    rest = "me@a:2379,b,10.0.0.1:99,[::1],[fe80::2]:7/jobs/here?cacert=/ca&cert=/c&key=/k"
    access, prefix = parse_etcd(rest, {PASSWORD_VARIABLE: "s3cret"})
    assert access.endpoints == ("a:2379", "b:2379", "10.0.0.1:99", "[::1]:2379", "[fe80::2]:7")
    assert (access.user, access.password(), prefix) == ("me", "s3cret", "jobs/here")
    assert access.tls == TlsFiles("/ca", "/c", "/k")


def test_little_is_needed() -> None:
    access, prefix = parse_etcd("a", {})
    assert (access.endpoints, access.user, access.tls, prefix) == (("a:2379",), "", None, "ddp-rendezvous")
    assert parse_etcd("a/?tls=true", {})[0].tls == TlsFiles()


def test_a_password_in_the_url_is_the_last_resort() -> None:
    assert parse_etcd("u:p%40ss@a", {})[0].password() == "p@ss"
    assert parse_etcd("u:p%40ss@a", {PASSWORD_VARIABLE: "better"})[0].password() == "better"


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("redis://a", "unknown store redis"),
        ("file:", "unknown store file"),
        ("etcd:a", "unknown store etcd"),
        ("etcd:///x", "host is missing"),
        ("etcd://a:b:c", "use HOST:PORT"),
        ("etcd://:2379", "use HOST:PORT"),
        ("etcd://a?cacrt=x", "unknown setting 'cacrt'"),
        ("etcd://a?cert=x", "cert and key"),
        ("etcd://a?tls=yes", "true or false"),
        ("etcd://u:s3cret@a?tls=yes", "true or false"),
    ],
)
def test_mistakes_are_named_and_passwords_are_not(url: str, complaint: str) -> None:
    with pytest.raises(StoreError, match=complaint) as error:
        asyncio.run(open_store(url, "", {}))
    assert "u:s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("code", "details", "reaction"),
    [
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", "SIGN_IN"),
        ("INVALID_ARGUMENT", "etcdserver: user name is empty", "SIGN_IN"),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", "SIGN_IN"),
        ("INVALID_ARGUMENT", "etcdserver: duplicate key given in txn request", "REFUSED"),
        ("PERMISSION_DENIED", "the user name is empty in this proxy", "REFUSED"),
        ("UNAVAILABLE", "the auth store is old", "AGAIN"),
        ("NOT_FOUND", "etcdserver: requested lease not found", "NOT_FOUND"),
    ],
)
def test_only_a_missing_sign_in_leads_to_another_one(code: str, details: str, reaction: str) -> None:
    empty = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode[code], empty, empty, details)
    assert _reaction(error) is _Reaction[reaction]
