"""Finds stop strings in streamed text, and never emits a part of one. Pure.

One Knuth-Morris-Pratt automaton per stop string: constant work per character, wherever the text is cut.
"""

from collections.abc import Sequence


class _Automaton:
    """Tracks the longest prefix of `pattern` that the text ends with."""

    __slots__ = ("_failure", "matched", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern, self.matched = pattern, 0
        self._failure = [0] * len(pattern)
        length = 0
        for index in range(1, len(pattern)):
            while length and pattern[index] != pattern[length]:
                length = self._failure[length - 1]
            length += pattern[index] == pattern[length]
            self._failure[index] = length

    def advance(self, char: str) -> bool:
        """Take one character; True when the whole pattern has been seen."""
        while self.matched and self.pattern[self.matched] != char:
            self.matched = self._failure[self.matched - 1]
        self.matched += self.pattern[self.matched] == char
        return self.matched == len(self.pattern)


class StopMatcher:
    """`push` returns the text that is certainly before any stop string; `stopped` is the one found.

    The first stop string to be complete wins; of several at the same character, the longest.
    With `include`, the stop string itself ends the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.stopped: str | None = None
        self._automata = [_Automaton(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._include = include
        self._held = ""

    def push(self, text: str) -> str:
        """The text that may be emitted after `text` was added; "" once a stop string was found."""
        if self.stopped is not None:
            return ""
        if not self._automata:
            return text
        whole, start = self._held + text, len(self._held)
        for index in range(start, len(whole)):
            found = [a for a in self._automata if a.advance(whole[index])]
            if found:
                return self._stop(whole[: index + 1], found[0].pattern)
        held = max(a.matched for a in self._automata)
        num_emitted = len(whole) - held
        self._held = whole[num_emitted:]
        return whole[:num_emitted]

    def _stop(self, whole: str, stop: str) -> str:
        self.stopped, self._held = stop, ""
        return whole if self._include else whole[: -len(stop)]

    def flush(self) -> str:
        """The text ended: the rest that was held back."""
        held, self._held = self._held, ""
        return held
