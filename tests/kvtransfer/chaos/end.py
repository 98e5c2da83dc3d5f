"""A source or a target of tests/kvtransfer/chaos/chaos.py: a worker without a model, in a process that may be killed or
frozen.

    python tests/kvtransfer/chaos/end.py source|target '{"name": ..., "epoch": ..., "paths": {...}}'

Orders come as JSON lines on standard input and are answered in order; events tell how transfers end. Its
blocks are kept by the worker's own BlockPool. Blocks that nobody holds are overwritten at once: by a pattern on
the target, where any byte that lands later breaks it; on the source so that a late reader finds no KV.
"""

import asyncio
import contextlib
import ctypes
import json
import mmap
import os
import re
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from bench.transfer.ours import only
from kvrelay.decode import read_queue
from kvrelay.decode.target import KvTarget
from kvrelay.errors import TransferError
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvtransfer.mover.verification import ArrivingRead
from kvrelay.kvtransfer.paths.selection import TRANSPORTS
from kvrelay.kvtransfer.protocol.messages import TransferResult
from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.prefill.source import KvSource, SourceTransfer
from kvrelay.settings.cache import TransferSettings
from kvrelay.types import BlockId, Fingerprint, KvMemory
from tests.kvtransfer.chaos.content import LAYOUT, content, digests
from tests.kvtransfer.damage import damaged

SECRET = b"the secret of the chaos cluster"
LEASE_S, DEADLINE_S = 1.5, 4.0
HOST = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
UNHELD = 0xC5  # what blocks hold that nobody holds
FINGERPRINT = Fingerprint(
    protocol=1,
    model="chaos",
    dtype=LAYOUT.dtype,
    block_size=LAYOUT.block_size,
    num_layers=LAYOUT.num_layers,
    num_kv_heads=LAYOUT.num_kv_heads,
    head_dim=LAYOUT.head_dim,
    hash_seed="chaos",
)


class Blocks:
    """The pool: memory and who holds what."""

    def __init__(self) -> None:
        self.held = BlockPool(LAYOUT.num_blocks, prefix_caching=False)
        self.num_late_writes = 0
        fd = os.memfd_create("kvrelay-chaos", os.MFD_CLOEXEC)
        os.ftruncate(fd, LAYOUT.num_bytes)
        mapping = mmap.mmap(fd, LAYOUT.num_bytes)
        flat: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        flat[:] = UNHELD
        self.memory = KvMemory(LAYOUT, flat.ctypes.data, "cpu", fd, memoryview(mapping), flat)
        self.regions = flat.reshape(LAYOUT.num_blocks, LAYOUT.num_layers, -1).swapaxes(0, 1)

    def take(self, count: int) -> list[BlockId] | None:
        """Blocks that hold what they were left with; None: no room."""
        fresh = self.held.allocate(count)
        blocks = None if fresh is None else list(map(BlockId, fresh))
        if blocks is not None and (self.regions[:, blocks] != UNHELD).any():
            self.num_late_writes += 1
            self.regions[:, blocks] = UNHELD
        return blocks

    def give_back(self, blocks: list[BlockId]) -> None:
        self.regions[:, blocks] = UNHELD
        self.held.release(blocks)

    def take_away(self, blocks: list[BlockId]) -> None:
        """Re-use held blocks under their holder's feet: every free block gets a new generation."""
        self.give_back(blocks)
        every = self.held.allocate(self.held.num_available)
        assert every is not None
        self.give_back(list(map(BlockId, every)))

    def status(self) -> dict[str, Any]:
        return {
            "missing": LAYOUT.num_blocks - self.held.num_available,
            "late_writes": self.num_late_writes,
            "files": dict(Counter(_open_files())),
            "threads": threading.active_count(),
        }


def _open_files() -> Iterator[str]:
    """The kind of each."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            yield re.split(r"[:\d]|_posix", os.readlink(f"/proc/self/fd/{entry}"))[0]


class End:
    """What both kinds share: the way out, and an engine for each path."""

    def __init__(self, config: dict[str, Any], out: TextIO) -> None:
        self.name, self.epoch, self._out = config["name"], config["epoch"], out
        self.blocks = Blocks()
        self.paths: dict[str, dict[str, Any]] = {
            path: {**each, "transports": usable}
            for path, each in config["paths"].items()
            if (usable := [n for n in each["transports"] if TRANSPORTS[n].why_not(self.blocks.memory) is None])
        }

    def say(self, **message: Any) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def settings(self, path: str) -> tuple[TransferSettings, dict[str, Transport]]:
        """An engine's settings and the transports that it may choose from."""
        names, more = self.paths[path]["transports"], self.paths[path]["settings"]
        setting = only(names[0])[0] if len(names) == 1 else "auto"
        return TransferSettings(transport=setting, **more), {name: TRANSPORTS[name] for name in names}


