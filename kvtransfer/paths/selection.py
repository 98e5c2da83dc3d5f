"""Which transport carries a pair's blocks. The decision is pure; the table of transports is here too."""

from collections.abc import Mapping
from types import MappingProxyType

from kvrelay.errors import BackendUnavailable
from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.kvtransfer.transports.loopback import LOOPBACK
from kvrelay.kvtransfer.transports.nixl.reader import NIXL
from kvrelay.kvtransfer.transports.shm import SHM
from kvrelay.kvtransfer.transports.tcp.transport import TCP, tcp
from kvrelay.plane.tls import ClusterTls
from kvrelay.types import KvMemory

TRANSPORTS: Mapping[str, Transport] = MappingProxyType({t.name: t for t in (LOOPBACK, SHM, NIXL, TCP)})


def transports_for(tcp_streams: int, tls: ClusterTls | None) -> Mapping[str, Transport]:
    """The table, with TCP as the settings want it."""
    return MappingProxyType({**TRANSPORTS, "tcp": tcp(tcp_streams, tls)})


def is_cuda(device: str) -> bool:
    """Whether a pool on this device is in a GPU's memory."""
    return device.startswith("cuda")


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
    wanted = [name for name in transports if (name == "nixl") == is_cuda(memory.device)]
    names = [name for name in wanted if transports[name].why_not(memory) is None]
    if not names:
        reasons = "; ".join(f"{name}: {transports[name].why_not(memory)}" for name in wanted)
        raise BackendUnavailable("KV transport", reasons)
    return names
