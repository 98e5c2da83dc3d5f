"""Moves running sequences, with their KV, off workers that stop or no longer decode.

The ingress that owns a sequence moves it. It reserves blocks on another decode worker while the sequence decodes on;
then it has the worker that is left prefill the sequence as it stood: nearly all of that is in its prefix cache, and the
KV travels as after any prefill. When the other worker has it, the stream goes on from there, and the sequence ends
where it was. Tokens that both sent are delivered once. A move that fails changes nothing, as long as the worker that is
left still runs: the sequence stays, and is tried again. A worker without room for the extra sequence ends the original
when the KV is asked for; should that move fail, the sequence is computed again elsewhere, like after any failure.

Beam searches stay: their results come at the end alone. Imports no HTTP and no sockets.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvrelay.plane import messages as wire
from kvrelay.plane.reports import LoadReport, WorkerInfo
from kvrelay.router.types import Decision, RouteRequest
from kvrelay.serve.requests.attempt import GroupOrder, SequenceAttempt
from kvrelay.serve.requests.retries import AttemptFailed
from kvrelay.serve.telemetry.moves import MoveRecord, MoveStats
from kvrelay.serve.telemetry.observer import RequestObserver
from kvrelay.serve.workers.membership import Placer
from kvrelay.serve.workers.worker_link import Links
from kvrelay.types import Role, sides

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 2
"""Moves from one worker by one ingress: each adds its last block's tokens to a step there, and a read to the target."""
RESERVE_S = 2.0  # for the other worker to have blocks; then a third is asked
MOVE_S = 20.0  # a move that takes longer is given up
RETRY_S = 0.5  # before a sequence that could not move is tried again
FIRST_MOVE_S = 0.1  # assumed until one was measured
_POLL_S = 0.05
_SMOOTHING = 0.2


@dataclass(frozen=True, slots=True)
class Running:
    """One sequence on a worker that is to be emptied."""

    remaining_tokens: int  # at most
    tpot_s: float  # 0: not known yet


def move_order(sequences: Iterable[Running], move_s: float) -> list[int]:
    """Which sequences move, as indices: those with the most left to do first.

    What will have ended before a move would be over stays.
    """
    found = [(one.remaining_tokens, index) for index, one in enumerate(sequences) if _outlasts(one, move_s)]
    return [index for _, index in sorted(found, key=lambda item: (-item[0], item[1]))]


def _outlasts(one: Running, move_s: float) -> bool:
    return one.remaining_tokens > 1 and (not one.tpot_s or one.remaining_tokens * one.tpot_s > move_s)


def is_crowded(load: LoadReport | None, info: WorkerInfo | None) -> bool:
    """Whether a worker may lack the room for a sequence that shares nearly all its blocks with one that runs there."""
    if load is None or info is None:
        return False
    taken = load.running + load.receiving
    return load.waiting > 0 or taken >= info.max_running or load.free_blocks <= 2 * taken


class Movable(Protocol):
    """What is used of a RequestDriver."""

    attempt: SequenceAttempt | None
    move: asyncio.Task[None] | None
    order: GroupOrder
    observer: RequestObserver

    def moving_request(self) -> wire.SequenceRequest:
        """What another decode worker is to go on with, under an id of its own."""

    def switch(self, attempt: SequenceAttempt) -> None:
        """Go on with this attempt."""


