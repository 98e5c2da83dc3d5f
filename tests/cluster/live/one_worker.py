"""One decode worker with a tiny model, and peers that speak to it as ingresses do."""

import contextlib
import secrets

from kvrelay.cluster.launch.local import make_worker
from kvrelay.config import settings_from
from kvrelay.plane import connection as plane
from kvrelay.types import Role


@contextlib.asynccontextmanager
async def worker_and_peers(folder, count):
    secret = secrets.token_bytes(32)
    settings = settings_from(
        {
            "model": {"dtype": "float32"},
            "engine": {"kv_memory": "4MiB", "num_threads": 1, "backend": "reference"},
            "transfer": {"transport": "shm"},
        }
    )
    worker = make_worker(Role.DECODE, settings, folder, secret, "d0", None)
    info = await worker.start()
    peers = [await plane.connect("127.0.0.1", info.port, secret) for _ in range(count)]
    try:
        yield worker, peers
    finally:
        for peer in peers:
            await peer.aclose()
        await worker.aclose()
