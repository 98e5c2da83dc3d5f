"""What each worker has to do: its last report, and what this router has sent since it was written.

Owns the accounts; never imports torch, Ray, sockets or a clock. A request counts from the moment it is
assigned, before any report can show it, so that a burst spreads. When a report comes, what it
shows beyond our own assignments is other routers' work ("foreign"): own and foreign are added, so
nothing counts twice. Where the other routers tell theirs (wire.Assigned), foreign is what they say, without a report's delay.
Each change is written into the account's row of its role's columns at once.
"""

import math
from dataclasses import dataclass
from itertools import islice

from kvrelay.plane.messages import Assigned, AssignedByOthers, LoadReport, WorkerInfo
from kvrelay.router.fleet.columns import (
    DECODE_STEP,
    FREE_BLOCKS,
    KV_RATE,
    OUTPUT,
    QUEUED_REQUESTS,
    QUEUED_TOKENS,
    RECENT_STEP,
    REPORTED_AT,
    SEQUENCES,
    TURN,
    WAITING,
    Columns,
)
from kvrelay.router.policies.cost_model import CostModel
from kvrelay.router.types import WorkerLoad
from kvrelay.types import Role

_BUCKET = math.log(1.25)
MIN_BANDWIDTH_SAMPLE_BYTES = 32 << 20  # less says more about first touches of memory than about the link
MAX_PENDING_COMPARED = 128
RECENT_STEP_WINDOW_S = 10.0  # of steps that the pace is an average of
IDLE_HALF_LIFE_S = 5.0  # of what made a worker's last steps slow: a full batch, a first step, a neighbour


def _bucketed(value: float) -> float:
    """`value` to the nearest power of 1.25, so that measuring noise does not tell equal workers apart.

    0 for anything that is not a measurement (zero, negative, infinite, NaN).
    """
    if not 0 < value < math.inf:
        return 0.0
    return math.exp(_BUCKET * round(math.log(value) / _BUCKET))


class RecentStepTime:
    """How often a busy worker has stepped of late: what a sequence there waits for each of its tokens."""

    __slots__ = ("_seconds", "_steps")

    def __init__(self) -> None:
        self._seconds = self._steps = 0.0

    def observe(self, before: LoadReport, after: LoadReport, passed_s: float) -> None:
        """Two reports in a row. Between them the worker was busy if it was at the first: it reports when it falls idle."""
        steps = after.steps - before.steps
        if before.running and steps > 0 and passed_s > 0:
            keep = math.exp(-passed_s / RECENT_STEP_WINDOW_S)
            self._seconds = self._seconds * keep + passed_s
            self._steps = self._steps * keep + steps

    @property
    def seconds(self) -> float:
        """Of a step; 0: not known."""
        return self._seconds / self._steps if self._steps else 0.0


