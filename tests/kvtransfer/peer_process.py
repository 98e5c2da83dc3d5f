"""Both ends of the KV plane for tests: pools, recording sides, and a process that runs one of them.

As a script it is a peer: `peer_process.py source|target <json config>`; commands come as JSON
lines on stdin, answers go to stdout. It can be killed like any worker.
"""

import asyncio
import hashlib
import json
import mmap
import os
import sys
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvrelay.decode.target import KvTarget
from kvrelay.kvtransfer.paths.selection import TRANSPORTS
from kvrelay.kvtransfer.transports.tcp.reader import tcp
from kvrelay.plane.tls import ClusterTls
from kvrelay.prefill.source import KvSource
from kvrelay.settings.cache import TransferSettings
from kvrelay.types import Fingerprint, KvLayout, KvMemory

SECRET = b"a secret of the test cluster"
LAYOUT = KvLayout(num_layers=4, num_blocks=64, block_size=16, num_kv_heads=2, head_dim=32, dtype="bfloat16")
FINGERPRINT = Fingerprint(1, "model", "bfloat16", 16, 4, 2, 32, "seed")
ALL_LAYERS = range(LAYOUT.num_layers)


def allocate(layout=LAYOUT, fill=None):
    """A pool in a memfd; `fill` seeds its random content (None: zeros)."""
    fd = os.memfd_create("kvrelay-test-pool", os.MFD_CLOEXEC)
    os.ftruncate(fd, layout.num_bytes)
    mapping = mmap.mmap(fd, layout.num_bytes)
    array = np.frombuffer(mapping, dtype=np.uint8)
    if fill is not None:
        array[:] = np.random.default_rng(fill).integers(0, 256, layout.num_bytes, dtype=np.uint8)
    return KvMemory(layout, array.ctypes.data, "cpu", fd, memoryview(mapping), array)


def regions(memory):
    """[num_layers, num_blocks, region_bytes] view of a pool."""
    layout = memory.layout
    return memory.owner.reshape(layout.num_blocks, layout.num_layers, layout.region_bytes).swapaxes(0, 1)


def digest(memory, blocks):
    return hashlib.sha256(regions(memory)[:, list(blocks)].tobytes()).hexdigest()


def table(name):
    """(settings' transport, transports to choose from, TLS) that make `name` the only choice.

    "tcp x3": over three streams; "tcp+tls": everything that goes over TCP, messages too, is inside TLS.
    """
    if name == "loopback":
        return "auto", {"loopback": TRANSPORTS["loopback"]}, None
    plain, _, num_streams = name.removesuffix("+tls").partition(" x")
    tls = ClusterTls.derived(SECRET) if name.endswith("+tls") else None
    return plain, {**TRANSPORTS, "tcp": tcp(tls, num_streams=int(num_streams or 0))}, tls


WAIT_S = 60.0  # for an event that a test is sure of


class Generations(dict):
    """Generation of each block; 0 until bumped."""

    def __call__(self, block):
        return self.get(block, 0)


class SourceSide(KvSource):
    def __init__(
        self,
        transport="tcp",
        *,
        memory=None,
        fill=1,
        fingerprint=FINGERPRINT,
        secret=SECRET,
        epoch="p1",
        transports=None,
        probe_buffers=None,
        lease_s=10.0,
        deadline_s=30.0,
        window_bytes=64 << 20,
        **settings,
    ):
        self.generations, self.probe_buffers = Generations(), probe_buffers
        name, known, tls = table(transport)
        super().__init__(
            memory or allocate(fill=fill),
            "prefill-0",
            epoch,
            fingerprint,
            secret,
            TransferSettings(transport=name, **settings),
            host="127.0.0.1",
            generation_of=self.generations,
            probe_buffers=probe_buffers,
            transports=transports or known,
            tls=tls,
            lease_s=lease_s,
            deadline_s=deadline_s,
            window_bytes=window_bytes,
        )


