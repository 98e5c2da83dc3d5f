"""Which transports can connect two workers, and which network cards NIXL should use for a worker's memory.

NICs, PCI buses and NUMA nodes come from sysfs, GPUs' PCI addresses from torch where it is loaded (not run on hardware).
Whatever cannot be read is left out or unknown. A `Topology` crosses the wire in the handshake. Nothing here says that a
path works: transports find that out.
"""

import contextlib
import itertools
import logging
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec

from kvrelay.kvtransfer.transports.base import NAMESPACES, host_id
from kvrelay.machine import UNKNOWN_NODE, entries, is_loopback, node_cpus, text

logger = logging.getLogger(__name__)

_MULTI_RAIL_RATIO = 2.0  # a NIC this much slower than the fastest is no rail beside it
_PCI = re.compile(r"pci[0-9a-f]+:[0-9a-f]+|[0-9a-f]+:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_ETHERNET = "1"  # ARPHRD_ETHER
_TOKEN = secrets.token_hex(8)
_PLAIN = "not encrypted, for a private network"


class PciDevice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a NIC or GPU is. `pci_path`: host bridge, bridges and own address, outermost first; empty: virtual."""

    name: str  # "cuda:n" for a GPU, as this process numbers it
    numa_node: int = UNKNOWN_NODE
    pci_path: list[str] = []


class Nic(PciDevice, frozen=True, kw_only=True, omit_defaults=True):
    """One network device."""

    kind: Literal["rdma", "ethernet"]
    is_up: bool
    gbit_per_s: float = 0.0  # of an RDMA device; 0: unknown
    port: int = 1  # of an RDMA device
    addresses: list[str] = []  # IP


class Topology(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker's surroundings."""

    host: str  # equal under one kernel; "": unknown
    within: dict[str, str] = {}  # by transport: the same with the namespaces that it needs both ends to share
    process: str  # different in every process
    numa_node: int = UNKNOWN_NODE  # of all cores that the process may use, where they have one in common
    nics: list[Nic] = []
    gpus: list[PciDevice] = []


# ---- discovery


def this_machine() -> Topology:
    """Read once (milliseconds, blocking); a NIC that comes up later is found by the next process."""
    return _machine_of(os.getpid())  # a forked child is another process


@lru_cache(maxsize=1)
def _machine_of(pid: int) -> Topology:
    return discover(
        Path("/sys"),
        host=host_id(),
        within={name: host_id(*kinds) for name, kinds in NAMESPACES.items()},
        process=f"{_TOKEN}-{pid}",
        cores=os.sched_getaffinity(0),
        addresses=_addresses(),
        gpu_addresses=_gpu_addresses(),
    )


def discover(
    root: Path,
    *,
    host: str,
    within: Mapping[str, str] = MappingProxyType({}),
    process: str,
    cores: Iterable[int] = (),
    addresses: Mapping[str, Sequence[str]] | None = None,
    gpu_addresses: Sequence[str] = (),
) -> Topology:
    """The topology that the sysfs at `root` shows.

    Args:
        cores: that the process may use.
        addresses: IP addresses of network devices, by name.
        gpu_addresses: PCI address of each GPU, in this process's order.
    """
    node_of = node_cpus(root)
    nodes = {node_of.get(core, UNKNOWN_NODE) for core in cores}
    gpus = {f"cuda:{index}": root / "bus/pci/devices" / address for index, address in enumerate(gpu_addresses)}
    return Topology(
        host=host,
        within=dict(within),
        process=process,
        numa_node=nodes.pop() if len(nodes) == 1 else UNKNOWN_NODE,
        nics=[*_rdma_nics(root), *_ethernet_nics(root, addresses or {})],
        gpus=[
            PciDevice(name=name, numa_node=_numa_node(device), pci_path=_pci_path(device))
            for name, device in gpus.items()
        ],
    )


def _number(written: str, default: int) -> int:
    match = re.match(r"-?\d+", written)
    return int(match.group()) if match else default


def _pci_path(device: Path) -> list[str]:
    """Host bridge, bridges, device: those parts of the resolved path that are PCI addresses."""
    with contextlib.suppress(OSError):
        return [part for part in device.resolve(strict=True).parts if _PCI.fullmatch(part)]
    return []


def _numa_node(device: Path) -> int:
    """Of the device or of what it is plugged into (a virtio device has none of its own)."""
    with contextlib.suppress(OSError):
        where = device.resolve()
        while _pci_path(where):
            node = _number(text(where / "numa_node"), UNKNOWN_NODE)
            if node != UNKNOWN_NODE:
                return node
            where = where.parent
    return UNKNOWN_NODE


def _rdma_nics(root: Path) -> Iterator[Nic]:
    for folder in entries(root / "class/infiniband"):
        for port in entries(folder / "ports"):
            rate = re.match(r"[\d.]+", text(port / "rate"))
            yield Nic(
                name=folder.name,
                kind="rdma",
                port=_number(port.name, 1),
                is_up="ACTIVE" in text(port / "state"),
                gbit_per_s=float(rate.group()) if rate else 0.0,
                numa_node=_numa_node(folder / "device"),
                pci_path=_pci_path(folder / "device"),
            )


def _ethernet_nics(root: Path, addresses: Mapping[str, Sequence[str]]) -> Iterator[Nic]:
    for folder in entries(root / "class/net"):
        if text(folder / "type") == _ETHERNET:
            is_up, known = text(folder / "operstate") == "up", list(addresses.get(folder.name, ()))
            yield Nic(name=folder.name, kind="ethernet", is_up=is_up, addresses=known)


def _addresses() -> dict[str, list[str]]:
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }


