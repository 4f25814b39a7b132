"""Calls to an etcd cluster that are retried until they succeed.

The client uses one member at a time. If it does not answer, the client asks all members at once, repeatedly, and then
continues with the first that answers. A member may have stopped, hang, or wait for a leader that has stopped. The only
sign of this is a missing answer. Each attempt has a short timeout, which grows while no member answers. So requests to
a slow cluster succeed in the end. A request may be executed more than once, or its answer may be lost. So all requests
are idempotent, and writes contain an id by which the writer recognises them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from enum import Enum, auto
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio

from rendezvous.pb import etcd_pb2 as pb
from rendezvous.store.etcd_wire import AUTHENTICATE, RANGE, Member, one_error_if_reopened
from rendezvous.store.protocol import StoreError

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from rendezvous.store.etcd_wire import Access, Metadata, Method

Q = TypeVar("Q", bound="Message")
A = TypeVar("A", bound="Message")

_log = logging.getLogger(__name__)
_ATTEMPT_S = 0.6  # a request that was forwarded to a dead leader is never answered
_ATTEMPTS_OF_A_LENGTH = 4
_LOCAL_ANSWER_S = 0.5
_LONGEST_ATTEMPT_S = 6.0  # a little more than etcd itself waits for its own quorum
_SHORTEST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.3


class Unreachable(Exception):
    """No member answered within the caller's timeout."""


class NotFound(StoreError):
    """The lease that the request refers to does not exist."""


class _Reaction(Enum):
    AGAIN = auto()  # another member, or later
    SIGN_IN = auto()  # etcd does not know our access token
    NOT_FOUND = auto()
    REFUSED = auto()


