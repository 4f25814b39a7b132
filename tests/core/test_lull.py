"""Words held back: the last one counts, quiet or a long time lets them out, and a better word makes them obsolete."""

from __future__ import annotations

import asyncio
import selectors

from rendezvous.service.jobs import LONGEST_S, QUIET_S, Coalescer


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
