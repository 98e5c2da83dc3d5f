"""What the parts of a KvTarget share: its identity, where it receives into, and its grants."""

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.decode.grants import GrantTable
from kvrelay.kvtransfer.protocol.tickets import ProbeBuffers, TransferResult, TransferStats
from kvrelay.kvtransfer.reads.receive_plan import Tamper
from kvrelay.kvtransfer.transports.base import Reader
from kvrelay.settings.transfer import TransferSettings
from kvrelay.types import Fingerprint, KvMemory


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """What the target compares a source's Hello with."""

    worker_id: str
    epoch: str
    fingerprint: Fingerprint
    device: str
    checksums: str  # as Hello.checksums


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivingEnd:
    """`offers`: transports that the target can read over, best first. `tamper`: fault injection, now."""

    identity: TargetIdentity
    settings: TransferSettings
    memory: KvMemory
    secret: bytes
    grants: GrantTable
    stats: TransferStats
    offers: list[str]
    probe_buffers: ProbeBuffers | None
    make_reader: Callable[[str, KvMemory], Reader]
    generation_of: Callable[[int], int]
    on_commit: Callable[[str, bytes, TransferResult], None]
    tamper: Callable[[], Tamper | None]
