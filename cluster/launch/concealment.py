"""Keeps secrets out of what others see of a process: its command line (`ps`), its environment in /proc, and the
environment of its children. Linux only; elsewhere it does nothing.
"""

import contextlib
import ctypes
from collections.abc import Sequence
from pathlib import Path

from kvrelay.environment import take_secrets

_SECRETS = ("--api-key", "serve.api_key", "cluster.secret")
_FIRST = 45  # of the numbers in /proc/self/stat after the name: start and end of the arguments, then of the environment


def conceal(arguments: Sequence[str]) -> None:
    """Overwrite the secrets among this command's arguments, and those of its environment, which it takes out of it."""
    hidden = [value.encode() for value in (*secrets_among(arguments), *take_secrets())]
    with contextlib.suppress(OSError):
        numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        _overwrite(int(numbers[_FIRST]), int(numbers[_FIRST + 1]), hidden)
        _overwrite(int(numbers[_FIRST + 2]), int(numbers[_FIRST + 3]), hidden)


def secrets_among(arguments: Sequence[str]) -> list[str]:
    """The values of `--api-key` and of `--set` for the settings that are secrets."""
    found = []
    for before, argument in zip(("", *arguments), arguments, strict=False):
        name, _, value = argument.removeprefix("--set=").partition("=")
        if before == "--api-key":
            found.append(argument)
        elif name in _SECRETS:
            found.append(value)
    return [value for value in found if value]


def _overwrite(start: int, end: int, hidden: Sequence[bytes]) -> None:
    """In this process's memory between two addresses, which holds strings that end with a zero byte: each that is a
    secret, or NAME=secret.
    """
    place = start
    for text in ctypes.string_at(start, end - start).split(b"\0"):
        for secret in hidden:
            if text == secret or text.endswith(b"=" + secret):
                ctypes.memset(place + len(text) - len(secret), ord("x"), len(secret))
        place += len(text) + 1
