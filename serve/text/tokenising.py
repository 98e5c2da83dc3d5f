"""Tokenising of prompts: long texts on threads of their own, within a budget of characters, and of a text that cannot
fit the context no more than shows that.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvrelay.errors import Overloaded

Encode = Callable[..., list[int]]  # a tokenizer's
MAX_CHARS = 16 << 20  # of all texts on the threads or queued for them; a single text may have more
_RETRY_AFTER_S = 1.0
_CHARS_PER_TOKEN = 6  # few texts have more; of those that fit, only these are tokenised in part and then as a whole


def margin(most_tokens: int) -> int:
    """How many tokens too many the beginning of a text must have for the text to be refused. Where it is cut, only the
    last few tokens depend on what follows: it ends with no space, which a special token may swallow.
    """
    return max(256, most_tokens // 16)


class TextThreads:
    """Threads for long texts."""

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self._max_chars, self._num_chars = max_chars, 0
        self._executor = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="kvrelay-tokenise")

    async def encode(
        self, encode: Encode, text: str, most_tokens: int | None = None, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Raises Overloaded: the texts under way fill the budget."""
        if self._num_chars and self._num_chars + len(text) > self._max_chars:
            message = f"texts of {self._num_chars} characters are being tokenised, and this would be over the limit"
            raise Overloaded(message, _RETRY_AFTER_S)
        self._num_chars += len(text)
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._executor, _encode, encode, text, most_tokens, add_special_tokens)
        finally:
            self._num_chars -= len(text)


def _encode(encode: Encode, text: str, most_tokens: int | None, add_special_tokens: bool) -> list[int]:
    if most_tokens is not None:
        most = most_tokens + margin(most_tokens)
        num_chars = _CHARS_PER_TOKEN * most
        while num_chars < len(text):
            ids = encode(text[:num_chars].rstrip(), add_special_tokens=add_special_tokens)
            if len(ids) > most:
                return ids
            num_chars *= 4
    return encode(text, add_special_tokens=add_special_tokens)


THREADS = TextThreads()  # of this process