class WorkerAccount:
    """One incarnation of one worker. Mutable; written only by Ledger and Router."""

    __slots__ = (
        "_columns",
        "_foreign_prefills",
        "_foreign_sequences",
        "_foreign_tokens",
        "_idle_since_s",
        "_model",
        "_others",
        "_recent_step",
        "_told_foreign",
        "_told_sequences",
        "changed",
        "info",
        "own_overdue_tokens",
        "own_prefills",
        "own_requests",
        "own_sequences",
        "own_shown",
        "own_tokens",
        "own_unconfirmed_blocks",
        "report",
        "reported_at_s",
        "role",
        "row",
        "turn",
    )

    def __init__(self, info: WorkerInfo, model: CostModel) -> None:
        self.info, self._model = info, model
        self.role = Role(info.role)
        self.row = 0  # in the columns of its role
        self.report: LoadReport | None = None
        self.reported_at_s: float | None = None
        self.own_tokens = 0  # assigned prompt tokens not yet computed
        self.own_overdue_tokens = 0  # of those, of prompts that are late in any case
        self.own_prefills = 0  # assigned prompts not yet computed
        self.own_requests = 0  # assigned and not ended (on a prefill worker: no first token yet)
        self.own_sequences = 0  # those, a group as all of its members
        self.own_shown = 0  # those, as reports count them: a group is one sequence until its prompt is computed
        self.own_unconfirmed_blocks = 0  # blocks of assigned requests without a first token
        self._foreign_tokens = 0
        self._foreign_prefills = 0
        self._foreign_sequences = 0
        self._recent_step = RecentStepTime()
        self._idle_since_s: float | None = None  # as its reports say
        self._others: AssignedByOthers | None = None
        self.changed: dict[WorkerAccount, None] | None = None  # where it is noted that our own share has changed
        self.turn = 0  # when it was last chosen
        self._columns: Columns | None = None
        self._told_foreign = self._told_sequences = 0  # to the columns

    def place(self, columns: Columns | None, row: int = 0) -> None:
        """From now on this is its row; None: it has none, for it is gone."""
        self._columns, self.row, self._told_foreign, self._told_sequences = columns, row, 0, 0
        self._write_report()
        self._write_load()

    def apply_report(self, report: LoadReport, now_s: float) -> None:
        """Take the newest report. Reports of one connection come in order."""
        if self.report is not None and self.reported_at_s is not None:
            self._recent_step.observe(self.report, report, now_s - self.reported_at_s)
        if report.running or report.waiting or report.receiving:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        self.report, self.reported_at_s = report, now_s
        self._count_foreign()
        self._write_report()
        self._write_load()

    def apply_others(self, others: AssignedByOthers) -> None:
        """What the other routers say that they have assigned to it."""
        self._others = others
        self._count_foreign()
        self._write_load()

    def _count_foreign(self) -> None:
        """As the others say; while one of them has not, at least what the last report shows beyond our own."""
        others, report = self._others or _UNTOLD, self.report or _UNREPORTED
        tokens, prefills, sequences = others.tokens, others.prompts, others.sequences
        if not others.is_complete:
            unexplained = max(0, report.queued_tokens - self.own_tokens)
            waiting_elsewhere = max(1, report.waiting - self.own_prefills)
            shown = report.running + report.waiting + report.receiving
            tokens = max(tokens, unexplained)
            prefills = max(prefills, waiting_elsewhere if unexplained else 0)
            sequences = max(sequences, shown - self.own_shown)
        self._foreign_tokens, self._foreign_prefills, self._foreign_sequences = tokens, prefills, sequences

    def assigned(self) -> Assigned:
        """Our own share, for the other routers."""
        return Assigned(
            tokens=self.own_tokens, prompts=self.own_prefills, sequences=self.own_sequences,
            blocks=self.own_unconfirmed_blocks,
        )  # fmt: skip

    @property
    def foreign_tokens(self) -> int:
        """Prompt tokens in its queue that other routers sent."""
        return self._foreign_tokens

    @property
    def foreign_sequences(self) -> int:
        return self._foreign_sequences

    @property
    def prefill_tokens_per_s(self) -> float:
        """As it measured; 0: not yet."""
        return _bucketed(self.report.prefill_tokens_per_s) if self.report is not None else 0.0

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
        assert self.own_tokens >= 0 <= self.own_prefills and self.own_requests >= 0 <= self.own_unconfirmed_blocks
        assert self.own_requests <= self.own_shown <= self.own_sequences
        if self.changed is not None:
            self.changed[self] = None
        self._write_load()

    def load(self) -> WorkerLoad:
        """All of it as one record, for people and for refusals."""
        info = self.info
        rate, step_s, kv_rate = self._speeds()
        tokens, requests, sequences, waiting, free = self._counts()
        return WorkerLoad(
            worker_id=info.worker_id,
            node_id=info.node_id,
            max_model_len=info.max_model_len,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            kv_bytes_per_token=info.kv_bytes_per_token,
            prefill_tokens_per_s=rate,
            decode_step_s=step_s,
            kv_bytes_per_s=kv_rate,
            queued_tokens=tokens,
            queued_requests=requests,
            sequences=sequences,
            waiting=waiting,
            free_blocks=free,
            turn=self.turn,
        )

    def _counts(self) -> tuple[int, int, int, int, int]:
        """Queued tokens, queued requests, sequences, those of them that wait, free blocks."""
        report = self.report or _UNREPORTED
        sequences = self._foreign_sequences + self.own_sequences
        free = report.free_blocks if self.report is not None else self.info.num_blocks
        return (
            max(self._foreign_tokens + self.own_tokens - report.overdue_tokens, 0),  # those let whoever comes go first
            max(self._foreign_prefills + self.own_prefills - report.overdue, 0),
            sequences,
            max(report.waiting, sequences - self.info.max_running, 0),
            free - max(0, self.own_unconfirmed_blocks + (self._others or _UNTOLD).blocks - report.leased_blocks),
        )

    @property
    def unreported_overdue_tokens(self) -> int:
        """Of the queue, those of our own late prompts that the worker does not count as such (yet): they give way all the same."""
        return max(0, self.own_overdue_tokens - (self.report or _UNREPORTED).overdue_tokens)

    def _speeds(self) -> tuple[float, float, float]:
        """Prompt tokens/s, seconds of a decode step, KV bytes/s; 0: not measured."""
        report = self.report or _UNREPORTED
        moved = report.kv_bytes if report.kv_bytes >= MIN_BANDWIDTH_SAMPLE_BYTES else 0
        return (
            _bucketed(report.prefill_tokens_per_s),
            _bucketed(report.decode_step_s or report.step_s),
            _bucketed(moved / report.kv_seconds) if report.kv_seconds > 0 else 0.0,
        )

    def _write_load(self) -> None:
        if self._columns is None:
            return
        columns, row = self._columns, self.row
        ints = columns.ints
        tokens, requests, sequences, waiting, free = self._counts()
        ints[QUEUED_TOKENS, row], ints[QUEUED_REQUESTS, row], ints[SEQUENCES, row] = tokens, requests, sequences
        ints[WAITING, row], ints[FREE_BLOCKS, row], ints[TURN, row] = waiting, free, self.turn
        unseen = 0 if self._others is not None and self._others.is_complete else self._foreign_sequences
        columns.num_foreign += unseen - self._told_foreign
        columns.num_sequences += sequences - self._told_sequences
        self._told_foreign, self._told_sequences = unseen, sequences

    def _write_report(self) -> None:
        if self._columns is None:
            return
        floats, row = self._columns.floats, self.row
        rate, step_s, kv_rate = self._speeds()
        self._columns.set_prefill_rate(row, rate)
        floats[DECODE_STEP, row] = step_s = self._rested_s(step_s or self._model.default_decode_step_s)
        floats[RECENT_STEP, row] = max(step_s, self._rested_s(self._recent_step.seconds))
        floats[KV_RATE, row] = kv_rate or self._model.default_kv_bytes_per_s
        floats[OUTPUT, row] = self.report.output_tokens if self.report is not None else 0.0
        if self.reported_at_s is not None:
            floats[REPORTED_AT, row] = self.reported_at_s

    def _rested_s(self, seconds: float) -> float:
        """What its last steps took, less and less held against it while it has nothing to do: nobody would go there again."""
        default_s = self._model.default_decode_step_s
        if self._idle_since_s is None or self.reported_at_s is None or seconds <= default_s:
            return seconds
        left = 0.5 ** ((self.reported_at_s - self._idle_since_s) / IDLE_HALF_LIFE_S)
        return max(default_s, _bucketed(default_s + left * (seconds - default_s)))


