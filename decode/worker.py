"""The decode worker: reserves blocks, receives and verifies KV, decodes; it prefills short prompts itself.

No other process writes this worker's blocks: it reads KV from the prefill worker into blocks that it reserved, and
decodes from them only after the whole transfer was verified.
"""

import asyncio
import logging
import math

import msgspec

from kvrelay.decode.target import KvTarget
from kvrelay.engine.step.config import Reservation
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.build import WorkerOptions
from kvrelay.engine.worker.ingresses import IngressLink, RequestTable
from kvrelay.engine.worker.role import WorkerParts
from kvrelay.engine.worker.thread import EngineProbeBuffers, EngineThread
from kvrelay.errors import TransferError
from kvrelay.grammar.compiler import CompiledGrammar
from kvrelay.kvtransfer.paths.selection import transports_for
from kvrelay.kvtransfer.protocol.messages import TransferResult, reason_word, span_attributes
from kvrelay.plane.messages import Manifest, Reserve, Reserved, SequenceRequest, Transferred, decode_manifest
from kvrelay.plane.reports import PairReport, PairsSeen
from kvrelay.plane.tls import ClusterTls
from kvrelay.types import Role

logger = logging.getLogger(__name__)

_MAX_WAIT_S = 3600.0


class Incoming:
    """Made on the worker's loop when Reserve arrives; ends when the sequence is in the batch, or never will be."""

    def __init__(self, link: IngressLink, request: SequenceRequest) -> None:
        loop = asyncio.get_running_loop()
        self.link, self.request = link, request
        self.has_ticket = False  # a transfer may write its blocks
        self._reserved: asyncio.Future[Reservation] = loop.create_future()
        self._committed: asyncio.Future[tuple[bytes, TransferResult]] = loop.create_future()

    @property
    def is_waiting(self) -> bool:
        """Without a reservation yet."""
        return not self._reserved.done()

    def reserved(self, reservation: Reservation) -> None:
        self._reserved.set_result(reservation)

    def committed(self, payload: bytes, result: TransferResult) -> None:
        """The transfer has ended well: every block is here and verified."""
        self.has_ticket = False
        if not self._committed.done():
            self._committed.set_result((payload, result))

    def failed(self, error: TransferError) -> None:
        """The transfer has ended badly."""
        self.has_ticket = False
        if not self._committed.done():
            self._committed.set_exception(error)
            self._committed.exception()  # retrieved, though a dropped request does not await it

    async def reservation(self, timeout_s: float) -> Reservation | None:
        """Wait for blocks; None when none became free in time. A timeout that is no number counts as 0."""
        try:
            async with asyncio.timeout(max(0.0, min(timeout_s, _MAX_WAIT_S))):
                return await self._reserved
        except TimeoutError:
            return None

    async def commit(self) -> tuple[bytes, TransferResult]:
        """Wait for the KV. Returns the prefill worker's manifest, as it came. Raises TransferError."""
        return await self._committed


def manifest_in(payload: bytes, request: SequenceRequest, vocab_size: int) -> Manifest:
    """The manifest, if it fits the request. Raises ValueError naming what does not."""
    try:
        manifest = decode_manifest(payload)
    except msgspec.DecodeError as error:
        raise ValueError(f"malformed manifest: {error}") from error
    if manifest.num_tokens != len(request.token_ids):
        raise ValueError(f"the manifest is of {manifest.num_tokens} tokens, not {len(request.token_ids)}")
    if manifest.position != request.num_output_tokens:
        raise ValueError(f"the manifest's token is output {manifest.position}, not {request.num_output_tokens}")
    if len(manifest.token_ids) != _num_first_tokens(request):
        raise ValueError(f"the manifest has {len(manifest.token_ids)} tokens, not {_num_first_tokens(request)}")
    if not all(0 <= token < vocab_size for token in manifest.token_ids):
        raise ValueError("a token of the manifest is outside the vocabulary")
    if not _are_candidates(manifest.candidates, request, vocab_size):
        raise ValueError("the manifest's candidates do not fit the request")
    return manifest


def _num_first_tokens(request: SequenceRequest) -> int:
    """Tokens that a prefill worker samples for this request."""
    if (group := request.group) is None:
        return 1
    return group.num_sequences if group.beams is None else 0


