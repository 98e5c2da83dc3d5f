"""What every policy sees and what it answers. Pure: no torch, Ray, sockets, clock or random source.

A policy is a function of what it is shown: it keeps nothing between two calls and changes nothing. What seems to need memory is
in the columns (`turn`: when a worker was last chosen) or drawn from the request (`RoutingContext.draw`), so that a decision can be told
again from its inputs, and the simulator runs the very same code.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvrelay.router.types import Candidate, RouteRequest

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MAX_CANDIDATES = 16
"""Ways that a policy lists, best first."""


@dataclass(slots=True, eq=False)
class WorkerTable:
    """The workers of one role that may take a request, as columns: row i is `names[i]`. Not to be written into.

    Two are made for each decision; not frozen, since making one of 19 fields then takes ten times as long (1.4 us).

    Token counts of the prompt (`held`, `expected`, `in_any_tier`) are whole blocks. Speeds are measured ones, else what is assumed of a
    worker that has not measured: never 0.
    """

    names: tuple[str, ...]
    nodes: Ints  # equal numbers: the same machine
    held: Ints  # of this prompt's tokens, in the worker's pool, for certain
    expected: Ints  # at least `held`: and with prompts that are on their way there
    in_any_tier: Ints  # at least `held`: and with its own lower tiers
    queued_tokens: Ints  # of prompts, not yet computed
    queued_requests: Ints
    sequences: Ints  # running, waiting or receiving
    waiting: Ints  # of those, in line
    free_blocks: Ints
    num_blocks: Ints
    block_size: Ints  # tokens
    prefill_tokens_per_s: Floats
    decode_step_s: Floats
    recent_step_s: Floats  # between two tokens of a sequence there of late, whatever else its steps computed; at least decode_step_s
    kv_bytes_per_s: Floats  # at which KV arrives there from another process of its machine
    kv_bytes_per_token: Ints
    turn: Ints  # when it was last chosen by this router: the larger, the later; 0: never
    age_s: Floats  # of its last report; infinite before the first
    output_tokens: Floats  # mean of the outputs that ended there last; 0: not known

    def __len__(self) -> int:
        return len(self.names)


def any_of(bools: Bools) -> bool:
    """As `bools.any()`, in a fifth of the time where there are few."""
    return len(bools) > 0 and bool(bools[bools.argmax()])


def only(column: Ints) -> int | None:
    """The one value of a column that is stored once; None: it has several, or has them in as many places."""
    return int(column[0]) if column.strides == (0,) and len(column) else None


def select_rows(table: WorkerTable, rows: Ints) -> WorkerTable:
    """Only these rows of it, in that order."""
    columns = (getattr(table, field.name)[rows] for field in fields(table) if field.name != "names")
    return WorkerTable(tuple(table.names[row] for row in rows), *columns)


@dataclass(frozen=True, slots=True)
class RoutingContext:
    """What is the same for every worker. draw: in [0, 1), made of the request's id and the settings' seed."""

    request: RouteRequest
    draw: float
    now_s: float
    others: float = 0.0  # share of all work at the workers that other routers sent, and do not tell of
    arrivals_per_s: float = (
        0.0  # of prompts that begin with the same prefix, as far as some worker holds or will hold it
    )
    excess: float = 0.0  # by how many times its share of the queued work the request's tenant has more than it
    stored: int = 0  # of the prompt's tokens, in the cluster's own store, from where any worker can load them


class Policy(Protocol):
    """One way of choosing. Constructed once, with its options; see `router/policies/registry.py`."""

    name: ClassVar[str]
    term_names: ClassVar[tuple[str, ...]]

    def rank(self, context: RoutingContext, prefills: WorkerTable, decodes: WorkerTable) -> list[Candidate]:
        """The best ways, best first, at most MAX_WAYS; empty where there is none.

        Where the request forces it (`request.force`), all are local (prefill None) or all remote; where it needs no decode and
        there are prefill workers, all have decode None. Without prefill workers every way is local.
        """
        ...


@runtime_checkable
class OrdersLines(Protocol):
    """A policy that says how soon tokens are wanted: workers order their lines and cut prompts in pieces by it."""

    def wanted(self, request: RouteRequest) -> tuple[float, float]:
        """Seconds to the first token, and for each further one."""
        ...


Options = dict[str, Any]
"""A policy's own settings, as in `router.policy_options`; unknown names and wrong types raise ConfigError."""
