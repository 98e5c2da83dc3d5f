"""Reads this machine's topology: NICs and NUMA nodes from sysfs, GPUs from torch and NVML where these are there.

The GPU part has not been run on hardware. Whatever cannot be read is left out or unknown: a
topology only ranks paths, it never forbids one.
"""

import contextlib
import ctypes
import importlib
import logging
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvrelay.kvtransfer.transports.base import host_id
from kvrelay.kvtransfer.transports.topology import Gpu, Nic, Topology
from kvrelay.machine import UNKNOWN_NODE, entries, node_cpus, node_folders, text

logger = logging.getLogger(__name__)

_PCI = re.compile(r"pci[0-9a-f]+:[0-9a-f]+|[0-9a-f]+:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_ETHERNET = "1"  # ARPHRD_ETHER
_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED
_TOKEN = secrets.token_hex(8)


def this_machine() -> Topology:
    """Read once (milliseconds, blocking); a NIC that comes up later is found by the next process."""
    return _machine_of(os.getpid())  # a forked child is another process


@lru_cache(maxsize=1)
def _machine_of(pid: int) -> Topology:
    return discover(
        Path("/sys"),
        host=host_id(),
        process=f"{_TOKEN}-{pid}",
        cores=os.sched_getaffinity(0),
        addresses=_addresses(),
        gpu_addresses=_gpu_addresses(),
        fabrics=_fabrics(),
    )


def discover(
    root: Path,
    *,
    host: str,
    process: str,
    cores: Iterable[int] = (),
    addresses: Mapping[str, Sequence[str]] | None = None,
    gpu_addresses: Sequence[str] = (),
    fabrics: Mapping[str, str] | None = None,
) -> Topology:
    """The topology that the sysfs at `root` shows.

    Args:
        cores: that the process may use.
        addresses: IP addresses of network devices, by name.
        gpu_addresses: PCI address of each GPU, in this process's order.
        fabrics: NVLink domains by PCI address; a GPU without one counts to its host's.
    """
    node_of = node_cpus(root)
    nodes = {node_of.get(core, UNKNOWN_NODE) for core in cores}
    return Topology(
        host=host,
        process=process,
        numa_node=nodes.pop() if len(nodes) == 1 else UNKNOWN_NODE,
        numa_distances=_distances(root),
        nics=[*_rdma_nics(root), *_ethernet_nics(root, addresses or {})],
        gpus=[_gpu(root, index, address, fabrics or {}, host) for index, address in enumerate(gpu_addresses)],
    )


# ---- sysfs


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


def _distances(root: Path) -> list[list[int]]:
    """Between NUMA nodes: [from][to]."""
    rows = {
        node: [int(word) for word in text(folder / "distance").split() if word.isdigit()]
        for node, folder in node_folders(root).items()
    }
    return [rows.get(node, []) for node in range(max(rows, default=-1) + 1)]


def _rdma_nics(root: Path) -> Iterable[Nic]:
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


def _ethernet_nics(root: Path, addresses: Mapping[str, Sequence[str]]) -> Iterable[Nic]:
    for folder in entries(root / "class/net"):
        if text(folder / "type") != _ETHERNET:
            continue
        mbit_per_s = _number(text(folder / "speed"), -1)
        yield Nic(
            name=folder.name,
            kind="ethernet",
            is_up=text(folder / "operstate") == "up",
            gbit_per_s=max(mbit_per_s, 0) / 1000,
            numa_node=_numa_node(folder / "device"),
            pci_path=_pci_path(folder / "device"),
            addresses=list(addresses.get(folder.name, ())),
        )


def _gpu(root: Path, index: int, address: str, fabrics: Mapping[str, str], host: str) -> Gpu:
    device = root / "bus/pci/devices" / address
    return Gpu(
        index=index,
        nvlink_domain=fabrics.get(address) or host,
        numa_node=_numa_node(device),
        pci_path=_pci_path(device),
    )


# ---- the rest of the machine


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


def _fabrics() -> dict[str, str]:
    """NVLink domains that span hosts, by PCI address. Empty without pynvml or a driver."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # not installed, or no driver: NVML's own classes
        logger.debug("no NVML: %s", error)
        return {}
    try:
        return fabrics_of(nvml)
    finally:
        nvml.nvmlShutdown()


def fabrics_of(nvml: Any) -> dict[str, str]:
    """As `_fabrics`, of an initialised pynvml."""
    domains = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(Exception):  # NVML's own classes: this GPU has no fabric
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if domain := _fabric(nvml, handle):
                domains[_pci_address(nvml, handle)] = domain
    return domains


def _pci_address(nvml: Any, handle: Any) -> str:
    """NVML writes eight digits of domain, sysfs four."""
    address = nvml.nvmlDeviceGetPciInfo(handle).busId
    text = address.decode() if isinstance(address, bytes) else str(address)
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _fabric(nvml: Any, handle: Any) -> str:
    """Cluster and clique; "" while the GPU has not joined a fabric."""
    info = nvml.c_nvmlGpuFabricInfoV_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    cluster = bytes(info.clusterUuid)
    return f"{cluster.hex()}/{info.cliqueId}" if info.state == _COMPLETED and any(cluster) else ""
