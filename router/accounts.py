"""What each worker has to do: its last report, and what this router has sent since it was written.

Owns the accounts; never imports torch, Ray, sockets or a clock. A request counts from the moment it is
assigned, before any report can show it, so that a burst spreads. When a report comes, what it
shows beyond our own assignments is other routers' work ("foreign"): own and foreign are added, so
nothing counts twice.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from kvrelay.router.types import WorkerLoad
from kvrelay.wire import LoadReport, WorkerInfo

_BUCKET = math.log(1.25)
MIN_BANDWIDTH_SAMPLE_BYTES = 32 << 20  # less says more about first touches of memory than about the link
MAX_PENDING_COMPARED = 128


def _bucketed(value: float) -> float:
    """`value` to the nearest power of 1.25, so that measuring noise does not tell equal workers apart.

    0 for anything that is not a measurement (zero, negative, infinite, NaN).
    """
    if not 0 < value < math.inf:
        return 0.0
    return math.exp(_BUCKET * round(math.log(value) / _BUCKET))


class WorkerAccount:
    """One incarnation of one worker. Mutable; written only by Ledger and Router."""

    __slots__ = (
        "_foreign_prefills",
        "_foreign_sequences",
        "_foreign_tokens",
        "_view",
        "info",
        "own_prefills",
        "own_requests",
        "own_sequences",
        "own_shown",
        "own_tokens",
        "own_unconfirmed_blocks",
        "report",
        "reported_at_s",
        "turn",
    )

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.report: LoadReport | None = None
        self.reported_at_s: float | None = None
        self.own_tokens = 0  # assigned prompt tokens not yet computed
        self.own_prefills = 0  # assigned prompts not yet computed
        self.own_requests = 0  # assigned and not ended (on a prefill worker: no first token yet)
        self.own_sequences = 0  # those, a group as all of its members
        self.own_shown = 0  # those, as reports count them: a group is one sequence until its prompt is computed
        self.own_unconfirmed_blocks = 0  # blocks of assigned requests without a first token
        self._foreign_tokens = 0
        self._foreign_prefills = 0
        self._foreign_sequences = 0
        self.turn = 0
        self._view: WorkerLoad | None = None

    def apply_report(self, report: LoadReport, now_s: float) -> None:
        """Take the newest report. Reports of one connection come in order."""
        self.report, self.reported_at_s, self._view = report, now_s, None
        self._foreign_tokens = max(0, report.queued_tokens - self.own_tokens)
        waiting_elsewhere = max(1, report.waiting - self.own_prefills)
        self._foreign_prefills = waiting_elsewhere if self._foreign_tokens else 0
        shown = report.running + report.waiting + report.receiving
        self._foreign_sequences = max(0, shown - self.own_shown)

    @property
    def foreign_tokens(self) -> int:
        """Prompt tokens in its queue that other routers sent."""
        return self._foreign_tokens

    @property
    def foreign_sequences(self) -> int:
        return self._foreign_sequences

    def add(
        self,
        *,
        tokens: int = 0,
        prefills: int = 0,
        requests: int = 0,
        sequences: int = 0,
        shown: int = 0,
        blocks: int = 0,
    ) -> None:
        """Change our own share. Never below zero."""
        self.own_tokens += tokens
        self.own_prefills += prefills
        self.own_requests += requests
        self.own_sequences += sequences
        self.own_shown += shown
        self.own_unconfirmed_blocks += blocks
        assert min(self.own_tokens, self.own_prefills, self.own_requests, self.own_unconfirmed_blocks) >= 0
        assert self.own_requests <= self.own_shown <= self.own_sequences
        self._view = None

    def take_turn(self, turn: int) -> None:
        """Remember when it was last chosen."""
        self.turn, self._view = turn, None

    def load(self) -> WorkerLoad:
        """The frozen view for the cost; kept until something changes."""
        if self._view is None:
            self._view = self._build()
        return self._view

    def _build(self) -> WorkerLoad:
        info, report = self.info, self.report or _UNREPORTED
        sequences = self._foreign_sequences + self.own_sequences
        queued_tokens = self._foreign_tokens + self.own_tokens
        free = report.free_blocks if self.report is not None else info.num_blocks
        moved = report.kv_bytes if report.kv_bytes >= MIN_BANDWIDTH_SAMPLE_BYTES else 0
        return WorkerLoad(
            worker_id=info.worker_id,
            node_id=info.node_id,
            max_model_len=info.max_model_len,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            kv_bytes_per_token=info.kv_bytes_per_token,
            prefill_tokens_per_s=_bucketed(report.prefill_tokens_per_s),
            decode_step_s=_bucketed(report.decode_step_s or report.step_s),
            kv_bytes_per_s=_bucketed(moved / report.kv_seconds) if report.kv_seconds > 0 else 0.0,
            queued_tokens=queued_tokens,
            queued_requests=self._foreign_prefills + self.own_prefills,
            sequences=sequences,
            waiting=max(report.waiting, sequences - info.max_running, 0),
            free_blocks=free - max(0, self.own_unconfirmed_blocks - report.leased_blocks),
            turn=self.turn,
        )


_UNREPORTED = LoadReport(seq=-1)


def _seats(count: int) -> dict[str, int]:
    """A prompt at its prefill worker: one sequence there, however many go on from it."""
    return {"requests": count, "sequences": count, "shown": count}


@dataclass(slots=True)
class Assignment:
    """One request's shares: where it is computed, where it is decoded."""

    request_id: str
    block_hashes: tuple[bytes, ...]
    compute: WorkerAccount
    compute_tokens: int
    decode: WorkerAccount | None
    decode_blocks: int
    assigned_at_s: float
    predicted_ttft_s: float
    width: int = 1  # sequences on the decode worker
    has_first_token: bool = False


