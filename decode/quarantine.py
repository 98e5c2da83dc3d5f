"""Blocks of ended transfers that a read may still write: the engine gives them to no sequence until they are
released.
"""

from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.thread import EngineThread


class Quarantine:
    """Called on the worker's loop; acts on the engine's thread, in the order of the calls."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._keys: dict[str, int] = {}  # the engine's, by request; touched on its thread only

    def hold(self, request_id: str) -> None:
        """End the sequence, but keep its blocks until `release`."""

        def hold(engine: Engine) -> None:
            key = engine.requests.quarantine(request_id)
            if key is not None:
                self._keys[request_id] = key

        self._thread.post(hold)

    def release(self, request_id: str) -> None:
        """No read can write its blocks any more. No effect for a request that is not held."""

        def release(engine: Engine) -> None:
            key = self._keys.pop(request_id, None)
            if key is not None:
                engine.requests.unquarantine(key)

        self._thread.post(release)
