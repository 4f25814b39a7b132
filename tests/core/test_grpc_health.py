"""What probes are told: `live` is yes as long as somebody answers, all else is whether the service serves."""

from __future__ import annotations

import pytest

from rendezvous.service.server import LIVE, NOT_SERVING, SERVING, HealthAnswers


@pytest.mark.parametrize("serving", [False, True])
def test_who_cannot_serve_is_alive_all_the_same(serving: bool) -> None:
    health = HealthAnswers(("jobs",))
    health.set(serving)
    assert health.answer(LIVE) == SERVING
    assert {health.answer(""), health.answer("jobs")} == {SERVING if serving else NOT_SERVING}
