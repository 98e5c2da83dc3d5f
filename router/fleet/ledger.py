"""Requests that this router has assigned and that have not ended: their share of each worker's load.

Never imports torch, Ray, sockets or a clock. A request counts from the moment it is assigned, before any report can
show it, so that a burst spreads over workers.
"""

from dataclasses import dataclass
from itertools import islice

from kvrelay.router.fleet.account import WorkerAccount

MAX_PENDING_COMPARED = 128
"""Queued prompts, the newest ones, that a new prompt is compared with."""


def _prefill_share(count: int) -> dict[str, int]:
    """A prompt on its prefill worker: one sequence there, whatever the number of sequences that decode from it."""
    return {"requests": count, "sequences": count, "reported_sequences": count}


@dataclass(slots=True)
class Assignment:
    """One request: the workers that compute its prompt and decode it, and its share of their load."""

    request_id: str
    block_hashes: tuple[bytes, ...]
    compute: WorkerAccount
    compute_tokens: int
    decode: WorkerAccount | None
    decode_blocks: int
    assigned_at_s: float
    predicted_ttft_s: float
    tenant: str = ""
    width: int = 1  # sequences on the decode worker
    is_overdue: bool = False  # it will miss its TTFT target in any case
    has_first_token: bool = False


def common_prefix(one: tuple[bytes, ...], other: tuple[bytes, ...], known: int = 0) -> int:
    """Number of leading hashes that two chains share; `known` of them for certain. Chained hashes are nested, so
    bisection is exact.
    """
    low, high = known, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class Ledger:
    """Assigned requests, and their load on the accounts of their workers."""

    def __init__(self) -> None:
        self._assignments: dict[str, Assignment] = {}
        self._pending: dict[bytes, dict[str, Assignment]] = {}  # by first block hash, until the first token
        self.overdue_blocks = 0  # reserved on decode workers for overdue prompts that prefill workers compute
        self.with_overdue: set[WorkerAccount] = set()  # workers that have overdue prompts to compute
        self._queued: dict[str, int] = {}  # by tenant: assigned prompt tokens that are not computed yet
        self._turn = 0

    def __len__(self) -> int:
        return len(self._assignments)

    def assign(self, assignment: Assignment) -> None:
        """Count a request from now on. An earlier attempt of the same id ends."""
        self.end(assignment.request_id)
        self._turn += 1
        self._assignments[assignment.request_id] = assignment
        compute, decode = assignment.compute, assignment.decode
        self._queue(assignment.tenant, assignment.compute_tokens)
        compute.turn = self._turn
        compute.add(tokens=assignment.compute_tokens, prefills=1, **_prefill_share(int(decode is not compute)))
        self._count_overdue(assignment, assignment.compute_tokens)
        if decode is not None:
            decode.turn = self._turn
            decode.add(requests=1, sequences=assignment.width, reported_sequences=1, blocks=assignment.decode_blocks)
        if assignment.block_hashes:
            self._pending.setdefault(assignment.block_hashes[0], {})[assignment.request_id] = assignment

    def first_token(self, request_id: str, now_s: float) -> float | None:
        """The prompt is computed. Returns observed minus predicted TTFT in seconds, the first time; else None."""
        assignment = self._assignments.get(request_id)
        if assignment is None or assignment.has_first_token:
            return None
        assignment.has_first_token = True
        self._queue(assignment.tenant, -assignment.compute_tokens)
        compute, decode = assignment.compute, assignment.decode
        compute.add(tokens=-assignment.compute_tokens, prefills=-1, **_prefill_share(-int(decode is not compute)))
        self._count_overdue(assignment, -assignment.compute_tokens)
        if decode is not None:
            decode.add(reported_sequences=assignment.width - 1, blocks=-assignment.decode_blocks)
        if assignment.block_hashes:
            bucket = self._pending[assignment.block_hashes[0]]
            del bucket[request_id]
            if not bucket:
                del self._pending[assignment.block_hashes[0]]
        return now_s - assignment.assigned_at_s - assignment.predicted_ttft_s

    def computing(self, request_id: str) -> Assignment | None:
        """The request, while it has no first token."""
        assignment = self._assignments.get(request_id)
        return None if assignment is None or assignment.has_first_token else assignment

    def end(self, request_id: str) -> None:
        """Remove everything that is still counted for it. Idempotent."""
        assignment = self._assignments.get(request_id)
        if assignment is None:
            return
        self.first_token(request_id, assignment.assigned_at_s)
        if assignment.decode is not None:
            assignment.decode.add(requests=-1, sequences=-assignment.width, reported_sequences=-assignment.width)
        del self._assignments[request_id]

    def narrow(self, request_id: str, width: int) -> None:
        """Only `width` sequences of a group continue, at least one. It never grows again."""
        assignment = self._assignments.get(request_id)
        if assignment is None or not 1 <= width < assignment.width:
            return
        num_ended, assignment.width = assignment.width - width, width
        if assignment.decode is not None:
            assignment.decode.add(sequences=-num_ended, reported_sequences=-num_ended * assignment.has_first_token)

    def _count_overdue(self, assignment: Assignment, tokens: int) -> None:
        if not assignment.is_overdue:
            return
        account = assignment.compute
        account.own.overdue_tokens += tokens
        if assignment.decode is not account:
            self.overdue_blocks += assignment.decode_blocks if tokens > 0 else -assignment.decode_blocks
        if account.own.overdue_tokens:
            self.with_overdue.add(account)
        else:
            self.with_overdue.discard(account)

    def _queue(self, tenant: str, tokens: int) -> None:
        left = self._queued.get(tenant, 0) + tokens
        if left:
            self._queued[tenant] = left
        else:
            self._queued.pop(tenant, None)

    def excess(self, tenant: str) -> float:
        """The tenant's queued tokens over an equal share of all queued tokens, minus 1; 0 if it has no more, or is
        alone.
        """
        own = self._queued.get(tenant, 0)
        if not own or len(self._queued) < 2:
            return 0.0
        share = sum(self._queued.values()) / len(self._queued)
        return max(0.0, own / share - 1.0)

    def pending_matches(self, hashes: tuple[bytes, ...]) -> dict[WorkerAccount, int]:
        """Workers that are about to compute a prefix of `hashes`, and how many of its hashes they will hold.

        Only the MAX_PENDING_COMPARED newest prompts are compared.
        """
        found: dict[WorkerAccount, int] = {}
        bucket = self._pending.get(hashes[0]) if hashes else None
        if bucket is None:
            return found
        num_hashes, known_of = len(hashes), found.get
        for assignment in islice(reversed(bucket.values()), MAX_PENDING_COMPARED):
            known, chain = known_of(assignment.compute, 0), assignment.block_hashes
            if known < min(num_hashes, len(chain)) and hashes[known] == chain[known]:  # it shares more than is known
                found[assignment.compute] = common_prefix(hashes, chain, known + 1)
        return found
