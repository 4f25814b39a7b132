"""Who uses the page: logins, and the cookie of a session.

Theory of operation
-------------------
A login is a token of the API. The cookie of the session is the token itself: the service stores no sessions, so they
outlive a restart, and end when the token expires or its key is removed. The cookie is HttpOnly: no script can read it.

A service without tokens, and a job of `ddp-launch --web`, print a URL with a random token that is valid for one login.
Its session is a random value that is valid as long as the process. The token is behind the `#` of the URL: browsers do
not send this part, so it is in no log and in no Referer.

Every request that does something needs a header with a value that is derived from the cookie. Pages of other sites can
neither read it nor set the header. SameSite=Strict and the check of Sec-Fetch-Site and Origin are two more barriers.
"""

from __future__ import annotations

import getpass
import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rendezvous.access.auth import Denied, Identity, Reason, Right

if TYPE_CHECKING:
    from rendezvous.access.auth import Gate, Grant

_RANDOM_SESSIONS = 64  # of one process; the oldest ends when there are more
_LONGEST_S = 30 * 86_400


@dataclass(frozen=True, slots=True)
class Session:
    identity: Identity
    csrf: str

    @property
    def role(self) -> str:
        grant = self.identity.grant
        return "operator" if grant is None else grant.role.value

    @property
    def until(self) -> float | None:
        return None if self.identity.grant is None else self.identity.grant.until

    def may_control(self, job_id: str | None = None) -> bool:
        return self.identity.may(Right.CONTROL, job_id)


class Logins:
    """`gate` checks tokens. If it uses none, there is one login, with `once`, and `grant` is what its user may do."""

    def __init__(self, gate: Gate, grant: Grant | None = None) -> None:
        self._gate, self._one = gate, Identity(f"user {_user()}", grant)
        self.once = "" if gate.uses_tokens else secrets.token_urlsafe(32)
        self._sessions: list[str] = []

    def login(self, credential: str) -> str:
        """The cookie of a new session. Raises `Denied`."""
        if self._gate.uses_tokens:
            self._gate.holder_of(credential.strip())
            return credential.strip()
        if not self.once or not hmac.compare_digest(credential.strip().encode(), self.once.encode()):
            used = "" if self.once else " The token of the URL was used before; it is valid for one login."
            raise _unknown(f"this is not the token of the URL that was printed at the start.{used}")
        self.once = ""
        cookie = secrets.token_urlsafe(32)
        self._sessions = [*self._sessions, cookie][-_RANDOM_SESSIONS:]
        return cookie

    def logout(self, cookie: str) -> None:
        self._sessions = [each for each in self._sessions if each != cookie]

    def session(self, cookie: str) -> Session:
        """Raises `Denied`."""
        if self._gate.uses_tokens:
            return Session(self._gate.holder_of(cookie), csrf_of(cookie))
        known = [each for each in self._sessions if hmac.compare_digest(each.encode(), cookie.encode())]
        if not known:
            raise _unknown("log in: open the URL that was printed at the start")
        return Session(self._one, csrf_of(cookie))

    def max_age_s(self, cookie: str, now: float) -> int:
        until = self.session(cookie).until
        return _LONGEST_S if until is None else int(max(1, min(until - now, _LONGEST_S)))


def _user() -> str:
    """Who runs this process: for a job of ddp-launch, and a service on loopback, also the user of the page."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container without this user
        return str(os.getuid())


def csrf_of(cookie: str) -> str:
    return hmac.digest(cookie.encode(), b"actions of the page", hashlib.sha256).hex()


def _unknown(words: str) -> Denied:
    return Denied(words, Reason.BAD_TOKEN)
