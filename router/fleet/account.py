"""One worker's load: its last report, and what this router has assigned since.

Never imports torch, Ray, sockets or a clock. What a report shows beyond our own assignments is other routers' work
("foreign"): own and foreign work are added, so nothing counts twice. Where the other routers report their assignments
(messages.Assigned), foreign work is what they report, without a load report's delay. Each change is written into the
worker's row of its role's columns at once.
"""

import math
from dataclasses import dataclass

from kvrelay.plane.messages import Assigned, AssignedByOthers, LoadReport, WorkerInfo
from kvrelay.router.fleet.columns import Columns, RowLoad, RowReport
from kvrelay.router.policies.cost_model import CostModel
from kvrelay.router.types import WorkerLoad
from kvrelay.types import Role

_BUCKET = math.log(1.25)
RECENT_STEP_WINDOW_S = 10.0
"""Time constant of the recent step time's average."""
IDLE_HALF_LIFE_S = 5.0
"""Half-life of a slow step time while a worker is idle: what made it slow (a full batch, a first step, a neighbour)
passes.
"""


def bucketed(value: float) -> float:
    """`value` rounded to a power of 1.25, so that measurement noise does not distinguish equal workers; 0 if not
    positive and finite.
    """
    if not 0 < value < math.inf:
        return 0.0
    return math.exp(_BUCKET * round(math.log(value) / _BUCKET))


class StepTime:
    """A worker's recent step time, prefill chunks included: what its sequences wait for each token."""

    __slots__ = ("_default_s", "_idle_since_s", "_seconds", "_steps")

    def __init__(self, default_s: float) -> None:
        """`default_s`: assumed of a decode step before the first measurement."""
        self._default_s = default_s
        self._seconds = self._steps = 0.0
        self._idle_since_s: float | None = None  # as reports show it

    def observe(self, before: LoadReport | None, after: LoadReport, passed_s: float, now_s: float) -> None:
        """Two reports in a row, `passed_s` apart.

        The worker was busy in between if it was at the first: it reports when it falls idle.
        """
        if before is not None and before.running and (steps := after.steps - before.steps) > 0 and passed_s > 0:
            keep = math.exp(-passed_s / RECENT_STEP_WINDOW_S)
            self._seconds = self._seconds * keep + passed_s
            self._steps = self._steps * keep + steps
        if after.running or after.waiting or after.receiving:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s

    @property
    def recent_s(self) -> float:
        """Mean seconds of a step, recently; 0: unknown."""
        return self._seconds / self._steps if self._steps else 0.0

    def decayed_s(self, seconds: float, now_s: float | None) -> float:
        """A step time that falls to the default while the worker is idle: else a slow last step would keep requests
        away for good.
        """
        if self._idle_since_s is None or now_s is None or seconds <= self._default_s:
            return seconds
        left = 0.5 ** ((now_s - self._idle_since_s) / IDLE_HALF_LIFE_S)
        return max(self._default_s, bucketed(self._default_s + left * (seconds - self._default_s)))


MIN_BANDWIDTH_SAMPLE_BYTES = 32 << 20
"""Bytes moved before a bandwidth counts as measured: fewer measure first touches of memory rather than the link."""

_UNREPORTED = LoadReport(seq=-1)
_NO_OTHERS = AssignedByOthers(0, False)


@dataclass(slots=True)
class OwnLoad:
    """What this router has assigned to one worker and that has not ended."""

    tokens: int = 0  # prompt tokens not computed yet
    overdue_tokens: int = 0  # of those, of prompts that will miss their TTFT target in any case
    prefills: int = 0  # prompts not computed yet
    requests: int = 0  # on a prefill worker: until the first token
    sequences: int = 0  # those requests, a group as all of its members
    reported_sequences: int = 0  # as reports count them: a group is one sequence until its prompt is computed
    unconfirmed_blocks: int = 0  # blocks reserved for requests without a first token


