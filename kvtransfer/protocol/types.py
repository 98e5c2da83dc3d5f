"""What a transfer ends in, the counts that both sides keep, and what a pair of workers knows of its paths."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.plane.messages import KvPathLoad
from kvrelay.plane.messages import PairReport as PairReport  # these two cross the request plane as well
from kvrelay.plane.messages import PathReport as PathReport


@dataclass(frozen=True, slots=True)
class TransferResult:
    """One committed transfer. On the source, `exposed_s` runs from commit() to its return."""

    transport: str  # the path that moved most of it
    num_blocks: int
    num_bytes: int
    seconds: float  # spent reading and verifying, summed over reads
    exposed_s: float  # commit received to committed: what the prefill's compute did not hide
    retries: int = 0  # reads that failed and went on over another path; counted by the target


def span_attributes(result: TransferResult) -> dict[str, str | int | float]:
    """A transfer that ended well, as attributes of its trace span."""
    return {
        "path": result.transport, "blocks": result.num_blocks, "bytes": result.num_bytes, "seconds": result.seconds,
        "exposed_s": result.exposed_s, "retries": result.retries,
    }  # fmt: skip


@dataclass(slots=True)
class PathCounters:
    """One path's share since start. Bytes and seconds are of reads that ended well."""

    num_bytes: int = 0
    seconds: float = 0.0
    exposed_s: float = 0.0  # of transfers that went mostly this way
    check_s: float = 0.0  # of `seconds`, spent on checksums
    retries: int = 0  # reads that failed here and went on over another path


@dataclass(slots=True)
class TransferStats:
    """Counters since start, a record of 13 attributes. `transport` is the path used last."""

    transport: str = ""
    transfers: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    exposed_s: float = 0.0
    check_s: float = 0.0  # spent on checksums, at this end
    retries: int = 0
    refusals: int = 0
    refusals_by_reason: Counter[str] = field(default_factory=Counter)
    open_transfers: int = 0  # leases active
    expired_leases: int = 0
    quarantined_blocks: int = 0
    paths: dict[str, PathCounters] = field(default_factory=dict)

    def count(self, result: TransferResult) -> None:
        """Add one committed transfer."""
        self.transport = result.transport
        self.transfers += 1
        self.num_bytes += result.num_bytes
        self.seconds += result.seconds
        self.exposed_s += result.exposed_s

    def refuse(self, reason: str) -> None:
        """Add one transfer that was not committed."""
        self.refusals += 1
        self.refusals_by_reason[reason] += 1

    def path(self, name: str) -> PathCounters:
        """This path's counters, to add to."""
        return self.paths.setdefault(name, PathCounters())

    def path_loads(self) -> list[KvPathLoad]:
        """Every path's counters, as a load report carries them."""
        return [
            KvPathLoad(
                name, counters.num_bytes, counters.seconds, counters.exposed_s, counters.check_s, counters.retries
            )
            for name, counters in self.paths.items()
        ]


class ProbeBuffers(Protocol):
    """The worker's source of pool blocks for probe transfers."""

    async def take(self, count: int) -> list[int]:
        """Up to `count` blocks that nothing else holds; none while the pool is busy."""

    def put_back(self, blocks: Sequence[int]) -> None:
        """These may be re-used."""