@dataclass(slots=True)
class Opened:
    transfer: SourceTransfer
    blocks: list[BlockId]  # empty once given back


class SourceEnd(End):
    """Opens, announces, commits and cancels as it is told."""

    async def start(self) -> None:
        self._engines: dict[str, KvSource] = {}
        self._open: dict[str, Opened] = {}
        self._commits: set[asyncio.Task[None]] = set()
        for path in self.paths:
            settings, table = self.settings(path)
            self._engines[path] = engine = KvSource(
                self.blocks.memory,
                f"{self.name}.{path}",
                self.epoch,
                FINGERPRINT,
                SECRET,
                settings,
                host=HOST,
                generation_of=self.blocks.held.generation,
                transports=table,
                lease_s=LEASE_S,
                deadline_s=DEADLINE_S,
            )
            await engine.start()

    def on_open(self, order: dict[str, Any]) -> dict[str, Any]:
        blocks = self.blocks.take(order["num_blocks"])
        if blocks is None:
            return {"refused": "no room at the source"}
        generations = [self.blocks.held.generation(block) for block in blocks]
        self.blocks.regions[:, blocks] = content(self.epoch, blocks, generations)
        try:
            transfer = self._engines[order["path"]].open(order["request_id"], bytes.fromhex(order["ticket"]))
        except TransferError as error:
            self.blocks.give_back(blocks)
            return {"refused": f"{type(error).__name__}: {error.why}"}
        self._open[order["opening"]] = Opened(transfer, blocks)
        return {"epoch": self.epoch, "blocks": blocks, "generations": generations}

    def on_announce(self, order: dict[str, Any]) -> dict[str, Any]:
        opened = self._open.get(order["opening"])
        if opened is not None and opened.blocks:
            first, stop = order["blocks"]
            opened.transfer.announce(first, opened.blocks[first:stop], range(*order["layers"]))
        return {}

    def on_commit(self, order: dict[str, Any]) -> dict[str, Any]:
        opened = self._open.get(order["opening"])
        if opened is not None:
            task = asyncio.create_task(self._commit(order["opening"], opened))
            self._commits.add(task)
            task.add_done_callback(self._commits.discard)
        return {}

    async def _commit(self, opening: str, opened: Opened) -> None:
        try:
            await opened.transfer.commit(opening.encode())
            outcome = "committed"
        except TransferError as error:
            outcome = f"{type(error).__name__}: {error.why}"
        self._give_back(opening)
        self.say(event="source-end", opening=opening, outcome=outcome)

    def _give_back(self, opening: str) -> None:
        opened = self._open.pop(opening, None)
        if opened is not None and opened.blocks:
            self.blocks.give_back(opened.blocks)
            opened.blocks = []

    def on_cancel(self, order: dict[str, Any]) -> dict[str, Any]:
        """As a prefill worker does on Abort: cancel, and the blocks are free in the same instant."""
        opened = self._open.get(order["opening"])
        if opened is not None:
            opened.transfer.cancel("chaos")
            self._give_back(order["opening"])
        return {}

    def on_take_away(self, order: dict[str, Any]) -> dict[str, Any]:
        opened = self._open.get(order["opening"])
        if opened is not None and opened.blocks:
            self.blocks.take_away(opened.blocks)
            opened.blocks = []
        return {}

    def status(self) -> dict[str, Any]:
        stats = [engine.stats() for engine in self._engines.values()]
        return {**self.blocks.status(), "open": sum(each.open_transfers for each in stats), "quarantined": 0}

    async def aclose(self) -> None:
        for engine in self._engines.values():
            await engine.aclose()
        await asyncio.gather(*self._commits, return_exceptions=True)


@dataclass(slots=True)
class Granted:
    path: str
    blocks: list[BlockId]  # empty once taken away


