"""The decode worker: reserves, receives, verifies, decodes; and prefills by itself what is short.

Nobody else writes this worker's blocks: it reads them from the prefill worker into blocks that it
reserved, and decodes from them only after the whole transfer was verified.
"""

import asyncio
import logging
import math
from typing import Any

import msgspec

from kvrelay.decode.target import KvTarget
from kvrelay.engine.step.engine import Engine, Reservation, StepResult
from kvrelay.engine.worker.probe_buffers import BlockLender
from kvrelay.engine.worker.service import Link, WorkerService
from kvrelay.errors import TransferError
from kvrelay.kvtransfer.paths.selection import transports_for
from kvrelay.kvtransfer.protocol.tickets import reason_word
from kvrelay.kvtransfer.protocol.types import TransferResult, TransferStats, span_attributes
from kvrelay.plane.messages import (
    PairReport,
    PairsSeen,
    Reserve,
    Reserved,
    SequenceRequest,
    Transferred,
    decode_manifest,
)
from kvrelay.types import Role

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 3600.0


class DecodeWorker(WorkerService):
    """One engine that takes sequences over after their first token."""

    role = Role.DECODE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._target: KvTarget | None = None
        self._expected: dict[str, SequenceRequest] = {}  # reserved or in line for it, not yet committed
        self._granted: set[str] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._quarantined: dict[str, int] = {}  # touched on the engine's thread only
        self._vocab_size = 0
        self._told: list[PairReport] = []

    # ---- the KV plane

    async def _start_transfers(self, engine: Engine) -> None:
        self._vocab_size = engine.model.spec.vocab_size
        self._target = KvTarget(
            engine.memory, self.worker_id, self.epoch, engine.fingerprint, self.secret, self.settings.transfer,
            host=self.host, generation_of=engine.pool.generation,
            on_commit=self._on_commit, on_failed=self._on_transfer_failed, on_released=self._on_released,
            lender=BlockLender(self.thread),
            tls=self.tls, transports=transports_for(self.settings.transfer.tcp_streams, self.tls),
        )  # fmt: skip
        await self._target.start()

    async def _stop_transfers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        if self._target is not None:
            await self._target.aclose()

    def _transports(self) -> list[str]:
        return list(self._target.transports) if self._target else []

    def _kv_port(self) -> int:
        return self._target.port if self._target else 0

    def _pairs(self) -> list[PairReport]:
        return self._target.pairs() if self._target else []

    def _news(self) -> PairsSeen | None:
        """The paths' speeds, when they differ from what was last told."""
        pairs = self._pairs()
        if pairs == self._told:
            return None
        self._told = pairs
        self._tell_hop(pairs)
        return PairsSeen(reports=pairs)

    def _tell_hop(self, pairs: list[PairReport]) -> None:
        """The engine is to know what it costs to hand a sequence back: over the slowest of the paths that are chosen."""
        paths = [path for pair in pairs if pair.ok for path in pair.paths if path.is_chosen and path.bytes_per_s > 0]
        if paths:
            speed, latency_s = min(path.bytes_per_s for path in paths), max(path.latency_s for path in paths)
            self.thread.post(lambda engine: engine.note_transfer_speed(speed, latency_s))

    def _subscribe(self, link: Link) -> None:
        self._told = []  # the newcomer has heard nothing
        super()._subscribe(link)

    @property
    def target(self) -> KvTarget:
        """The receiving end of the KV plane (fault injection hooks in there)."""
        assert self._target is not None
        return self._target

    def _transfer_stats(self) -> TransferStats | None:
        return self._target.stats() if self._target is not None else None

    # ---- reservations

    def _on_reserve(self, link: Link, message: Reserve) -> None:
        request = message.request
        request_id = request.request_id
        speed = message.prefill_tokens_per_s

        def reserve(engine: Engine) -> None:
            engine.reserve(request, prefill_tokens_per_s=speed)

        if self._admit(link, request, reserve) and self._loop is not None:
            self._expected[request_id] = request
            wait_s = max(0.0, min(message.timeout_s, _LONGEST_WAIT_S))  # not a number: 0
            self._timers[request_id] = self._loop.call_later(wait_s, self._on_wait_over, request_id)

    def _on_wait_over(self, request_id: str) -> None:
        self._timers.pop(request_id, None)
        if request_id in self._expected and request_id not in self._granted:
            self._refused(request_id, "full", "no blocks became free in time")
            self.thread.post(lambda engine: engine.abort(request_id))

    def _refused(self, request_id: str, reason: str, message: str) -> None:
        self._unexpect(request_id)
        super()._refused(request_id, reason, message)

    def _unexpect(self, request_id: str) -> None:
        self._expected.pop(request_id, None)
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    def _on_reservations(self, result: StepResult) -> None:
        for reservation in result.reservations:
            self._grant(reservation)

    def _grant(self, reservation: Reservation) -> None:
        request_id = reservation.request_id
        link = self._owners.get(request_id)
        if link is None or request_id not in self._expected:
            self.thread.post(lambda engine: engine.abort(request_id))  # it gave up while waiting
            return
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()
        try:
            ticket = self.target.grant(
                request_id, reservation.first_block, reservation.target_blocks, reservation.num_blocks,
                num_tokens=len(self._expected[request_id].token_ids),
            )  # fmt: skip
        except ValueError as error:  # the transport still holds blocks of an earlier request of this id
            self._refused(request_id, "duplicate", str(error))
            self.thread.post(lambda engine: engine.abort(request_id))
            return
        self._granted.add(request_id)
        self._begin_span(request_id, "kv transfer", held_tokens=reservation.held_tokens)
        link.send(
            Reserved(
                request_id=request_id, ticket=ticket, held_tokens=reservation.held_tokens, waited_s=reservation.waited_s
            )
        )

    # ---- the end of a transfer

    def _on_commit(self, request_id: str, payload: bytes, result: TransferResult) -> None:
        self._granted.discard(request_id)
        request = self._expected.get(request_id)
        self._unexpect(request_id)
        link = self._owners.get(request_id)
        if request is None or link is None:
            self.thread.post(lambda engine: engine.abort(request_id))
            return
        try:
            manifest = decode_manifest(payload)
        except msgspec.DecodeError as error:
            manifest = None
            logger.warning("request %s: malformed manifest: %s", request_id, error)
        if (
            manifest is None
            or manifest.num_tokens != len(request.token_ids)
            or manifest.position != request.num_output_tokens
            or len(manifest.token_ids) != _num_first_tokens(request)
            or not all(0 <= token < self._vocab_size for token in manifest.token_ids)
            or not _are_candidates(manifest.candidates, request, self._vocab_size)
        ):
            self._fail(request_id, "transfer", "the manifest does not fit the reservation", retryable=True)
            self.thread.post(lambda engine: engine.abort(request_id))
            return
        link.send(
            Transferred(
                request_id=request_id, transport=result.transport, blocks=result.num_blocks,
                num_bytes=result.num_bytes, seconds=result.seconds, exposed_s=result.exposed_s,
            )
        )  # fmt: skip
        self._end_span(request_id, "kv transfer", **span_attributes(result))
        self._begin_span(request_id, "decode")
        token_ids, candidates = manifest.token_ids, manifest.candidates
        self.thread.post(lambda engine: engine.activate(request_id, token_ids, candidates))

    def _on_transfer_failed(self, request_id: str, error: TransferError) -> None:
        logger.warning("request %s: %s", request_id, error)
        self._quarantine(request_id)
        self._end_span(request_id, "kv transfer", error=str(error), reason=reason_word(error))
        self._fail(request_id, "transfer", str(error), retryable=True)

    def _quarantine(self, request_id: str) -> None:
        """Keep the blocks taken until the transport can write them no more."""
        self._unexpect(request_id)
        keys = self._quarantined

        def quarantine(engine: Engine) -> None:
            key = engine.quarantine(request_id)
            if key is not None:
                keys[request_id] = key

        self.thread.post(quarantine)

    def _on_released(self, request_id: str) -> None:
        self._granted.discard(request_id)
        keys = self._quarantined

        def release(engine: Engine) -> None:
            key = keys.pop(request_id, None)
            if key is not None:
                engine.unquarantine(key)

        self.thread.post(release)

    def _release(self, request_id: str, reason: str) -> None:
        if request_id in self._granted:
            self._quarantine(request_id)
            self.target.revoke(request_id, reason)
        else:
            self._unexpect(request_id)
            super()._release(request_id, reason)


def _num_first_tokens(request: SequenceRequest) -> int:
    """Tokens that a prefill worker draws for this request."""
    if (group := request.group) is None:
        return 1
    return group.num_sequences if group.beams is None else 0


def _are_candidates(candidates: list[tuple[int, float]], request: SequenceRequest, vocab_size: int) -> bool:
    """Whether a beam search can begin with these; nothing else comes with any."""
    if request.group is None or request.group.beams is None:
        return not candidates
    tokens = {token for token, _ in candidates}
    is_finite = all(-math.inf <= logprob <= 0.0 for _, logprob in candidates)
    return len(tokens) == len(candidates) > 0 and is_finite and 0 <= min(tokens) <= max(tokens) < vocab_size
