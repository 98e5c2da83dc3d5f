"""Sessions of KV hints that all ingresses share: the registry keeps them, each ingress caches them for FRESH_S.

A change on one ingress reaches the others within FRESH_S. A restarted registry has no sessions: requests that name one
get 404 until the client creates it again.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError

from kvrelay.serve.api.sessions import MAX_SESSIONS, SessionHints, SessionKey, too_many_sessions
from kvrelay.serve.requests.retries import Unavailable

logger = logging.getLogger(__name__)

FRESH_S = 2.0
TIMEOUT_S = 5.0
_RETRY_AFTER_S = 1.0


class SharedSessions:
    """`registry`: the handle of the registry's actor."""

    def __init__(self, registry: Any, clock: Callable[[], float]) -> None:
        self._registry, self._clock = registry, clock
        self._known: dict[SessionKey, tuple[float, SessionHints]] = {}  # time of the registry's answer

    async def put(self, key: SessionKey, hints: SessionHints) -> None:
        kept = await self._call(self._registry.put_session, key, hints)
        if kept is None:
            raise too_many_sessions()
        self._note(key, kept)

    async def get(self, key: SessionKey) -> SessionHints | None:
        known = self._known.get(key)
        if known is not None and self._clock() - known[0] < FRESH_S:
            return known[1]
        hints: SessionHints | None = await self._call(self._registry.session, key)
        self._note(key, hints)
        return hints

    async def delete(self, key: SessionKey) -> SessionHints | None:
        self._note(key, None)
        hints: SessionHints | None = await self._call(self._registry.delete_session, key)
        self._note(key, None)  # another request may have cached it meanwhile
        return hints

    def _note(self, key: SessionKey, hints: SessionHints | None) -> None:
        self._known.pop(key, None)
        if hints is not None:
            self._known[key] = (self._clock(), hints)
            if len(self._known) > MAX_SESSIONS:
                del self._known[next(iter(self._known))]

    @staticmethod
    async def _call(method: Any, *arguments: object) -> Any:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await method.remote(*arguments)
        except (RayError, TimeoutError) as error:
            logger.warning("the registry does not answer about a session: %s", error)
            message = "sessions cannot be looked up now: the registry does not answer"
            raise Unavailable(message, _RETRY_AFTER_S, "sessions_unavailable") from error