class TargetEnd(End):
    """Grants and revokes as it is told; tells what every grant came to, and what its blocks hold."""

    def __init__(self, config: dict[str, Any], out: TextIO) -> None:
        super().__init__(config, out)
        self._forgets = config.get("forgets", False)  # one release, to see that it is missed
        self._granted: dict[str, Granted] = {}
        self._to_flip: set[int] = set()  # blocks in which to flip a bit whenever they arrive: a slow read is repeated
        self._flipped: dict[int, int] = {}  # offset -> what stands there since: a second read may end meanwhile

    async def start(self) -> None:
        self._engines: dict[str, KvTarget] = {}
        read_queue.ArrivingRead = damaged(ArrivingRead, self._tamper)
        for path in self.paths:
            settings, table = self.settings(path)
            self._engines[path] = engine = KvTarget(
                self.blocks.memory,
                f"{self.name}.{path}",
                self.epoch,
                FINGERPRINT,
                SECRET,
                settings,
                host=HOST,
                generation_of=self.blocks.held.generation,
                on_commit=self._on_commit,
                on_failed=self._on_failed,
                on_released=self._on_released,
                transports=table,
                lease_s=LEASE_S,
            )
            await engine.start()

    def on_grant(self, order: dict[str, Any]) -> dict[str, Any]:
        request_id, path = order["request_id"], order["path"]
        blocks = self.blocks.take(order["num_blocks"] - order["first_block"])
        if blocks is None:
            return {"refused": "no room at the target"}
        ticket = self._engines[path].grant(request_id, order["first_block"], blocks, order["num_blocks"])
        self._granted[request_id] = Granted(path, blocks)
        if order["flip"] and blocks:
            self._to_flip.add(blocks[len(blocks) // 2])
        return {"ticket": ticket.hex(), "late_writes": self.blocks.num_late_writes}

    def on_revoke(self, order: dict[str, Any]) -> dict[str, Any]:
        granted = self._granted.get(order["request_id"])
        if granted is not None:
            self._engines[granted.path].revoke(order["request_id"], "chaos")
        return {}

    def on_take_away(self, order: dict[str, Any]) -> dict[str, Any]:
        granted = self._granted.get(order["request_id"])
        if granted is not None and granted.blocks:
            self.blocks.take_away(granted.blocks)
            granted.blocks = []
        return {}

    def _tamper(self, memory: KvMemory, offset: int, num_bytes: int) -> None:
        first, last = offset // LAYOUT.block_bytes, (offset + num_bytes - 1) // LAYOUT.block_bytes
        for block in self._to_flip.intersection(range(first, last + 1)):
            at = max(offset, block * LAYOUT.block_bytes) + 7
            if memory.view is not None:
                memory.view[at] = self._flipped.setdefault(at, memory.view[at] ^ 0x10)

    def _on_commit(self, request_id: str, payload: bytes, result: TransferResult) -> None:
        blocks = self._granted[request_id].blocks
        found = digests(self.blocks.regions[:, blocks])
        self._give_back(request_id)
        self.say(
            event="committed",
            request_id=request_id,
            opening=payload.decode(),
            digests=found,
            transport=result.transport,
        )

    def _on_failed(self, request_id: str, error: TransferError) -> None:
        self.say(event="failed", request_id=request_id, outcome=f"{type(error).__name__}: {error.why}")

    def _on_released(self, request_id: str) -> None:
        if self._forgets:
            self._forgets = False
            self._granted.pop(request_id)
        else:
            self._give_back(request_id)
        self.say(event="released", request_id=request_id)

    def _give_back(self, request_id: str) -> None:
        granted = self._granted.pop(request_id)
        if granted.blocks:
            self._to_flip.difference_update(granted.blocks)
            self._flipped = {at: to for at, to in self._flipped.items() if at // LAYOUT.block_bytes in self._to_flip}
            self.blocks.give_back(granted.blocks)

    def status(self) -> dict[str, Any]:
        stats = [engine.stats() for engine in self._engines.values()]
        return {
            **self.blocks.status(),
            "open": sum(each.open_transfers for each in stats),
            "quarantined": sum(each.quarantined_blocks for each in stats),
        }

    async def aclose(self) -> None:
        for engine in self._engines.values():
            await engine.aclose()


async def run(role: str, config: dict[str, Any], out: TextIO) -> None:
    end = (SourceEnd if role == "source" else TargetEnd)(config, out)
    await end.start()
    end.say(event="ready", paths=list(end.paths))
    orders = {name.removeprefix("on_"): getattr(end, name) for name in dir(end) if name.startswith("on_")}
    orders["status"] = lambda order: end.status()
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        order = json.loads(line)
        try:
            answer = orders[order["op"]](order)
        except Exception as error:  # told to the driver, which counts it as a fault of ours
            traceback.print_exc()
            answer = {"broken": f"{type(error).__name__}: {error}"}
        end.say(re=order["id"], **answer)
    await end.aclose()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a frozen process would outlive its driver
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not be taken for answers
    asyncio.run(run(sys.argv[1], json.loads(sys.argv[2]), answers))
