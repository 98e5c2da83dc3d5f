"""One run: clients, and beside them the faults of each part, one after the other; at the end everything must be back.

A part is harmed again once it is whole, so at any time a worker of each role lives. Kinds that overlap strike on and
on, however long the last ones last.
"""

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import psutil

from kvrelay.cluster.chaos import processes
from kvrelay.cluster.chaos.clients import REQUEST_S, ChaosClients
from kvrelay.cluster.chaos.cluster import PARTS, Cluster
from kvrelay.cluster.chaos.faults import FaultKind, NothingToHarm
from kvrelay.cluster.chaos.history import ClientStream, StreamHistory, silence_s
from kvrelay.cluster.chaos.schedule import PlannedFault, planned_faults
from kvrelay.cluster.errors import ClusterError

WHOLE_S = 300.0  # the longest wait for a part to be back: Serve starts nothing while its controller is down, too
POOLS_S = 60.0  # and for the pools' blocks, in the end
POLL_S = 0.5
SURE = 4  # looks in a row: each ingress has its own view, and any of them answers
SAMPLE_S = 5.0
FD_SLACK = 32


@dataclass(frozen=True, slots=True)
class StruckFault:
    """A fault and what came of it. Times in seconds, `at_s` since the run began."""

    kind: str
    at_s: float
    silence_s: float | None  # the longest of a stream that ran then; None: none did
    whole_s: float | None  # from when it was undone until the part was back; None: not within WHOLE_S


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process at one time, in seconds since the run began. `shared_bytes`: of `rss_bytes`, those of files and of
    shared memory, such as pools, which count in every process that maps them.
    """

    at_s: float
    pid: int
    name: str
    rss_bytes: int
    num_fds: int
    shared_bytes: int = 0


@dataclass(slots=True)
class ChaosObservations:
    """What a run has seen so far."""

    faults: list[StruckFault] = field(default_factory=list)
    ingress_kills_s: list[tuple[float, float]] = field(default_factory=list)
    samples: list[ProcessSample] = field(default_factory=list)
    shared_files: set[str] = field(default_factory=set)
    leaks: list[str] = field(default_factory=list)


class ChaosRun:
    """Harms a cluster while clients use it."""

    def __init__(
        self, cluster: Cluster, clients: ChaosClients, history: StreamHistory, clock: Callable[[], float]
    ) -> None:
        self.seen = ChaosObservations()
        self._cluster, self._clients, self._history, self._clock = cluster, clients, history, clock
        self._parts, self._looking = defaultdict[str, asyncio.Lock](asyncio.Lock), asyncio.Lock()
        self._looked_s, self._lacking = float("-inf"), set(PARTS)

    async def run(
        self, faults: Mapping[str, FaultKind], *, num_clients: int, seconds: float, rate: float, seed: int
    ) -> None:
        """`rate`: faults per second of the kinds that overlap together, and of the others together if every part
        recovered at once. Raises ClusterError: a part has no process.
        """
        alone, overlapping = (
            sorted({one.part for one in faults.values() if one.overlaps is own}) for own in (False, True)
        )
        first = await self._sample()
        sampling = asyncio.create_task(self._sample_on())
        load = asyncio.create_task(self._clients.run(num_clients))
        try:
            async with asyncio.TaskGroup() as group:
                for part in (*alone, *overlapping):
                    kinds = sorted(name for name, one in faults.items() if one.part == part)
                    mean_gap_s = len(alone if part in alone else overlapping) / rate
                    plan = planned_faults(part, kinds, mean_gap_s=mean_gap_s, seed=seed)
                    group.create_task(self._harm(plan, faults, self._clock() + seconds, group))
        except* ClusterError as errors:
            raise errors.exceptions[0] from None
        finally:
            self._clients.is_over = True
            await load
            sampling.cancel()
        self.seen.leaks += await self._pool_leaks()
        self.seen.leaks += fd_leaks(first, await self._sample())

    async def _harm(
        self, plan: Iterator[PlannedFault], faults: Mapping[str, FaultKind], end_s: float, group: asyncio.TaskGroup
    ) -> None:
        due_s = self._clock()
        for planned in plan:
            due_s += planned.gap_s
            await asyncio.sleep(max(min(due_s, end_s) - self._clock(), 0.0))
            if self._clock() >= end_s:
                return
            kind = faults[planned.kind]
            if kind.overlaps:
                group.create_task(self._suffer(kind, planned, group))
                continue
            async with AsyncExitStack() as held:
                for part in sorted((kind.part, *kind.also)):  # in one order, against deadlocks
                    await held.enter_async_context(self._parts[part])
                if self._clock() < end_s and not await self._suffer(kind, planned, group):
                    return
            due_s = self._clock()

    async def _suffer(self, kind: FaultKind, planned: PlannedFault, group: asyncio.TaskGroup) -> bool:
        """Whether the part is whole again. Recorded by `group`, once the silence is known."""
        before_s = self._clock()
        try:
            await kind.strike(planned.choice)
        except NothingToHarm:
            return True
        struck_s, running = self._clock(), [one for one in self._history.running.values() if one.is_streamed]
        if planned.kind == "kill-ingress":
            self.seen.ingress_kills_s.append((before_s, struck_s))
        if kind.is_held:
            try:
                await asyncio.sleep(planned.hold_s)
            finally:
                await asyncio.to_thread(kind.undo)
        whole_s = await self._until_whole(kind)
        group.create_task(self._record(planned.kind, struck_s, running, whole_s))
        return whole_s is not None

    async def _record(self, kind: str, struck_s: float, running: Sequence[ClientStream], whole_s: float | None) -> None:
        self.seen.faults.append(StruckFault(kind, struck_s, await self._silence(running, struck_s), whole_s))

    async def _until_whole(self, kind: FaultKind) -> float | None:
        begun_s = last_s = self._clock()
        good, parts = list[float](), {kind.part, *kind.also} & set(PARTS)
        while parts and self._clock() - begun_s < WHOLE_S:
            looked_s, lacking = await self._look()
            if looked_s > last_s:
                last_s = looked_s
                is_good = await asyncio.to_thread(kind.is_over) and not parts & lacking
                good = [*good, self._clock()] if is_good else []
                if len(good) >= SURE:
                    return good[0] - begun_s
            await asyncio.sleep(POLL_S)
        return None if parts else 0.0

    async def _look(self) -> tuple[float, set[str]]:
        """The time of the last look, at most POLL_S ago, and what was lacking then."""
        async with self._looking:
            if self._clock() - self._looked_s > POLL_S:
                now_s = self._clock()
                self._lacking = await asyncio.to_thread(self._cluster.lacking)
                self._looked_s = now_s
            return self._looked_s, self._lacking

    async def _silence(self, running: Sequence[ClientStream], struck_s: float) -> float | None:
        """The longest of these streams, once that is known."""
        found = list[float]()
        for stream in running:
            while (silence := silence_s(stream, struck_s)) is None and stream.end_s is None:
                if self._clock() > struck_s + REQUEST_S:
                    break
                await asyncio.sleep(POLL_S / 5)
            found += [] if silence is None else [silence]
        return max(found, default=None)

    # ---- what is left

    async def _sample_on(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            await self._sample()

    async def _sample(self) -> list[ProcessSample]:
        now_s = self._clock()
        found = await asyncio.to_thread(lambda: [one for pid in self._cluster.pids() if (one := sample(pid, now_s))])
        self.seen.samples += found
        pids = [one.pid for one in found]
        self.seen.shared_files |= await asyncio.to_thread(lambda: set().union(*map(processes.shared_files, pids)))
        return found

    async def _pool_leaks(self) -> list[str]:
        """Workers that do not have all of their blocks free or cached in the end."""
        end_s = self._clock() + POOLS_S
        while True:
            try:
                workers = (await asyncio.to_thread(self._cluster.status))["workers"]
                found = [line for one in workers if (line := pool_problem(one))]
            except ClusterError as error:
                found = [str(error)]
            if not found or self._clock() > end_s:
                return found
            await asyncio.sleep(POLL_S)


def sample(pid: int, now_s: float) -> ProcessSample | None:
    """None where it has gone."""
    try:
        process = psutil.Process(pid)
        memory, name = process.memory_info(), processes.short_name(pid)
        return ProcessSample(now_s, pid, name, memory.rss, process.num_fds(), memory.shared)
    except (psutil.Error, OSError):
        return None


def pool_problem(worker: Mapping[str, Any]) -> str:
    """What an idle worker's status shows as not given back; "" where free + cached = total."""
    if not worker["is_up"]:
        return f"{worker['worker_id']}: {worker['error']}"
    load = worker["load"]
    held = {name: load[name] for name in ("used_blocks", "leased_blocks", "quarantined_blocks") if load[name]}
    lost = load["total_blocks"] - load["free_blocks"] - load["used_blocks"]
    return f"{worker['worker_id']}: {held}, {lost} lost" if held or lost else ""


def fd_leaks(first: Sequence[ProcessSample], last: Sequence[ProcessSample]) -> list[str]:
    """Processes that have many more descriptors than at first."""
    before = {one.pid: one for one in first}
    return [
        f"process {one.pid}, {one.name}: {before[one.pid].num_fds} descriptors, then {one.num_fds}"
        for one in last
        if one.pid in before and one.num_fds > before[one.pid].num_fds + FD_SLACK
    ]


def shared_left(files: set[str]) -> list[str]:
    """Of these files in /dev/shm, those that are there after the cluster has ended."""
    return [f"shared memory {name}" for name in sorted(files) if os.path.exists(f"/dev/shm/{name}")]
