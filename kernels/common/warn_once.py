"""Warnings that are logged once per owner. Imports no torch."""

import logging


class WarnOnce:
    """Logs each text once at WARNING."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger, self._seen = logger, set[str]()

    def __call__(self, text: str) -> None:
        if text not in self._seen:
            self._seen.add(text)
            self._logger.warning("%s", text)
