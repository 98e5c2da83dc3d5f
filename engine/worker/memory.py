"""How much memory is free where a pool is to lie, and the share of it that the pool takes."""

from pathlib import Path

import psutil
import torch

_CGROUPS = (  # (folder, limit, use) of version 2 and of version 1
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def pool_bytes(share: float, device: torch.device, num_workers: int) -> int:
    """Bytes for one worker's pool: `share` of what is free on its device now.

    Args:
        num_workers: of this machine, which share its memory. Of no account on a GPU: what others took is not free.
    """
    if device.type == "cuda":  # unverified on a GPU
        torch.cuda.empty_cache()  # what loading the weights left behind
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(share * free_bytes)
    return int(share * host_bytes() / max(num_workers, 1))


def host_bytes() -> int:
    """Bytes of host memory that this process may still take: the kernel's estimate, or less in a container."""
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
