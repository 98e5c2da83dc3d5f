"""The source's connections to decode workers: made when first needed, compared and probed when workers are paired."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.errors import TransferError, TransferRefused
from kvrelay.kvtransfer.paths.discovery import this_machine
from kvrelay.kvtransfer.plans.copy_plan import pair, wire_layout
from kvrelay.kvtransfer.protocol.checksums import PoolChecksums, kind_of
from kvrelay.kvtransfer.protocol.messages import Hello, Offer
from kvrelay.kvtransfer.protocol.tickets import REMEDIES, TRANSFER_PROTOCOL, PairReport, ProbeBuffers, reason_of
from kvrelay.plane.tls import ClusterTls
from kvrelay.prefill.source_link import TargetAddress, TargetLink
from kvrelay.settings.transfer import TransferSettings
from kvrelay.types import Fingerprint, KvLayout, KvMemory

_PAIR_TIMEOUT_S = 60.0
_PROBE_BYTES = 8 << 20
_LOST_REMEDY = "see whether the decode worker runs, and whether its KV port can be reached from here"


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """What a source's Hello says of its worker."""

    worker_id: str
    epoch: str
    fingerprint: Fingerprint


class TargetLinks:
    """One link for each decode worker that KV was sent to, or that was paired."""

    def __init__(
        self,
        memory: KvMemory,
        me: SourceIdentity,
        secret: bytes,
        settings: TransferSettings,
        *,
        offers: Callable[[], list[Offer]],
        add_busy: Callable[[int], None],
        checksums: PoolChecksums,
        probe_buffers: ProbeBuffers | None,
        tls: ClusterTls | None,
    ) -> None:
        self._memory, self._me, self._secret, self._settings = memory, me, secret, settings
        self._offers, self._add_busy, self._checksums, self._tls = offers, add_busy, checksums, tls
        self._probe_buffers = probe_buffers
        self._links: dict[TargetAddress, TargetLink] = {}

    @property
    def all(self) -> list[TargetLink]:
        return list(self._links.values())

    async def aclose(self) -> None:
        for link in self.all:
            await link.aclose()

    def to(self, address: TargetAddress) -> TargetLink:
        """The link to this decode worker; a new one connects in the background."""
        if address not in self._links:
            link = TargetLink(
                address, self._hello(), self._secret, self._settings, lambda link: self._forget(address, link),
                tls=self._tls,
            )  # fmt: skip
            self._links[address] = link
            link.start()
        return self._links[address]

    def _forget(self, address: TargetAddress, link: TargetLink) -> None:
        if self._links.get(address) is link:
            del self._links[address]

    def _hello(self) -> Hello:
        me, memory = self._me, self._memory
        return Hello(
            protocol=TRANSFER_PROTOCOL, worker_id=me.worker_id, epoch=me.epoch, fingerprint=me.fingerprint,
            topology=this_machine(), device=memory.device, layout=memory.layout,
            checksums=kind_of(memory, self._settings.checks), offers=self._offers(),
        )  # fmt: skip

    async def pair(self, address: TargetAddress, *, is_anew: bool = False) -> PairReport:
        """Connect to a decode worker, compare fingerprints and probe every path (again, when `is_anew`).

        Never raises TransferError.
        """
        link = self.to(address)
        try:
            async with asyncio.timeout(_PAIR_TIMEOUT_S):
                await link.ready("pairing")
                if is_anew or not link.paths:
                    await self._probe(link)
        except (TransferError, TimeoutError) as error:
            return self._unpaired(address, error, link.remedy)
        return PairReport(
            source=self._me.worker_id, target=address.worker, target_epoch=address.epoch, ok=True, paths=link.paths
        )

    def _unpaired(self, address: TargetAddress, error: TransferError | TimeoutError, remedy: str) -> PairReport:
        reason = reason_of(error) if isinstance(error, TransferRefused) else None
        detail = error.why if isinstance(error, TransferError) else f"it did not answer within {_PAIR_TIMEOUT_S:g} s"
        return PairReport(
            source=self._me.worker_id, target=address.worker, target_epoch=address.epoch, ok=False,
            reason=str(reason or type(error).__name__),
            detail=detail.removeprefix(f"{reason}: ").removesuffix(f"; {remedy}"),
            remedy=remedy or (REMEDIES.get(reason, "see the logs of both workers") if reason else _LOST_REMEDY),
        )  # fmt: skip

    async def _probe(self, link: TargetLink) -> None:
        probe_buffers = self._probe_buffers
        blocks = await probe_buffers.take(_num_probe_blocks(self._memory)) if probe_buffers is not None else []
        self._add_busy(1)
        try:
            checksums = b""
            if blocks and link.reply is not None and link.reply.checks != "off":
                checksums = await self._probe_checksums(link.reply.layout, blocks)
            await link.probe(blocks, checksums)
        finally:
            self._add_busy(-1)
            if probe_buffers is not None:
                probe_buffers.put_back(blocks)

    async def _probe_checksums(self, target: KvLayout, blocks: list[int]) -> bytes:
        pairing = pair(self._memory.layout, wire_layout(target, self._memory.layout.dtype))
        end, layers = pairing.source, pairing.overlap.layers
        pieces = end.pieces_of(end.chunks(blocks), layers).reshape(-1, pairing.pieces_per_chunk)
        return await self._checksums.packed(pieces, pairing.piece_bytes)

    def reports(self) -> list[PairReport]:
        """The decode workers that this one is connected to, with what was probed."""
        return [
            PairReport(
                source=self._me.worker_id, target=address.worker, target_epoch=address.epoch, ok=link.reply is not None,
                paths=link.paths,
            )
            for address, link in self._links.items()
        ]  # fmt: skip


def _num_probe_blocks(memory: KvMemory) -> int:
    """How many blocks a probe reads: about _PROBE_BYTES, at most a sixteenth of the pool, at least one."""
    layout = memory.layout
    return max(1, min(_PROBE_BYTES // layout.block_bytes, layout.num_blocks // 16))