class Migrations:
    """Empties workers that drain. Lives on the ingress's loop."""

    def __init__(
        self, placer: Placer, links: Links, running: Collection[Movable], stats: MoveStats, clock: Callable[[], float]
    ) -> None:
        """running: every sequence that runs at this ingress."""
        self._placer, self._links, self._running, self._stats, self._clock = placer, links, running, stats, clock
        self._emptying: dict[str, asyncio.Task[None]] = {}  # by worker
        self._not_before_s: dict[Movable, float] = {}  # of those that could not move
        self.move_s = FIRST_MOVE_S  # recent mean
        self.is_enabled = True  # else sequences end where they run, or are computed again

    def on_draining(self, worker_id: str) -> None:
        """The worker takes no new sequences: move what it decodes. Idempotent."""
        if self.is_enabled and worker_id not in self._emptying and any(self._on(worker_id)):
            task = asyncio.get_running_loop().create_task(self._empty(worker_id), name=f"empty {worker_id}")
            self._emptying[worker_id] = task
            task.add_done_callback(lambda _: self._emptying.pop(worker_id))

    async def aclose(self) -> None:
        """End every move."""
        tasks = [*self._emptying.values(), *(one.move for one in self._running if one.move is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on(self, worker_id: str) -> list[Movable]:
        """The sequences that decode there, or will."""
        return [one for one in self._running if one.attempt is not None and one.attempt.decision.decode == worker_id]

    def _is_draining(self, worker_id: str) -> bool:
        link = self._links.get(worker_id)
        if link is None:
            return True  # a former member
        no_longer_decodes = link.info is not None and Role.DECODE not in sides(link.info.role)
        return no_longer_decodes or (link.load is not None and link.load.is_draining)

    async def _empty(self, worker_id: str) -> None:
        """Move the worker's sequences, a few at a time, until it runs none of them, or no longer drains."""
        logger.info("worker %s drains: %d sequences of this ingress run there", worker_id, len(self._on(worker_id)))
        while (there := self._on(worker_id)) and self._is_draining(worker_id):
            num_moving = sum(one.move is not None for one in there)
            for one in self._next(there, MOST_AT_ONCE - num_moving):
                one.move = asyncio.get_running_loop().create_task(self._move(one, worker_id))
            moving = [one.move for one in there if one.move is not None]
            if len(moving) < MOST_AT_ONCE:
                await asyncio.sleep(_POLL_S)
            else:
                await asyncio.wait(moving, return_when=asyncio.FIRST_COMPLETED)
        self._not_before_s = {one: at_s for one, at_s in self._not_before_s.items() if one in self._running}

    def _next(self, there: list[Movable], count: int) -> list[Movable]:
        now_s = self._clock()
        free = [one for one in there if self._may_move(one) and self._not_before_s.get(one, 0.0) <= now_s]
        states = [Running(one.order.remaining, one.observer.tpot_s) for one in free]
        return [free[index] for index in move_order(states, self.move_s)[: max(count, 0)]]

    @staticmethod
    def _may_move(one: Movable) -> bool:
        if one.move is not None or one.attempt is None or not one.attempt.is_decoding:
            return False
        group = one.attempt.request.group
        return group is None or group.beams is None

    # ---- one move

    async def _move(self, one: Movable, source: str) -> None:
        """One sequence, to the first worker that takes it."""
        before, record, outcome = one.attempt, None, "ended"
        assert before is not None
        excluded = frozenset({source})
        try:
            async with asyncio.timeout(MOVE_S):
                while True:
                    request = one.moving_request()
                    record = MoveRecord(self._stats, len(request.token_ids), self._clock)
                    decision = self._placer.place(_route(request, source, excluded))
                    if not isinstance(decision, Decision):
                        outcome = "failed"
                        return
                    submission = self._links.open(request.request_id)
                    attempt = SequenceAttempt(request, decision, submission, one.order, self._placer, record)
                    try:
                        await self._carry_over(one, before, attempt, source)
                    except AttemptFailed as failure:
                        outcome = "failed"
                        logger.info("request %s stays on %s: %s: %s", before.id, source, failure, failure.why)
                        if failure.worker_id == source or len(excluded) > 3 or not before.holds(source):
                            before.give_up(source, failure)
                            return
                        excluded |= {failure.worker_id}
                        continue
                    finally:
                        if one.attempt is not attempt:
                            attempt.close("not moved")
                    outcome = "moved" if one.attempt is attempt else "ended"
                    return
        except TimeoutError:
            outcome = "failed"
            before.give_up(source, AttemptFailed(source, "lost", f"no KV arrived within {MOVE_S:g} s"))
        except asyncio.CancelledError:
            if one in self._running:
                outcome = "failed"  # the sequence goes on: the worker that it leaves has failed
            raise
        finally:
            if one.move is asyncio.current_task():
                one.move = None
            self._count(one, record, outcome)

    async def _carry_over(self, one: Movable, before: SequenceAttempt, attempt: SequenceAttempt, source: str) -> None:
        """Reserve, send the KV, and switch. Raises AttemptFailed."""
        request = attempt.request
        ticket = await attempt.reserve(wire.Reserve(request=request, timeout_s=RESERVE_S))
        attempt.submit(request, ticket, moves=before.id)
        link = self._links.find(source)
        if link is not None and is_crowded(link.load, link.info):
            before.leave(source)  # behind the Prefill, on the same connection: its blocks are cached by then
        await attempt.arrived()
        if one.attempt is before and one.order.finish_reason is None:
            one.switch(attempt)
        else:
            before.wake()  # the last token came with the move

    def _count(self, one: Movable, record: MoveRecord | None, outcome: str) -> None:
        if record is not None:
            record.ended(outcome)
        if outcome == "moved" and record is not None:
            self.move_s += _SMOOTHING * (record.facts["seconds"] - self.move_s)
            one.observer.moved(record.target, **record.facts)
        elif outcome == "failed":
            self._not_before_s[one] = self._clock() + RETRY_S


def _route(request: wire.SequenceRequest, source: str, excluded: frozenset[str]) -> RouteRequest:
    return RouteRequest(
        request_id=request.request_id,
        block_hashes=tuple(request.block_hashes),
        num_tokens=len(request.token_ids),
        max_tokens=max(2, request.sampling.max_tokens - request.num_output_tokens),
        excluded=excluded,
        force="local",  # nothing is sent to a prefill worker
        width=max(1, request.num_sequences),
        session=request.hints.session,
        tenant=request.tenant,
        priority=request.priority,
        source=source,
    )
