"""KvTarget: the decode worker's end of the KV plane. Grants tickets, reads, verifies, commits.

It alone writes this worker's pool, and only into blocks of a live grant.
"""

import asyncio
import copy
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from kvrelay.decode.grants import GrantTable, check_grantable
from kvrelay.decode.receiving_end import ReceivingEnd, TargetIdentity
from kvrelay.decode.target_link import SourceLink
from kvrelay.errors import BackendUnavailable, TransferError
from kvrelay.kvtransfer.mover.mover import library
from kvrelay.kvtransfer.paths.discovery import this_machine
from kvrelay.kvtransfer.paths.selection import TRANSPORTS, offered
from kvrelay.kvtransfer.protocol.checksums import kind_of
from kvrelay.kvtransfer.protocol.tickets import (
    NONCE_BYTES,
    PairReport,
    ProbeBuffers,
    Reason,
    Ticket,
    Transcript,
    TransferResult,
    TransferStats,
    refusal,
    seal,
)
from kvrelay.kvtransfer.reads.receive_plan import Tamper
from kvrelay.kvtransfer.transports.base import Reader, Transport
from kvrelay.plane import connection as plane
from kvrelay.plane.framing import Connection
from kvrelay.plane.tls import ClusterTls
from kvrelay.settings.transfer import TransferSettings
from kvrelay.types import Fingerprint, KvMemory

logger = logging.getLogger(__name__)


class KvTarget:
    """Receives into one pool. One for each decode worker; lives on its loop, as do its callbacks.

    `tamper`, when set, is called with (pool, offset, num_bytes) for every region after it was
    read and before it is verified: fault injection for tests and `kvrelay verify`.

    Every grant ends exactly once: on_commit; or on_failed (not after our own revoke) and then on_released, as soon as
    no transport can write those blocks any more.
    """

    tamper: Tamper | None = None

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
    ) -> None:
        self.memory, self._host, self._transports = memory, host, transports
        self._stats = TransferStats()
        self.grants = GrantTable(self._stats, on_failed, on_released)
        self._end = ReceivingEnd(
            identity=TargetIdentity(worker_id, epoch, fingerprint, memory.device, kind_of(memory, settings.checks)),
            settings=settings, memory=memory, secret=secret, grants=self.grants, stats=self._stats, offers=[],
            probe_buffers=probe_buffers, make_reader=self._make_reader, generation_of=generation_of,
            on_commit=on_commit, tamper=lambda: self.tamper,
        )  # fmt: skip
        self._links: set[SourceLink] = set()
        self._server = plane.Server(self._serve, secret, tls=tls)
        self._port = 0

    async def start(self) -> None:
        """Listen for sources. Raises BackendUnavailable when a forced transport cannot be used."""
        await asyncio.to_thread(library)  # compiled now, not in the first read
        await asyncio.to_thread(this_machine)  # known from then on
        self._end.offers[:] = offered(self._end.settings.transport, self.memory, self._transports)
        try:
            self._port = await self._server.start(self._host)
        except OSError as error:
            raise BackendUnavailable("KV plane", f"cannot listen on {self._host}: {error}") from error

    async def aclose(self) -> None:
        """End every grant (each is released as far as its transport allows), stop listening."""
        for grant in self.grants.live:
            error = refusal(grant.request_id, Reason.CANCELLED, "the target is shutting down")
            self.grants.end(grant, error, is_ours=True)
        await self._server.aclose()

    @property
    def port(self) -> int:
        """Where sources connect; 0 before start()."""
        return self._port

    @property
    def transports(self) -> list[str]:
        """Names of the transports that this pool can be read into over, best first."""
        return list(self._end.offers)

    def stats(self) -> TransferStats:
        """Counts so far, as a copy."""
        stats = copy.deepcopy(self._stats)
        stats.open_transfers, stats.quarantined_blocks = len(self.grants), self.quarantined_blocks()
        return stats

    def links(self) -> list[SourceLink]:
        """The connected sources."""
        return list(self._links)

    def pairs(self) -> list[PairReport]:
        """The prefill workers that are connected, with what is known of the paths from each now."""
        me, now_s = self._end.identity, time.monotonic()
        return [
            PairReport(
                source=link.hello.worker_id,
                target=me.worker_id,
                target_epoch=me.epoch,
                ok=True,
                paths=link.route.table.reports(now_s),
            )
            for link in self._links
            if link.hello is not None and link.route is not None
        ]

    def quarantined_blocks(self) -> int:
        """Blocks of ended transfers that a transport may still write."""
        return self.grants.num_quarantined_blocks

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
        layout, me = self.memory.layout, self._end.identity
        check_grantable(request_id, first_block, block_ids, num_blocks, layout.num_blocks)
        if self.grants.holds(request_id):
            raise ValueError(f"{request_id} still holds the blocks of an earlier grant")
        ticket = Ticket(
            request_id=request_id, target_worker=me.worker_id, target_epoch=me.epoch,
            target_host=self._host, target_port=self._port, first_block=first_block, num_blocks=num_blocks,
            num_tokens=num_blocks * layout.block_size if num_tokens is None else num_tokens, layout=layout,
            target_blocks=list(block_ids), generations=[self._end.generation_of(block) for block in block_ids],
            fingerprint=me.fingerprint, lease_s=self._end.settings.lease_s, nonce=secrets.token_bytes(NONCE_BYTES),
        )  # fmt: skip
        data = seal(ticket, self._end.secret)
        self.grants.add(ticket, data, Transcript(self._end.secret, ticket.nonce))
        return data

    def revoke(self, request_id: str, reason: str = "cancelled") -> None:
        """End this request's grant from our side: no on_failed; on_released follows. Idempotent."""
        for grant in self.grants.live:
            if grant.request_id == request_id:
                self.grants.end(grant, refusal(request_id, Reason.CANCELLED, reason), is_ours=True)

    async def _serve(self, connection: Connection) -> None:
        link = SourceLink(self._end, connection)
        self._links.add(link)
        try:
            await link.serve()
        finally:
            self._links.discard(link)

    def _make_reader(self, name: str, memory: KvMemory) -> Reader:
        return self._transports[name].make_reader(memory, self._end.secret, self._host)
