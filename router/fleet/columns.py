"""The loads of one role's workers as columns: row i is the worker `names[i]`, in the order of their ids.

Owns the arrays. A worker's account writes its row whenever it changes, so that a decision reads all workers in a few
numpy calls. A column that never changes and has one value is stored once (see `only`), so that arithmetic on it is done
once. Rows are laid out anew when a worker comes or goes. Pure: never imports torch, Ray, sockets, a clock or a random
source.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from kvrelay.plane.messages import WorkerInfo
from kvrelay.router.policies.base import Floats, Ints, WorkerTable, any_of, only
from kvrelay.router.types import RouteRequest

# rows of `Columns.ints`: first the fields of RowLoad, then constants
QUEUED_TOKENS, QUEUED_REQUESTS, SEQUENCES, WAITING, FREE_BLOCKS, TURN = range(6)
NODE, NUM_BLOCKS, BLOCK_SIZE, KV_BYTES_PER_TOKEN, LONGEST, ROOM = range(6, 12)
# rows of `Columns.floats`; PREFILL_RATE is 0 while it is not measured
PREFILL_RATE, DECODE_STEP, RECENT_STEP, KV_RATE, REPORTED_AT, OUTPUT = range(6)


class PrefixHits(NamedTuple):
    """Tokens of one prompt that each worker holds, by row of a `Columns`; see WorkerTable."""

    held: Ints
    expected: Ints
    in_any_tier: Ints


class RowLoad(NamedTuple):
    """One worker's load, as its account writes it; see WorkerTable."""

    queued_tokens: int
    queued_requests: int
    sequences: int
    waiting: int
    free_blocks: int
    turn: int


class RowReport(NamedTuple):
    """One worker's measurements, as its account writes them; see WorkerTable. prefill_rate: 0 if not measured."""

    prefill_rate: float
    decode_step_s: float
    recent_step_s: float
    kv_rate: float
    output_tokens: float


class Columns:
    """All live workers of one role. Written by their accounts.

    It has more than 12 attributes, because decisions read views that are made once per layout.
    """

    __slots__ = (
        "_assumed_rate",
        "_fixed",
        "_float_rows",
        "_int_rows",
        "_least_longest",
        "_least_room",
        "_sequences",
        "_speeds",
        "_unreported",
        "floats",
        "index_rows",
        "ints",
        "names",
        "num_sequences",
        "num_unreported",
        "row_of",
    )

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
        self.ints[LONGEST] = [info.max_model_len for info in infos]
        self.ints[ROOM] = self.ints[NUM_BLOCKS] * self.ints[BLOCK_SIZE]
        self._least_longest, self._least_room = (
            int(self.ints[which].min(initial=1 << 62)) for which in (LONGEST, ROOM)
        )
        self._int_rows, self._float_rows = tuple(self.ints[:NODE]), tuple(self.floats)
        self._fixed = [_shared(self.ints[which]) for which in (NODE, NUM_BLOCKS, BLOCK_SIZE, KV_BYTES_PER_TOKEN)]
        self._speeds: Floats | None = None  # prefill rates, with `_assumed_rate` for unmeasured workers; None: outdated
        self._assumed_rate = 0.0

    def __len__(self) -> int:
        return len(self.names)

    def write_load(self, row: int, load: RowLoad, num_unreported: int) -> None:
        """`num_unreported`: of its sequences, those that other routers assigned without reporting them."""
        ints = self.ints
        ints[QUEUED_TOKENS, row], ints[QUEUED_REQUESTS, row], ints[SEQUENCES, row], ints[WAITING, row] = load[:4]
        ints[FREE_BLOCKS, row], ints[TURN, row] = load[4:]
        self.num_unreported += num_unreported - self._unreported[row]
        self.num_sequences += load.sequences - self._sequences[row]
        self._unreported[row], self._sequences[row] = num_unreported, load.sequences

    def write_report(self, row: int, report: RowReport, reported_at_s: float | None) -> None:
        """`reported_at_s`: None before the first report."""
        floats = self.floats
        if floats[PREFILL_RATE, row] != report.prefill_rate:
            floats[PREFILL_RATE, row], self._speeds = report.prefill_rate, None
        floats[DECODE_STEP, row], floats[RECENT_STEP, row] = report.decode_step_s, report.recent_step_s
        floats[KV_RATE, row], floats[OUTPUT, row] = report.kv_rate, report.output_tokens
        if reported_at_s is not None:
            floats[REPORTED_AT, row] = reported_at_s

    def _rates(self, assumed: float) -> Floats:
        """Prompt tokens/s of all workers; `assumed` for those that have not measured."""
        if self._speeds is None or assumed != self._assumed_rate:
            rate = self.floats[PREFILL_RATE]
            self._speeds, self._assumed_rate = np.where(rate, rate, assumed), assumed
        return self._speeds

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
        tokens, requests, sequences, waiting, free, turn = ints
        nodes, blocks, size, per_token = fixed
        return WorkerTable(
            names,
            nodes,
            *held,
            tokens,
            requests,
            sequences,
            waiting,
            free,
            blocks,
            size,
            rates,
            step_s,
            recent_step_s,
            kv_rate,
            per_token,
            turn,
            now_s - reported_at_s,
            output_tokens,
        )


def _shared(column: Ints) -> Ints:
    """The column; stored as one number (stride 0) if all its values are equal."""
    if not len(column) or (column != column[0]).any():
        return column
    return np.broadcast_to(column[0], column.shape)
