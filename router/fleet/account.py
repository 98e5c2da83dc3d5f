"""The loads of one role's workers as columns, and the accounts that write them: a worker's last report, and what this
router has assigned since. Pure.

Row i is the worker `names[i]`, in the order of their ids; an account that has changed writes its row before the columns
are read. What a report shows beyond our own assignments is other routers' work ("foreign"), which they report
themselves (messages.Assigned): own and foreign work are added, so nothing counts twice.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvrelay.plane.messages import Assigned
from kvrelay.plane.reports import AssignedByOthers, LoadReport, WorkerInfo
from kvrelay.router.policies.base import CostModel, Floats, Ints, WorkerTable, any_of, only
from kvrelay.router.types import RouteRequest
from kvrelay.types import Role, sides

# rows of `Columns.ints`: first those of a worker's load, then constants
QUEUED_TOKENS, QUEUED_REQUESTS, OVERDUE_TOKENS, SEQUENCES, WAITING, FREE_BLOCKS, TURN = range(7)
NODE, NUM_BLOCKS, BLOCK_SIZE, KV_BYTES_PER_TOKEN, DECODES, LONGEST, ROOM = range(7, 14)
# rows of `Columns.floats`; PREFILL_RATE is 0 while it is not measured
PREFILL_RATE, DECODE_STEP, RECENT_STEP, KV_RATE, REPORTED_AT, OUTPUT = range(6)


class PrefixHits(NamedTuple):
    """Tokens of one prompt that each worker holds, by row of a `Columns`; see WorkerTable."""

    held: Ints
    expected: Ints
    in_any_tier: Ints


class Columns:
    """All live workers of one role. Written by their accounts.

    It has more than 12 attributes, because decisions read views that are made once per layout.
    """

    def __init__(self, infos: Sequence[WorkerInfo], nodes: Sequence[int], index_rows: Sequence[int]) -> None:
        """`infos` in the order of their ids; each has the machine of that number in `nodes` and that row of the prefix
        index.
        """
        self.num_unreported = 0  # sequences that other routers assigned without reporting them
        self.num_sequences = 0  # all
        self._unreported, self._sequences = [0] * len(infos), [0] * len(infos)  # by row, as counted in those two
        self.index_rows: Ints = np.array(index_rows, np.int64)
        self.names = tuple(info.worker_id for info in infos)
        self.row_of = {name: row for row, name in enumerate(self.names)}
        self.ints: Ints = np.zeros((ROOM + 1, len(infos)), np.int64)
        self.floats: Floats = np.zeros((OUTPUT + 1, len(infos)))
        self.floats[REPORTED_AT] = -np.inf
        self.ints[NODE] = nodes
        self.ints[NUM_BLOCKS] = [info.num_blocks for info in infos]
        self.ints[BLOCK_SIZE] = [info.block_size for info in infos]
        self.ints[KV_BYTES_PER_TOKEN] = [info.kv_bytes_per_token for info in infos]
        self.ints[DECODES] = [Role.DECODE in sides(info.role) for info in infos]
        self.ints[LONGEST] = [info.max_model_len for info in infos]
        self.ints[ROOM] = self.ints[NUM_BLOCKS] * self.ints[BLOCK_SIZE]
        self._least_longest, self._least_room = (
            int(self.ints[which].min(initial=1 << 62)) for which in (LONGEST, ROOM)
        )
        self._int_rows, self._float_rows = tuple(self.ints[:NODE]), tuple(self.floats)
        self._fixed = [_shared(self.ints[which]) for which in range(NODE, LONGEST)]
        self.stale: dict[WorkerAccount, None] = {}  # whose loads have changed since `write_stale`
        self._speeds: Floats | None = None  # as `_rates` returned them for `_assumed_rate`; None: outdated
        self._assumed_rate = 0.0
        self._num_measured = Counter[float]()  # workers, by measured prefill rate

    def __len__(self) -> int:
        return len(self.names)

    def write_load(self, row: int, load: tuple[int, ...], turn: int, num_unreported: int) -> None:
        """`load`: as WorkerAccount.counts; `num_unreported`: of its sequences, those that other routers assigned
        without reporting them.
        """
        ints, sequences = self.ints, load[SEQUENCES]
        ints[:TURN, row], ints[TURN, row] = load, turn
        self.num_unreported += num_unreported - self._unreported[row]
        self.num_sequences += sequences - self._sequences[row]
        self._unreported[row], self._sequences[row] = num_unreported, sequences

    def write_stale(self) -> None:
        """Bring the rows up to date."""
        stale, self.stale = self.stale, {}
        for account in stale:
            for columns, row in account.places.values():
                if columns is self:
                    account.write_load(columns, row)

    def write_rate(self, row: int, prefill_rate: float) -> None:
        """0: not measured."""
        if (before := float(self.floats[PREFILL_RATE, row])) != prefill_rate:
            self.floats[PREFILL_RATE, row], self._speeds = prefill_rate, None
            self._num_measured[before] -= before > 0
            self._num_measured[prefill_rate] += prefill_rate > 0

    def _rates(self, assumed: float) -> Floats:
        """Prompt tokens/s of all workers: of one that measured about what most did, or nothing yet, the median of the
        measured ones, so that measurements of other prompts do not distinguish equal workers; `assumed` if there are
        none.
        """
        if self._speeds is None or assumed != self._assumed_rate:
            rate, usual = self.floats[PREFILL_RATE], self._median_rate() or assumed
            is_own = (rate > SAME_SPEED * usual) | ((rate < usual / SAME_SPEED) & (rate > 0))
            self._speeds, self._assumed_rate = np.where(is_own, rate, usual), assumed
        return self._speeds

    def _median_rate(self) -> float:
        """0: none has measured."""
        left = self._num_measured.total() / 2
        for rate in sorted(self._num_measured):
            left -= self._num_measured[rate]
            if left <= 0:
                return rate
        return 0.0

    def queued_s(self, assumed: float) -> Floats:
        """Seconds of queued prompts at each worker, overdue ones left out; `assumed`: prompt tokens/s of workers that
        have not measured.
        """
        seconds: Floats = self.ints[QUEUED_TOKENS] / self._rates(assumed)
        return seconds

    def fitting(self, request: RouteRequest, *, needs_output: bool) -> Ints | None:
        """Rows of the workers that could hold the request if they were empty; None: all. Workers cut output beyond
        their context.
        """
        least = request.num_tokens + (request.max_tokens > 1)
        most = request.num_tokens + (request.max_tokens if needs_output and request.needs_decode else 1)
        if least <= self._least_longest and most <= self._least_room:
            return None
        longest, room = self.ints[LONGEST], self.ints[ROOM]
        return np.flatnonzero((longest >= least) & (np.minimum(longest, most) <= room))

    def usable(
        self, request: RouteRequest, *, max_waiting: int, needs_output: bool, excluded: Collection[str]
    ) -> Ints | None:
        """Rows of the workers that can take the request now: large enough, not excluded, queue not full. None: all."""
        rows = self.fitting(request, needs_output=needs_output)
        without = [row for name in excluded if (row := self.row_of.get(name)) is not None] if excluded else None
        is_full = self._int_rows[WAITING] >= max_waiting
        if rows is None and not without and not any_of(is_full):
            return None
        is_free = ~is_full
        if without:
            is_free[without] = False
        return np.flatnonzero(is_free) if rows is None else rows[is_free[rows]]

    def table(self, rows: Ints | None, held: PrefixHits, prefill_rate: float, now_s: float) -> WorkerTable:
        """The table that policies read, of these rows (None: all). `held` has a value for each row of these columns.

        `prefill_rate`: prompt tokens/s assumed of a worker that has not measured.
        """
        names, ints, fixed, rates = self.names, self._int_rows, self._fixed, self._rates(prefill_rate)
        _, step_s, recent_step_s, kv_rate, reported_at_s, output_tokens = self._float_rows
        if rows is not None:
            names = tuple(map(names.__getitem__, rows.tolist()))
            ints, rates, held = (
                tuple(self.ints[:NODE, rows]),
                rates[rows],
                PrefixHits(*(column[rows] for column in held)),
            )
            _, step_s, recent_step_s, kv_rate, reported_at_s, output_tokens = self.floats[:, rows]
            fixed = [column[: len(rows)] if only(column) is not None else column[rows] for column in fixed]
        nodes, *constants = fixed
        speeds = rates, step_s, recent_step_s, kv_rate
        columns = (nodes, *held, *ints, *constants, *speeds, now_s - reported_at_s, output_tokens)
        return WorkerTable(names, *columns)


def _shared(column: Ints) -> Ints:
    """The column; stored as one number (stride 0) if all its values are equal."""
    if not len(column) or (column != column[0]).any():
        return column
    return np.broadcast_to(column[0], column.shape)


_BUCKET = math.log(1.25)
SAME_SPEED = 1.6
"""Workers whose measured speeds differ by no more than this factor, two buckets, are taken to be equally fast."""
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

_SHOWN_FACTS = ("worker_id", "node_id", "max_model_len", "num_blocks", "block_size", "kv_bytes_per_token")
_SHOWN_LOAD = (
    "prefill_tokens_per_s", "decode_step_s", "kv_bytes_per_s", "queued_tokens", "queued_requests", "overdue_tokens",
    "sequences", "waiting", "free_blocks", "turn",
)  # fmt: skip
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

    def __init__(self, info: WorkerInfo, model: CostModel) -> None:
        self.info, self._model = info, model
        self.report: LoadReport | None = None
        self.reported_at_s: float | None = None
        self.own = OwnLoad()
        self.foreign_tokens = 0  # queued prompt tokens that other routers assigned
        self.foreign_sequences = 0
        self.foreign_prompts = 0  # those prompts
        self._others: AssignedByOthers | None = None
        self._step_time = StepTime(model.default_decode_step_s)
        self.changed: dict[WorkerAccount, None] | None = None
        """Accounts whose own load is to be shared with the other routers; None: no other router listens."""
        self.turn = 0  # when it was last chosen
        self.places: dict[Role, tuple[Columns, int]] = {}
        """Its row in the columns of each role that it has; none while the worker is down, or changes its role."""

    def set_places(self, places: dict[Role, tuple[Columns, int]]) -> None:
        """Write to these rows from now on."""
        self.places = places
        self._write_report()
        self._load_changed()

    def apply_report(self, report: LoadReport, now_s: float) -> None:
        """Take the newest report. Reports of one connection come in order."""
        passed_s = now_s - self.reported_at_s if self.reported_at_s is not None else 0.0
        self._step_time.observe(self.report, report, passed_s, now_s)
        self.report, self.reported_at_s = report, now_s
        self._count_foreign()
        self._write_report()
        self._load_changed()

    def apply_others(self, others: AssignedByOthers) -> None:
        """What the other routers report that they have assigned to it."""
        self._others = others
        self._count_foreign()
        self._load_changed()

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
        self.foreign_tokens, self.foreign_prompts, self.foreign_sequences = tokens, prefills, sequences

    def assigned(self) -> Assigned:
        own = self.own
        return Assigned(tokens=own.tokens, prompts=own.prefills, sequences=own.sequences, blocks=own.unconfirmed_blocks)

    @property
    def num_others(self) -> int:
        """Other routers that are connected to it."""
        return (self._others or _NO_OTHERS).num_others

    @property
    def prefill_tokens_per_s(self) -> float:
        """Measured prefill speed; 0: not measured yet."""
        return bucketed(self.report.prefill_tokens_per_s) if self.report is not None else 0.0

    @property
    def unreported_overdue_tokens(self) -> int:
        """Tokens of our own overdue prompts that the worker does not report as overdue (yet): it queues them last all
        the same.
        """
        return self.overdue_tokens - (self.report or _UNREPORTED).overdue_tokens

    @property
    def overdue_tokens(self) -> int:
        """Tokens of all overdue prompts to be computed at the worker."""
        return max(self.own.overdue_tokens, (self.report or _UNREPORTED).overdue_tokens)

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
        self._load_changed()

    def load(self) -> dict[str, str | float]:
        """The worker's whole load by name, for `kvrelay status`. Rates are 0 while unmeasured."""
        facts = {name: getattr(self.info, name) for name in _SHOWN_FACTS}
        return facts | dict(zip(_SHOWN_LOAD, (*self._speeds(), *self.counts(), self.turn), strict=True))

    def counts(self) -> tuple[int, int, int, int, int, int]:
        """(queued tokens, queued requests, overdue tokens, sequences, waiting ones, free blocks); see WorkerTable."""
        report, own = self.report or _UNREPORTED, self.own
        sequences = self.foreign_sequences + own.sequences
        free = report.free_blocks if self.report is not None else self.info.num_blocks
        return (
            max(self.foreign_tokens + own.tokens - report.overdue_tokens, 0),  # new requests go before overdue ones
            max(self.foreign_prompts + own.prefills - report.overdue, 0),
            report.overdue_tokens,
            sequences,
            max(report.waiting, sequences - self.info.max_running, 0),
            free - max(0, own.unconfirmed_blocks + (self._others or _NO_OTHERS).blocks - report.leased_blocks),
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

    def _load_changed(self) -> None:
        """Written when the columns are next read: between two decisions a worker's load changes several times."""
        for columns, _ in self.places.values():
            columns.stale[self] = None

    def write_load(self, columns: Columns, row: int) -> None:
        """To one of its places."""
        is_shared = self._others is not None and self._others.is_complete
        columns.write_load(row, self.counts(), self.turn, 0 if is_shared else self.foreign_sequences)

    def _write_report(self) -> None:
        for columns, row in self.places.values():
            self._write_report_to(columns, row)

    def _write_report_to(self, columns: Columns, row: int) -> None:
        floats = columns.floats
        rate, step_s, kv_rate = self._speeds()
        columns.write_rate(row, rate)
        step_s = self._step_time.decayed_s(step_s or self._model.default_decode_step_s, self.reported_at_s)
        recent_s = self._step_time.decayed_s(self._step_time.recent_s, self.reported_at_s)
        floats[DECODE_STEP, row], floats[RECENT_STEP, row] = step_s, max(step_s, recent_s)
        floats[KV_RATE, row] = kv_rate or self._model.default_kv_bytes_per_s
        if self.report is not None:
            floats[OUTPUT, row], floats[REPORTED_AT, row] = self.report.output_tokens, self.reported_at_s
