"""A node of the cluster's store as a plain process, for a cluster without Ray (`cluster/launch/local.py`).

The child ends when its standard input closes, however its parent died. Each line of input is a list of all live nodes.
"""

import asyncio
import json
import logging
import os
import sys
from dataclasses import asdict, dataclass

from kvrelay.cluster.store.service import make_service
from kvrelay.config import Settings, settings_from
from kvrelay.errors import KvrelayError, WorkerLost
from kvrelay.kvcache.stores.placement import StoreAddress

START_TIMEOUT_S = 60.0
_STOP_S = 10.0


@dataclass(slots=True)
class ProcessStore:
    """A node in a child process."""

    process: asyncio.subprocess.Process
    address: StoreAddress

    @property
    def pid(self) -> int:
        return self.process.pid

    def set_nodes(self, nodes: list[StoreAddress]) -> None:
        """Send all live nodes; no effect on a process that has ended."""
        if self.process.stdin is not None and self.process.returncode is None:
            self.process.stdin.write(json.dumps([asdict(node) for node in nodes]).encode() + b"\n")

    async def aclose(self) -> None:
        """Stop it; kill it if it does not end in time."""
        if self.process.returncode is None and self.process.stdin is not None:
            self.process.stdin.close()
            try:
                async with asyncio.timeout(_STOP_S):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
        await self.process.wait()


async def spawn_store(node_id: str, settings: Settings, secret: bytes, host: str = "127.0.0.1") -> ProcessStore:
    """Start a node and wait until it listens. Raises WorkerLost, with its error."""
    order = {"node_id": node_id, "settings": settings.model_dump(), "secret": secret.hex(), "host": host}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvrelay.cluster.store.process",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "NIXL_LOG_LEVEL": "WARN"},
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(order).encode() + b"\n")
    line = b""
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await process.stdout.readline()
    except TimeoutError:
        process.kill()
    answer = json.loads(line) if line else {"error": "it ended while starting"}
    if "error" in answer:
        await process.wait()
        raise WorkerLost(node_id, answer["error"])
    return ProcessStore(process, StoreAddress(**answer))


async def _child() -> int:
    """Read settings from standard input, then serve until it closes."""
    order = json.loads(sys.stdin.buffer.readline())
    settings = settings_from(order["settings"])
    try:
        service = make_service(order["node_id"], settings, bytes.fromhex(order["secret"]), order["host"])
        address = await service.start()
    except (KvrelayError, OSError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    service.set_nodes([address])
    print(json.dumps(asdict(address)), flush=True)
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        service.set_nodes([StoreAddress(**node) for node in json.loads(line)])
    await service.aclose()
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    sys.exit(asyncio.run(_child()))
