"""Words held back: the last one counts, quiet or a long time lets them out, and a better word makes them obsolete."""

from __future__ import annotations

import asyncio
import selectors

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from rendezvous.client.channel import Route
from rendezvous.service.jobs import LONGEST_S, QUIET_S, Coalescer
from rendezvous.service.waiting_jobs import WaitingJob, hints


class _Clock:
    """An event loop whose time passes only when nothing else is left to do."""

    def __init__(self) -> None:
        self.now = 0.0
        self.loop = asyncio.SelectorEventLoop(_Skips(self))
        self.loop.time = lambda: self.now  # type: ignore[method-assign]


class _Skips(selectors.SelectSelector):
    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._clock.now += timeout or 0.0
        return super().select(0)


def _told(
    *words: tuple[float, str, str], dropped: tuple[float, str] | None = None
) -> list[tuple[float, str, str]]:
    """`words`: when, to whom, what. What was delivered, and when."""
    clock = _Clock()
    told: list[tuple[float, str, str]] = []

    async def story() -> None:
        coalescer: Coalescer[str, str] = Coalescer(
            lambda to, word: told.append((round(clock.now, 3), to, word))
        )
        loop = asyncio.get_running_loop()
        for at, to, word in words:
            loop.call_at(at, coalescer.put, to, word)
        if dropped is not None:
            loop.call_at(dropped[0], coalescer.drop, dropped[1])
        await asyncio.sleep(words[-1][0] + 2 * LONGEST_S)

    try:
        clock.loop.run_until_complete(story())
    finally:
        clock.loop.close()
    return told


def test_a_word_comes_when_it_has_been_quiet() -> None:
    assert _told((1.0, "a", "one")) == [(1.0 + QUIET_S, "a", "one")]


def test_only_the_last_word_to_each_counts() -> None:
    told = _told((1.0, "a", "one"), (1.1, "b", "two"), (1.2, "a", "three"))
    assert told == [(1.2 + QUIET_S, "a", "three"), (1.2 + QUIET_S, "b", "two")]


def test_unrest_holds_words_back_only_so_long() -> None:
    unrest = [(1.0 + 0.1 * i, f"n{i}", "word") for i in range(60)]
    told = _told(*unrest)
    assert sorted(told, key=lambda t: int(t[1][1:])) == told  # each once, in order
    assert {to for _, to, _ in told} == {to for _, to, _ in unrest}
    assert told[0][0] == 1.0 + LONGEST_S
    assert told[-1][0] == round(unrest[-1][0] + QUIET_S, 3)


def test_what_became_obsolete_is_not_told() -> None:
    assert _told((1.0, "a", "one"), (1.1, "b", "two"), dropped=(1.2, "a")) == [
        (round(1.1 + QUIET_S, 3), "b", "two")
    ]


def test_the_next_word_after_all_were_dropped_waits_anew() -> None:
    assert _told((1.0, "a", "one"), (9.0, "b", "two"), dropped=(1.1, "a")) == [(9.0 + QUIET_S, "b", "two")]


# --- nodes of one job that wait in two jobs -----------------------------------------------------------


@pytest.mark.parametrize(
    ("jobs", "hinted"),
    [
        ((), ()),
        ((("train", 2, 2),), ()),
        ((("train", 2, 2), ("eval", 2, 2)), ("train", "eval")),  # nobody else waits
        ((("train", 2, 2), ("eval", 2, 3)), ()),  # jobs of other sizes are not one job
        ((("train", 2, 2), ("train-v2", 2, 2), ("eval", 2, 2)), ("train", "train-v2")),
        ((("train", 2, 2), ("eval", 2, 2), ("tokenize", 2, 2)), ()),
    ],
)
def test_which_jobs_are_mentioned(jobs: tuple[tuple[str, int, int], ...], hinted: tuple[str, ...]) -> None:
    assert tuple(hints([WaitingJob(*job) for job in jobs])) == hinted


def test_a_hint_names_both_jobs_and_the_option() -> None:
    found = hints([WaitingJob(f"train-{n}", 2, 2) for n in range(9)])
    assert len(found) == 9
    assert all(name in found["train-8"] for name in ("train-8", "train-0", "--rdzv-id"))
    assert "train-5" not in found["train-8"]  # a few are enough


def test_a_busy_service_compares_nothing() -> None:
    assert hints([WaitingJob(f"train-{n}", 2, 2) for n in range(5000)]) == {}


# --- how a client finds the replica that decides about a job ------------------------------------------


def refusal(owner: str = "") -> AioRpcError:
    trailing = Metadata(("rendezvous-owner", owner)) if owner else Metadata()
    return AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), trailing)


def test_endpoints_are_called_in_turn() -> None:
    route = Route(["a:1", "b:1"])
    called = []
    for _ in range(3):
        called.append(route.endpoint)
        route.refused(refusal())
    assert called == ["a:1", "b:1", "a:1"]


def test_a_redirect_is_followed_once() -> None:
    """An owner that has gone since does not hold the client up."""
    route = Route(["a:1", "b:1"])
    route.refused(refusal("c:1"))
    assert (route.endpoint, route.owner) == ("c:1", "c:1")
    route.refused(refusal())
    assert (route.endpoint, route.owner) == ("a:1", "")
