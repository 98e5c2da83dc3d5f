"""The faults: what each does to a cluster, how it is undone, and what shows that it is over.

Not done: changed bits in a worker's own memory, its pool and host tier. A block that is used before the sweep comes
round to it (kvcache/pool/resident_audit.py) gives wrong tokens, so there is nothing that must hold.
"""

import asyncio
import mmap
import os
import random
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from kvrelay.cluster.chaos import processes
from kvrelay.cluster.chaos.clients import ChaosClients
from kvrelay.cluster.chaos.clock import open_clock, set_clock
from kvrelay.cluster.chaos.cluster import PARTS, Cluster, send_signal
from kvrelay.cluster.errors import ClusterError

STEP_S = 3600  # of a clock, forward or back
MEMORY_BYTES = 1 << 30  # at most, of memory pressure, and at most a quarter of what is available
STAGES = ("before", "midway", "queued")  # of a request whose client leaves
QUEUED_REQUESTS = 24
STORE = "store"  # folder of the cluster's store
FLIPS = 64  # places in one file
SLAB = "/memfd:kvrelay-slab"  # kvtransfer/slabs/slabs.py
DISK_BYTES = 48 << 20  # less than the workers' disk tiers may take together
_ALLOCATE = f"""
import sys, time
memory = bytearray(int(sys.argv[1]))
memory[::{mmap.PAGESIZE}] = bytes([1]) * len(memory[::{mmap.PAGESIZE}])
time.sleep(600)
"""


class NothingToHarm(Exception):
    """This time the fault has no object, such as a file that is not there yet. It does not count."""


class FaultKind(ABC):
    """One kind of fault. `part`: what it harms; one fault of a part is under way at a time, unless it `overlaps`."""

    part: str
    also: tuple[str, ...] = ()  # other parts that it harms
    is_held = False  # for some seconds, then undone
    overlaps = False  # any number at once: it keeps nothing, and all that it harms is repaired by reading or ends

    @abstractmethod
    async def strike(self, choice: float) -> None:
        """`choice`, in [0, 1): which of several. Raises NothingToHarm."""

    def undo(self) -> None:
        """After it was held."""
        return

    def is_over(self) -> bool:
        """Whether nothing of it is left, but for what the part itself lacks."""
        return True


async def _processes(cluster: Cluster, part: str) -> list[int]:
    """Raises ClusterError: there are none."""
    if not (pids := await asyncio.to_thread(cluster.part, part)):
        raise ClusterError(f"the cluster has no process of its {part}")
    return pids


class Kill(FaultKind):
    """kill -9 of one of the part's processes. Over when there are as many again."""

    def __init__(self, cluster: Cluster, part: str) -> None:
        self._cluster, self.part = cluster, part
        self._before: list[int] = []
        self._pid = 0

    async def strike(self, choice: float) -> None:
        self._before = await _processes(self._cluster, self.part)
        self._pid = self._before[int(choice * len(self._before))]
        send_signal(self._pid, signal.SIGKILL)

    def is_over(self) -> bool:
        now = self._cluster.part(self.part)
        return self._pid not in now and len(now) >= len(self._before)


class Stop(FaultKind):
    """SIGSTOP of one of the part's processes, which goes on when this is undone, unless it was replaced meanwhile."""

    is_held = True

    def __init__(self, cluster: Cluster, part: str) -> None:
        self._cluster, self.part, self._pid = cluster, part, 0

    async def strike(self, choice: float) -> None:
        pids = await _processes(self._cluster, self.part)
        self._pid = pids[int(choice * len(pids))]
        send_signal(self._pid, signal.SIGSTOP)

    def undo(self) -> None:
        send_signal(self._pid, signal.SIGCONT)


class Leave(FaultKind):
    """Clients close their connections: `before` the first token, `midway` or while most are `queued`."""

    part, overlaps = "clients", True

    def __init__(self, clients: ChaosClients, stage: str) -> None:
        self._clients, self._stage = clients, stage

    async def strike(self, choice: float) -> None:
        if self._stage == "midway":
            await self._clients.leave_midway(choice)
        else:
            count = QUEUED_REQUESTS if self._stage == "queued" else 1
            await self._clients.leave_before_first_token(choice, num_requests=count)


class FillDisk(FaultKind):
    """The file system of the disk tier is full."""

    part, is_held = "disk space", True

    def __init__(self, folder: Path) -> None:
        self._file = folder / "filler"

    async def strike(self, choice: float) -> None:
        await asyncio.to_thread(self._fill)

    def _fill(self) -> None:
        with self._file.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 20)):
                    pass
            except OSError:
                return

    def undo(self) -> None:
        self._file.unlink(missing_ok=True)


