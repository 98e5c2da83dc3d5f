"""Ends of the peers for bench/transfer/transfer.py: a plain loop over a socket, NIXL without anything of ours,
Mooncake's transfer engine.

Each as it is used well: lists prepared once, blocks sorted by where they lie in the source, one call for
one transfer. None of them verifies what came.
"""

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.transfer.blocks import End, Pool, Row, Shape, block_lists

HOST = "127.0.0.1"


def by_source(pair: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
    """(source blocks, target blocks) in the order of the source's memory."""
    sources, targets = zip(*sorted(zip(*pair, strict=True)), strict=True)
    return list(sources), list(targets)


class PullingSide(End):
    """A target that fetches; `_fetch` moves one transfer's blocks."""

    def __init__(self, pools: dict[str, Pool]) -> None:
        super().__init__(pools)
        self._pool = next(iter(pools.values()))
        self._read: list[float] = []

    async def begin(self, row: Row, shape: Shape) -> dict[str, Any]:
        self._read = []
        return {}

    async def move(self, row: Row, shape: Shape, order: dict[str, Any]) -> None:
        for index, pair in enumerate(block_lists(shape, self._pool.num_bytes)):
            began = time.perf_counter()
            self._fetch(row, shape, index, *pair)
            self._read.append(time.perf_counter() - began)

    def _fetch(self, row: Row, shape: Shape, index: int, sources: list[int], targets: list[int]) -> None:
        raise NotImplementedError

    async def end(self) -> dict[str, list[float]]:
        return {"read": self._read}


# ---- a plain loop over a blocking socket

_ORDER = struct.Struct("<QQ")  # bytes of a block, number of blocks; their ids follow


class PlainSource(End):
    """Sends each block that is asked for with one call, from a thread for each socket."""

    async def start(self) -> dict[str, Any]:
        self._listeners = {"tcp": socket.create_server((HOST, 0)), "unix": socket.socket(socket.AF_UNIX)}
        self._listeners["unix"].bind(f"\0kvrelay-bench-{os.getpid()}")
        self._listeners["unix"].listen()
        for listener in self._listeners.values():
            threading.Thread(target=self._serve, args=(listener,), daemon=True).start()
        port, name = (listener.getsockname() for listener in self._listeners.values())
        return {"tcp": port, "unix": name.decode()}

    def _serve(self, listener: socket.socket) -> None:
        peer, _ = listener.accept()
        pool = self.pools["source"].view
        while order := peer.recv(_ORDER.size, socket.MSG_WAITALL):
            size, count = _ORDER.unpack(order)
            for block in np.frombuffer(peer.recv(8 * count, socket.MSG_WAITALL), dtype=np.uint64).tolist():
                peer.sendall(pool[block * size : (block + 1) * size])

    async def aclose(self) -> None:
        for listener in self._listeners.values():
            listener.close()


class PlainTarget(PullingSide):
    """Receives each block into its place."""

    async def connect(self, peer: dict[str, Any]) -> None:
        self._sockets = {"tcp": socket.create_connection(peer["tcp"]), "unix": socket.socket(socket.AF_UNIX)}
        self._sockets["unix"].connect(peer["unix"])
        self._sockets["tcp"].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _fetch(self, row: Row, shape: Shape, index: int, sources: list[int], targets: list[int]) -> None:
        sock, pool, size = self._sockets[row["settings"]["family"]], self._pool.view, shape.block_bytes
        sock.sendall(_ORDER.pack(size, len(sources)) + np.array(sources, dtype=np.uint64).tobytes())
        for block in targets:
            left = pool[block * size : (block + 1) * size]
            while left:
                left = left[sock.recv_into(left) :]

    async def aclose(self) -> None:
        for sock in self._sockets.values():
            sock.close()


# ---- NIXL


def nixl_agent(name: str, pool: Pool) -> Any:
    """An agent without a progress thread (the stock one spins a core), with the pool registered."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    from kvrelay.kvtransfer.transports.nixl.agent import import_nixl

    api = import_nixl()
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(pool.address, pool.num_bytes, 0, "")], "DRAM", backends=["UCX"])
    return agent


class NixlSource(End):
    """Makes progress during visits: all the time over TCP, where reads need it, else for the first connection only."""

    def __init__(self, pools: dict[str, Pool], *, spins: bool) -> None:
        super().__init__(pools)
        self._pool, self._pause_s = pools["source"], 0.0 if spins else 1e-3
        self._agent: Any = None
        self._is_visited = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._progress, daemon=True)

    async def start(self) -> dict[str, Any]:
        self._agent = nixl_agent("source", self._pool)
        self._thread.start()
        return {"metadata": self._agent.get_agent_metadata().hex(), "address": self._pool.address}

    def _progress(self) -> None:
        while self._is_visited.wait() and not self._is_over:
            self._agent.get_new_notifs()
            if self._pause_s:
                time.sleep(self._pause_s)

    async def begin(self, row: Row, shape: Shape) -> dict[str, Any]:
        self._is_visited.set()
        return {}

    async def end(self) -> dict[str, list[float]]:
        self._is_visited.clear()
        return {}

    async def aclose(self) -> None:
        self._is_over = True
        self._is_visited.set()
        self._thread.join()


class NixlTarget(PullingSide):
    """Rows for every block prepared once; a transfer names rows, is posted once and polled."""

    def __init__(self, pools: dict[str, Pool], every: dict[str, Shape]) -> None:
        super().__init__(pools)
        self._sizes = {shape.block_bytes for shape in every.values()}
        self._agent: Any = None
        self._rows: dict[int, tuple[Any, Any]] = {}

    async def start(self) -> dict[str, Any]:
        self._agent = nixl_agent("target", self._pool)
        return {}

    async def connect(self, peer: dict[str, Any]) -> None:
        source = self._agent.add_remote_agent(bytes.fromhex(peer["metadata"]))
        for size in self._sizes:
            mine = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._table(self._pool.address, size), "DRAM")
            theirs = self._agent.prep_xfer_dlist(source, self._table(peer["address"], size), "DRAM")
            self._rows[size] = (mine, theirs)

    def _table(self, address: int, size: int) -> Any:
        return np.array([[address, size, 0, size, self._pool.num_bytes // size]], dtype=np.uint64)  # stride and count

    def _fetch(self, row: Row, shape: Shape, index: int, sources: list[int], targets: list[int]) -> None:
        sources, targets = by_source((sources, targets))
        mine, theirs = self._rows[shape.block_bytes]
        handle = self._agent.make_prepped_xfer(
            "READ", mine, np.array(targets, dtype=np.int32), theirs, np.array(sources, dtype=np.int32)
        )
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL: {state}")
        handle.release()


# ---- Mooncake


class MooncakeSide(PullingSide):
    """Mooncake's transfer engine over TCP; one batched synchronous read for each transfer."""

    def __init__(self, pools: dict[str, Pool]) -> None:
        super().__init__(pools)
        self._engine: Any = None
        self._peer: dict[str, Any] = {}

    async def start(self) -> dict[str, Any]:
        from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

        self._engine = TransferEngine()
        if self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("Mooncake's engine did not start")
        if self._engine.register_memory(self._pool.address, self._pool.num_bytes) != 0:
            raise RuntimeError("Mooncake did not register the pool")
        return {"session": f"{HOST}:{self._engine.get_rpc_port()}", "address": self._pool.address}

    async def connect(self, peer: dict[str, Any]) -> None:
        self._peer = peer

    def _fetch(self, row: Row, shape: Shape, index: int, sources: list[int], targets: list[int]) -> None:
        sources, targets = by_source((sources, targets))
        size = shape.block_bytes
        status = self._engine.batch_transfer_sync_read(
            self._peer["session"],
            [self._pool.address + block * size for block in targets],
            [self._peer["address"] + block * size for block in sources],
            [size] * len(sources),
        )
        if status != 0:
            raise RuntimeError(f"Mooncake: {status}")


def make(kind: str, role: str, pools: dict[str, Pool], every: dict[str, Shape], config: dict[str, Any]) -> End:
    ends: dict[tuple[str, str], Callable[[], End]] = {
        ("plain", "source"): lambda: PlainSource(pools),
        ("plain", "target"): lambda: PlainTarget(pools),
        ("nixl", "source"): lambda: NixlSource(pools, spins=config.get("spins", False)),
        ("nixl", "target"): lambda: NixlTarget(pools, every),
        ("mooncake", "source"): lambda: MooncakeSide(pools),
        ("mooncake", "target"): lambda: MooncakeSide(pools),
    }
    return ends[kind, role]()
