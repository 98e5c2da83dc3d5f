"""KvSource: the prefill worker's end of the KV plane. Announces; never writes anyone's memory.

Blocks stay this worker's until commit() ended or cancel() was called; the target's last step
asks whether they still were, so a block that was let go of early is never decoded from.
"""

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvrelay.errors import (
    BackendUnavailable,
    ChecksumMismatch,
    LayoutMismatch,
    LeaseExpired,
    PeerLost,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from kvrelay.kvtransfer.mover.mover import Receipt, hash_in_place, library
from kvrelay.kvtransfer.mover.mover_thread import MoverThread
from kvrelay.kvtransfer.paths.discovery import this_machine
from kvrelay.kvtransfer.paths.selection import TRANSPORTS, offered
from kvrelay.kvtransfer.plans.copy_plan import Offsets, Pairing, cut, pair
from kvrelay.kvtransfer.protocol.check_sampling import Chosen, chosen_regions
from kvrelay.kvtransfer.protocol.checksums import Checksums, kind_of, pack
from kvrelay.kvtransfer.protocol.chunk_checksums import checksums_of_atoms
from kvrelay.kvtransfer.protocol.grants import atoms_wanted
from kvrelay.kvtransfer.protocol.messages import (
    Announce,
    Cancel,
    Commit,
    Committed,
    Confirmed,
    Hello,
    Offer,
    Open,
    Progress,
    ReadDone,
    Refusal,
    ToSource,
    encode,
)
from kvrelay.kvtransfer.protocol.tickets import (
    REMEDIES,
    TRANSFER_PROTOCOL,
    Reason,
    Ticket,
    Transcript,
    open_ticket,
    reason_of,
    refusal,
)
from kvrelay.kvtransfer.protocol.types import Lender, PairReport, TransferResult, TransferStats
from kvrelay.kvtransfer.reads.probes import num_probe_blocks
from kvrelay.kvtransfer.reads.receive_plan import wire_layout
from kvrelay.kvtransfer.transports.base import Exporter, Transport
from kvrelay.kvtransfer.transports.copying import INLINE_BYTES
from kvrelay.plane.tls import ClusterTls
from kvrelay.prefill.source_link import TargetAddress, TargetLink
from kvrelay.settings.transfer import TransferSettings
from kvrelay.types import Fingerprint, KvLayout, KvMemory

logger = logging.getLogger(__name__)

ANNOUNCE_BYTES = 16 << 20  # about what one announcement covers; smaller ones cost more than they hide
_PAIR_TIMEOUT_S = 60.0
_LOST_REMEDY = "see whether the decode worker runs, and whether its KV port can be reached from here"
_KINDS: dict[str, type[TransferError]] = {
    kind.__name__: kind for kind in (TransferRefused, TransferTimeout, LeaseExpired, ChecksumMismatch, PeerLost)
}


@dataclass(frozen=True, slots=True)
class _Announcement:
    first_atom: int
    atoms: Offsets
    layers: range  # the model's numbers


class SourceTransfer:
    """One transfer of this source. Made by KvSource.open; used on its loop only."""

    def __init__(self, source: "KvSource", ticket: Ticket, data: bytes, link: TargetLink, pairing: Pairing) -> None:
        self.ticket, self._pairing = ticket, pairing
        self._num_atoms, self._first_atom = atoms_wanted(pairing, ticket)
        self._source, self._data, self._link = source, data, link
        self._outbox: asyncio.Queue[_Announcement | bytes] = asyncio.Queue()  # bounded by the ticket's regions
        self._generations: dict[int, int] = {}  # of every announced block, when it was announced
        self._outcome: asyncio.Future[TransferResult] = asyncio.get_running_loop().create_future()
        self._commit_at = 0.0
        self._num_ahead = 0  # bytes announced and not yet read, as the link's window counts them
        self._chosen: Chosen | None = None
        self._transcript = source.transcript(ticket.nonce)
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

        Never raises for a transfer that has ended; commit() tells. Raises ValueError on block ids
        outside this pool, or beyond the ticket.
        """
        if self._outcome.done():
            return
        layout, end = self._source.memory.layout, self._pairing.source
        last = -(-self.ticket.num_tokens // layout.block_size)
        if first_index + len(block_ids) > last:
            raise ValueError(f"{self.request_id}: announced beyond the {last} blocks of the ticket")
        each = end.atoms_per_block
        first = max(first_index * each, self._first_atom)
        stop = min((first_index + len(block_ids)) * each, self._first_atom + self._num_atoms)
        if stop <= first or not len(layers):
            return
        atoms = end.numbers(block_ids, first - first_index * each, stop - first)
        blocks = (atoms // each).tolist()
        if min(blocks) < 0 or max(blocks) >= layout.num_blocks:
            raise ValueError(f"{self.request_id}: announced a block that is not in the pool")
        for block in blocks:
            self._generations.setdefault(block, self._source.generation_of(block))
        of_model = range(layout.first_layer + layers.start, layout.first_layer + layers.stop)
        self._outbox.put_nowait(_Announcement(first, atoms, of_model))

    async def commit(self, payload: bytes) -> TransferResult:
        """Everything is announced; `payload` goes to the decode worker. Ends when that has the blocks.

        Raises: TransferRefused, TransferTimeout (after deadline_s from here), PeerLost,
        ChecksumMismatch, LeaseExpired. In every case the blocks may be re-used afterwards.
        """
        self._commit_at = time.monotonic()
        self._outbox.put_nowait(payload)
        try:
            deadline_s = self._source.settings.deadline_s
            done, _ = await asyncio.wait({self._outcome}, timeout=deadline_s)
        except asyncio.CancelledError:
            self.cancel("the commit was cancelled")
            raise
        if not done:
            late = TransferTimeout(self.request_id, f"the target did not finish within {deadline_s:g} s")
            self._end(late, is_told=True)
        return self._outcome.result()

    def cancel(self, reason: str = "cancelled") -> None:
        """Give up: tell the target, wait for nothing. Idempotent; no effect once ended."""
        self._end(refusal(self.request_id, Reason.CANCELLED, reason), is_told=True)

    # ---- called by the link

    def on_message(self, message: ToSource) -> None:
        match message:
            case ReadDone():
                self._confirm()
            case Refusal(kind=kind, why=why):
                self._end(_KINDS.get(kind, TransferRefused)(self.request_id, why))
            case Progress(num_bytes=num_bytes):
                self._give(min(num_bytes, self._num_ahead))
            case Committed(transport=transport, num_bytes=num_bytes, seconds=seconds):
                exposed_s = time.monotonic() - self._commit_at
                blocks = len(self.ticket.target_blocks)
                self._end(TransferResult(transport, blocks, num_bytes, seconds, exposed_s))

    def on_lost(self, error: TransferError) -> None:
        self._end(error)

    def _confirm(self) -> None:
        """The target has read everything: say so only if every announced block was ours throughout."""
        for block, generation in self._generations.items():
            if self._source.generation_of(block) != generation:
                why = f"block {block} of the source was re-used"
                self._end(refusal(self.request_id, Reason.STALE_GENERATION, why), is_told=True)
                return
        self._link.tell(Confirmed(nonce=self.ticket.nonce))

    # ---- inside

    async def _run(self) -> None:
        """Connect, open, then send announcements in order as their checksums become ready."""
        try:
            await self._link.ready(self.request_id)
            nonce, reply = self.ticket.nonce, self._link.reply
            if reply is not None and reply.checks == "sampled":
                num_layers = len(self._pairing.overlap.layers)
                self._chosen = chosen_regions(nonce, num_layers, self._num_atoms, reply.sampled_share)
            await self._link.send(self.request_id, Open(nonce=nonce, request_id=self.request_id, ticket=self._data))
            while True:
                item = await self._outbox.get()
                if isinstance(item, bytes):
                    commit = Commit(nonce=nonce, payload=item, seal=self._transcript.seal(item))
                    await self._link.send(self.request_id, commit)
                    return
                await self._send(item)
        except TransferError as error:
            self._end(error)
        except Exception as error:  # a process edge: the request fails, the worker lives
            logger.exception("transfer of %s failed", self.request_id)
            self._end(refusal(self.request_id, Reason.CANCELLED, f"the source failed: {error}"), is_told=True)

    async def _send(self, item: _Announcement) -> None:
        """In pieces, so that the target reads the first while the next is hashed, and others get their turn."""
        atom_bytes = self._pairing.atom_bytes
        for which, layers in cut(len(item.atoms), item.layers, atom_bytes, ANNOUNCE_BYTES):
            atoms, first_atom = item.atoms[which], item.first_atom + which.start
            taken = await self._link.window.take(len(atoms) * len(layers) * atom_bytes)
            self._num_ahead += taken  # not in one statement: what is given back meanwhile would be lost
            message = Announce(
                nonce=self.ticket.nonce, first_atom=first_atom, atoms=atoms.tolist(), first_layer=layers.start,
                num_layers=len(layers), checksums=await self._checksums(first_atom, atoms, layers),
            )  # fmt: skip
            self._transcript.add(encode(message))
            await self._link.send(self.request_id, message)

    async def _checksums(self, first_atom: int, atoms: Offsets, layers: range) -> bytes:
        if self._link.reply is None or self._link.reply.checks == "off":
            return b""
        end = self._pairing.source
        pieces = end.pieces_of(end.offsets(atoms), layers).reshape(-1, self._pairing.pieces_per_atom)
        if self._chosen is not None:
            first_layer, first = self._pairing.overlap.layers.start, first_atom - self._first_atom
            rows = slice(layers.start - first_layer, layers.stop - first_layer)
            pieces = pieces[self._chosen[rows, first : first + len(atoms)].ravel()]
        return await self._source.checksums(pieces, self._pairing.piece_bytes)

    def _give(self, num_bytes: int) -> None:
        self._num_ahead -= num_bytes
        self._link.window.give(num_bytes)

    def _end(self, outcome: TransferResult | TransferError, *, is_told: bool = False) -> None:
        if self._outcome.done():
            return
        self._link.remove(self)
        self._give(self._num_ahead)
        if is_told:
            why = outcome.why if isinstance(outcome, TransferError) else ""
            self._link.tell(Cancel(nonce=self.ticket.nonce, reason=why))
        if isinstance(outcome, TransferResult):
            self._outcome.set_result(outcome)
        else:
            self._outcome.set_exception(outcome)
            self._outcome.exception()  # seen: whoever cancels need not ask
            self._task.cancel()
        self._source.on_ended(self, outcome)


class KvSource:
    """Exports one pool and opens transfers out of it. One for each prefill worker."""

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
        lender: Lender | None = None,
        transports: Mapping[str, Transport] = TRANSPORTS,
        tls: ClusterTls | None = None,
    ) -> None:
        self.memory, self.settings, self.generation_of, self.lender = memory, settings, generation_of, lender
        self._tls = tls
        self._worker_id, self._epoch, self._fingerprint = worker_id, epoch, fingerprint
        self._secret, self._host, self._transports = secret, host, transports
        self._exporters: dict[str, Exporter] = {}
        self._links: dict[TargetAddress, TargetLink] = {}
        self._open: set[SourceTransfer] = set()
        self._mover = MoverThread()
        self._hasher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-checksums")  # where there is no mover
        self._stats = TransferStats()

    async def start(self) -> None:
        """Make the pool readable. Raises BackendUnavailable when a forced transport cannot be used."""
        await asyncio.to_thread(this_machine)  # known from then on
        await asyncio.to_thread(library)  # compiled now, not for the first announcement
        for name in offered(self.settings.transport, self.memory, self._transports):
            exporter = self._transports[name].make_exporter(self.memory, self._secret, self._host)
            try:
                await exporter.start()
            except BackendUnavailable as error:
                if self.settings.transport != "auto":
                    raise
                logger.warning("KV transport %s is left out: %s", name, error.why)
                continue
            self._exporters[name] = exporter
        if not self._exporters:
            raise BackendUnavailable("KV transport", "no transport could be started")

    async def aclose(self) -> None:
        """Cancel what is open, close connections, stop exporting."""
        for transfer in list(self._open):
            transfer.cancel("the source is shutting down")
        for link in list(self._links.values()):
            await link.aclose()
        for exporter in self._exporters.values():
            await exporter.aclose()
        self._exporters.clear()
        await self._mover.aclose()
        self._hasher.shutdown(wait=False)

    @property
    def transports(self) -> list[str]:
        """Names of the transports on offer, best first."""
        return list(self._exporters)

    def stats(self) -> TransferStats:
        """Counts so far, as a copy."""
        stats = copy.deepcopy(self._stats)
        stats.open_transfers = len(self._open)
        return stats

    def open(self, request_id: str, ticket: bytes) -> SourceTransfer:
        """Begin the transfer that `ticket` admits; connects in the background.

        Raises TransferRefused: bad_mac, out_of_range, used, unknown (another request's), or
        fingerprint with the field that differs.
        """
        try:
            content = open_ticket(ticket, self._secret)
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
        self._tell_exporters()
        return transfer

    def _pair_with(self, ticket: Ticket) -> Pairing:
        """Raises TransferRefused (fingerprint) naming the field that forbids the transfer."""
        convert_dtype = self.settings.convert_dtype
        if difference := self._fingerprint.incompatibility(ticket.fingerprint, convert_dtype=convert_dtype):
            raise refusal(ticket.request_id, Reason.FINGERPRINT, f"{difference}; {difference.remedy}")
        layout = self.memory.layout
        try:
            return pair(layout, wire_layout(ticket.layout, layout.dtype))
        except LayoutMismatch as error:
            raise refusal(ticket.request_id, Reason.FINGERPRINT, str(error)) from error

    def _link_to(self, address: TargetAddress) -> TargetLink:
        if address not in self._links:
            link = TargetLink(
                address, self._hello(), self._secret, self.settings, lambda link: self._forget(address, link),
                tls=self._tls,
            )  # fmt: skip
            self._links[address] = link
            link.start()
        return self._links[address]

    def _forget(self, address: TargetAddress, link: TargetLink) -> None:
        if self._links.get(address) is link:
            del self._links[address]

    def _hello(self) -> Hello:
        return Hello(
            protocol=TRANSFER_PROTOCOL, worker_id=self._worker_id, epoch=self._epoch, fingerprint=self._fingerprint,
            topology=this_machine(), device=self.memory.device, layout=self.memory.layout,
            checksums=kind_of(self.memory, self.settings.checks),
            offers=[Offer(name, exporter.describe()) for name, exporter in self._exporters.items()],
        )  # fmt: skip

    # ---- pairing

    async def pair(self, address: TargetAddress, *, is_anew: bool = False) -> PairReport:
        """Connect to a decode worker, compare fingerprints and probe every path (again, when `is_anew`).

        Never raises TransferError.
        """
        link = self._link_to(address)
        try:
            async with asyncio.timeout(_PAIR_TIMEOUT_S):
                await link.ready("pairing")
                if is_anew or not link.paths:
                    await self._probe(link)
        except (TransferError, TimeoutError) as error:
            return self._unpaired(address, error, link.remedy)
        return PairReport(
            source=self._worker_id, target=address.worker, target_epoch=address.epoch, ok=True, paths=link.paths
        )

    def _unpaired(self, address: TargetAddress, error: TransferError | TimeoutError, remedy: str) -> PairReport:
        reason = reason_of(error) if isinstance(error, TransferRefused) else None
        detail = error.why if isinstance(error, TransferError) else f"it did not answer within {_PAIR_TIMEOUT_S:g} s"
        return PairReport(
            source=self._worker_id, target=address.worker, target_epoch=address.epoch, ok=False,
            reason=str(reason or type(error).__name__),
            detail=detail.removeprefix(f"{reason}: ").removesuffix(f"; {remedy}"),
            remedy=remedy or (REMEDIES.get(reason, "see the logs of both workers") if reason else _LOST_REMEDY),
        )  # fmt: skip

    async def _probe(self, link: TargetLink) -> None:
        lender = self.lender
        blocks = await lender.borrow(num_probe_blocks(self.memory)) if lender is not None else []
        try:
            checksums = b""
            if blocks and link.reply is not None and link.reply.checks != "off":
                checksums = await self._probe_checksums(link.reply.layout, blocks)
            self._tell_exporters(num_probes=1)
            await link.probe(blocks, checksums)
        finally:
            self._tell_exporters()
            if lender is not None:
                lender.give_back(blocks)

    async def _probe_checksums(self, target: KvLayout, blocks: list[int]) -> bytes:
        pairing = pair(self.memory.layout, wire_layout(target, self.memory.layout.dtype))
        end, layers = pairing.source, pairing.overlap.layers
        pieces = end.pieces_of(end.atoms(blocks), layers).reshape(-1, pairing.pieces_per_atom)
        return await self.checksums(pieces, pairing.piece_bytes)

    def pairs(self) -> list[PairReport]:
        """The decode workers that this one is connected to, with what was probed."""
        return [
            PairReport(
                source=self._worker_id, target=address.worker, target_epoch=address.epoch, ok=link.reply is not None,
                paths=link.paths,
            )
            for address, link in self._links.items()
        ]  # fmt: skip

    # ---- for the transfers

    def transcript(self, nonce: bytes) -> Transcript:
        return Transcript(self._secret, nonce)

    async def checksums(self, pieces: Offsets, piece_bytes: int) -> bytes:
        """Packed checksums of atoms, [num_atoms, pieces_per_atom] of offsets; on a thread unless they are few."""
        began = time.perf_counter()
        if pieces.size * piece_bytes <= INLINE_BYTES and self.memory.view is not None:
            values = checksums_of_atoms(self.memory, pieces, piece_bytes)
        else:
            values = await self._checksums_on_thread(pieces, piece_bytes)
        self._stats.check_s += time.perf_counter() - began
        return pack(values)

    async def _checksums_on_thread(self, pieces: Offsets, piece_bytes: int) -> Checksums:
        receipt = Receipt(pieces, piece_bytes)
        if self.memory.view is not None and MoverThread.can_be():
            hashing = hash_in_place(self.memory.view, receipt)
            if hashing is not None:
                await self._mover.submit(hashing, hashing.result)
                return receipt.found
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._hasher, checksums_of_atoms, self.memory, pieces, piece_bytes)

    def on_ended(self, transfer: SourceTransfer, outcome: TransferResult | TransferError) -> None:
        """A transfer is over (called by it, once)."""
        self._open.discard(transfer)
        self._tell_exporters()
        if isinstance(outcome, TransferResult):
            self._stats.count(outcome)
            sums = self._stats.path(outcome.transport)
            sums.num_bytes += outcome.num_bytes
            sums.seconds += outcome.seconds
            sums.exposed_s += outcome.exposed_s
            return
        if isinstance(outcome, LeaseExpired):
            self._stats.expired_leases += 1
        reason = reason_of(outcome) if isinstance(outcome, TransferRefused) else type(outcome).__name__
        if reason is not Reason.CANCELLED:
            self._stats.refuse(str(reason))

    def _tell_exporters(self, num_probes: int = 0) -> None:
        for exporter in self._exporters.values():
            exporter.set_busy(len(self._open) + num_probes)
