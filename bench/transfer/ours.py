"""kvrelay's own ends for bench/transfer/transfer.py: KvSource and KvTarget over one transport, an engine per row and
shape.
"""

import dataclasses
import time
import typing
from collections.abc import Mapping
from typing import Any

from bench.transfer.blocks import End, Pool, Row, Shape, block_lists, fingerprint_of
from kvrelay.decode.target import KvTarget
from kvrelay.kvtransfer.paths.selection import TRANSPORTS
from kvrelay.kvtransfer.protocol.messages import TransferResult
from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.kvtransfer.transports.tcp.reader import tcp
from kvrelay.plane.tls import ClusterTls
from kvrelay.prefill.source import KvSource
from kvrelay.settings.cache import TransferSettings
from kvrelay.settings.choices import TransportName

SECRET = b"bench"
HOST = "127.0.0.1"


def only(transport: str, *, tcp_streams: int = 0, tls: bool = False) -> tuple[str, Mapping[str, Transport]]:
    """(setting, table) that leave `transport` as the only choice. Streams and TLS are TCP's."""
    setting = transport if transport in typing.get_args(TransportName) else "auto"
    if not tcp_streams and not tls:
        return setting, {transport: TRANSPORTS[transport]}
    return setting, {transport: tcp(ClusterTls.derived(SECRET) if tls else None, num_streams=tcp_streams)}


def engine_key(row: Row, shape: Shape) -> tuple[str, int, int]:
    return row["name"], shape.region_bytes, shape.num_layers


class ReadClock:
    """Notes when reads begin and end, around a transport's readers."""

    def __init__(self) -> None:
        self.first_s = self.last_s = 0.0

    def around(self, transport: Transport) -> Transport:
        return dataclasses.replace(
            transport, make_reader=lambda *args: _TimedReader(transport.make_reader(*args), self)
        )

    def take(self) -> float:
        """Seconds from the first read's begin to the last one's end since it was last asked."""
        taken, self.first_s = self.last_s - self.first_s, 0.0
        return taken


class _TimedReader:
    """A reader that records the time; all else is the reader's own."""

    def __init__(self, reader: Any, clock: ReadClock) -> None:
        self._reader, self._clock = reader, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read(self, *args: Any, **kwargs: Any) -> Any:
        clock = self._clock
        clock.first_s = clock.first_s or time.perf_counter()
        done = self._reader.read(*args, **kwargs)
        clock.last_s = time.perf_counter()  # of a read that is over: its transfer may be, too, before callbacks run
        done.add_done_callback(lambda _: setattr(clock, "last_s", time.perf_counter()))
        return done


class OurSource(End):
    """Opens, announces everything at once and commits, one transfer after the other."""

    def __init__(self, pools: dict[str, Pool], config: dict[str, Any]) -> None:
        super().__init__(pools)
        self._pool, self._transport = pools["source"], config["transport"]
        self._engines: dict[tuple[str, int, int], KvSource] = {}
        self._whole: list[float] = []

    async def _engine(self, row: Row, shape: Shape) -> KvSource:
        key = engine_key(row, shape)
        if key not in self._engines:
            memory, (setting, table) = self._pool.memory(shape), only(self._transport, **row["table"])
            engine = KvSource(
                memory,
                "source",
                f"source-{len(self._engines)}",
                fingerprint_of(memory.layout),
                SECRET,
                TransferSettings(transport=setting, **row["settings"]),
                host=HOST,
                generation_of=lambda block: 0,
                transports=table,
            )
            await engine.start()
            self._engines[key] = engine
        return self._engines[key]

    async def begin(self, row: Row, shape: Shape) -> dict[str, Any]:
        await self._engine(row, shape)
        self._whole = []
        return {}

    async def move(self, row: Row, shape: Shape, order: dict[str, Any]) -> None:
        engine = await self._engine(row, shape)
        plans = block_lists(shape, self._pool.num_bytes)
        for (blocks, _), (name, ticket) in zip(plans, order["tickets"], strict=True):
            sealed = bytes.fromhex(ticket)
            began = time.perf_counter()
            transfer = engine.open(name, sealed)
            transfer.announce(0, blocks, range(shape.num_layers))
            await transfer.commit(b"")
            self._whole.append(time.perf_counter() - began)

    async def end(self) -> dict[str, list[float]]:
        return {"whole": self._whole}

    async def aclose(self) -> None:
        for engine in self._engines.values():
            await engine.aclose()


class OurTarget(End):
    """Grants a visit's tickets in advance; its reads are timed where they are made."""

    def __init__(self, pools: dict[str, Pool], config: dict[str, Any]) -> None:
        super().__init__(pools)
        self._pool, self._transport = pools["target"], config["transport"]
        self._engines: dict[tuple[str, int, int], KvTarget] = {}
        self._clock = ReadClock()
        self._figures: dict[str, list[float]] = {}
        self._problems: list[str] = []
        self._num_granted = 0

    async def _engine(self, row: Row, shape: Shape) -> KvTarget:
        key = engine_key(row, shape)
        if key not in self._engines:
            memory, (setting, table) = self._pool.memory(shape), only(self._transport, **row["table"])
            engine = KvTarget(
                memory,
                "target",
                f"target-{len(self._engines)}",
                fingerprint_of(memory.layout),
                SECRET,
                TransferSettings(transport=setting, **row["settings"]),
                host=HOST,
                generation_of=lambda block: 0,
                on_commit=lambda _, __, result: self._on_commit(result),
                on_failed=lambda _, error: self._problems.append(str(error)),
                on_released=lambda _: None,
                transports={name: self._clock.around(transport) for name, transport in table.items()},
            )
            await engine.start()
            self._engines[key] = engine
        return self._engines[key]

    async def begin(self, row: Row, shape: Shape) -> dict[str, Any]:
        engine = await self._engine(row, shape)
        self._figures, tickets = {"read": [], "busy": []}, []
        for _, blocks in block_lists(shape, self._pool.num_bytes):
            self._num_granted += 1
            name = f"bench-{self._num_granted}"
            tickets.append((name, engine.grant(name, 0, blocks, len(blocks)).hex()))
        return {"tickets": tickets}

    async def end(self) -> dict[str, list[float]]:
        return self._figures

    def _on_commit(self, result: TransferResult) -> None:
        self._figures["read"].append(self._clock.take())
        self._figures["busy"].append(result.seconds)

    async def aclose(self) -> None:
        for engine in self._engines.values():
            await engine.aclose()


def make(kind: str, role: str, pools: dict[str, Pool], every: dict[str, Shape], config: dict[str, Any]) -> End:
    return {"source": OurSource, "target": OurTarget}[role](pools, config)
