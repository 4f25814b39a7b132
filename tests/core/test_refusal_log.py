"""What is said of those who are refused, and how often; and what gRPC's core says of handshakes."""

from __future__ import annotations

import asyncio
import logging
import os

import pytest

from rendezvous.access.core_log import CoreLines, Failed, ask_core
from rendezvous.access.refusals import Reason, Refusals
from rendezvous.metrics import Metrics


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_flood_is_one_line_and_later_one_more_that_counts_it(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()

    async def story() -> None:
        refusals = Refusals(metrics, quiet_s=0.01)
        for _ in range(1000):
            refusals.note(Reason.BAD_TOKEN, "10.0.0.9", "no token")
        refusals.note(Reason.PLAINTEXT, "10.0.0.9", "no TLS")
        assert said(caplog) == ["refused 10.0.0.9: no token", "refused 10.0.0.9: no TLS"]
        while len(said(caplog)) < 3:  # noqa: ASYNC110  # a log tells nobody that it has grown
            await asyncio.sleep(0)
        refusals.note(Reason.BAD_TOKEN, "10.0.0.9", "no token")  # after the quiet, one line again

    with caplog.at_level(logging.INFO, "rendezvous"):
        asyncio.run(story())
    assert said(caplog)[2:] == [
        "refused 10.0.0.9 999 more times within 0.01 s: no token",
        "refused 10.0.0.9: no token",
    ]
    assert 'refused_total{reason="bad_token"} 1001' in metrics.text()
    assert 'refused_total{reason="plaintext"} 1' in metrics.text()
    assert 'refused_total{reason="hung_up"} 0' in metrics.text()


def test_however_many_peers_there_are_the_lines_are_few(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        refusals = Refusals(Metrics())
        for i in range(10_000):
            refusals.note(Reason.NO_TOKEN, f"10.0.{i >> 8}.{i & 255}", "no token")

    with caplog.at_level(logging.INFO, "rendezvous"):
        asyncio.run(story())
    assert len(said(caplog)) == 33
    assert said(caplog)[-1] == "refused other clients: no token"


# --- the core's lines ----------------------------------------------------------------------------------

_HEAD = b"I1121 16:50:58.861605   14758 handshaker.cc:155] "
_ARGS = (
    b" shutdown=false index=2, args={endpoint=0x7f, args={grpc.internal.endpoint_local_address=ipv4:127.0.0.1:29998, "
    b"grpc.internal.endpoint_peer_address=ipv4:10.0.0.9:39000, grpc.internal.server_credentials=0x55}, exit_early=0}"
)
_SSL = b"UNKNOWN: Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1:SSL routines:OPENSSL_internal:"


def heard(*lines: bytes) -> tuple[list[bytes], list[Failed]]:
    """The lines for people, and the failures."""
    core, shown, failed = CoreLines(), [], []
    for line in lines:
        for_people, found = core.take(line)
        shown += [line] if for_people else []
        failed += [found] if found else []
    return shown, failed


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (_SSL + b"PEER_DID_NOT_RETURN_A_CERTIFICATE: Invalid context: OK", Reason.NO_CERTIFICATE),
        (_SSL + b"CERTIFICATE_VERIFY_FAILED: certificate has expired: OK", Reason.EXPIRED_CERTIFICATE),
        (_SSL + b"CERTIFICATE_VERIFY_FAILED: unable to get local issuer", Reason.UNKNOWN_CERTIFICATE),
        (_SSL + b"WRONG_VERSION_NUMBER: Invalid context: OK", Reason.PLAINTEXT),
        (_SSL + b"TLSV1_ALERT_UNKNOWN_CA: Invalid context", Reason.DISTRUSTED),
        (b"UNAVAILABLE: Handshake read failed (Socket closed)", Reason.HUNG_UP),
        (b"DEADLINE_EXCEEDED: Handshake timed out", Reason.TLS_HANDSHAKE),
        (b"a word that no version has said so far", Reason.TLS_HANDSHAKE),
    ],
)
@pytest.mark.parametrize("in_one_line", [True, False])
def test_a_failed_handshake_is_told_once_with_its_peer(
    error: bytes, reason: Reason, in_one_line: bool
) -> None:
    trace = (b"=== Source Location Trace: ===", b"src/core/handshaker/security/security_handshaker.cc:440")
    begin = _HEAD + b"CallNextHandshakerLocked: error=" + error
    lines = [begin + _ARGS] if in_one_line else [begin, *trace, _ARGS]
    again = (_HEAD + b"handshake manager 0x7f: Failed with error: " + error, *trace, b"")
    shown, failed = heard(*lines, *again, b"ours")
    assert [(each.reason, each.peer) for each in failed] == [(reason, "10.0.0.9")]
    assert shown == [b"ours"]


def test_what_is_not_the_cores_is_for_people() -> None:
    ours = (
        b"Traceback (most recent call last):",
        b"",
        b" shutdown=x",
        b"src/core/x",
        b"=== Source Location Trace",
    )
    assert heard(*ours) == (list(ours), [])
    fatal = b"F1121 16:50:58.861605   14758 chttp2.cc:1] check failed"
    assert heard(fatal)[0] == [fatal]


def test_what_goes_well_and_what_this_side_began_is_no_refusal() -> None:
    fine = _HEAD + b"CallNextHandshakerLocked: error=OK" + _ARGS
    of_a_client = (
        _HEAD + b"CallNextHandshakerLocked: error=UNAVAILABLE: x" + _ARGS.replace(b"server_cred", b"cred")
    )
    assert heard(fine, of_a_client) == ([], [])
    trace = (b"=== Source Location Trace: ===", b"src/core/util/status_helper.cc:68", b"")
    assert heard(_HEAD + b"connect failed (UNKNOWN: refused", *trace, b"ours", b"", b"ours") == (
        [b"ours", b"", b"ours"],
        [],
    )


@pytest.mark.parametrize(
    ("inherited", "asks"),
    [({}, True), ({"GRPC_VERBOSITY": "NONE"}, True), ({"GRPC_VERBOSITY": "DEBUG"}, False)],
)
def test_the_core_is_asked_unless_somebody_reads_its_log(
    monkeypatch: pytest.MonkeyPatch, inherited: dict[str, str], asks: bool
) -> None:
    """A parent of ours may have hushed it for itself: that is nobody's wish to read it."""
    for name in ("GRPC_VERBOSITY", "GRPC_TRACE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    assert ask_core() == asks
    assert (os.environ.get("GRPC_TRACE") == "handshaker") == asks
