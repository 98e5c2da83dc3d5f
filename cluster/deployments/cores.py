"""Which CPU cores a worker gets: disjoint from its neighbours' on the same machine while there are enough.

A core is a physical one, with all its hyperthreads, so that no two workers share one; a worker's cores are of one NUMA
node where they can be: its weights and KV, which its threads touch first, then lie beside them. A core is held through
a lock on a small file, so the kernel gives it back however the holder died, and two clusters of one user on one
machine do not meet either.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvrelay.machine import Core


class CoreLease:
    """Cores held by this process until `release` or its death. `cpus`: those of all of them, what a thread is pinned to."""

    def __init__(self, cores: tuple[Core, ...], locks: list[int]) -> None:
        self.cores, self._locks = cores, locks

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    def release(self) -> None:
        """Give the cores back. Idempotent."""
        while self._locks:
            os.close(self._locks.pop())


def fair_share(num_cores: int, num_workers: int) -> int:
    """Cores for each of `num_workers` on a machine with `num_cores`; at least one."""
    return max(1, num_cores // max(1, num_workers))


def choose(holders: Mapping[Core, int], want: int) -> list[Core]:
    """`want` cores of those with the fewest holders; where these leave a choice, of as few NUMA nodes as can be.

    Of several nodes that have enough the one with the fewest such cores gives them, so that others stay whole.

    Args:
        holders: of each core, how many hold it.
        want: at most the number of cores.
    """
    level = sorted(holders.values())[want - 1]
    chosen = sorted(core for core in holders if holders[core] < level)
    while (left := want - len(chosen)) > 0:
        free: dict[int, list[Core]] = {}
        for core in sorted(holders):
            if holders[core] == level and core not in chosen:
                free.setdefault(core.node, []).append(core)
        begun = {core.node for core in chosen}
        node = min(free, key=lambda node: _rank(node, len(free[node]), left, is_begun=node in begun))
        chosen += free[node][:left]
    return chosen


def _rank(node: int, num_free: int, left: int, *, is_begun: bool) -> tuple[bool, bool, int, int]:
    """Least is best: a node that has given cores, then the smallest that has enough, then the largest."""
    has_enough = num_free >= left
    return not is_begun, not has_enough, num_free if has_enough else -num_free, node


def acquire_cores(folder: Path, cores: Sequence[Core], want: int) -> CoreLease:
    """Hold `want` of `cores`: free ones first, then those with the fewest holders, of one NUMA node where that leaves a choice.

    Blocks while another process chooses (milliseconds).

    Args:
        folder: where the lock files lie; one per user and machine.
        want: cut to the number of cores.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _alone(folder / "choosing"):
        found = {core: _next_lock(folder, core) for core in cores}
        chosen = set(choose({core: holders for core, (holders, _) in found.items()}, min(want, len(found))))
        for core, (_, lock) in found.items():
            if core not in chosen:
                os.close(lock)
    return CoreLease(tuple(sorted(chosen)), [found[core][1] for core in sorted(chosen)])


def _next_lock(folder: Path, core: Core) -> tuple[int, int]:
    """How many hold the core, and a lock for one more: the n-th file is its n-th holder's."""
    holders = 0
    while (lock := _try_lock(folder / f"core{core.index}.{holders}")) is None:
        holders += 1
    return holders, lock


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time: locks taken to look at cores must not pass for holders."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _try_lock(path: Path) -> int | None:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
