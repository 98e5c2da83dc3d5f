"""Which CPU cores a worker gets: disjoint from its neighbours' on the same machine while there are enough.

A core is held through a lock on a small file, so the kernel gives it back however the holder
died, and two clusters of one user on one machine do not meet either. Imports nothing of ours.
"""

import fcntl
import os
from pathlib import Path

_MAX_SHARERS = 64


class CoreLease:
    """Cores held by this process until `release` or its death."""

    def __init__(self, cores: tuple[int, ...], locks: list[int]) -> None:
        self.cores, self._locks = cores, locks

    def release(self) -> None:
        """Give the cores back. Idempotent."""
        while self._locks:
            os.close(self._locks.pop())


def fair_share(num_cores: int, num_workers: int) -> int:
    """Cores for each of `num_workers` on a machine with `num_cores`; at least one."""
    return max(1, num_cores // max(1, num_workers))


def usable_cores() -> tuple[int, ...]:
    """The cores that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def acquire_cores(folder: Path, cores: tuple[int, ...], want: int) -> CoreLease:
    """Hold `want` of `cores`: free ones first, then those with the fewest holders.

    Args:
        folder: where the lock files lie; one per user and machine.
        want: cut to the number of cores.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    taken: dict[int, int] = {}
    for layer in range(_MAX_SHARERS):  # layer n holds a core's n-th sharer
        for core in cores:
            if len(taken) == min(want, len(cores)):
                break
            if core not in taken and (lock := _try_lock(folder / f"core{core}.{layer}")) is not None:
                taken[core] = lock
    return CoreLease(tuple(sorted(taken)), list(taken.values()))


def _try_lock(path: Path) -> int | None:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