_UNREPORTED = LoadReport(seq=-1)
_UNTOLD = AssignedByOthers(0, False)


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
    tenant: str = ""
    width: int = 1  # sequences on the decode worker
    is_overdue: bool = False  # its first token, in any case
    has_first_token: bool = False


def common_prefix(one: tuple[bytes, ...], other: tuple[bytes, ...], known: int = 0) -> int:
    """Leading hashes that two chains share, at least the `known` ones. Chained hashes are nested, so bisection is exact."""
    low, high = known, min(len(one), len(other))
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
        self.overdue_blocks = 0  # that decode workers keep for late prompts which others compute
        self.with_overdue: set[WorkerAccount] = set()  # that have prompts to compute which are late in any case
        self._queued: dict[str, int] = {}  # by tenant, assigned prompt tokens that are not computed yet
        self._turn = 0

    def __len__(self) -> int:
        return len(self._assignments)

    def assign(self, assignment: Assignment) -> None:
        """Count a request from now on; an earlier attempt of the same id ends."""
        self.end(assignment.request_id)
        self._turn += 1
        self._assignments[assignment.request_id] = assignment
        compute, decode = assignment.compute, assignment.decode
        self._queue(assignment.tenant, assignment.compute_tokens)
        compute.turn = self._turn
        compute.add(tokens=assignment.compute_tokens, prefills=1, **_seats(int(decode is not compute)))
        self._count_overdue(assignment, assignment.compute_tokens)
        if decode is not None:
            decode.turn = self._turn
            decode.add(requests=1, sequences=assignment.width, shown=1, blocks=assignment.decode_blocks)
        if assignment.block_hashes:
            self._pending.setdefault(assignment.block_hashes[0], {})[assignment.request_id] = assignment

    def first_token(self, request_id: str, now_s: float) -> float | None:
        """The prompt is computed. Returns observed minus predicted seconds, once; else None."""
        assignment = self._assignments.get(request_id)
        if assignment is None or assignment.has_first_token:
            return None
        assignment.has_first_token = True
        self._queue(assignment.tenant, -assignment.compute_tokens)
        compute, decode = assignment.compute, assignment.decode
        compute.add(tokens=-assignment.compute_tokens, prefills=-1, **_seats(-int(decode is not compute)))
        self._count_overdue(assignment, -assignment.compute_tokens)
        if decode is not None:
            decode.add(shown=assignment.width - 1, blocks=-assignment.decode_blocks)
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

    def _count_overdue(self, assignment: Assignment, tokens: int) -> None:
        if not assignment.is_overdue:
            return
        account = assignment.compute
        account.own_overdue_tokens += tokens
        if assignment.decode is not account:
            self.overdue_blocks += assignment.decode_blocks if tokens > 0 else -assignment.decode_blocks
        if account.own_overdue_tokens:
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
        """By how many times an equal share of all queued tokens the tenant has more than it; 0: no more, or alone."""
        own = self._queued.get(tenant, 0)
        if not own or len(self._queued) < 2:
            return 0.0
        share = sum(self._queued.values()) / len(self._queued)
        return max(0.0, own / share - 1.0)

    def pending_matches(self, hashes: tuple[bytes, ...]) -> dict[WorkerAccount, int]:
        """Workers that are about to compute a prefix of `hashes`, and how many of its hashes; the newest, bounded."""
        found: dict[WorkerAccount, int] = {}
        bucket = self._pending.get(hashes[0]) if hashes else None
        if bucket is None:
            return found
        num_hashes, known_of = len(hashes), found.get
        for assignment in islice(reversed(bucket.values()), MAX_PENDING_COMPARED):
            known, chain = known_of(assignment.compute, 0), assignment.block_hashes
            if (
                known < num_hashes and known < len(chain) and hashes[known] == chain[known]
            ):  # it shares more than is known
                found[assignment.compute] = common_prefix(hashes, chain, known + 1)
        return found
