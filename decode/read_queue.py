"""The reads from one source: its transfers take turns, a unit at a time; each unit is verified and counted.

A transfer with a hundred thousand tokens gets one unit per turn like every other.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

from kvrelay.decode.grants import Grant, GrantTable, ReadUnit
from kvrelay.errors import ChecksumMismatch, CorruptRead, PeerLost, TransferError, TransferTimeout, TransportError
from kvrelay.kvtransfer.mover.verification import ArrivingRead, ReceivePlan
from kvrelay.kvtransfer.paths.selection import Route, untried
from kvrelay.kvtransfer.protocol.messages import Progress, ReadDone, Reason, ToSource, TransferStats, refusal
from kvrelay.kvtransfer.transports.base import Reader

logger = logging.getLogger(__name__)

_ABANDON_GRACE_S = 1.0  # for an abandoned read to end, before its path is called stuck


class ReadQueue:
    """Reads announced units over `route`, at most `route.max_in_flight` at a time. Idle while nothing is announced.

    Args:
        staging_lock: held by whatever uses the plan's staging buffer.
        send: sends to the source.
        commit: ends a grant well. Raises TransferRefused.
        abort: drops the connection to the source.
    """

    def __init__(
        self,
        grants: GrantTable,
        stats: TransferStats,
        route: Route,
        plan: ReceivePlan,
        staging_lock: asyncio.Lock,
        *,
        generation_of: Callable[[int], int],
        stall_s: float,
        send: Callable[[ToSource], None],
        commit: Callable[[Grant], None],
        abort: Callable[[], None],
    ) -> None:
        self._grants, self._stats, self._route, self._plan = grants, stats, route, plan
        self._staging_lock, self._generation_of, self._stall_s = staging_lock, generation_of, stall_s
        self._send, self._commit, self._abort = send, commit, abort
        self._turns: deque[Grant] = deque()  # grants with pending units, each once
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, grant: Grant) -> None:
        """The grant has pending units."""
        if grant.pending and grant not in self._turns:
            self._turns.append(grant)
        self._start_reads()

    def advance(self, grant: Grant) -> None:
        """Once all is read, commit where every byte was verified; else ask the source whether it held the blocks until
        now. Raises TransferRefused.
        """
        if grant.is_ended or grant.is_waiting or not grant.is_read:
            return
        if grant.is_verified:
            self._commit(grant)
        else:
            grant.is_waiting = True
            self._send(ReadDone(nonce=grant.ticket.nonce))

    async def aclose(self) -> None:
        """Drop what is pending; wait for the readers to end as far as they can."""
        self._turns.clear()
        await self._route.aclose()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_reads(self) -> None:
        while self._turns and len(self._tasks) < self._route.max_in_flight:
            grant = self._turns.popleft()
            if grant.is_ended or not grant.pending:
                continue
            unit = grant.pending.popleft()
            if grant.pending:
                self._turns.append(grant)
            task = asyncio.create_task(self._run(grant, unit), name=f"kv read for {grant.request_id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: self._start_reads())

    # ---- one unit

    async def _run(self, grant: Grant, unit: ReadUnit) -> None:
        """Read one unit over the best path that works; what goes wrong ends its grant, and nothing else."""
        try:
            await self._read_unit(grant, unit)
        except TransferError as error:
            self._grants.end(grant, error)
        except Exception as error:  # a process edge: the request fails, the worker lives
            logger.exception("request %s: reading its KV failed", grant.request_id)
            self._grants.end(grant, refusal(grant.request_id, Reason.CANCELLED, f"the target failed: {error}"))

    async def _read_unit(self, grant: Grant, unit: ReadUnit) -> None:
        route = self._route
        for name in untried(route.table, time.monotonic):
            if grant.is_ended:  # while this task waited; its blocks may be released by now
                return
            reader = None
            try:
                reader = await route.reader(name)
                await self._read_over(name, reader, grant, unit)
                return
            except CorruptRead as error:
                route.failed(name, str(error), reader)
                index, layer = divmod(error.region, len(unit.layers))
                block = unit.target_chunks[index] // self._plan.pairing.target.chunks_per_block
                where = f"layer {unit.layers[layer]} of block {block}"
                raise ChecksumMismatch(grant.request_id, f"{name}: {error}, first {where}") from error
            except TransportError as error:
                if grant.is_ended:  # then the read was stopped from here
                    return
                route.failed(name, str(error), reader)
                grant.retries += 1
                self._stats.retries += 1
                self._stats.path(name).retries += 1
        raise PeerLost(grant.request_id, f"no path to the source is left: {route.problems()}")

    async def _read_over(self, name: str, reader: Reader, grant: Grant, unit: ReadUnit) -> None:
        """Raises TransportError once nothing of the read can land any more."""
        plan = self._plan
        async with self._staging_lock if plan.staging is not None else contextlib.nullcontext():
            if grant.is_ended:
                return
            grant.check_generations(self._generation_of, grant.blocks_of(unit))  # before a byte is written
            copies, pieces = plan.read(unit.source_chunks, unit.target_chunks, unit.layers)
            arrival = ArrivingRead(plan.memory, pieces, plan.pairing.piece_bytes, unit.checksums, unit.is_checked)
            began = time.monotonic()
            try:
                with grant.busy(time.monotonic):
                    await self._wait_for(reader, grant, reader.read(copies, arrival), arrival)
            except TransferTimeout as error:
                self._route.table.failed(name, error.why, time.monotonic())  # the reader stays: its read is not over
                if plan.staging is not None:
                    self._abort()  # the staging buffer may still be written: the next connection has another
                raise
            if plan.staging is not None:
                with grant.busy(time.monotonic):
                    await self._convert(grant, unit)
        if grant.is_ended:
            return
        num_bytes, counters = copies.total_bytes, self._stats.path(name)
        grant.num_unverified -= 1
        grant.bytes_by_path[name] += num_bytes
        counters.num_bytes += num_bytes
        counters.seconds += self._route.ended(name, num_bytes, began, time.monotonic())
        counters.check_s += arrival.check_s
        self._stats.check_s += arrival.check_s
        if not grant.is_read:  # else the commit reports the rest
            self._send(Progress(nonce=grant.ticket.nonce, num_bytes=num_bytes))
        self.advance(grant)

    async def _wait_for(
        self, reader: Reader, grant: Grant, read: "asyncio.Future[None]", arrival: ArrivingRead
    ) -> None:
        """Wait for a read while bytes land. Raises TransferTimeout where it cannot be stopped either."""
        self._grants.track(grant, read, reader)
        seen, stall_s = -1, self._stall_s
        while not read.done() and arrival.num_landed > seen:
            seen = arrival.num_landed
            await asyncio.wait({read}, timeout=stall_s)
        if not read.done():
            reader.abandon(read)
            await asyncio.wait({read}, timeout=_ABANDON_GRACE_S)
        if not read.done():
            raise TransferTimeout(grant.request_id, f"a read got stuck for {stall_s:g} s and cannot be stopped")
        read.result()

    async def _convert(self, grant: Grant, unit: ReadUnit) -> None:
        """Cast a verified unit from the staging buffer into the pool; the blocks are not free until that has ended."""
        if grant.is_ended:
            return
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(None, self._plan.settle, unit.target_chunks, unit.layers)
        self._grants.track(grant, work, None)
        await asyncio.wait({work})
        work.result()
