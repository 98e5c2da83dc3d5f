"""The rows of `kvrelay verify` for pre-empted sequences: swapped, computed again, handed back to the prefill worker.

Every prompt is prefilled on P and decoded on D, which takes it off its batch after some tokens and forgets its cache, so that
nothing but the way in question can bring its KV back. Controls: changed bytes in swapped blocks are computed anew; with checks
off they change the answer.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.cluster.verify.rows import Verifier
from kvrelay.engine.scheduling.preemption_policy import PreemptionMode
from kvrelay.engine.scheduling.scheduler import StepPlan
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.service import WorkerService

if TYPE_CHECKING:
    from kvrelay.cluster.launch.local import LocalCluster

_AFTER_TOKENS = 4  # of output
_CONTROL = "3 blocks"  # the case that the controls spoil
Damage = Callable[[Engine], None]


class PreemptionRows:
    """Runs the rows with a decode worker in this process, whose scheduler it can reach into."""

    def __init__(self, verifier: Verifier, model_dir: Path, transport: str) -> None:
        self._verifier, self._model_dir, self._transport = verifier, model_dir, transport

    async def run(self) -> None:
        for way in PreemptionMode:
            async with self._cluster(way, "full") as (cluster, worker):
                await self._row(way, cluster, worker)
                if way is PreemptionMode.SWAP:
                    await self._rotten_row(cluster, worker)
                leaks = await cluster.pool_leaks()
                self._verifier.add_row(f"pre-empted: every block given back ({way})").claim(
                    holds=not leaks, note=leaks[0] if leaks else "free + cached = total"
                )
        async with self._cluster(PreemptionMode.SWAP, "off") as (cluster, worker):
            await self._control_row(cluster, worker)

    @asynccontextmanager
    async def _cluster(self, way: PreemptionMode, checks: str) -> AsyncIterator[tuple["LocalCluster", WorkerService]]:
        from kvrelay.cluster.launch.local import local_cluster

        self._verifier.tell(f"pre-emption: {way}")
        # drafts could end a stream before it is pre-empted
        settings = self._verifier.settings_over(self._transport, checks, preemption=str(way), speculation="off")
        async with local_cluster(settings, self._model_dir) as cluster:
            yield cluster, cluster.inside[0]

    async def _row(self, way: PreemptionMode, cluster: "LocalCluster", worker: WorkerService) -> None:
        row = self._verifier.add_row(f"pre-empted over the hop: {way}")
        with _preempting(worker) as count:
            for index, case in enumerate(self._verifier.cases):
                tokens, _ = await self._verifier.tokens_of(cluster, case, "remote")
                row.count(case.name, self._verifier.expected(index), tokens)
        num_so = (await worker.thread.call(lambda engine: engine.load())).preempted.get(str(way), 0)
        wanted = len(self._verifier.cases)
        row.claim(
            holds=num_so == count() == wanted,
            note=f"{num_so} of {wanted} sequences went this way, {count()} pre-empted",
        )

    async def _rotten_row(self, cluster: "LocalCluster", worker: WorkerService) -> None:
        row = self._verifier.add_row("pre-empted: changed swapped bytes refused")
        before = (await worker.thread.call(lambda engine: engine.load())).swap_corrupt_blocks
        tokens = await self._with_rot(cluster, worker)
        found = (await worker.thread.call(lambda engine: engine.load())).swap_corrupt_blocks - before
        row.count(_CONTROL, self._expected(), tokens)
        row.claim(holds=found > 0, note=f"{found} blocks found wrong, the sequence was computed anew")

    async def _control_row(self, cluster: "LocalCluster", worker: WorkerService) -> None:
        """The oracle itself can fail."""
        row = self._verifier.add_row("pre-empted: changed swapped bytes with checks off change the answer")
        changed = await self._with_rot(cluster, worker) != self._expected()
        row.claim(holds=changed, note="the answer changed" if changed else "UNDETECTED: the same answer from wrong KV")

    async def _with_rot(self, cluster: "LocalCluster", worker: WorkerService) -> list[int]:
        with _preempting(worker, _rot):
            tokens, _ = await self._verifier.tokens_of(cluster, self._verifier.cases[self._control_index()], "remote")
        return tokens

    def _control_index(self) -> int:
        return [case.name for case in self._verifier.cases].index(_CONTROL)

    def _expected(self) -> list[int]:
        return self._verifier.expected(self._control_index())


@contextmanager
def _preempting(worker: WorkerService, damage: Damage = lambda engine: None) -> Iterator[Callable[[], int]]:
    """Each request is taken off the worker's batch once, after some tokens, and its cache forgotten; yields a counter."""
    engine = worker.thread.engine
    assert engine is not None
    scheduler, seen = engine.scheduler, set[str]()
    plain = scheduler.schedule

    def schedule() -> StepPlan:
        for seq in list(scheduler.running):
            name = seq.request_id.partition("~")[0]  # the same however often it was handed back
            if seq.num_output >= _AFTER_TOKENS and name not in seen:
                seen.add(name)
                engine.preempt((seq,))
                damage(engine)
                engine.pool.reset_cache()
        return plain()

    scheduler.schedule = schedule  # type: ignore[method-assign]
    try:
        yield lambda: len(seen)
    finally:
        scheduler.schedule = plain  # type: ignore[method-assign]


def _rot(engine: Engine) -> None:
    """Change bytes of every swapped block: exponents, too."""
    area = engine.scheduler.preemptor.area
    assert area is not None
    for seq in engine.scheduler.swapped:
        for slot in seq.swapped.slots if seq.swapped is not None else ():
            view = area.slab.slot(slot)
            view[:] = bytes(byte ^ 0x5A for byte in view[:4096]) + bytes(view[4096:])
