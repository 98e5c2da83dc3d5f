"""KvTarget: the decode worker's end of the KV plane. Grants tickets, reads, verifies, commits.

It alone writes this worker's pool, and only into blocks of a live grant.
"""

import asyncio
import copy
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from kvrelay.decode.grants import GrantTable, ReceivingEnd
from kvrelay.decode.target_link import SourceLink
from kvrelay.errors import BackendUnavailable, TransferError
from kvrelay.kvtransfer.mover.mover import library
from kvrelay.kvtransfer.paths.probes import ProbeBuffers
from kvrelay.kvtransfer.paths.selection import TRANSPORTS, offered
from kvrelay.kvtransfer.protocol.messages import (
    LEASE_S,
    NONCE_BYTES,
    PairReport,
    Reason,
    Ticket,
    Transcript,
    TransferResult,
    TransferStats,
    refusal,
    seal,
)
from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.kvtransfer.transports.discovery import this_machine
from kvrelay.plane import connection as plane
from kvrelay.plane.framing import Connection
from kvrelay.plane.tls import ClusterTls
from kvrelay.settings.transfer import TransferSettings
from kvrelay.types import Fingerprint, KvMemory

logger = logging.getLogger(__name__)

STALL_S = 2.0  # a read without progress for so long continues over another path, or fails


class KvTarget:
    """Receives into one pool. One for each decode worker; lives on its loop, as do its callbacks.

    Every grant ends exactly once: on_commit; or on_failed (not after our own revoke) and then on_released, as soon as
    no transport can write those blocks any more. `lease_s`: blocks of a silent source are freed after this time.
    """

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
        on_commit: Callable[[str, bytes, TransferResult], None],
        on_failed: Callable[[str, TransferError], None],
        on_released: Callable[[str], None],
        probe_buffers: ProbeBuffers | None = None,
        transports: Mapping[str, Transport] = TRANSPORTS,
        tls: ClusterTls | None = None,
        lease_s: float = LEASE_S,
        stall_s: float = STALL_S,
    ) -> None:
        self.memory, self._host, self._all_transports = memory, host, transports
        self._stats = TransferStats()
        self.grants = GrantTable(self._stats, on_failed, on_released)
        self.transports: list[str] = []
        """Names of those that this pool can be read into over, best first."""
        self._end = ReceivingEnd(
            worker_id=worker_id, epoch=epoch, fingerprint=fingerprint, settings=settings, memory=memory, secret=secret,
            grants=self.grants, stats=self._stats, offers=self.transports, probe_buffers=probe_buffers,
            make_reader=lambda name, memory: transports[name].make_reader(memory, secret, host),
            generation_of=generation_of, on_commit=on_commit, lease_s=lease_s, stall_s=stall_s,
        )  # fmt: skip
        self.links: set[SourceLink] = set()
        self._server = plane.Server(self._serve, secret, tls=tls)
        self.port = 0  # where sources connect, after start()

    async def start(self) -> None:
        """Listen for sources. Raises BackendUnavailable when a forced transport cannot be used."""
        await asyncio.to_thread(library)  # compiled now, not in the first read
        await asyncio.to_thread(this_machine)  # known from then on
        self.transports += offered(self._end.settings.transport, self.memory, self._all_transports)
        try:
            self.port = await self._server.start(self._host)
        except OSError as error:
            raise BackendUnavailable("KV plane", f"cannot listen on {self._host}: {error}") from error

    async def aclose(self) -> None:
        """End every grant (each is released as far as its transport allows), stop listening."""
        for grant in self.grants.live:
            error = refusal(grant.request_id, Reason.CANCELLED, "the target is shutting down")
            self.grants.end(grant, error, is_ours=True)
        await self._server.aclose()

    def stats(self) -> TransferStats:
        """Counts so far, as a copy."""
        stats = copy.deepcopy(self._stats)
        stats.open_transfers, stats.quarantined_blocks = len(self.grants), self.grants.num_quarantined_blocks
        return stats

    def pairs(self) -> list[PairReport]:
        """The prefill workers that are connected, with what is known of the paths from each now."""
        end, now_s = self._end, time.monotonic()
        return [
            PairReport(
                source=link.hello.worker_id, target=end.worker_id, target_epoch=end.epoch, ok=True,
                paths=link.route.table.reports(now_s),
            )
            for link in self.links
            if link.hello is not None and link.route is not None
        ]  # fmt: skip

    def grant(
        self,
        request_id: str,
        first_block: int,
        block_ids: Sequence[int],
        num_blocks: int,
        *,
        num_tokens: int | None = None,
    ) -> bytes:
        """A sealed ticket that admits one transfer into `block_ids`; its lease starts now.

        Args:
            block_ids: where blocks first_block..num_blocks-1 of the sequence must land.
            num_tokens: of the sequence, where its last block is not full.

        Raises ValueError: blocks that do not fit, or a grant of this request that is not yet released.
        """
        layout, end = self.memory.layout, self._end
        if not 0 <= first_block <= num_blocks or len(block_ids) != num_blocks - first_block:
            raise ValueError(f"{request_id}: {len(block_ids)} blocks granted for {first_block}..{num_blocks}")
        if len(set(block_ids)) != len(block_ids) or any(not 0 <= block < layout.num_blocks for block in block_ids):
            raise ValueError(f"{request_id}: granted blocks must be distinct and inside the pool")
        if self.grants.holds(request_id):
            raise ValueError(f"{request_id} still holds the blocks of an earlier grant")
        ticket = Ticket(
            request_id=request_id, target_worker=end.worker_id, target_epoch=end.epoch,
            target_host=self._host, target_port=self.port, first_block=first_block, num_blocks=num_blocks,
            num_tokens=num_blocks * layout.block_size if num_tokens is None else num_tokens, layout=layout,
            target_blocks=list(block_ids), generations=[end.generation_of(block) for block in block_ids],
            fingerprint=end.fingerprint, lease_s=end.lease_s, nonce=secrets.token_bytes(NONCE_BYTES),
        )  # fmt: skip
        self.grants.add(ticket, Transcript(end.secret, ticket.nonce))
        return seal(ticket, end.secret)

    def revoke(self, request_id: str, reason: str = "cancelled") -> None:
        """End this request's grant from our side: no on_failed; on_released follows. Idempotent."""
        for grant in self.grants.live:
            if grant.request_id == request_id:
                self.grants.end(grant, refusal(request_id, Reason.CANCELLED, reason), is_ours=True)

    async def _serve(self, connection: Connection) -> None:
        link = SourceLink(self._end, connection)
        self.links.add(link)
        try:
            await link.serve()
        finally:
            self.links.discard(link)
