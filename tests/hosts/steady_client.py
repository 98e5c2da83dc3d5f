"""A client that goes on while the cluster changes, and counts what fails."""

import http.client
import threading
from collections.abc import Callable
from typing import Self

PAUSE_S = 0.2  # between two requests: the hosts share this machine's cores


class SteadyClient:
    """Calls `answer`, which sends one greedy request, again and again while the context is entered. One that raises, or
    whose tokens differ from the first one's, has failed.
    """

    def __init__(self, answer: Callable[[], list[int]]) -> None:
        self._answer = answer
        self._right: list[int] = []
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="steady client")
        self.requests = self.failed = 0
        self.first_failure = ""

    def __enter__(self) -> Self:
        self._right = self._answer()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._has_ended.wait(PAUSE_S):
            try:
                tokens = self._answer()
                failure = "" if tokens == self._right else f"{tokens} instead of {self._right}"
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                failure = repr(error)
            self.requests += 1
            if failure:
                self.failed += 1
                self.first_failure = self.first_failure or failure
