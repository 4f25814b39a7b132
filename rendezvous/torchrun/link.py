"""One session with the rendezvous, for a thread that has no event loop.

A separate thread runs the loop, so that heartbeats continue while torch's agent sleeps, waits or kills. The threads
share the standing under one condition. The link sends messages in the order in which the standing changed.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from rendezvous.torchrun.standing import come, hear
from rendezvous.values.events import Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.client.session import Session
    from rendezvous.torchrun.standing import Said, Standing
    from rendezvous.values.events import FromAgent, ToAgent

_JOIN_AGAIN_S = 1.0
_CLOSE_S = 5.0

Answer = TypeVar("Answer")


class JobOver(Exception):
    def __init__(self, standing: Standing) -> None:
        super().__init__("the job is over for this node")
        self.standing = standing


class Link:
    def __init__(self, standing: Standing, open_session: Callable[[], Session]) -> None:
        self._standing = standing
        self._open_session = open_session
        self._changed = threading.Condition()
        self._heard = 0
        self._broken: BaseException | None = None
        self._session: Session | None = None
        self._unsent: list[FromAgent] = []
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="ddp rendezvous", daemon=True)
        self._thread.start()

    @property
    def standing(self) -> Standing:
        with self._changed:
            return self._standing

    def do(self, act: Callable[[Standing], Said]) -> Standing:
        """Apply an action of torch's agent to the standing, and send the messages that follow."""
        with self._changed:
            self._standing, said = act(self._standing)
            self._say(said)
            self._changed.notify_all()
            return self._standing

    def wait_for(self, look: Callable[[Standing], Answer | None], silence_s: float) -> Answer:
        """Return the result of `look` as soon as there is one. Raise JobOver if the job is over before.

        Raise TimeoutError if no message came from the service for `silence_s`.
        """
        with self._changed:
            while (found := look(self._standing)) is None:
                if self._standing.over:
                    raise JobOver(self._standing)
                if self._broken is not None:
                    raise ConnectionError(str(self._broken)) from self._broken
                heard = self._heard
                if not self._changed.wait(silence_s) and self._heard == heard:
                    raise TimeoutError
            return found

    def close(self) -> None:
        """Close the session. Messages queued before are still sent."""
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(_CLOSE_S)

    # --- the thread of the loop ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._listen())
        except asyncio.CancelledError:
            pass
        except Exception as error:
            with self._changed:
                self._broken = error
                self._changed.notify_all()
        finally:
            self._loop.close()

    async def _listen(self) -> None:
        self._task = asyncio.current_task()
        session = self._open_session()
        try:
            with self._changed:
                self._session = session
                self._flush()
            while True:
                self._hear(await session.receive())
        finally:
            await asyncio.wait_for(session.close(), _CLOSE_S)

    def _hear(self, message: ToAgent) -> None:
        with self._changed:
            self._standing, said = hear(self._standing, message)
            self._say(said)
            self._heard += 1
            self._changed.notify_all()
        if isinstance(message, Refused) and message.retryable:
            self._loop.call_later(_JOIN_AGAIN_S, self._join_again)

    def _join_again(self) -> None:
        """Join again if no ranks run here. Otherwise torch's agent first reaps its ranks, then joins again."""
        with self._changed:
            if self._standing.running is None:
                self._standing, said = come(self._standing)
                self._say(said)

    def _say(self, said: tuple[FromAgent, ...]) -> None:
        self._unsent += said
        if said and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        with self._changed:
            if self._session is None:
                return
            for message in self._unsent:
                self._session.send(message)
            self._unsent.clear()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self._loop.call_soon(self._cancel)
