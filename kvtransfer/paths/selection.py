"""Which transports a pool can use, and its memory made readable over them."""

import logging
from collections.abc import Mapping
from types import MappingProxyType

from kvrelay.errors import BackendUnavailable
from kvrelay.kvtransfer.protocol.messages import Offer
from kvrelay.kvtransfer.transports.base import Exporter, Transport
from kvrelay.kvtransfer.transports.memory import LOOPBACK, SHM
from kvrelay.kvtransfer.transports.nixl.reader import NIXL
from kvrelay.kvtransfer.transports.tcp.reader import tcp
from kvrelay.plane.tls import ClusterTls
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)

TRANSPORTS: Mapping[str, Transport] = MappingProxyType({t.name: t for t in (LOOPBACK, SHM, NIXL, tcp())})


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
    wanted = [name for name in transports if (name == "nixl") == is_on_gpu]
    names = [name for name in wanted if transports[name].why_not(memory) is None]
    if not names:
        reasons = "; ".join(f"{name}: {transports[name].why_not(memory)}" for name in wanted)
        raise BackendUnavailable("KV transport", reasons)
    return names


class PoolExports:
    """The transports over which other processes read this memory, between start() and aclose()."""

    def __init__(self, memory: KvMemory, secret: bytes, host: str, transports: Mapping[str, Transport]) -> None:
        self._memory, self._secret, self._host, self._transports = memory, secret, host, transports
        self.exporters: dict[str, Exporter] = {}  # started, best first
        self._num_busy = 0  # transfers and probes under way

    async def start(self, setting: str) -> None:
        """Make the memory readable. Raises BackendUnavailable when a forced transport cannot be used, or none can."""
        for name in offered(setting, self._memory, self._transports):
            exporter = self._transports[name].make_exporter(self._memory, self._secret, self._host)
            try:
                await exporter.start()
            except BackendUnavailable as error:
                if setting != "auto":
                    raise
                logger.warning("KV transport %s is left out: %s", name, error.why)
                continue
            self.exporters[name] = exporter
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
