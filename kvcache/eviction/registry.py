"""Eviction policies by name (`cache.policy`).

A new one is a class with `score` and a line in `_MAKERS`; see usage.py.
"""

from collections.abc import Callable

from kvrelay.kvcache.eviction.classic import Lfu, Lru
from kvrelay.kvcache.eviction.survival import Survival
from kvrelay.kvcache.eviction.usage import EntryUsage, EvictionPolicy

__all__ = ["EntryUsage", "EvictionPolicy", "Lru", "make_policy", "policy_names"]

_MAKERS: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda capacity_blocks: Lru(),
    "lfu": lambda capacity_blocks: Lfu(),
    "survival": Survival,
}


def policy_names() -> tuple[str, ...]:
    """All names that `make_policy` accepts."""
    return tuple(_MAKERS)


def make_policy(name: str, capacity_blocks: int) -> EvictionPolicy:
    """A new policy for one cache of so many blocks. Raises ValueError, listing the known names."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise ValueError(f"unknown eviction policy {name!r}; choose one of {', '.join(_MAKERS)}")
    return maker(capacity_blocks)