class EtcdClient:
    """`kind`: how to connect to a member; `MemberOfThread` in another thread than that of the service."""

    def __init__(self, access: Access, kind: type[Member] = Member) -> None:
        self.access = access
        self._members = [kind(endpoint, access.tls) for endpoint in access.endpoints]
        self._at = random.randrange(len(self._members))
        self._token: str | None = None if access.user else ""
        self._signing_in = asyncio.Lock()
        self._not_answering = False
        self._closed = False

    async def call(
        self,
        method: Method[Q, A],
        request: Q,
        *,
        attempt_s: float = _ATTEMPT_S,
        give_up_at: float | None = None,
    ) -> A:
        """Call a method. Raises `Unreachable` at `give_up_at` (monotonic); with None it keeps trying."""
        failures = 0
        while True:
            longest_s = min(attempt_s * 2 ** (failures // _ATTEMPTS_OF_A_LENGTH), _LONGEST_ATTEMPT_S)
            limit_s = _within(longest_s, give_up_at)
            asked = list(self._members) if failures else [self.member()]
            answer = await self._first_answer(asked, method, request, limit_s)
            if answer is not None:
                return answer
            failures += 1
            await _pause(failures - 2, give_up_at)

    async def _first_answer(
        self, asked: list[Member], method: Method[Q, A], request: Q, limit_s: float
    ) -> A | None:
        """The first answer; None if no member answered."""
        if len(asked) == 1:
            return await self._ask(asked[0], method, request, limit_s)
        attempts = [asyncio.ensure_future(self._ask(member, method, request, limit_s)) for member in asked]
        try:
            for attempt in asyncio.as_completed(attempts):
                answer = await attempt
                if answer is not None:
                    return answer
            return None
        finally:
            for task in attempts:
                task.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)

    async def _ask(self, member: Member, method: Method[Q, A], request: Q, limit_s: float) -> A | None:
        used: Metadata = ()
        try:
            with one_error_if_reopened():
                used = await self.metadata(limit_s)
                answer = await member.ask(method, request, used, limit_s)
        except grpc.aio.AioRpcError as error:
            self._react(member, method.name, error, used)
            return None
        self._note_answer(member)
        return answer

    async def most_members_answer(self, patience: float = 1.0) -> bool:
        """Whether a majority of the members answers, with or without a leader. `patience` times the usual timeout.

        If so, no other majority exists that could serve another replica.
        """
        limit_s = patience * _LOCAL_ANSWER_S
        answers = await asyncio.gather(*(self._answers(member, limit_s) for member in self._members))
        return 2 * sum(answers) > len(self._members)

    async def _answers(self, member: Member, limit_s: float) -> bool:
        request = pb.RangeRequest(key=b"\0", serializable=True, count_only=True)
        try:
            with one_error_if_reopened():
                used = (("token", self._token),) if self._token else ()
                await member.ask(RANGE, request, used, limit_s)
        except grpc.aio.AioRpcError as error:
            return _reaction(error) is not _Reaction.AGAIN
        return True

    async def metadata(self, limit_s: float = _ATTEMPT_S) -> Metadata:
        if self._token is None:
            await self._sign_in(limit_s)
        return (("token", self._token),) if self._token else ()

    def member(self) -> Member:
        """The member in use."""
        if self._closed:
            raise StoreError("internal error: the store was used after it was closed")
        return self._members[self._at]

    def switch_from(self, member: Member) -> None:
        """Use the next member after a failure of this one, unless the client has already switched."""
        if self._members[self._at] is member:
            self._at = (self._at + 1) % len(self._members)

    def sign_in_again(self, used: Metadata) -> None:
        """Drop the token, unless it was renewed since `used`."""
        if self.access.user and used == (("token", self._token),):
            self._token = None

    async def close(self) -> None:
        self._closed = True
        for member in self._members:
            await member.close()

    def _react(self, member: Member, name: str, error: grpc.aio.AioRpcError, used: Metadata) -> None:
        match _reaction(error):
            case _Reaction.AGAIN:
                if not self._not_answering:
                    _log.warning(
                        "etcd at %s does not answer: %s; retrying with all members",
                        member.endpoint,
                        words(error),
                    )
                self._not_answering = True
                self.switch_from(member)
            case _Reaction.SIGN_IN:
                if not self.access.user:
                    raise StoreError(
                        f"etcd requires a user and a password: use etcd://USER@HOST ({words(error)})"
                    ) from error
                self.sign_in_again(used)
            case _Reaction.NOT_FOUND:
                raise NotFound(words(error)) from error
            case _Reaction.REFUSED:
                raise StoreError(
                    f"etcd at {member.endpoint} refused {name}: {words(error)}. Check the role of the user in etcd"
                ) from error

    def _note_answer(self, member: Member) -> None:
        self._at = self._members.index(member)
        if self._not_answering:
            self._not_answering = False
            _log.info("etcd at %s answers again", member.endpoint)

    async def _sign_in(self, limit_s: float) -> None:
        async with self._signing_in:
            if self._token is not None:
                return
            request = pb.AuthenticateRequest(name=self.access.user, password=self.access.password())
            try:
                answer = await self.member().ask(AUTHENTICATE, request, (), limit_s)
            except grpc.aio.AioRpcError as error:
                if "authentication is not enabled" not in (error.details() or ""):
                    raise
                _log.warning(
                    "etcd does not use authentication, so user and password have no effect: remove USER@ from --store"
                )
                self._token = ""
            else:
                self._token = answer.token


def _reaction(error: grpc.aio.AioRpcError) -> _Reaction:
    details = error.details() or ""
    match error.code():
        case grpc.StatusCode.UNAUTHENTICATED:
            return _Reaction.SIGN_IN
        case grpc.StatusCode.INVALID_ARGUMENT if (
            "user name is empty" in details or "auth store is old" in details
        ):
            return _Reaction.SIGN_IN
        case grpc.StatusCode.NOT_FOUND:
            return _Reaction.NOT_FOUND
        case (
            grpc.StatusCode.INVALID_ARGUMENT
            | grpc.StatusCode.PERMISSION_DENIED
            | grpc.StatusCode.UNIMPLEMENTED
            | grpc.StatusCode.OUT_OF_RANGE
            | grpc.StatusCode.FAILED_PRECONDITION
        ):
            return _Reaction.REFUSED
        case _:
            return _Reaction.AGAIN


def words(error: grpc.aio.AioRpcError) -> str:
    return f"{error.details() or 'etcd gave no reason'} ({error.code().name})"


def _within(limit_s: float, give_up_at: float | None) -> float:
    if give_up_at is None:
        return limit_s
    left_s = give_up_at - time.monotonic()
    if left_s <= 0.0:
        raise Unreachable("no member of etcd answered within the timeout")
    return min(limit_s, left_s)


async def _pause(rounds: int, give_up_at: float | None) -> None:
    """Wait before a retry. There is no wait until every member was asked once, then growing waits with jitter."""
    if rounds < 0:
        return
    longest_s = min(_SHORTEST_PAUSE_S * 2 ** min(rounds, 10), _LONGEST_PAUSE_S)
    await asyncio.sleep(_within(random.uniform(0.5, 1.0) * longest_s, give_up_at))
