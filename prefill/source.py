"""KvSource: the prefill worker's end of the KV plane. Announces; never writes memory of another process.

Blocks stay this worker's until commit() ended or cancel() was called. One that was re-used early is never decoded from:
either every byte must have the checksum of when it was ours, or the target asks, once it has read all, whether it is.
"""

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvrelay import errors
from kvrelay.errors import LayoutMismatch, TransferError, TransferRefused
from kvrelay.kvtransfer.mover.copy_plan import Offsets, Pairing, cut, pair
from kvrelay.kvtransfer.mover.mover import library
from kvrelay.kvtransfer.mover.verification import Chosen, PoolChecksums, chosen_regions, kind_of
from kvrelay.kvtransfer.paths.probes import ProbeBuffers
from kvrelay.kvtransfer.paths.selection import TRANSPORTS, PoolExports
from kvrelay.kvtransfer.protocol import messages as wire
from kvrelay.kvtransfer.protocol.messages import Reason, Ticket, TransferResult, TransferStats, reason_of, refusal
from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.kvtransfer.transports.topology import this_machine
from kvrelay.plane.reports import PairReport
from kvrelay.plane.tls import ClusterTls
from kvrelay.prefill.source_link import PAIR_TIMEOUT_S, WINDOW_BYTES, TargetAddress, TargetLink
from kvrelay.settings.cache import TransferSettings
from kvrelay.types import Fingerprint, KvMemory

logger = logging.getLogger(__name__)

ANNOUNCE_BYTES = 16 << 20  # about what one announcement covers; smaller ones cost more than they hide
DEADLINE_S = 30.0  # a transfer that is not committed this long after its prefill fails
_PROBE_BYTES = 8 << 20
_KINDS: dict[str, type[TransferError]] = {
    kind.__name__: kind
    for kind in (TransferRefused, errors.TransferTimeout, errors.LeaseExpired, errors.ChecksumMismatch, errors.PeerLost)
}


@dataclass(frozen=True, slots=True)
class _Announcement:
    first_chunk: int
    chunks: Offsets
    layers: range


