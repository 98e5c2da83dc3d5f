"""What every policy receives and returns. Pure: no torch, Ray, sockets, clock or random source.

A policy is a function of its arguments: it keeps no state between two calls and changes nothing. What looks like state
is in the columns (`turn`: when a worker was last chosen); randomness comes from the request (`RoutingContext.draw`). So
a decision can be reproduced from its inputs, and the simulator runs the same code.
"""

import difflib
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from kvrelay.errors import ConfigError
from kvrelay.router.types import Candidate, RouteRequest

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MAX_CANDIDATES = 16
"""Candidates that a policy returns, at most."""

Options = dict[str, Any]
"""A policy's own settings, as in `router.policy_options`; unknown names and wrong types raise ConfigError."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Weights of the cost terms, and the speeds that are assumed of a worker before its first measurement."""

    default_prefill_tokens_per_s: float = 2000.0
    default_decode_step_s: float = 0.03
    default_kv_bytes_per_s: float = 4e9  # between processes of one host
    tier_bytes_per_s: float = 2e9  # from a worker's lower tiers into its pool
    other_node_share: float = 0.25  # of a bandwidth, between hosts
    unhidden_share: float = 0.05  # of a transfer, even under a long prefill: its last layers
    handoff_s: float = 0.002
    displaced_share: float = 0.04  # of KV that arrives at a worker: so much displaces what would have been found again
    decode_load_weight: float = 0.016  # of a step, per sequence on the decode worker and token of the mean output
    both_load_weight: float = 0.1  # of a step, per sequence, where all workers decode: see CommonCost.decode
    stall_weight: float = 0.1  # of the prefill's time, per sequence that it stalls
    next_stall_weight: float = 1.0  # of the prefill's time, for the sequences that will arrive during it
    max_pressure: float = 64.0  # seconds of harm to later requests per second of prefill while all workers compute
    missed_s: float = 8.0  # cost of one missed target
    ttft_s: float = 5.0  # default TTFT target
    tpot_s: float = 0.1  # default TPOT target
    expected_output_tokens: int = 256  # mean output, and the most that a request is charged blocks for in advance
    local_prefill_tokens: int = 32  # up to so many uncached tokens fit beside a decode step without stalling it


class PolicyOptions(BaseModel):
    """Options of one policy: unknown names and wrong types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Model = TypeVar("Model", bound=PolicyOptions)


def parse_options(model: type[Model], policy: str, options: Options) -> Model:
    """The options with their defaults. Raises ConfigError, which names the first invalid one."""
    try:
        return model.model_validate(options)
    except ValidationError as error:
        raise ConfigError(f"router.policy_options of {policy}: {_first_problem(error, model)}") from error


def _first_problem(error: ValidationError, model: type[PolicyOptions]) -> str:
    problem = error.errors(include_url=False)[0]
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] != "extra_forbidden":
        return f"{name}: {problem['msg']}"
    near = difflib.get_close_matches(name, model.model_fields, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(model.model_fields) or 'none'}"
    return f"there is no option {name}; {hint}"


@dataclass(slots=True, eq=False)
class WorkerTable:
    """The workers of one role that may take a request, as columns: row i is `names[i]`. Read-only.

    Two are built per decision; not frozen, because building a frozen dataclass of 21 fields takes ten times as long
    (1.4 us).

    Token counts of the prompt (`held`, `expected`, `in_any_tier`) are whole blocks. Speeds are measured, or the assumed
    default of a worker that has not measured yet: never 0.
    """

    names: tuple[str, ...]
    nodes: Ints  # equal numbers: the same machine
    held: Ints  # tokens of this prompt in the worker's KV pool
    expected: Ints  # at least `held`: also those of queued prompts with the same prefix
    in_any_tier: Ints  # at least `held`: also those in the worker's lower tiers
    queued_tokens: Ints  # prompt tokens not computed yet, without overdue prompts, which new requests overtake
    queued_requests: Ints
    overdue_tokens: Ints
    sequences: Ints  # running, waiting or receiving KV
    waiting: Ints  # of those, queued
    free_blocks: Ints
    turn: Ints  # when this router last chose it: the larger, the later; 0: never
    num_blocks: Ints
    block_size: Ints  # tokens
    kv_bytes_per_token: Ints
    decodes: Ints  # whether it decodes too: 1 or 0
    prefill_tokens_per_s: Floats
    decode_step_s: Floats
    recent_step_s: Floats  # recent inter-token latency, with prefill chunks; decode_step_s, the least, under an SLO
    kv_bytes_per_s: Floats  # KV transfer bandwidth from another process of its machine
    age_s: Floats  # of its last load report; infinite before the first
    output_tokens: Floats  # mean of its recent outputs; 0: unknown

    def __len__(self) -> int:
        return len(self.names)


def any_of(bools: Bools) -> bool:
    """`bools.any()`, five times faster for short arrays."""
    return len(bools) > 0 and bool(bools[bools.argmax()])


def only(column: Ints) -> int | None:
    """The value of a constant column, which is stored once (stride 0); None: the column has several values, or is
    empty.
    """
    return int(column[0]) if column.strides == (0,) and len(column) else None


def select_rows(table: WorkerTable, rows: Ints) -> WorkerTable:
    columns = (getattr(table, field.name)[rows] for field in fields(table) if field.name != "names")
    return WorkerTable(tuple(table.names[row] for row in rows), *columns)


@dataclass(frozen=True, slots=True)
class RoutingContext:
    """Inputs of a decision that are the same for every worker."""

    request: RouteRequest
    draw: float  # in [0, 1), from a hash of the request id
    now_s: float
    unreported_share: float = (
        0.0  # of all sequences at the workers, those of routers that do not report their assignments
    )
    arrivals_per_s: float = 0.0  # of prompts that share this one's prefix, as far as a worker holds it or will hold it
    tenant_excess: float = 0.0  # the tenant's queued work over an equal share, minus 1; at least 0
    stored_tokens: int = 0  # of the prompt, in the cluster's KV store, from where any worker can load them


class RoutingPolicy(ABC):
    """A routing policy: ranks (prefill worker, decode worker) candidates. Built once, from `router.policy_options`.

    `name` is its value of `router.policy` (a policy from elsewhere is named by its path, `module:Class`); `term_names`
    names the terms of its scores.
    """

    name: ClassVar[str]
    term_names: ClassVar[tuple[str, ...]]
    weighs_both: ClassVar[bool] = False
    """Whether it is shown pairs, under an SLO, where all workers do both and one holds half of the prompt."""

    @abstractmethod
    def __init__(self, options: Options) -> None:
        """Raises ConfigError for an unknown option or a wrong type."""

    @classmethod
    def build(cls, options: Options, model: CostModel) -> Self:
        """The policy of these options; `model` has the settings' cost parameters, for policies that use them."""
        return cls(options)

    @abstractmethod
    def rank(self, context: RoutingContext, prefills: WorkerTable, decodes: WorkerTable) -> list[Candidate]:
        """The best candidates, best first, at most MAX_CANDIDATES; empty if there is none.

        With `request.force` all are local (prefill None) or all remote. For a request that needs no decode, all have
        decode None if there are prefill workers. Without prefill workers every candidate is local.
        """

    def latency_targets(self, request: RouteRequest) -> tuple[float, float] | None:
        """(TTFT target, TPOT target) in seconds, by which workers order their queues and size prefill chunks; None:
        none.
        """
        return None