def common_prefix(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    """Leading hashes that two chains share. Chained hashes are nested, so bisection is exact."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class Ledger:
    """Every request that this router has assigned and that has not ended."""

    def __init__(self) -> None:
        self._assignments: dict[str, Assignment] = {}
        self._pending: dict[bytes, dict[str, Assignment]] = {}  # by first block, until the first token
        self._turn = 0

    def __len__(self) -> int:
        return len(self._assignments)

    def assign(self, assignment: Assignment) -> None:
        """Count a request from now on; an earlier attempt of the same id ends."""
        self.end(assignment.request_id)
        self._turn += 1
        self._assignments[assignment.request_id] = assignment
        compute, decode = assignment.compute, assignment.decode
        compute.add(tokens=assignment.compute_tokens, prefills=1, **_seats(int(decode is not compute)))
        compute.take_turn(self._turn)
        if decode is not None:
            decode.add(requests=1, sequences=assignment.width, shown=1, blocks=assignment.decode_blocks)
            decode.take_turn(self._turn)
        if assignment.block_hashes:
            self._pending.setdefault(assignment.block_hashes[0], {})[assignment.request_id] = assignment

    def first_token(self, request_id: str, now_s: float) -> float | None:
        """The prompt is computed. Returns observed minus predicted seconds, once; else None."""
        assignment = self._assignments.get(request_id)
        if assignment is None or assignment.has_first_token:
            return None
        assignment.has_first_token = True
        compute, decode = assignment.compute, assignment.decode
        compute.add(tokens=-assignment.compute_tokens, prefills=-1, **_seats(-int(decode is not compute)))
        if decode is not None:
            decode.add(shown=assignment.width - 1, blocks=-assignment.decode_blocks)
        if assignment.block_hashes:
            bucket = self._pending[assignment.block_hashes[0]]
            del bucket[request_id]
            if not bucket:
                del self._pending[assignment.block_hashes[0]]
        return now_s - assignment.assigned_at_s - assignment.predicted_ttft_s

    def end(self, request_id: str) -> None:
        """Give back everything that is still counted for it. Idempotent."""
        assignment = self._assignments.get(request_id)
        if assignment is None:
            return
        self.first_token(request_id, assignment.assigned_at_s)
        if assignment.decode is not None:
            assignment.decode.add(requests=-1, sequences=-assignment.width, shown=-assignment.width)
        del self._assignments[request_id]

    def narrow(self, request_id: str, width: int) -> None:
        """Of a group no more than so many sequences go on, at least one. It never grows again."""
        assignment = self._assignments.get(request_id)
        if assignment is None or not 1 <= width < assignment.width:
            return
        gone, assignment.width = assignment.width - width, width
        if assignment.decode is not None:
            assignment.decode.add(sequences=-gone, shown=-gone * assignment.has_first_token)

    def pending_matches(self, hashes: tuple[bytes, ...]) -> Iterator[tuple[WorkerAccount, int]]:
        """Workers that are about to compute a prefix of `hashes`, with its hashes; newest first, bounded."""
        if not hashes or hashes[0] not in self._pending:
            return
        for assignment in islice(reversed(self._pending[hashes[0]].values()), MAX_PENDING_COMPARED):
            yield assignment.compute, common_prefix(hashes, assignment.block_hashes)