def _are_candidates(candidates: list[tuple[int, float]], request: SequenceRequest, vocab_size: int) -> bool:
    """Whether a beam search can begin with these; other requests have none."""
    if request.group is None or request.group.beams is None:
        return not candidates
    tokens = {token for token, _ in candidates}
    is_finite = all(-math.inf <= logprob <= 0.0 for _, logprob in candidates)
    return len(tokens) == len(candidates) > 0 and is_finite and 0 <= min(tokens) <= max(tokens) < vocab_size


class DecodeRole:
    """Serves Reserve. Lives on the worker's loop."""

    def __init__(
        self,
        options: WorkerOptions,
        epoch: str,
        tls: ClusterTls | None,
        engine: Engine,
        thread: EngineThread,
        requests: RequestTable,
    ) -> None:
        transfer = options.settings.transfer
        self.plane = KvTarget(
            engine.cache.memory,
            options.worker_id,
            epoch,
            engine.cache.fingerprint,
            options.secret,
            transfer,
            host=options.host,
            generation_of=engine.pool.generation,
            on_commit=self._on_commit,
            on_failed=self._on_failed,
            on_released=self._on_released,
            probe_buffers=EngineProbeBuffers(thread),
            tls=tls,
            transports=transports_for(tls),
        )
        self._vocab_size = engine.model.spec.vocab_size
        self._thread, self._requests = thread, requests
        self._incoming: dict[str, Incoming] = {}
        self._tasks: dict[Incoming, asyncio.Task[None]] = {}
        self._quarantined: dict[str, int] = {}  # the engine's keys, by request; touched on its thread only
        self._reported: list[PairReport] = []  # how fast KV comes from each connected prefill worker

    # ---- one request

    def handle(self, link: IngressLink, message: Reserve) -> None:
        """Have the engine reserve blocks; `_receive` goes on from there."""
        request, speed = message.request, message.prefill_tokens_per_s
        incoming = Incoming(link, request)

        def reserve(engine: Engine, grammar: CompiledGrammar | None) -> None:
            engine.reserve(request, prefill_tokens_per_s=speed, grammar=grammar)

        if self._requests.admit(link, request, reserve, self.drop, side=Role.DECODE):
            self._incoming[request.request_id] = incoming
            task = asyncio.create_task(self._receive(incoming, message.timeout_s), name=f"receive {request.request_id}")
            self._tasks[incoming] = task
            task.add_done_callback(lambda _: self._tasks.pop(incoming))

    async def _receive(self, incoming: Incoming, timeout_s: float) -> None:
        """One sequence's way into the batch: blocks are reserved, a ticket goes out, KV comes in, decoding begins."""
        request, request_id = incoming.request, incoming.request.request_id
        reservation = await incoming.reservation(timeout_s)
        if reservation is None:
            self._refuse(request_id, "full", "no blocks became free in time")
            return
        try:
            ticket = self._grant(incoming, reservation)
        except ValueError as error:  # a read may still write blocks of an earlier request of this id
            self._refuse(request_id, "duplicate", str(error))
            return
        self._requests.begin_span(request_id, "kv transfer", held_tokens=reservation.held_tokens)
        incoming.link.send(
            Reserved(
                request_id=request_id, ticket=ticket, held_tokens=reservation.held_tokens, waited_s=reservation.waited_s
            )
        )
        try:
            payload, result = await incoming.commit()
        except TransferError as error:
            del self._incoming[request_id]
            logger.warning("request %s: %s", request_id, error)
            self._requests.end_span(request_id, "kv transfer", error=str(error), reason=reason_word(error))
            self._requests.fail(request_id, "transfer", str(error))
            return
        del self._incoming[request_id]
        try:
            manifest = manifest_in(payload, request, self._vocab_size)
        except ValueError as error:
            logger.warning("request %s: %s", request_id, error)
            self._requests.fail(request_id, "transfer", str(error))
            self._abort(request_id)
            return
        incoming.link.send(
            Transferred(
                request_id=request_id,
                transport=result.transport,
                blocks=result.num_blocks,
                num_bytes=result.num_bytes,
                seconds=result.seconds,
                exposed_s=result.exposed_s,
            )
        )
        self._requests.end_span(request_id, "kv transfer", **span_attributes(result))
        self._requests.begin_span(request_id, "decode")
        token_ids, candidates = manifest.token_ids, manifest.candidates
        self._thread.post(lambda engine: engine.requests.activate(request_id, token_ids, candidates))

    def _grant(self, incoming: Incoming, reservation: Reservation) -> bytes:
        """A ticket for the reserved blocks. Raises ValueError."""
        ticket = self.plane.grant(
            reservation.request_id,
            reservation.first_block,
            reservation.target_blocks,
            reservation.num_blocks,
            num_tokens=len(incoming.request.token_ids),
        )
        incoming.has_ticket = True
        return ticket

    def _refuse(self, request_id: str, reason: str, message: str) -> None:
        """Give up a sequence that has no ticket."""
        self._incoming.pop(request_id, None)
        self._requests.refuse_added(request_id, reason, message)
        self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        self._thread.post(lambda engine: engine.abort(request_id))

    def on_reservations(self, reservations: list[Reservation]) -> None:
        for reservation in reservations:
            request_id = reservation.request_id
            incoming = self._incoming.get(request_id)
            if incoming is not None and incoming.is_waiting:
                incoming.reserved(reservation)
            else:  # it was dropped while it waited
                self._abort(request_id)

    # ---- the end of a transfer, as the target reports it

    def _on_commit(self, request_id: str, payload: bytes, result: TransferResult) -> None:
        incoming = self._incoming.get(request_id)
        if incoming is not None:
            incoming.committed(payload, result)
        else:
            self._abort(request_id)

    def _on_failed(self, request_id: str, error: TransferError) -> None:
        self._hold(request_id)
        incoming = self._incoming.get(request_id)
        if incoming is not None:
            incoming.failed(error)

    def _on_released(self, request_id: str) -> None:
        """No read can write its blocks any more. No effect for a request that is not held."""

        def release(engine: Engine) -> None:
            key = self._quarantined.pop(request_id, None)
            if key is not None:
                engine.requests.unquarantine(key)

        self._thread.post(release)

    def _hold(self, request_id: str) -> None:
        """End the sequence, but keep its blocks, which a read may still write, until they are released."""

        def hold(engine: Engine) -> None:
            key = engine.requests.quarantine(request_id)
            if key is not None:
                self._quarantined[request_id] = key

        self._thread.post(hold)

    # ---- the end of a request

    def drop(self, request_id: str, reason: str) -> None:
        incoming = self._incoming.pop(request_id, None)
        if incoming is not None and incoming in self._tasks:
            self._tasks[incoming].cancel()

    def release(self, request_id: str, reason: str) -> None:
        incoming = self._incoming.get(request_id)
        self.drop(request_id, reason)
        if incoming is not None and incoming.has_ticket:
            self._hold(request_id)
            self.plane.revoke(request_id, reason)
        else:
            self._abort(request_id)

    # ---- facts

    def changes(self) -> PairsSeen | None:
        """The connected prefill workers and the paths from each, where that differs from the last report.

        The engine is given what returning a sequence to prefill costs: over the slowest of the chosen paths.
        """
        pairs = self.plane.pairs()
        if pairs == self._reported:
            return None
        self._reported = pairs
        paths = [path for pair in pairs if pair.ok for path in pair.paths if path.is_chosen and path.bytes_per_s > 0]
        if paths:
            speed, latency_s = min(path.bytes_per_s for path in paths), max(path.latency_s for path in paths)
            self._thread.post(lambda engine: engine.requests.note_transfer_speed(speed, latency_s))
        return PairsSeen(reports=pairs)

    def subscribed(self) -> None:
        self._reported = []

    async def aclose(self) -> None:
        """End every transfer and stop listening for sources."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.plane.aclose()


async def start_target(parts: WorkerParts) -> DecodeRole:
    """A worker's target, which listens. Raises BackendUnavailable: a forced transport cannot be used."""
    role = DecodeRole(parts.options, parts.epoch, parts.tls, parts.engine, parts.thread, parts.requests)
    await role.plane.start()
    return role
