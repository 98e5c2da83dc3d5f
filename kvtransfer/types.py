"""What a transfer ends in, and the counts that both sides keep."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TransferResult:
    """One committed transfer. On the source, `exposed_s` runs from commit() to its return."""

    transport: str
    num_blocks: int
    num_bytes: int
    seconds: float  # spent reading and verifying, summed over reads
    exposed_s: float  # commit received to committed: what the prefill's compute did not hide


@dataclass(slots=True)
class TransferStats:
    """Sums since start. `transport` is the one used last."""

    transport: str = ""
    transfers: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    exposed_s: float = 0.0
    refusals: int = 0
    refusals_by_reason: Counter[str] = field(default_factory=Counter)
    open_transfers: int = 0
    quarantined_blocks: int = 0

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
