"""Eviction policies by name. A new one is a class with `score` and a line of `register`; usage.py has the contract."""

from collections.abc import Callable

from kvrelay.kvcache.eviction.classic import Fifo, Lfu, Lru, Slru
from kvrelay.kvcache.eviction.survival import Survival
from kvrelay.kvcache.eviction.tinylfu import TinyLfu
from kvrelay.kvcache.eviction.usage import Policy, Usage

__all__ = ["Lru", "Policy", "Usage", "make_policy", "policy_names", "register"]

_MAKERS: dict[str, Callable[[int], Policy]] = {}


def register(name: str, maker: Callable[[int], Policy]) -> None:
    """Make a policy known. `maker` gets the cache's capacity in blocks. Raises ValueError: the name is taken."""
    if name in _MAKERS:
        raise ValueError(f"there is an eviction policy {name!r} already")
    _MAKERS[name] = maker


def policy_names() -> tuple[str, ...]:
    """All that `make_policy` knows."""
    return tuple(_MAKERS)


def make_policy(name: str, capacity_blocks: int) -> Policy:
    """A new policy for one cache of so many blocks. Raises ValueError naming those that there are."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise ValueError(f"there is no eviction policy {name!r}; there are {', '.join(_MAKERS)}")
    return maker(capacity_blocks)


register("lru", lambda capacity: Lru())
register("lfu", lambda capacity: Lfu())
register("fifo", lambda capacity: Fifo())
register("slru", Slru)
register("tinylfu", TinyLfu)
register("survival", Survival)
register("cost", Survival.by_cost)