class Corrupt(FaultKind):
    """Bytes change in one of the files that are there now: of a disk tier, of the cluster's store, or shared memory."""

    overlaps = True

    def __init__(self, part: str, files: Callable[[], Iterable[Path]]) -> None:
        self.part, self._files = part, files

    async def strike(self, choice: float) -> None:
        await asyncio.to_thread(lambda: flip_bytes(sorted(self._files()), random.Random(choice)))


def store_memory(cluster: Cluster) -> list[Path]:
    """The memory of the cluster's store, out of which workers on its host read blocks."""
    stores = cluster.processes(lambda line: "ray::StoreActor" in line)
    return [path for pid in stores for path in processes.open_files(pid, SLAB)]


def flip_bytes(files: Sequence[Path], draw: random.Random) -> None:
    """Flip FLIPS bytes of one of these files. Raises NothingToHarm."""
    with suppress(FileNotFoundError):  # it has just been deleted, or its process has ended
        if files and (size := (path := draw.choice(files)).stat().st_size):
            with path.open("r+b", buffering=0) as file:
                for at in sorted(draw.randrange(size) for _ in range(FLIPS)):
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes(one ^ 0xFF for one in byte))
            return
    raise NothingToHarm


class MemoryPressure(FaultKind):
    """Another process takes memory, within MEMORY_BYTES, and touches all of it."""

    part, is_held = "memory", True

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._process: subprocess.Popen[bytes] | None = None

    async def strike(self, choice: float) -> None:
        num_bytes = min(MEMORY_BYTES, psutil.virtual_memory().available // 4)
        self._process = self._cluster.spawn([sys.executable, "-c", _ALLOCATE, str(num_bytes)], "pressure")

    def undo(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class StepClock(FaultKind):
    """The wall clock of one of kvrelay's processes is wrong by up to STEP_S, and then right again. Not of Ray's: its
    Serve controller measures health checks by it, and after a step back it makes none for as long.
    """

    part, is_held = "clock", True

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._file = cluster, -1

    async def strike(self, choice: float) -> None:
        await asyncio.to_thread(self._step, random.Random(choice))

    def _step(self, draw: random.Random) -> None:
        pids = [pid for part in PARTS if part != "controller" for pid in self._cluster.part(part)]
        pid = draw.choice(pids) if pids else 0
        try:
            self._file = open_clock(Path(f"/proc/{pid}/root{self._cluster.clock}"))  # as the process sees it
        except FileNotFoundError as error:  # it has just ended
            raise NothingToHarm from error
        set_clock(self._file, processes.own_pid(pid), draw.randint(-STEP_S, STEP_S))

    def undo(self) -> None:
        set_clock(self._file)
        os.close(self._file)


class Nothing(FaultKind):
    """The control: how long streams are silent without a fault."""

    part = "control"

    async def strike(self, choice: float) -> None:
        return


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A file system of DISK_BYTES at `folder`; yields False where this user may mount none."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "kvrelay-chaos", str(folder)]
    try:
        is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        is_mounted = False
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], capture_output=True)


@dataclass(frozen=True, slots=True)
class FaultTargets:
    """What faults harm. `disk`: the disk tier's folder, and in it that of the store."""

    cluster: Cluster
    clients: ChaosClients
    disk: Path


FULL_DISK, CLOCK_STEP = "full-disk", "clock-step"  # kinds that are impossible on some machines
FAULTS: dict[str, Callable[[FaultTargets], FaultKind]] = {
    "nothing": lambda to: Nothing(),
    **{f"kill-{part}": partial(lambda part, to: Kill(to.cluster, part), part) for part in PARTS},
    **{f"stop-{part}": partial(lambda part, to: Stop(to.cluster, part), part) for part in PARTS if part != "ingress"},
    **{f"leave-{stage}": partial(lambda stage, to: Leave(to.clients, stage), stage) for stage in STAGES},
    "corrupt-disk": lambda to: Corrupt("disk", lambda: to.disk.glob("worker-*/segment-*")),
    "corrupt-store": lambda to: Corrupt("disk", lambda: (to.disk / STORE).glob("*/worker-*/segment-*")),
    "corrupt-shm": lambda to: Corrupt("shared memory", lambda: store_memory(to.cluster)),
    FULL_DISK: lambda to: FillDisk(to.disk),
    CLOCK_STEP: lambda to: StepClock(to.cluster),
    "memory": lambda to: MemoryPressure(to.cluster),
}
