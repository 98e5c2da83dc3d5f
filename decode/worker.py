"""The decode worker: reserves blocks, receives and verifies KV, decodes; it prefills short prompts itself.

No other process writes this worker's blocks: it reads KV from the prefill worker into blocks that it reserved, and
decodes from them only after the whole transfer was verified.
"""

import asyncio
import logging

from kvrelay.decode.path_speeds import PathSpeeds
from kvrelay.decode.quarantine import Quarantine
from kvrelay.decode.reservations import CommittedTransfer, Incoming, manifest_in
from kvrelay.decode.target import KvTarget
from kvrelay.engine.step.config import Reservation
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.build import WorkerOptions
from kvrelay.engine.worker.ingresses import IngressLink, RequestTable
from kvrelay.engine.worker.service import WorkerService
from kvrelay.engine.worker.thread import EngineProbeBuffers, EngineThread
from kvrelay.errors import TransferError
from kvrelay.kvtransfer.paths.selection import transports_for
from kvrelay.kvtransfer.protocol.tickets import TransferResult, TransferStats, reason_word, span_attributes
from kvrelay.plane.messages import (
    Pair,
    PairReport,
    PairsSeen,
    Prefill,
    Reserve,
    Reserved,
    TokenOutput,
    Transferred,
)
from kvrelay.plane.tls import ClusterTls
from kvrelay.types import Role

logger = logging.getLogger(__name__)


class DecodeWorker(WorkerService):
    """One engine that takes sequences over after their first token."""

    role = Role.DECODE

    def __init__(self, options: WorkerOptions) -> None:
        super().__init__(options)
        self._decode: DecodeRole | None = None

    async def _start_role(self, engine: Engine) -> "DecodeRole":
        self._decode = role = DecodeRole(self.options, self.epoch, self.tls, engine, self.thread, self.requests)
        await role.target.start()
        return role

    @property
    def target(self) -> KvTarget:
        """The receiving end of the KV plane (fault injection hooks in there)."""
        assert self._decode is not None
        return self._decode.target


class DecodeRole:
    """Serves Reserve. Lives on the worker's loop."""

    watches_outputs = False

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
        self.target = KvTarget(
            engine.cache.memory, options.worker_id, epoch, engine.cache.fingerprint, options.secret, transfer,
            host=options.host, generation_of=engine.pool.generation,
            on_commit=self._on_commit, on_failed=self._on_failed, on_released=self._on_released,
            probe_buffers=EngineProbeBuffers(thread), tls=tls, transports=transports_for(transfer.tcp_streams, tls),
        )  # fmt: skip
        self._worker_id, self._vocab_size = options.worker_id, engine.model.spec.vocab_size
        self._thread, self._requests = thread, requests
        self._incoming: dict[str, Incoming] = {}
        self._tasks: dict[Incoming, asyncio.Task[None]] = {}
        self._quarantine = Quarantine(thread)
        self._speeds = PathSpeeds(thread, self.target.pairs)

    # ---- one request

    def handle(self, link: IngressLink, message: Prefill | Reserve | Pair) -> None:
        match message:
            case Reserve():
                self._begin(link, message)
            case Prefill(request=request):
                why = f"{self._worker_id} does not prefill for others"
                self._requests.refuse(link, request.request_id, "invalid", why)
            case Pair():
                logger.warning("%s is asked to pair with %s, but sends no KV", self._worker_id, message.worker_id)

    def _begin(self, link: IngressLink, message: Reserve) -> None:
        """Have the engine reserve blocks; `_receive` goes on from there."""
        request, speed = message.request, message.prefill_tokens_per_s
        incoming = Incoming(link, request)

        def reserve(engine: Engine) -> None:
            engine.reserve(request, prefill_tokens_per_s=speed)

        if self._requests.admit(link, request, reserve, self.drop):
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
            commit = await incoming.commit()
        except TransferError as error:
            del self._incoming[request_id]
            logger.warning("request %s: %s", request_id, error)
            self._requests.end_span(request_id, "kv transfer", error=str(error), reason=reason_word(error))
            self._requests.fail(request_id, "transfer", str(error))
            return
        del self._incoming[request_id]
        try:
            manifest = manifest_in(commit.payload, request, self._vocab_size)
        except ValueError as error:
            logger.warning("request %s: %s", request_id, error)
            self._requests.fail(request_id, "transfer", str(error))
            self._abort(request_id)
            return
        incoming.link.send(_transferred(request_id, commit.result))
        self._requests.end_span(request_id, "kv transfer", **span_attributes(commit.result))
        self._requests.begin_span(request_id, "decode")
        token_ids, candidates = manifest.token_ids, manifest.candidates
        self._thread.post(lambda engine: engine.activate(request_id, token_ids, candidates))

    def _grant(self, incoming: Incoming, reservation: Reservation) -> bytes:
        """A ticket for the reserved blocks. Raises ValueError."""
        ticket = self.target.grant(
            reservation.request_id, reservation.first_block, reservation.target_blocks, reservation.num_blocks,
            num_tokens=len(incoming.request.token_ids),
        )  # fmt: skip
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
            incoming.committed(CommittedTransfer(payload, result))
        else:
            self._abort(request_id)

    def _on_failed(self, request_id: str, error: TransferError) -> None:
        self._quarantine.hold(request_id)
        incoming = self._incoming.get(request_id)
        if incoming is not None:
            incoming.failed(error)

    def _on_released(self, request_id: str) -> None:
        self._quarantine.release(request_id)

    # ---- the end of a request

    def drop(self, request_id: str, reason: str) -> None:
        incoming = self._incoming.pop(request_id, None)
        if incoming is not None and incoming in self._tasks:
            self._tasks[incoming].cancel()

    def release(self, request_id: str, reason: str) -> None:
        incoming = self._incoming.get(request_id)
        self.drop(request_id, reason)
        if incoming is not None and incoming.has_ticket:
            self._quarantine.hold(request_id)
            self.target.revoke(request_id, reason)
        else:
            self._abort(request_id)

    def on_output(self, output: TokenOutput) -> None:
        """Decoding is the engine's; nothing here waits for an output."""

    # ---- facts

    @property
    def transports(self) -> list[str]:
        return self.target.transports

    @property
    def kv_port(self) -> int:
        return self.target.port

    def pairs(self) -> list[PairReport]:
        return self.target.pairs()

    def stats(self) -> TransferStats:
        return self.target.stats()

    def changes(self) -> PairsSeen | None:
        return self._speeds.changes()

    def subscribed(self) -> None:
        self._speeds.report_again()

    async def aclose(self) -> None:
        """End every transfer and stop listening for sources."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.target.aclose()


def _transferred(request_id: str, result: TransferResult) -> Transferred:
    return Transferred(
        request_id=request_id,
        transport=result.transport,
        blocks=result.num_blocks,
        num_bytes=result.num_bytes,
        seconds=result.seconds,
        exposed_s=result.exposed_s,
    )
