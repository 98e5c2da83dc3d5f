"""The accounts of one role's workers as columns: row i is the worker `names[i]`, in the order of their ids.

Owns the arrays; an account writes its own row whenever it changes, so that a decision reads all workers in a few numpy calls.
A column that never changes and has one value is stored once (see `only`), so that what is made of it is one number, too. Rows are laid out anew when a worker comes or goes. Pure: never imports torch, Ray, sockets, a clock or a random source.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from kvrelay.plane.messages import WorkerInfo
from kvrelay.router.policies.base import Floats, Ints, WorkerTable, any_of, only
from kvrelay.router.types import RouteRequest

# rows of `Columns.ints`: first what changes, in the order in which an account writes it
QUEUED_TOKENS, QUEUED_REQUESTS, SEQUENCES, WAITING, FREE_BLOCKS, TURN = range(6)
NODE, NUM_BLOCKS, BLOCK_SIZE, KV_BYTES_PER_TOKEN, LONGEST, ROOM = range(6, 12)
# rows of `Columns.floats`; the first is 0 while it is not measured
PREFILL_RATE, DECODE_STEP, RECENT_STEP, KV_RATE, REPORTED_AT, OUTPUT = range(6)


class PrefixHits(NamedTuple):
    """Tokens of one prompt, by row of a `Columns`: see Side for the meanings."""

    held: Ints
    expected: Ints
    in_any_tier: Ints


class Columns:
    """All live workers of one role. Written by their accounts."""

    __slots__ = (
        "_assumed_rate",
        "_fixed",
        "_float_rows",
        "_int_rows",
        "_least_longest",
        "_least_room",
        "_speeds",
        "floats",
        "index_rows",
        "ints",
        "names",
        "num_foreign",
        "num_sequences",
        "row_of",
    )

    def __init__(self, infos: Sequence[WorkerInfo], nodes: Sequence[int], index_rows: Sequence[int]) -> None:
        """`infos` in the order of their ids, each on the machine of that number in `nodes`, and in that row of the index."""
        self.num_foreign = 0  # sequences that other routers sent and do not tell of
        self.num_sequences = 0  # all
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
        self._fixed = [_once(self.ints[which]) for which in (NODE, NUM_BLOCKS, BLOCK_SIZE, KV_BYTES_PER_TOKEN)]
        self._speeds: Floats | None = None  # with what is assumed of the unmeasured; None: not made yet
        self._assumed_rate = 0.0

    def __len__(self) -> int:
        return len(self.names)

    def set_prefill_rate(self, row: int, rate: float) -> None:
        """Prompt tokens/s, as measured; 0: not yet."""
        if self.floats[PREFILL_RATE, row] != rate:
            self.floats[PREFILL_RATE, row], self._speeds = rate, None

    def _rates(self, assumed: float) -> Floats:
        """Prompt tokens/s of all, `assumed` of those that have not measured."""
        if self._speeds is None or assumed != self._assumed_rate:
            rate = self.floats[PREFILL_RATE]
            self._speeds, self._assumed_rate = np.where(rate, rate, assumed), assumed
        return self._speeds

    def queued_s(self, assumed: float) -> Floats:
        """Seconds of prompts at each worker, but for those that give way; `assumed`: prompt tokens/s of who has not measured."""
        seconds: Floats = self.ints[QUEUED_TOKENS] / self._rates(assumed)
        return seconds

    def fitting(self, request: RouteRequest, *, needs_output: bool) -> Ints | None:
        """Rows of the workers that could hold it if they were empty; None: all. Output beyond the context is theirs to cut."""
        least = request.num_tokens + (request.max_tokens > 1)
        most = request.num_tokens + (request.max_tokens if needs_output and request.needs_decode else 1)
        if least <= self._least_longest and most <= self._least_room:
            return None
        longest, room = self.ints[LONGEST], self.ints[ROOM]
        return np.flatnonzero((longest >= least) & (np.minimum(longest, most) <= room))

    def usable(
        self, request: RouteRequest, *, max_waiting: int, needs_output: bool, excluded: Collection[str]
    ) -> Ints | None:
        """Rows of those that can take it now: not excluded, a place in line, room. None: all of them."""
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
        """What a policy sees of these rows (None: of all). `held` has a value for each row of this table.

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
            names, nodes, *held, tokens, requests, sequences, waiting, free, blocks, size,
            rates, step_s, recent_step_s, kv_rate, per_token, turn, now_s - reported_at_s, output_tokens,
        )  # fmt: skip


def _once(column: Ints) -> Ints:
    """The column, in the place of one number where it is always the same one."""
    if not len(column) or (column != column[0]).any():
        return column
    return np.broadcast_to(column[0], column.shape)
