"""Finds stop strings in streamed text, and never emits a part of one. Pure."""

from collections.abc import Sequence


class StopMatcher:
    """`push` returns the text that is certainly before any stop string; `stopped` is the one found.

    The first stop string to be complete wins; of several at the same character, the longest.
    With `include`, the stop string itself ends the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.stopped: str | None = None
        self._stops, self._include = stops, include
        self._held = ""  # the longest end of the text that a stop string begins with

    def push(self, text: str) -> str:
        """The text that may be emitted after `text` was added; "" once a stop string was found."""
        if self.stopped is not None:
            return ""
        whole = self._held + text
        ends = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := whole.find(stop)) >= 0]
        if ends:
            end, _, self.stopped = min(ends)
            self._held = ""
            return whole[:end] if self._include else whole[: end - len(self.stopped)]
        cut = len(whole) - max((overlap(whole, stop) for stop in self._stops), default=0)
        self._held = whole[cut:]
        return whole[:cut]

    def flush(self) -> str:
        """The text ended: the rest that was held back."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, and does not end with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