class TargetSide(KvTarget):
    """Records how every grant ends; `event(kind, request_id)` waits for it."""

    def __init__(
        self,
        transport="tcp",
        *,
        memory=None,
        fingerprint=FINGERPRINT,
        epoch="d1",
        transports=None,
        probe_buffers=None,
        lease_s=10.0,
        stall_s=2.0,
        **settings,
    ):
        self.generations, self.probe_buffers = Generations(), probe_buffers
        self.ends = []  # (kind, request_id, detail) in order
        self._waiting = {}
        name, known, tls = table(transport)
        super().__init__(
            memory or allocate(),
            "decode-0",
            epoch,
            fingerprint,
            SECRET,
            TransferSettings(transport=name, **settings),
            host="127.0.0.1",
            generation_of=self.generations,
            on_commit=lambda request_id, payload, result: self._record("commit", request_id, (payload, result)),
            on_failed=lambda request_id, error: self._record("failed", request_id, error),
            on_released=lambda request_id: self._record("released", request_id, None),
            probe_buffers=probe_buffers,
            transports=transports or known,
            tls=tls,
            lease_s=lease_s,
            stall_s=stall_s,
        )

    def _record(self, kind, request_id, detail):
        self.ends.append((kind, request_id, detail))
        self._future(kind, request_id).set_result(detail)

    def _future(self, kind, request_id):
        return self._waiting.setdefault((kind, request_id), asyncio.get_running_loop().create_future())

    async def event(self, kind, request_id):
        """The end of this kind; at once AssertionError if the grant has ended in the other way."""
        opposite = {"commit": "failed", "failed": "commit"}.get(kind)
        ways = [self._future(way, request_id) for way in (kind, opposite) if way]
        await asyncio.wait(ways, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        assert ways[0].done(), f"{request_id} did not come to {kind!r}, but to {self.ends}"
        return ways[0].result()

    def kinds(self, request_id):
        return [kind for kind, name, _ in self.ends if name == request_id]


class FreeBlocks:
    """Lends these blocks, as a worker lends free ones of its pool; knows which are out."""

    def __init__(self, *blocks):
        self.free, self.taken = list(blocks), []

    async def take(self, count):
        taken, self.free = self.free[:count], self.free[count:]
        self.taken += taken
        return taken

    def put_back(self, blocks):
        for block in blocks:
            self.taken.remove(block)
            self.free.append(block)


# ---- the script


def say(**message):
    print(json.dumps(message), flush=True)


async def commands():
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


async def run_source(config):
    source = SourceSide(**config)
    await source.start()
    say(op="ready", pid=os.getpid(), transports=source.transports)
    transfers, tasks = {}, set()

    async def commit(request_id):
        try:
            result = await transfers[request_id].commit(b"payload of " + request_id.encode())
            say(op="committed", request_id=request_id, num_bytes=result.num_bytes, transport=result.transport)
        except Exception as error:
            say(op="failed", request_id=request_id, error=type(error).__name__, why=str(error))

    async for command in commands():
        match command["op"]:
            case "open":
                transfers[command["request_id"]] = source.open(command["request_id"], bytes.fromhex(command["ticket"]))
            case "announce":
                first, last = command["layers"]
                transfers[command["request_id"]].announce(0, command["blocks"], range(first, last))
            case "commit":
                task = asyncio.create_task(commit(command["request_id"]))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            case "digest":
                say(op="digest", value=digest(source.memory, command["blocks"]))
            case "cpu":
                times = os.times()
                say(op="cpu", seconds=times.user + times.system)
            case "stop":
                break
    await source.aclose()


async def run_target(config):
    target = TargetSide(**config)
    await target.start()
    say(op="ready", pid=os.getpid(), transports=target.transports)
    async for command in commands():
        match command["op"]:
            case "grant":
                blocks = command["blocks"]
                say(op="ticket", ticket=target.grant(command["request_id"], 0, blocks, len(blocks)).hex())
            case "kinds":
                say(op="kinds", kinds=target.kinds(command["request_id"]))
            case "await":
                await target.event(command["kind"], command["request_id"])
                say(op="event", digest=digest(target.memory, command["blocks"]))
            case "stop":
                break
    await target.aclose()


if __name__ == "__main__":
    asyncio.run({"source": run_source, "target": run_target}[sys.argv[1]](json.loads(sys.argv[2])))
