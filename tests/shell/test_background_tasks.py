"""No diagnostic ends an agent: its errors are logged once, and the fact that is waited for comes all the same."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from launcher.error_boundary import ErrorBoundary
from launcher.exchange import AgentEvent, Inspected, LastInspected, StacksTaken
from launcher.health.node_watch import Sampler
from launcher.wiring import BackgroundTasks
from rendezvous.values.rank_view import RankReport
from rendezvous.values.types import Cause, FailureClass

if TYPE_CHECKING:
    from launcher.health.node_health import NodeReading

SIGHTS = (RankReport(0), RankReport(1))
CAUSE = Cause("n0", 1, 1, FailureClass.HANG, "it made no progress", 124)


def fail(*_args: object) -> NoReturn:
    int(math.inf)
    raise AssertionError


def test_an_error_is_logged_once_with_its_place_and_its_result_replaced() -> None:
    lines: list[str] = []
    boundary = ErrorBoundary(lines.append)
    assert [boundary.called("a look", fail, 7) for _ in range(3)] == [7, 7, 7]
    assert boundary.called("another look", fail, None) is None
    assert boundary.called("a look", lambda: 5, 7) == 5
    assert len(lines) == 2
    assert all("OverflowError at test_background_tasks.py:" in line and "\n" not in line for line in lines)


def test_a_cancelled_errand_is_not_an_error() -> None:
    async def main() -> None:
        lines: list[str] = []
        task = asyncio.ensure_future(ErrorBoundary(lines.append).awaited("a look", asyncio.sleep(60), None))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not lines

    asyncio.run(main())


def test_a_preparation_ends_when_the_job_is_sealed_again() -> None:
    async def main() -> None:
        parts, over = SimpleNamespace(), asyncio.Event()
        tasks = BackgroundTasks(ErrorBoundary(lambda _: None), parts, parts, parts, fail)  # type: ignore[arg-type]

        async def prepare(*waits: Any) -> None:
            try:
                await asyncio.gather(*waits)
            except asyncio.CancelledError:
                over.set()
                raise
            fail()

        tasks.prepare(prepare(asyncio.sleep(600)))
        await asyncio.sleep(0)
        tasks.prepare(None)
        await over.wait()
        tasks.prepare(None)  # nothing is left to end
        await tasks.end()

    asyncio.run(main())


@pytest.mark.parametrize("broken", ["reports", "with_recorders", "with_stacks", "await_dumps", ""])
def test_every_errand_ends_with_its_fact(broken: str) -> None:
    async def through(value: Any, name: str) -> Any:
        return fail() if name == broken else value

    parts: Any = SimpleNamespace(
        reports=fail if broken == "reports" else lambda: SIGHTS,
        with_recorders=lambda _generation, seen: through(seen, "with_recorders"),
        with_stacks=lambda cause: through(cause, "with_stacks"),
        await_dumps=lambda _generation: through(None, "await_dumps"),
    )

    async def main() -> list[AgentEvent]:
        facts: list[AgentEvent] = []
        background_tasks = BackgroundTasks(
            ErrorBoundary(lambda _line: None), parts, parts, parts, facts.append
        )
        await background_tasks.inspect_ranks(3)
        background_tasks.inspect_last(3)
        await background_tasks.take_stacks(3, CAUSE)
        return facts

    seen = () if broken == "reports" else SIGHTS
    assert asyncio.run(main()) == [Inspected(3, seen), LastInspected(3, seen), StacksTaken(3, CAUSE)]


def test_a_look_at_the_node_that_fails_is_made_again() -> None:
    class Node:
        looks = 0

        def read(self) -> NodeReading:
            self.looks += 1
            if self.looks == 3:
                sampler.close()
            fail()

    lines: list[str] = []
    node: Any = Node()
    sampler = Sampler(lambda: node, fail, 0.0, ErrorBoundary(lines.append))
    sampler._run()
    assert node.looks == 3
    assert len(lines) == 1
