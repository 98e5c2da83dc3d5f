"""Where a worker's memory and its network cards are, and which paths between two workers that speaks for.

Plain data and pure functions; discovery.py fills the data from the machine. A `Topology` crosses
the wire in the handshake. Nothing here says that a path works: transports find that out.
"""

from collections.abc import Sequence
from enum import IntEnum
from ipaddress import ip_address
from typing import Literal

import msgspec

from kvrelay.machine import UNKNOWN_NODE

_SWITCH_DEPTH = 2  # host bridge and root port in common: what lies below is one PCIe switch
_MULTI_RAIL_RATIO = 2.0  # a NIC this much slower than the fastest is no rail beside it


class Nic(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One network device. `pci_path`: its PCI host bridge, bridges and own address, outermost first; empty: virtual."""

    name: str
    kind: Literal["rdma", "ethernet"]
    is_up: bool
    gbit_per_s: float = 0.0  # 0: unknown
    port: int = 1  # of an RDMA device
    numa_node: int = UNKNOWN_NODE
    pci_path: list[str] = []
    addresses: list[str] = []  # IP


class Gpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU as this process numbers it. GPUs of one `nvlink_domain` reach each other over NVLink."""

    index: int
    nvlink_domain: str = ""  # fabric cluster and clique, else the host
    numa_node: int = UNKNOWN_NODE
    pci_path: list[str] = []


class Topology(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker's surroundings."""

    host: str  # equal on one host; "": unknown
    process: str  # different in every process
    numa_node: int = UNKNOWN_NODE  # of all cores that the process may use, where they have one in common
    numa_distances: list[list[int]] = []  # [from node][to node], 10 = the same
    nics: list[Nic] = []
    gpus: list[Gpu] = []

    def gpu(self, device: str) -> Gpu | None:
        """The GPU that "cuda:n" names, where it is known."""
        kind, _, index = device.partition(":")
        wanted = int(index or 0)
        return next((gpu for gpu in self.gpus if kind == "cuda" and gpu.index == wanted), None)


# ---- affinity


class Near(IntEnum):
    """How near a NIC is to memory, nearest first."""

    SWITCH = 0
    HOST_BRIDGE = 1
    NODE = 2
    FAR = 3
    UNKNOWN = 4


class Affinity(msgspec.Struct, frozen=True, order=True):
    """Orders NICs by the way between them and a device."""

    near: Near
    cost: int  # PCI num_bridges on the way, or the NUMA distance
    text: str


def affinity(topology: Topology, nic: Nic, device: str) -> Affinity:
    """How far it is from `nic` to the memory of `device` ("cpu": the process's cores): PCIe first, then NUMA."""
    gpu = topology.gpu(device)
    if gpu is not None and gpu.pci_path and nic.pci_path:
        shared = _common_prefix(gpu.pci_path, nic.pci_path)
        num_bridges = len(gpu.pci_path) + len(nic.pci_path) - 2 * shared
        if shared >= _SWITCH_DEPTH:
            return Affinity(Near.SWITCH, num_bridges, f"same PCIe switch as {device}")
        if shared:
            return Affinity(Near.HOST_BRIDGE, num_bridges, f"same PCIe host bridge as {device}")
    node = gpu.numa_node if gpu is not None else topology.numa_node
    whose = device if gpu is not None else "the worker's cores"
    if UNKNOWN_NODE in (node, nic.numa_node):
        return Affinity(Near.UNKNOWN, 0, f"affinity to {whose} unknown")
    if node == nic.numa_node:
        return Affinity(Near.NODE, 10, f"same NUMA node as {whose}")
    distance = _distance(topology.numa_distances, node, nic.numa_node)
    return Affinity(Near.FAR, distance, f"NUMA distance {distance} from {whose}")


def _common_prefix(first: Sequence[str], second: Sequence[str]) -> int:
    count = 0
    for mine, theirs in zip(first, second, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def _distance(distances: list[list[int]], node: int, other: int) -> int:
    try:
        return distances[node][other]
    except IndexError:
        return 255  # what the kernel calls unreachable; here: unknown


def best_nics(topology: Topology, device: str) -> list[Nic]:
    """The NICs that a transfer from or to `device` should use: RDMA if any is up, nearest first, fastest first.

    Only those of the nearest kind, and none that is much slower than the fastest of them.
    """
    up = [nic for nic in topology.nics if nic.is_up]
    rdma = [nic for nic in up if nic.kind == "rdma"]
    candidates = rdma or [nic for nic in up if nic.pci_path]
    if not candidates:
        return []
    by_way = {nic.name: affinity(topology, nic, device) for nic in candidates}
    nearest = min((by_way[nic.name].near, by_way[nic.name].cost) for nic in candidates)
    near = [nic for nic in candidates if (by_way[nic.name].near, by_way[nic.name].cost) == nearest]
    fastest = max(nic.gbit_per_s for nic in near)
    rails = [nic for nic in near if nic.gbit_per_s * _MULTI_RAIL_RATIO >= fastest]
    return sorted(rails, key=lambda nic: (-nic.gbit_per_s, nic.name))


def ucx_devices(topology: Topology, device: str, host: str) -> list[str]:
    """What UCX_NET_DEVICES should name for a worker that listens at `host`; empty: leave it to UCX.

    A worker at a loopback address needs no card at all. Beside RDMA stays the Ethernet device of
    `host`, for peers that have no RDMA.
    """
    if _is_loopback(host):
        return ["lo"]
    up = [nic for nic in topology.nics if nic.is_up]
    own = [nic.name for nic in up if nic.kind == "ethernet" and host in nic.addresses]
    rdma = [nic for nic in best_nics(topology, device) if nic.kind == "rdma"]
    if rdma:
        return [f"{nic.name}:{nic.port}" for nic in rdma] + own
    num_ethernet = sum(nic.kind == "ethernet" for nic in up)
    return own if num_ethernet > 1 else []


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# ---- ranking

_IN_PROCESS = ("loopback",)
_BETWEEN_PROCESSES = ("tcp", "nixl")  # also between hosts; every other name is a transport of one host


class PathKind(IntEnum):
    """Kinds of paths, best first."""

    PROCESS = 0
    HOST = 1
    NVLINK = 2
    RDMA = 3
    TCP = 4
    TCP_BY_UCX = 5


def rank_paths(
    source: Topology, target: Topology, source_device: str, target_device: str, offers: Sequence[str]
) -> list[tuple[str, str]]:
    """(transport, why), best first; transports that cannot reach from one to the other are left out.

    Args:
        offers: what both sides can use, best first; keeps its order among equals.
    """
    ranked: list[tuple[PathKind, str, str]] = []
    for name in offers:
        path = _path(name, source, target, source_device, target_device)
        if path is not None:
            ranked.append((path[0], name, path[1]))
    ranked.sort(key=lambda entry: entry[0])
    return [(name, why) for _, name, why in ranked]


def _path(
    name: str, source: Topology, target: Topology, source_device: str, target_device: str
) -> tuple[PathKind, str] | None:
    is_same_host = bool(source.host) and source.host == target.host
    if name in _IN_PROCESS:
        is_same_process = is_same_host and source.process == target.process
        return (PathKind.PROCESS, "same process") if is_same_process else None
    if name not in _BETWEEN_PROCESSES:
        return (PathKind.HOST, "same host") if is_same_host else None
    if name == "tcp":
        return PathKind.TCP, _tcp(source, target, is_same_host=is_same_host)
    return _nixl(source, target, source_device, target_device, is_same_host=is_same_host)


def _nixl(
    source: Topology, target: Topology, source_device: str, target_device: str, *, is_same_host: bool
) -> tuple[PathKind, str]:
    gpus = source.gpu(source_device), target.gpu(target_device)
    if gpus[0] is not None and gpus[1] is not None and gpus[0].nvlink_domain:
        if gpus[0].nvlink_domain == gpus[1].nvlink_domain:
            return PathKind.NVLINK, f"NVLink domain {gpus[0].nvlink_domain}, {source_device} to {target_device}"
    elif is_same_host:
        return PathKind.HOST, "same host, through UCX"
    ways = (_rdma(source, source_device), _rdma(target, target_device))
    if ways[0] and ways[1]:
        return PathKind.RDMA, f"RDMA {ways[0]}, to {ways[1]}"
    why = _tcp(source, target, is_same_host=is_same_host)
    return (
        PathKind.TCP_BY_UCX,
        f"{why} through UCX: slow, and a target that dies during a read can take the source down",
    )


def _rdma(topology: Topology, device: str) -> str:
    """The NIC that a transfer of this device would use, with its affinity; "" where there is none."""
    nics = [nic for nic in best_nics(topology, device) if nic.kind == "rdma"]
    return ", ".join((*_named(nics[0]), affinity(topology, nics[0], device).text)) if nics else ""


def _tcp(source: Topology, target: Topology, *, is_same_host: bool) -> str:
    if is_same_host:
        return "TCP on one host"
    ends = [_named(nics[0])[0] for nics in (_ethernet(source), _ethernet(target)) if nics]
    slowest = min((nics[0].gbit_per_s for nics in (_ethernet(source), _ethernet(target)) if nics), default=0.0)
    speed = f", {slowest:g} Gb/s" if slowest else ""
    return f"TCP {' to '.join(ends)}{speed}" if ends else "TCP"


def _ethernet(topology: Topology) -> list[Nic]:
    nics = [nic for nic in topology.nics if nic.is_up and nic.kind == "ethernet" and nic.pci_path]
    return sorted(nics, key=lambda nic: (-nic.gbit_per_s, nic.name))


def _named(nic: Nic) -> tuple[str, ...]:
    return (nic.name, f"{nic.gbit_per_s:g} Gb/s") if nic.gbit_per_s else (nic.name,)