class WorkerAccount:
    """One incarnation of one worker. Written only by Ledger, LiveWorkers and Router.

    It has more than 12 attributes, because it joins a worker's report, our own load and other routers' load in one row.
    """

    __slots__ = (
        "_columns",
        "_foreign_prefills",
        "_model",
        "_others",
        "_step_time",
        "changed",
        "foreign_sequences",
        "foreign_tokens",
        "info",
        "own",
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
        self.own = OwnLoad()
        self.foreign_tokens = 0  # queued prompt tokens that other routers assigned
        self.foreign_sequences = 0
        self._foreign_prefills = 0
        self._others: AssignedByOthers | None = None
        self._step_time = StepTime(model.default_decode_step_s)
        self.changed: dict[WorkerAccount, None] | None = None
        """Accounts whose own load is to be shared with the other routers; None: no other router listens."""
        self.turn = 0  # when it was last chosen
        self._columns: Columns | None = None

    def set_row(self, columns: Columns | None, row: int = 0) -> None:
        """Write to this row from now on; None: the worker is down."""
        self._columns, self.row = columns, row
        self._write_report()
        self._write_load()

    def apply_report(self, report: LoadReport, now_s: float) -> None:
        """Take the newest report. Reports of one connection come in order."""
        passed_s = now_s - self.reported_at_s if self.reported_at_s is not None else 0.0
        self._step_time.observe(self.report, report, passed_s, now_s)
        self.report, self.reported_at_s = report, now_s
        self._count_foreign()
        self._write_report()
        self._write_load()

    def apply_others(self, others: AssignedByOthers) -> None:
        """What the other routers report that they have assigned to it."""
        self._others = others
        self._count_foreign()
        self._write_load()

    def _count_foreign(self) -> None:
        """As the other routers report; while one of them has not, at least what the last report shows beyond our own
        load.
        """
        others, report, own = self._others or _NO_OTHERS, self.report or _UNREPORTED, self.own
        tokens, prefills, sequences = others.tokens, others.prompts, others.sequences
        if not others.is_complete:
            unexplained = max(0, report.queued_tokens - own.tokens)
            waiting_elsewhere = max(1, report.waiting - own.prefills)
            reported = report.running + report.waiting + report.receiving
            tokens = max(tokens, unexplained)
            prefills = max(prefills, waiting_elsewhere if unexplained else 0)
            sequences = max(sequences, reported - own.reported_sequences)
        self.foreign_tokens, self._foreign_prefills, self.foreign_sequences = tokens, prefills, sequences

    def assigned(self) -> Assigned:
        """Our own load, for the other routers."""
        own = self.own
        return Assigned(tokens=own.tokens, prompts=own.prefills, sequences=own.sequences, blocks=own.unconfirmed_blocks)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Measured prefill speed; 0: not measured yet."""
        return bucketed(self.report.prefill_tokens_per_s) if self.report is not None else 0.0

    @property
    def unreported_overdue_tokens(self) -> int:
        """Tokens of our own overdue prompts that the worker does not report as overdue (yet): it queues them last all
        the same.
        """
        return max(0, self.own.overdue_tokens - (self.report or _UNREPORTED).overdue_tokens)

    def add(
        self,
        *,
        tokens: int = 0,
        prefills: int = 0,
        requests: int = 0,
        sequences: int = 0,
        reported_sequences: int = 0,
        blocks: int = 0,
    ) -> None:
        """Change our own load; it never falls below zero."""
        own = self.own
        own.tokens += tokens
        own.prefills += prefills
        own.requests += requests
        own.sequences += sequences
        own.reported_sequences += reported_sequences
        own.unconfirmed_blocks += blocks
        assert own.tokens >= 0 <= own.prefills and own.requests >= 0 <= own.unconfirmed_blocks
        assert own.requests <= own.reported_sequences <= own.sequences
        if self.changed is not None:
            self.changed[self] = None
        self._write_load()

    def load(self) -> WorkerLoad:
        """The worker's whole load as one record, for `kvrelay status`."""
        info, row = self.info, self._row_load()
        rate, step_s, kv_rate = self._speeds()
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
            queued_tokens=row.queued_tokens,
            queued_requests=row.queued_requests,
            sequences=row.sequences,
            waiting=row.waiting,
            free_blocks=row.free_blocks,
            turn=self.turn,
        )

    def _row_load(self) -> RowLoad:
        report, own = self.report or _UNREPORTED, self.own
        sequences = self.foreign_sequences + own.sequences
        free = report.free_blocks if self.report is not None else self.info.num_blocks
        return RowLoad(
            max(self.foreign_tokens + own.tokens - report.overdue_tokens, 0),  # new requests go before overdue ones
            max(self._foreign_prefills + own.prefills - report.overdue, 0),
            sequences,
            max(report.waiting, sequences - self.info.max_running, 0),
            free - max(0, own.unconfirmed_blocks + (self._others or _NO_OTHERS).blocks - report.leased_blocks),
            self.turn,
        )

    def _speeds(self) -> tuple[float, float, float]:
        """Prompt tokens/s, seconds of a decode step, KV bytes/s; 0: not measured."""
        report = self.report or _UNREPORTED
        moved = report.kv_bytes if report.kv_bytes >= MIN_BANDWIDTH_SAMPLE_BYTES else 0
        return (
            bucketed(report.prefill_tokens_per_s),
            bucketed(report.decode_step_s or report.step_s),
            bucketed(moved / report.kv_seconds) if report.kv_seconds > 0 else 0.0,
        )

    def _write_load(self) -> None:
        if self._columns is None:
            return
        is_shared = self._others is not None and self._others.is_complete
        self._columns.write_load(self.row, self._row_load(), 0 if is_shared else self.foreign_sequences)

    def _write_report(self) -> None:
        if self._columns is None:
            return
        rate, step_s, kv_rate = self._speeds()
        step_s = self._step_time.decayed_s(step_s or self._model.default_decode_step_s, self.reported_at_s)
        recent_step_s = max(step_s, self._step_time.decayed_s(self._step_time.recent_s, self.reported_at_s))
        kv_rate = kv_rate or self._model.default_kv_bytes_per_s
        output_tokens = self.report.output_tokens if self.report is not None else 0.0
        self._columns.write_report(
            self.row, RowReport(rate, step_s, recent_step_s, kv_rate, output_tokens), self.reported_at_s
        )
