"""Sessions: hints about KV that requests inherit by naming one. The table is pure; times are the caller's clock, in
seconds.

A session belongs to the salt that it was made with (the `cache_salt`, after the namespace of the API key); its key
holds a digest of that, never the salt. It expires after IDLE_S without use.
"""

from dataclasses import dataclass, replace
from typing import Protocol

from kvrelay.errors import InvalidRequest, Overloaded
from kvrelay.hashing import TENANT_CHARS, salt_name

MAX_SESSIONS = 4096
MAX_TENANT_SESSIONS = 1024
IDLE_S = 3600.0
_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class SessionHints:
    """What requests inherit; None: the default."""

    keep: bool | None = None
    priority: int | None = None
    pin_s: float | None = None
    made: str = ""  # random id of this session: one that is deleted and made again has another


@dataclass(frozen=True, slots=True)
class SessionKey:
    """`salt` is a digest (hashing.salt_name); "" for requests without a salt."""

    salt: str
    name: str

    @classmethod
    def of(cls, salt: str, name: str) -> "SessionKey":
        return cls(salt_name(salt), name)

    @property
    def tenant(self) -> str:
        """Which tenant's it is: of one API key, all salts."""
        return self.salt[:TENANT_CHARS]

    def __str__(self) -> str:
        return f"{self.salt}/{self.name}"


class Sessions(Protocol):
    """The sessions that an ingress uses. Raises RequestError (503) when they cannot be reached."""

    async def put(self, key: SessionKey, hints: SessionHints) -> None:
        """Make it, or replace its hints. Raises Overloaded: there are too many."""

    async def get(self, key: SessionKey) -> SessionHints | None:
        """Its hints; counts as a use."""

    async def delete(self, key: SessionKey) -> SessionHints | None:
        """Remove it. Its hints, None if there is no such session."""


class SessionTable:
    """At most MAX_SESSIONS, at most MAX_TENANT_SESSIONS of one tenant, in the order of their last use."""

    def __init__(self) -> None:
        self._sessions: dict[SessionKey, tuple[float, SessionHints]] = {}
        self._num_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def put(self, key: SessionKey, hints: SessionHints, now_s: float) -> SessionHints | None:
        """Make it, or replace its hints except `made`. The stored hints; None, and no change: there are too many."""
        self._expire(now_s)
        old = self.delete(key)
        if old is not None:
            hints = replace(hints, made=old.made)
        elif len(self) >= MAX_SESSIONS or self._num_of.get(key.tenant, 0) >= MAX_TENANT_SESSIONS:
            return None
        self._sessions[key] = (now_s, hints)
        self._num_of[key.tenant] = self._num_of.get(key.tenant, 0) + 1
        return hints

    def get(self, key: SessionKey, now_s: float) -> SessionHints | None:
        """Its hints; counts as a use."""
        self._expire(now_s)
        known = self._sessions.pop(key, None)
        if known is None:
            return None
        self._sessions[key] = (now_s, known[1])
        return known[1]

    def delete(self, key: SessionKey) -> SessionHints | None:
        """Remove it. Its hints, None if there is no such session."""
        known = self._sessions.pop(key, None)
        if known is None:
            return None
        self._num_of[key.tenant] -= 1
        if not self._num_of[key.tenant]:
            del self._num_of[key.tenant]
        return known[1]

    def _expire(self, now_s: float) -> None:
        while self._sessions:
            key, (used_s, _) = next(iter(self._sessions.items()))
            if now_s - used_s < IDLE_S:
                return
            self.delete(key)


def too_many_sessions() -> Overloaded:
    return Overloaded(
        f"there are too many sessions ({MAX_SESSIONS}, {MAX_TENANT_SESSIONS} of one tenant): delete some, "
        f"or wait until they have been idle for {IDLE_S:.0f} s",
        _RETRY_AFTER_S,
    )


def no_such_session(name: str, param: str | None) -> InvalidRequest:
    message = (
        f"there is no session {name!r} of this cache_salt; sessions are forgotten when idle for {IDLE_S:.0f} s: "
        f"make it (again) with PUT /v1/kv/sessions/{name}"
    )
    return InvalidRequest(message, param, 404, "session_not_found")