def _gpu_addresses() -> list[str]:
    """PCI addresses in torch's order. Only a process that has torch loaded has a pool on a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    try:
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0" for p in devices]
    except (AttributeError, RuntimeError) as error:
        logger.info("the GPUs' PCI addresses are unknown: %s", error)
        return []


# ---- network cards


def rdma_nics(topology: Topology, device: str) -> list[Nic]:
    """The RDMA NICs that a transfer from or to `device` ("cuda:n"; "cpu": the process's cores) should use.

    Only those nearest to it, by PCI bridges in common and then by NUMA node, and none that is much slower than the
    fastest of them; fastest first.
    """
    cores = PciDevice(name="cpu", numa_node=topology.numa_node)
    memory = next((gpu for gpu in topology.gpus if gpu.name == device), cores)
    up = [(_nearness(memory, nic), nic) for nic in topology.nics if nic.is_up and nic.kind == "rdma"]
    nearest = max((nearness for nearness, _ in up), default=None)
    near = [nic for nearness, nic in up if nearness == nearest]
    fastest = max((nic.gbit_per_s for nic in near), default=0.0)
    rails = [nic for nic in near if nic.gbit_per_s * _MULTI_RAIL_RATIO >= fastest]
    return sorted(rails, key=lambda nic: (-nic.gbit_per_s, nic.name))


def _nearness(memory: PciDevice, nic: Nic) -> tuple[int, bool]:
    """(PCI bridges in common, same NUMA node): more is nearer."""
    pairs = zip(memory.pci_path, nic.pci_path, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return shared, memory.numa_node == nic.numa_node != UNKNOWN_NODE


def ucx_devices(topology: Topology, device: str, host: str) -> list[str]:
    """What UCX_NET_DEVICES should name for a worker that listens at `host`; empty: leave it to UCX.

    A worker at a loopback address needs no card at all. Beside RDMA stays the Ethernet device of
    `host`, for peers that have no RDMA.
    """
    if is_loopback(host):
        return ["lo"]
    ethernet = [nic for nic in topology.nics if nic.is_up and nic.kind == "ethernet"]
    own = [nic.name for nic in ethernet if host in nic.addresses]
    if rdma := rdma_nics(topology, device):
        return [f"{nic.name}:{nic.port}" for nic in rdma] + own
    return own if len(ethernet) > 1 else []


# ---- paths


def rank_paths(
    source: Topology, target: Topology, source_device: str, target_device: str, offers: Sequence[str]
) -> list[tuple[str, str]]:
    """(transport, why), best first; transports that cannot reach from one to the other are left out.

    Args:
        offers: what both sides can use, best first. NIXL is left out where it has no RDMA and TCP is among them: a
            target that dies while UCX reads can take the source's process down.
    """
    near = [name for name in offers if _is_near(source, target, name)]
    whys = {**dict.fromkeys(near, "same host"), "tcp": "TCP on one host" if "tcp" in near else "TCP"}
    whys |= {"loopback": "same process"} if "loopback" in near else {}
    whys.pop("cuda_ipc" if source.process == target.process else "loopback", None)
    if "nixl" in near:
        whys["nixl"] = "same host, through UCX"
    elif (ours := rdma_nics(source, source_device)) and (theirs := rdma_nics(target, target_device)):
        whys["nixl"] = f"RDMA {_named(ours[0])}, to {_named(theirs[0])}; {_PLAIN}"
    else:
        whys["nixl"] = f"TCP through UCX: slow, a target that dies in a read can take the source down; {_PLAIN}"
    if "tcp" in offers and "RDMA" not in whys["nixl"]:
        del whys["nixl"]
    return [(name, whys[name]) for name in offers if name in whys]


def _is_near(source: Topology, target: Topology, transport: str) -> bool:
    """Whether both run under one kernel and in the namespaces that this transport needs within a host."""
    if not source.host or source.host != target.host:
        return False
    return source.within.get(transport) == target.within.get(transport)


def _named(nic: Nic) -> str:
    return f"{nic.name}, {nic.gbit_per_s:g} Gb/s" if nic.gbit_per_s else nic.name
