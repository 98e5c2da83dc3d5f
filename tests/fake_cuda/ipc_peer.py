"""A process with a KV pool in "CUDA memory", for test_cuda_ipc.py: `ipc_peer.py export|source|target <json config>`.

"export" gives out its pool's descriptor. "source" and "target" are those of tests/kvtransfer/peer_process.py; with
TRITON_INTERPRET=1 in the environment the Triton kernels run, on the host memory that the fake device's is.
"""

import asyncio
import functools
import json
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from kvrelay.decode import read_queue  # noqa: E402
from kvrelay.kvcache.memory.storage import KvStorage  # noqa: E402
from kvrelay.kvtransfer.mover import device_checksums  # noqa: E402
from kvrelay.kvtransfer.mover.verification import ArrivingRead  # noqa: E402
from kvrelay.kvtransfer.transports.cuda_ipc import CUDA_IPC  # noqa: E402
from tests.kvtransfer import peer_process  # noqa: E402
from tests.kvtransfer.damage import damaged  # noqa: E402


def random_bytes(layout, seed):
    return np.random.default_rng(seed).integers(0, 256, layout.num_bytes, dtype=np.uint8)


def allocate(layout=peer_process.LAYOUT, fill=None, device="cuda:0"):
    """A pool that is not at the beginning of its allocation; copies are the one thing that moves bytes here."""
    with torch.cuda.device(device):
        allocate.kept = torch.empty(512, dtype=torch.uint8, device=device)
        memory = KvStorage(layout, torch.device(device)).memory
        if fill is not None:
            whole = memory.owner.view(torch.uint8).view(-1)
            whole.copy_(torch.from_numpy(random_bytes(layout, fill)))
    return memory


def digest(memory, blocks):
    on_host = memory.owner.cpu().view(torch.uint8).numpy()
    return _digest(type("Host", (), {"owner": on_host, "layout": memory.layout}), blocks)


_digest = peer_process.digest


def flip(memory, offset, num_bytes):
    one = memory.owner.view(torch.uint8).view(-1)[offset + num_bytes // 2 :][:1]
    one.copy_(one.cpu() ^ 0x10)


async def export():
    exporter = CUDA_IPC.make_exporter(peer_process.allocate(fill=1), peer_process.SECRET, "")
    await exporter.start()
    peer_process.say(op="ready", descriptor=exporter.describe().hex())
    await asyncio.to_thread(sys.stdin.readline)
    await exporter.aclose()


if __name__ == "__main__":
    role, config = sys.argv[1], json.loads(sys.argv[2])
    if config.pop("flips", False):
        read_queue.ArrivingRead = damaged(ArrivingRead, flip)
    peer_process.allocate = functools.partial(allocate, device=config.pop("device", "cuda:0"))
    peer_process.digest = digest
    device_checksums.has_triton = lambda device: True  # it compares with torch's kernels, which do nothing here
    if role == "export":
        asyncio.run(export())
    else:
        asyncio.run({"source": peer_process.run_source, "target": peer_process.run_target}[role](config))
