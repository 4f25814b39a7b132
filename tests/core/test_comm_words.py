"""Which errors are about a peer or a connection, and not about the script."""

from __future__ import annotations

import pytest

from ddp.telemetry.comm_words import is_communication_error

QUOTED = (
    "Got the following error when running the callback: DistBackendError: rank 0 died (noticed by rank 1)"
)


@pytest.mark.parametrize(
    ("error", "is_about_communication"),
    [
        (RuntimeError(QUOTED), True),  # torch's reducer, over a group that was made in Python
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (RuntimeError("The size of tensor a (8) must match the size of tensor b (4)"), False),
        (ValueError("connection reset by peer"), False),
    ],
)
def test_an_error_of_communication_is_recognized(error: Exception, is_about_communication: bool) -> None:
    assert is_communication_error(error) is is_about_communication