class SourceTransfer:
    """One transfer of this source. Made by KvSource.open; used on its loop only. 15 attributes: the state
    of one transfer."""

    def __init__(self, source: "KvSource", ticket: Ticket, data: bytes, link: TargetLink, pairing: Pairing) -> None:
        self.ticket, self._pairing = ticket, pairing
        self._num_chunks, self._first_chunk = pairing.wanted(ticket.first_block, ticket.num_tokens)
        self._source, self._data, self._link = source, data, link
        self._outbox: asyncio.Queue[_Announcement | bytes] = asyncio.Queue()  # bounded by the ticket's regions
        self._generations: dict[int, int] = {}  # of every announced block, when it was announced
        self._outcome: asyncio.Future[TransferResult] = asyncio.get_running_loop().create_future()
        self._commit_at = 0.0
        self._num_ahead = 0  # bytes announced and not yet read, as the link's window counts them
        self._chosen: Chosen | None = None
        self._transcript = wire.Transcript(source.secret, ticket.nonce)
        self._task = asyncio.create_task(self._run(), name=f"kv transfer of {ticket.request_id}")

    @property
    def request_id(self) -> str:
        return self.ticket.request_id

    @property
    def is_on_gpu(self) -> bool:
        """Whether its blocks are final only once the GPU has done the work that was issued."""
        return self._source.memory.view is None

    def announce(self, first_index: int, block_ids: Sequence[int], layers: range) -> None:
        """Blocks first_index... of the sequence are final in `layers`; those that the target has are skipped.

        Never raises for a transfer that has ended; commit() raises. Raises ValueError on block ids
        outside this pool, or beyond the ticket.
        """
        if self._outcome.done():
            return
        layout, end = self._source.memory.layout, self._pairing.source
        last = -(-self.ticket.num_tokens // layout.block_size)
        if first_index + len(block_ids) > last:
            raise ValueError(f"{self.request_id}: announced beyond the {last} blocks of the ticket")
        each = end.chunks_per_block
        first = max(first_index * each, self._first_chunk)
        stop = min((first_index + len(block_ids)) * each, self._first_chunk + self._num_chunks)
        if stop <= first or not len(layers):
            return
        chunks = end.numbers(block_ids, first - first_index * each, stop - first)
        blocks = (chunks // each).tolist()
        if min(blocks) < 0 or max(blocks) >= layout.num_blocks:
            raise ValueError(f"{self.request_id}: announced a block that is not in the pool")
        for block in blocks:
            self._generations.setdefault(block, self._source.generation_of(block))
        self._outbox.put_nowait(_Announcement(first, chunks, layers))

    async def commit(self, payload: bytes) -> TransferResult:
        """Everything is announced; `payload` goes to the decode worker. Ends when that has the blocks.

        Raises: TransferRefused, TransferTimeout (after DEADLINE_S from here), PeerLost,
        ChecksumMismatch, LeaseExpired. In every case the blocks may be re-used afterwards.
        """
        self._commit_at = time.monotonic()
        self._outbox.put_nowait(payload)
        try:
            deadline_s = self._source.deadline_s
            done, _ = await asyncio.wait({self._outcome}, timeout=deadline_s)
        except asyncio.CancelledError:
            self.cancel("the commit was cancelled")
            raise
        if not done:
            timeout = errors.TransferTimeout(self.request_id, f"the target did not finish within {deadline_s:g} s")
            self._end(timeout, must_notify=True)
        return self._outcome.result()

    def cancel(self, reason: str = "cancelled") -> None:
        """Give up: notify the target, wait for nothing. Idempotent; no effect once ended."""
        if not self._outcome.done():
            self._end(refusal(self.request_id, Reason.CANCELLED, reason), must_notify=True)

    # ---- called by the link

    def on_message(self, message: wire.ToSource) -> None:
        match message:
            case wire.ReadDone():
                if self._holds_all():
                    self._link.notify(wire.Confirmed(nonce=self.ticket.nonce))
            case wire.Refusal(kind=kind, why=why):
                self._end(_KINDS.get(kind, TransferRefused)(self.request_id, why))
            case wire.Progress(num_bytes=num_bytes):
                self._give(min(num_bytes, self._num_ahead))
            case wire.Committed(transport=transport, num_bytes=num_bytes, seconds=seconds):
                exposed_s = time.monotonic() - self._commit_at
                blocks = len(self.ticket.target_blocks)
                self._end(TransferResult(transport, blocks, num_bytes, seconds, exposed_s))

    def on_lost(self, error: TransferError) -> None:
        self._end(error)

    def _holds_all(self) -> bool:
        """Whether every announced block was ours throughout; else the transfer ends."""
        for block, generation in self._generations.items():
            if self._source.generation_of(block) != generation:
                why = f"block {block} of the source was re-used"
                self._end(refusal(self.request_id, Reason.STALE_GENERATION, why), must_notify=True)
                return False
        return True

    # ---- inside

    async def _run(self) -> None:
        """Connect, open, then send announcements in order as their checksums become ready."""
        try:
            await self._link.ready(self.request_id)
            nonce, reply = self.ticket.nonce, self._link.reply
            if reply is not None and reply.checks == "sampled":
                self._chosen = chosen_regions(nonce, self._num_chunks, len(self._pairing.layers))
            await self._link.send(
                self.request_id, wire.Open(nonce=nonce, request_id=self.request_id, ticket=self._data)
            )
            while True:
                item = await self._outbox.get()
                if isinstance(item, bytes):
                    if not self._holds_all():  # while their checksums were computed
                        return
                    commit = wire.Commit(nonce=nonce, payload=item, seal=self._transcript.seal(item))
                    await self._link.send(self.request_id, commit)
                    return
                await self._send(item)
        except TransferError as error:
            self._end(error)
        except Exception as error:  # a process edge: the request fails, the worker lives
            logger.exception("request %s: its transfer failed", self.request_id)
            self._end(refusal(self.request_id, Reason.CANCELLED, f"the source failed: {error}"), must_notify=True)

    async def _send(self, item: _Announcement) -> None:
        """In pieces, so that the target reads the first while the next is hashed, and others get their turn."""
        chunk_bytes, most = self._pairing.chunk_bytes, self._source.announce_bytes(self._link.reply)
        for which, layers in cut(len(item.chunks), item.layers, chunk_bytes, most):
            chunks, first_chunk = item.chunks[which], item.first_chunk + which.start
            taken = await self._link.window.take(len(chunks) * len(layers) * chunk_bytes)
            self._num_ahead += taken  # not in one statement: what _give() returns meanwhile would be lost
            message = wire.Announce(
                nonce=self.ticket.nonce,
                first_chunk=first_chunk,
                chunks=chunks.tolist(),
                first_layer=layers.start,
                num_layers=len(layers),
                checksums=await self._checksums(first_chunk, chunks, layers),
            )
            self._transcript.add(wire.encode(message))
            await self._link.send(self.request_id, message)

    async def _checksums(self, first_chunk: int, chunks: Offsets, layers: range) -> bytes:
        if self._link.reply is None or self._link.reply.checks == "off":
            return b""
        end = self._pairing.source
        pieces = end.pieces_of(end.offsets(chunks), layers).reshape(-1, self._pairing.pieces_per_chunk)
        if self._chosen is not None:
            first = first_chunk - self._first_chunk
            pieces = pieces[self._chosen[first : first + len(chunks), layers.start : layers.stop].ravel()]
        return await self._source.checksums.packed(pieces, self._pairing.piece_bytes)

    def _give(self, num_bytes: int) -> None:
        self._num_ahead -= num_bytes
        self._link.window.give(num_bytes)

    def _end(self, outcome: TransferResult | TransferError, *, must_notify: bool = False) -> None:
        if self._outcome.done():
            return
        self._link.remove(self)
        self._give(self._num_ahead)
        if must_notify:
            why = outcome.why if isinstance(outcome, TransferError) else ""
            self._link.notify(wire.Cancel(nonce=self.ticket.nonce, reason=why))
        if isinstance(outcome, TransferResult):
            self._outcome.set_result(outcome)
        else:
            self._outcome.set_exception(outcome)
            self._outcome.exception()  # retrieved, though a canceller does not await it
            self._task.cancel()
        self._source.on_ended(self, outcome)


class KvSource:
    """Exports one pool and opens transfers out of it. One for each worker. 14 attributes: limits and parts.

    The pool is readable once `start` has ended; the first link to a decode worker awaits it.
    """

    port = 0  # it does not listen

    def __init__(
        self,
        memory: KvMemory,
        worker_id: str,
        epoch: str,
        fingerprint: Fingerprint,
        secret: bytes,
        settings: TransferSettings,
        *,
        host: str,
        generation_of: Callable[[int], int],
        probe_buffers: ProbeBuffers | None = None,
        transports: Mapping[str, Transport] = TRANSPORTS,
        tls: ClusterTls | None = None,
        lease_s: float = wire.LEASE_S,
        deadline_s: float = DEADLINE_S,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self.memory, self.settings, self.generation_of = memory, settings, generation_of
        self.secret, self.deadline_s = secret, deadline_s
        self._worker_id, self._epoch, self._fingerprint = worker_id, epoch, fingerprint
        self._starting = asyncio.Lock()
        self._open: set[SourceTransfer] = set()
        self._stats = TransferStats()
        self._probe_buffers = probe_buffers
        self.exports = PoolExports(memory, secret, host, transports)
        self.checksums = PoolChecksums(memory)
        self.links: dict[TargetAddress, TargetLink] = {}  # of each decode worker that KV was sent to, or was paired
        self._connect = partial(TargetLink, secret=secret, tls=tls, lease_s=lease_s, window_bytes=window_bytes)

    async def _hello(self) -> wire.Hello:
        """What a link sends first. Raises BackendUnavailable."""
        await self.start()
        return wire.Hello(
            protocol=wire.TRANSFER_PROTOCOL,
            worker_id=self._worker_id,
            epoch=self._epoch,
            fingerprint=self._fingerprint,
            topology=this_machine(),
            device=self.memory.device,
            layout=self.memory.layout,
            checksums=kind_of(self.memory, self.settings.checks),
            offers=self.exports.offers(),
        )

    async def start(self) -> None:
        """Make the pool readable, if it is not. Raises BackendUnavailable when a forced transport cannot be used."""
        async with self._starting:
            if self.exports.exporters:
                return
            await asyncio.to_thread(this_machine)  # known from then on
            await asyncio.to_thread(library)  # compiled now, not for the first announcement
            await self.exports.start(self.settings.transport)

    async def aclose(self) -> None:
        """Cancel what is open, close connections, stop exporting."""
        for transfer in list(self._open):
            transfer.cancel("the source is shutting down")
        for link in list(self.links.values()):
            await link.aclose()
        await self.exports.aclose()
        await self.checksums.aclose()

    @property
    def transports(self) -> list[str]:
        """Names of the transports on offer, best first."""
        return list(self.exports.exporters)

    def announce_bytes(self, reply: wire.HelloReply | None) -> int:
        """About what one announcement to this target covers: a turn of its transport at least."""
        transport = None if reply is None else self.exports.transports.get(reply.transport)
        return ANNOUNCE_BYTES if transport is None else max(ANNOUNCE_BYTES, transport.turn_bytes)

    def stats(self) -> TransferStats:
        """Counts so far, as a copy."""
        stats = copy.deepcopy(self._stats)
        stats.open_transfers, stats.check_s = len(self._open), self.checksums.seconds
        return stats

    def open(self, request_id: str, ticket: bytes) -> SourceTransfer:
        """Begin the transfer that `ticket` admits; connects in the background.

        Raises TransferRefused: bad_mac, out_of_range, used, unknown (another request's), or
        fingerprint with the field that differs.
        """
        try:
            content = wire.open_ticket(ticket, self.secret)
            if content.request_id != request_id:
                raise refusal(request_id, Reason.UNKNOWN, f"the ticket is for {content.request_id}")
            pairing = self._pair_with(content)
            if any(transfer.ticket.nonce == content.nonce for transfer in self._open):
                raise refusal(request_id, Reason.USED, "a transfer with this ticket is open")
        except TransferRefused as error:
            self._stats.refuse(str(reason_of(error)))
            raise TransferRefused(request_id, error.why) from None
        link = self._link_to(
            TargetAddress(content.target_worker, content.target_epoch, content.target_host, content.target_port)
        )
        transfer = SourceTransfer(self, content, ticket, link, pairing)
        link.add(transfer)
        self._open.add(transfer)
        self.exports.add_busy(1)
        return transfer

    def _pair_with(self, ticket: Ticket) -> Pairing:
        """Raises TransferRefused (fingerprint) naming the field that forbids the transfer."""
        convert_dtype = self.settings.convert_dtype
        if difference := self._fingerprint.incompatibility(ticket.fingerprint, convert_dtype=convert_dtype):
            raise refusal(ticket.request_id, Reason.FINGERPRINT, f"{difference}; {difference.remedy}")
        try:
            return pair(self.memory.layout, ticket.layout)
        except LayoutMismatch as error:
            raise refusal(ticket.request_id, Reason.FINGERPRINT, str(error)) from error

    def _link_to(self, address: TargetAddress) -> TargetLink:
        """The link to this decode worker; a new one connects in the background."""
        if address not in self.links:
            self.links[address] = link = self._connect(address, self._hello, on_closed=self._forget)
            link.start()
        return self.links[address]

    def _forget(self, address: TargetAddress) -> None:
        self.links.pop(address, None)

    async def pair(self, address: TargetAddress, *, is_anew: bool = False) -> PairReport:
        """Connect to a decode worker, compare fingerprints and probe every path (again, when `is_anew`).

        Never raises TransferError.
        """
        link = self._link_to(address)
        try:
            async with asyncio.timeout(PAIR_TIMEOUT_S):
                await link.ready("pairing")
                if is_anew or not link.paths:
                    await self._probe(link)
        except (TransferError, TimeoutError) as error:
            return link.report(self._worker_id, error)
        return link.report(self._worker_id)

    async def _probe(self, link: TargetLink) -> None:
        """With about _PROBE_BYTES of blocks, at most a sixteenth of the pool, at least one."""
        layout, blocks = self.memory.layout, list[int]()
        if self._probe_buffers is not None:
            count = max(1, min(_PROBE_BYTES // layout.block_bytes, layout.num_blocks // 16))
            blocks = await self._probe_buffers.take(count)
        self.exports.add_busy(1)
        try:
            checksums = b""
            if blocks and link.reply is not None and link.reply.checks != "off":
                pairing = pair(layout, link.reply.layout)
                pieces = pairing.source.pieces_of(pairing.source.chunks(blocks), pairing.layers)
                pieces = pieces.reshape(-1, pairing.pieces_per_chunk)
                checksums = await self.checksums.packed(pieces, pairing.piece_bytes)
            await link.probe(blocks, checksums)
        finally:
            self.exports.add_busy(-1)
            if self._probe_buffers is not None:
                self._probe_buffers.put_back(blocks)

    def pairs(self) -> list[PairReport]:
        """The decode workers that this one is connected to, with what was probed."""
        return [link.report(self._worker_id) for link in self.links.values()]

    def on_ended(self, transfer: SourceTransfer, outcome: TransferResult | TransferError) -> None:
        """A transfer has ended (called by it, once)."""
        self._open.discard(transfer)
        self.exports.add_busy(-1)
        if isinstance(outcome, TransferResult):
            self._stats.count(outcome)
            counters = self._stats.path(outcome.transport)
            counters.num_bytes += outcome.num_bytes
            counters.seconds += outcome.seconds
            counters.exposed_s += outcome.exposed_s
            return
        if isinstance(outcome, errors.LeaseExpired):
            self._stats.expired_leases += 1
        reason = reason_of(outcome) if isinstance(outcome, TransferRefused) else type(outcome).__name__
        if reason is not Reason.CANCELLED:
            self._stats.refuse(str(reason))
