"""Which CPU cores a worker gets: disjoint from its neighbours' on the same machine while there are enough.

Cores are physical, with all their hyperthreads, so that no two workers share one. A worker's cores are of one NUMA node
where possible: its threads touch its weights and KV first, which then lie in that node's memory. A core is held through
a lock on a small file: the kernel releases it however the holder dies, and two clusters of one user on one machine
share no core either.
"""

import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvrelay.config import Settings
from kvrelay.machine import Core, cpu_quota, usable_cores


class CoreLease:
    """Cores held by this process until `release` or its end. `cpus`: all their CPUs, for pinning."""

    def __init__(self, cores: tuple[Core, ...], locks: list[int]) -> None:
        self.cores, self._locks = cores, locks

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    def release(self) -> None:
        """Release the cores. Idempotent."""
        while self._locks:
            os.close(self._locks.pop())


def fair_share(num_cores: int, num_workers: int) -> int:
    """Cores for each of `num_workers` on a machine with `num_cores`; at least one."""
    return max(1, num_cores // max(1, num_workers))


def within_quota(settings: Settings, num_workers: int) -> Settings:
    """The settings; under a CPU quota, which pins no cores, with this worker's share of it as its number of threads."""
    cluster, engine = settings.cluster, settings.engine
    if engine.num_threads or cpu_quota() is None:
        return settings
    share = cluster.cores_per_worker or fair_share(usable_cores(), num_workers)
    return settings.model_copy(update={"engine": engine.model_copy(update={"num_threads": share})})


def choose(holders: Mapping[Core, int], want: int) -> list[Core]:
    """`want` cores with the fewest holders; among equals, of as few NUMA nodes as possible.

    Of several nodes with enough free cores, the one with the fewest is used (best fit).

    Args:
        holders: the number of holders of each core.
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
    """Smallest is best: a node already in use, then the smallest with enough cores, then the largest."""
    has_enough = num_free >= left
    return not is_begun, not has_enough, num_free if has_enough else -num_free, node


def acquire_cores(folder: Path, cores: Sequence[Core], want: int) -> CoreLease:
    """Hold `want` of `cores`: free ones first, then those with the fewest holders, of one NUMA node where possible.

    Blocks while another process chooses (milliseconds).

    Args:
        folder: where the lock files lie; one per user and machine.
        want: limited to the number of cores.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    alone = _lock(folder / "choosing", fcntl.LOCK_EX)  # locks that another process takes while choosing are no holders
    assert alone is not None
    try:
        found = {core: _next_lock(folder, core) for core in cores}
        chosen = set(choose({core: holders for core, (holders, _) in found.items()}, min(want, len(found))))
        for core, (_, lock) in found.items():
            if core not in chosen:
                os.close(lock)
    finally:
        os.close(alone)
    return CoreLease(tuple(sorted(chosen)), [found[core][1] for core in sorted(chosen)])


def _next_lock(folder: Path, core: Core) -> tuple[int, int]:
    """The core's number of holders, and a lock for one more: the n-th file belongs to the n-th holder."""
    holders = 0
    while (lock := _lock(folder / f"core{core.index}.{holders}", fcntl.LOCK_EX | fcntl.LOCK_NB)) is None:
        holders += 1
    return holders, lock


def _lock(path: Path, operation: int) -> int | None:
    """A descriptor that holds the file's lock; None: another does, and the operation does not wait."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, operation)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
