"""Which transports a pool can use, and its memory made readable over them."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvrelay.errors import BackendUnavailable, TransportError
from kvrelay.kvtransfer.protocol.messages import Offer
from kvrelay.kvtransfer.transports.base import Exporter, Reader, Transport
from kvrelay.kvtransfer.transports.cuda_ipc import CUDA_IPC
from kvrelay.kvtransfer.transports.memory import LOOPBACK, SHM
from kvrelay.kvtransfer.transports.nixl.reader import NIXL
from kvrelay.kvtransfer.transports.tcp.reader import tcp
from kvrelay.kvtransfer.transports.topology import Topology, rank_paths, this_machine
from kvrelay.plane.reports import PathReport
from kvrelay.plane.tls import ClusterTls
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)

TRANSPORTS: Mapping[str, Transport] = MappingProxyType({t.name: t for t in (LOOPBACK, SHM, CUDA_IPC, NIXL, tcp())})
_ON_GPU = {"cuda_ipc", "nixl"}  # that "auto" takes for a pool in CUDA memory


def transports_for(tls: ClusterTls | None) -> Mapping[str, Transport]:
    """The table, with TCP as the cluster wants it."""
    return MappingProxyType({**TRANSPORTS, "tcp": tcp(tls)})


def offered(setting: str, memory: KvMemory, transports: Mapping[str, Transport]) -> list[str]:
    """Transports that this pool can use under `setting`, best first.

    "auto" leaves NIXL out for host memory: creating an agent takes half a second, and the
    other paths are faster there. Raises BackendUnavailable when a forced one cannot be used.
    """
    if setting != "auto":
        if setting not in transports:
            raise BackendUnavailable(setting, "there is no such transport")
        if why := transports[setting].why_not(memory):
            raise BackendUnavailable(setting, why)
        return [setting]
    is_on_gpu = memory.device.startswith("cuda")
    wanted = [name for name in transports if (name in _ON_GPU) == is_on_gpu]
    problems = {name: why for name in wanted if (why := transports[name].why_not(memory)) is not None}
    if len(problems) == len(wanted):
        raise BackendUnavailable("KV transport", "; ".join(f"{name}: {why}" for name, why in problems.items()))
    for name, why in problems.items():
        logger.warning("KV transport %s is left out: %s", name, why)
    return [name for name in wanted if name not in problems]


class PoolExports:
    """The transports over which other processes read this memory, between start() and aclose()."""

    def __init__(self, memory: KvMemory, secret: bytes, host: str, transports: Mapping[str, Transport]) -> None:
        self._memory, self._secret, self._host, self.transports = memory, secret, host, transports
        self.exporters: dict[str, Exporter] = {}  # started, best first
        self._num_busy = 0  # transfers and probes under way

    async def start(self, setting: str) -> None:
        """Make the memory readable. Raises BackendUnavailable when a forced transport cannot be used, or none can."""
        for name in offered(setting, self._memory, self.transports):
            exporter = self.transports[name].make_exporter(self._memory, self._secret, self._host)
            try:
                await exporter.start()
            except BackendUnavailable as error:
                if setting != "auto":
                    raise
                logger.warning("KV transport %s is left out: %s", name, error.why)
                continue
            self.exporters[name] = exporter
            exporter.set_busy(self._num_busy)
        if not self.exporters:
            raise BackendUnavailable("KV transport", "no transport could be started")

    def offers(self) -> list[Offer]:
        """What readers need to connect, best first."""
        return [Offer(name, exporter.describe()) for name, exporter in self.exporters.items()]

    def add_busy(self, count: int) -> None:
        """So many more transfers or probes are under way."""
        self._num_busy += count
        for exporter in self.exporters.values():
            exporter.set_busy(self._num_busy)

    async def aclose(self) -> None:
        """Stop exporting. The memory stays."""
        for exporter in self.exporters.values():
            await exporter.aclose()
        self.exporters.clear()


_CONNECT_TIMEOUT_S = 25.0  # an RDMA wire-up included
_FIRST_IN_FLIGHT = 1  # reads at a time before the reader's own number is known
MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
CLEARLY_FASTER = 1.25  # a measured path overtakes a better-ranked one from here on
_TYPICAL_BYTES = 4 << 20  # about what one announcement brings
_WORTH_MEASURING_BYTES = 256 << 10  # smaller reads measure latency, not bandwidth
_WEIGHT = 0.2  # of a new observation in the moving average


@dataclass(slots=True)
class Path:
    """One way to move bytes, and what is known of it."""

    name: str
    why: str  # why it is ranked where it is
    bytes_per_s: float = 0.0  # moving average; 0: not measured
    latency_s: float = 0.0
    failures: int = 0  # in a row
    backs_off_until_s: float = 0.0
    problem: str = ""  # the last failure, until it has worked again

    def seconds_for(self, num_bytes: int) -> float:
        """Predicted; infinite where nothing was measured."""
        return self.latency_s + num_bytes / self.bytes_per_s if self.bytes_per_s else float("inf")


class PathTable:
    """Best first. A path that fails backs off, twice as long each time; the next one is taken meanwhile."""

    def __init__(self, ranked: Sequence[tuple[str, str]]) -> None:
        self._paths = [Path(name, why) for name, why in ranked]

    def __getitem__(self, name: str) -> Path:
        return next(path for path in self._paths if path.name == name)

    @property
    def names(self) -> list[str]:
        return [path.name for path in self._paths]

    def best(self, now_s: float, tried: Collection[str] = ()) -> Path | None:
        """The path to take, none of `tried`; where all back off, the one that returns first."""
        left = [path for path in self._paths if path.name not in tried]
        usable = [path for path in left if path.backs_off_until_s <= now_s]
        return usable[0] if usable else min(left, key=lambda path: path.backs_off_until_s, default=None)

    def failed(self, name: str, why: str, now_s: float) -> None:
        """It could not be opened, or a read over it failed."""
        path = self[name]
        path.problem = why
        if path.backs_off_until_s <= now_s:  # several reads may fail of the same cause
            path.backs_off_until_s = now_s + min(MIN_BACKOFF_S * 2**path.failures, MAX_BACKOFF_S)
            path.failures = min(path.failures + 1, 16)

    def moved(self, name: str, num_bytes: int, seconds: float) -> None:
        """A read over it ended well."""
        path = self[name]
        path.failures, path.problem, path.backs_off_until_s = 0, "", 0.0
        if num_bytes >= _WORTH_MEASURING_BYTES and seconds > 0:
            speed = num_bytes / seconds
            path.bytes_per_s += _WEIGHT * (speed - path.bytes_per_s) if path.bytes_per_s else speed

    def probed(self, name: str, bytes_per_s: float, latency_s: float) -> None:
        """What a probe measured."""
        path = self[name]
        path.bytes_per_s, path.latency_s = bytes_per_s, latency_s

    def reorder(self) -> None:
        """After a probe: a path goes before a better-ranked one that is clearly slower."""
        ordered: list[Path] = []
        for path in self._paths:
            seconds = path.seconds_for(_TYPICAL_BYTES) * CLEARLY_FASTER
            place = next(
                (i for i, other in enumerate(ordered) if seconds < other.seconds_for(_TYPICAL_BYTES)), len(ordered)
            )
            ordered.insert(place, path)
        self._paths = ordered

    def reports(self, now_s: float) -> list[PathReport]:
        """Best first. The chosen one is the path that the next read takes."""
        chosen = self.best(now_s)
        return [
            PathReport(
                path=path.name,
                why=path.why,
                is_chosen=path is chosen,
                bytes_per_s=path.bytes_per_s,
                latency_s=path.latency_s,
                problem=path.problem,
            )
            for path in self._paths
        ]


def untried(table: PathTable, clock: Callable[[], float]) -> Iterator[str]:
    """The paths to try one after the other: each twice, for a second connection may do what a broken one did not."""
    for _ in range(2):
        tried: set[str] = set()
        while (path := table.best(clock(), tried)) is not None:
            tried.add(path.name)
            yield path.name


class Route:
    """Which reader carries the next read. Owns the readers; a failed one is closed and made anew later."""

    def __init__(
        self, table: PathTable, descriptors: Mapping[str, bytes], make_reader: Callable[[str], Reader]
    ) -> None:
        self.table = table
        self._descriptors, self._make_reader = descriptors, make_reader
        self._connecting: dict[str, asyncio.Task[Reader]] = {}
        self._readers: dict[str, Reader] = {}  # connected
        self._last_end: dict[str, float] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def max_in_flight(self) -> int:
        """Reads that may usefully run at once now."""
        path = self.table.best(time.monotonic())
        reader = self._readers.get(path.name) if path is not None else None
        return reader.max_in_flight if reader is not None else _FIRST_IN_FLIGHT

    @property
    def next_path(self) -> str:
        """The path that the next read takes; "" where there is none."""
        path = self.table.best(time.monotonic())
        return path.name if path is not None else ""

    @classmethod
    def between(
        cls,
        source: Topology,
        source_device: str,
        offers: Sequence[Offer],
        target_device: str,
        usable: Sequence[str],
        make_reader: Callable[[str], Reader],
    ) -> "Route":
        """The paths from a source on another machine or device that both ends can use, best first; not connected."""
        descriptors = {offer.name: offer.descriptor for offer in offers}
        common = [name for name in usable if name in descriptors]
        ranked = rank_paths(source, this_machine(), source_device, target_device, common)
        return cls(PathTable(ranked), descriptors, make_reader)

    async def open(self) -> Path:
        """Connect the best path that can be connected. Raises TransportError when none can."""
        tried: set[str] = set()
        while (path := self.table.best(time.monotonic(), tried)) is not None:
            try:
                await self.reader(path.name)
            except TransportError as error:
                tried.add(path.name)
                self.failed(path.name, str(error))
                continue
            return path
        raise TransportError(self.problems() or "no transport that both sides have")

    async def reader(self, name: str) -> Reader:
        """This path's reader, connected. Raises TransportError, also once the route is closed."""
        if self._is_closed:
            raise TransportError("the route is closed")
        if name in self._readers:
            return self._readers[name]
        if name not in self._connecting:
            self._connecting[name] = asyncio.create_task(self._connect(name), name=f"kv connect over {name}")
        return await asyncio.shield(self._connecting[name])

    async def _connect(self, name: str) -> Reader:
        reader = self._make_reader(name)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await reader.connect(self._descriptors[name])
        except BaseException as error:
            await reader.aclose()
            if isinstance(error, TimeoutError):
                raise TransportError("connecting timed out") from error
            raise
        finally:
            self._connecting.pop(name, None)
        self._readers[name] = reader
        return reader

    def ended(self, name: str, num_bytes: int, began: float, now: float) -> float:
        """A read ended well. Returns the seconds that count as its own: not those that it waited for another read."""
        seconds = now - max(began, self._last_end.get(name, 0.0))
        self._last_end[name] = now
        self.table.moved(name, num_bytes, seconds)
        return seconds

    def failed(self, name: str, why: str, reader: Reader | None = None) -> None:
        """Have the path back off; its next use makes a new reader. `reader`: the one that failed, where there was
        one.

        Reads that fail with a reader that has been replaced meanwhile do not count against the new one.
        """
        if reader is not self._readers.get(name):
            return
        logger.warning("KV path %s backs off: %s", name, why)
        self.table.failed(name, why, time.monotonic())
        self._readers.pop(name, None)
        if reader is not None:
            task = asyncio.create_task(reader.aclose(), name=f"kv close {name}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def problems(self) -> str:
        """What is wrong with each path that failed last."""
        return "; ".join(f"{path}: {self.table[path].problem}" for path in self.table.names if self.table[path].problem)

    async def aclose(self) -> None:
        """Close every reader, as far as what is in flight lets it. Reads that fail by it open no other."""
        self._is_closed = True
        for task in list(self._connecting.values()):
            task.cancel()
        await asyncio.gather(*self._connecting.values(), return_exceptions=True)
        readers, self._readers = list(self._readers.values()), {}
        await asyncio.gather(*(reader.aclose() for reader in readers), *self._closing, return_exceptions=True)
