"""The machine's topology from sysfs (physical cores with their hyperthreads, NUMA nodes), its free memory, and which
addresses are its own alone.

Where sysfs cannot be read, every CPU counts as a core without a node. Imports nothing of ours.
"""

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

SYSFS = Path("/sys")
UNKNOWN_NODE = -1
_CPU_QUOTAS = (  # (folder, limit and period in one file, or in two) of version 2 and of version 1
    (Path("fs/cgroup"), ("cpu.max",)),
    (Path("fs/cgroup/cpu"), ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
    (Path("fs/cgroup/cpu,cpuacct"), ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
)
_CGROUPS = (  # (folder, limit, use) of version 2 and of version 1
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


@dataclass(frozen=True, slots=True, order=True)
class Core:
    """A physical core. `index` is its first CPU, whether or not it may be used; `cpus` are those that may."""

    index: int
    cpus: tuple[int, ...]
    node: int = UNKNOWN_NODE


def physical_cores(cpus: Iterable[int], root: Path = SYSFS) -> tuple[Core, ...]:
    """The cores that `cpus` are hyperthreads of, in order of their first CPU."""
    node_of = node_cpus(root)
    usable: dict[int, list[int]] = {}
    for cpu in sorted(set(cpus)):
        siblings = cpu_list(text(root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        usable.setdefault(min([cpu, *siblings]), []).append(cpu)
    return tuple(Core(index, tuple(own), node_of.get(own[0], UNKNOWN_NODE)) for index, own in sorted(usable.items()))


def own_cores(root: Path = SYSFS) -> tuple[Core, ...]:
    """The cores that this thread may run on."""
    return physical_cores(os.sched_getaffinity(0), root)


def cpu_quota(root: Path = SYSFS) -> float | None:
    """CPUs' worth of time that the control group of this container may use; None: no limit known.

    A container sees its own group at the mount's root. Kubernetes sets it from `limits.cpu`, Docker from `--cpus`.
    """
    found = []
    for folder, names in _CPU_QUOTAS:
        words = " ".join(text(root / folder / name) for name in names).split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def usable_cores(root: Path = SYSFS) -> int:
    """How many cores this process can keep busy: those that it may run on, fewer under a quota; at least one.

    A quota counts CPUs, which are hyperthreads: one that allows less than every CPU of the cores limits the cores.
    """
    cores = own_cores(root)
    quota = cpu_quota(root)
    return len(cores) if quota is None else max(1, min(len(cores), math.floor(quota)))


def node_cpus(root: Path) -> dict[int, int]:
    """The NUMA node of each CPU that has one."""
    return {cpu: node for node, folder in node_folders(root).items() for cpu in cpu_list(text(folder / "cpulist"))}


def node_folders(root: Path) -> dict[int, Path]:
    """The folder of each NUMA node, by its number."""
    found = ((re.fullmatch(r"node(\d+)", path.name), path) for path in entries(root / "devices/system/node"))
    return {int(match.group(1)): path for match, path in found if match is not None}


def cpu_list(listed: str) -> list[int]:
    """Of "0-3,8": 0, 1, 2, 3, 8."""
    found: list[int] = []
    for part in listed.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found += range(int(first), int(last if last.isdigit() else first) + 1)
    return found


def text(path: Path) -> str:
    """A file's content; "" where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def entries(folder: Path) -> list[Path]:
    """What is in a folder, sorted; nothing where it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def free_host_bytes() -> int:
    """Bytes of host memory that this process may still take: the kernel's estimate, or less in a container."""
    import psutil

    limits = [int(psutil.virtual_memory().available)]
    limits += [left for folder, limit, use in _CGROUPS if (left := _cgroup_left(folder, limit, use)) is not None]
    return max(min(limits), 0)


def _cgroup_left(folder: Path, limit: str, use: str) -> int | None:
    """What the control group mounted at `folder` leaves, page cache counted as free; None: no limit known."""
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / use).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(most) - used + int(stat.get("inactive_file", 0)) if most.isdigit() else None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens at this address or name."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
