"""What the fake CUDA runtime (runtime.c) has counted, for each device."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

NUM_DEVICES = 2


def is_loaded() -> bool:
    """Whether this process runs over the fake runtime."""
    return hasattr(ctypes.CDLL(None), "fake_counts")


def _names() -> list[str]:
    library = ctypes.CDLL(None)
    names = (ctypes.c_char_p * 64).in_dll(library, "fake_names")
    found = []
    for name in names:
        if name is None:
            return found
        found.append(name.decode())
    raise AssertionError("fake_names has no end")


def read(device: int = 0) -> dict[str, int]:
    """Every counter of a device since the process began."""
    names = _names()
    counts = ((ctypes.c_long * len(names)) * NUM_DEVICES).in_dll(ctypes.CDLL(None), "fake_counts")
    return dict(zip(names, counts[device], strict=True))


@contextmanager
def counted(device: int = 0) -> Iterator[dict[str, int]]:
    """Yields a dict that holds, after the context, what was counted in it; counters that stayed at 0 are left out."""
    before, found = read(device), {}
    yield found
    found |= {name: now - before[name] for name, now in read(device).items() if now > before[name]}
