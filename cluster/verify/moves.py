"""Rows about moves: each sequence goes to another decode worker with its KV, in the middle of its output."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

from kvrelay.cluster.verify.rows import Case, Must, Setup, VerifyRow, blocks_freed, during
from kvrelay.cluster.verify.suites import CONTROL, FLIPPED_BIT
from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.sequence import Sequence as EngineSequence
from kvrelay.engine.worker.service import WorkerService
from kvrelay.serve.requests import migration

MOVE_AFTER = 4  # tokens of output
POLL_S = 0.005


def _sequence(seq: EngineSequence) -> str:
    """The same for all attempts at it."""
    return seq.request_id.partition("~")[0]


@contextmanager
def leaving(worker: WorkerService, loop: asyncio.AbstractEventLoop, left: dict[str, str]) -> Iterator[None]:
    """The worker drains as soon as a sequence has MOVE_AFTER tokens, until it has none; then it takes requests again.

    Such a sequence goes no further there, but for the steps that send its KV. left: by sequence, the id of the attempt
    that is to move.
    """
    assert worker.thread.engine is not None
    scheduler = worker.thread.engine.scheduler
    schedule = scheduler.schedule

    async def drain() -> None:
        reports = worker._reports
        assert reports is not None
        try:
            await worker.drain(timeout_s=0.0)
            while len(worker.requests):
                await asyncio.sleep(POLL_S)
        finally:
            worker.requests.is_draining = False
            reports.announce()

    def start_draining() -> None:
        if not worker.requests.is_draining:
            draining.append(loop.create_task(drain()))

    def hold_then_schedule() -> StepPlan:
        for seq in scheduler.running:
            if seq.num_output >= MOVE_AFTER:
                left.setdefault(_sequence(seq), seq.request_id)
        if not any(left.get(_sequence(seq)) == seq.request_id for seq in scheduler.running):
            return schedule()
        loop.call_soon_threadsafe(start_draining)
        queued = (*scheduler.waiting, *scheduler.running)
        is_sending = any(left.get(_sequence(seq), seq.request_id) != seq.request_id for seq in queued)
        return schedule() if is_sending else StepPlan((), 0, ())

    draining: list[asyncio.Task[None]] = []
    with mock.patch.object(scheduler, "schedule", hold_then_schedule):
        yield
    for task in draining:
        task.cancel()


@during
async def moving(case: Case, *, num_failed: int = 0) -> AsyncIterator[None]:
    """Every sequence must move, after so many failures at least."""
    stats = case.cluster.dispatcher.stats.moves
    before, computed, left = Counter(stats.outcomes), stats.computed_tokens, dict[str, str]()
    with ExitStack() as stack:
        any_order = mock.patch.object(migration, "move_order", lambda running, move_s: list(range(len([*running]))))
        stack.enter_context(any_order)  # none stays because it is about to end
        for worker in case.cluster.inside:
            stack.enter_context(leaving(worker, asyncio.get_running_loop(), left))
        yield
    outcomes = {name: stats.outcomes[name] - before[name] for name in ("moved", "ended", "failed")}
    moved = outcomes["moved"] + outcomes["ended"]  # a short output ends on the other worker before its ingress knows
    note = f"{moved} of {len(case.answers)} sequences moved, {stats.computed_tokens - computed} tokens computed again"
    failed = f", {outcomes['failed']} moves failed" if outcomes["failed"] else ""
    case.result.check(note + failed, holds=moved == len(case.answers) and outcomes["failed"] >= num_failed)


def moves(transport: str) -> list[Setup]:
    """Moved equals disaggregated equals aggregated. Controls: KV that changes on the way."""
    name = "moved to another decode worker"
    disaggregated = VerifyRow(f"{name}, disaggregated", cold=True, during=(moving(),))
    aggregated = VerifyRow(f"{name}, aggregated", force="local", cold=True, during=(moving(),))
    # of a prompt that is computed where it decodes, only the move's KV travels
    refused = VerifyRow("moved: changed KV refused, moved again", Must.EQUAL, CONTROL, "local", cold=True)
    believed = replace(refused, name="moved: changed KV with checks off changes the answer", must=Must.CHANGE)
    refused = replace(refused, during=(moving(num_failed=1), FLIPPED_BIT))
    believed = replace(believed, during=(moving(), FLIPPED_BIT))
    rows = (disaggregated, aggregated, refused, blocks_freed("moved: every block freed"))
    undrafted = {"engine": {"speculation": "off"}}  # drafts could end an answer before it moves
    return [
        Setup("moves", rows, transport, overrides=undrafted, num_decode=2),
        Setup("moves, checks off", (believed,), transport, "off", undrafted, num_decode=2),
    ]
