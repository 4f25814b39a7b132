"""One session with the rendezvous, for a thread that has no event loop.

A separate thread runs the loop, so that heartbeats continue while torch's agent sleeps, waits or stops processes. The
threads share the node state, which one `threading.Condition` protects. The link sends messages in the order in which
the node state changed.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from rendezvous.torchrun.node_state import handle_message, next_rendezvous
from rendezvous.values.events import Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.client.session import Session
    from rendezvous.torchrun.node_state import NodeState, Transition
    from rendezvous.values.events import FromAgent, ToAgent

_JOIN_AGAIN_S = 1.0
_CLOSE_S = 5.0

Answer = TypeVar("Answer")


class JobOver(Exception):
    def __init__(self, node: NodeState) -> None:
        super().__init__("the rendezvous has ended for this node")
        self.node = node


class Link:
    def __init__(self, node: NodeState, open_session: Callable[[], Session]) -> None:
        self._node = node
        self._open_session = open_session
        self._changed = threading.Condition()
        self._received = 0
        self._broken: BaseException | None = None
        self._session: Session | None = None
        self._unsent: list[FromAgent] = []
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="ddp rendezvous", daemon=True)
        self._thread.start()

    @property
    def node(self) -> NodeState:
        with self._changed:
            return self._node

    def apply(self, act: Callable[[NodeState], Transition]) -> NodeState:
        """Apply an action of torch's agent to the node state, and send the resulting messages."""
        with self._changed:
            self._node, messages = act(self._node)
            self._queue(messages)
            self._changed.notify_all()
            return self._node

    def wait_for(self, look: Callable[[NodeState], Answer | None], silence_s: float) -> Answer:
        """Return the first result of `look` that is not None. Raise JobOver if the rendezvous ends before.

        Raise TimeoutError if no message came from the service for `silence_s`.
        """
        with self._changed:
            while (found := look(self._node)) is None:
                if self._node.over:
                    raise JobOver(self._node)
                if self._broken is not None:
                    raise ConnectionError(str(self._broken)) from self._broken
                received = self._received
                if not self._changed.wait(silence_s) and self._received == received:
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
                self._receive(await session.receive())
        finally:
            await asyncio.wait_for(session.close(), _CLOSE_S)

    def _receive(self, message: ToAgent) -> None:
        with self._changed:
            self._node, messages = handle_message(self._node, message)
            self._queue(messages)
            self._received += 1
            self._changed.notify_all()
        if isinstance(message, Refused) and message.retryable:
            self._loop.call_later(_JOIN_AGAIN_S, self._join_again)

    def _join_again(self) -> None:
        """Join again if no ranks run here. Otherwise torch's agent first reaps its ranks, then joins again."""
        with self._changed:
            if self._node.running is None:
                self._node, messages = next_rendezvous(self._node)
                self._queue(messages)

    def _queue(self, messages: tuple[FromAgent, ...]) -> None:
        self._unsent += messages
        if messages and not self._loop.is_closed():
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
