"""Policies that choose each role's worker on its own, and what they share: random numbers from one draw, the best rows
of a table, and candidates made of two rankings; and all policies by their value of `router.policy`. Pure: no torch,
Ray, sockets, clock or random source.
"""

from abc import abstractmethod
from collections.abc import Sequence
from difflib import get_close_matches
from functools import lru_cache
from hashlib import blake2b
from importlib import import_module
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from kvrelay.errors import ConfigError
from kvrelay.router.policies.base import (
    MAX_CANDIDATES,
    CostModel,
    Floats,
    Ints,
    Options,
    PolicyOptions,
    RoutingContext,
    RoutingPolicy,
    WorkerTable,
    parse_options,
)
from kvrelay.router.policies.joint import Joint
from kvrelay.router.types import Candidate
from kvrelay.settings.router import RouterSettings

Words = NDArray[np.uint64]
Column = Floats | Ints | Words

PAIRED_ROWS = 4
"""Workers of each role, at least, of which all pairs are candidates."""
PREFILL_STREAM, DECODE_STREAM = 1, 2
"""Independent streams of random numbers, one for each role."""
_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mixed(words: Words) -> Words:
    """A hash of each word.

    Source: the output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


def draws(draw: float, count: int, stream: int) -> Words:
    """`count` independent random words, the same for the same draw (in [0, 1)) and stream."""
    seed = mixed(np.array([(int(draw * 2**64) + stream * _GAMMA) & _MASK], dtype=np.uint64))
    return mixed(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA) + seed)


def unit(words: Words) -> Floats:
    """The words as numbers in (0, 1)."""
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def best_rows(score: Column, tie: Column) -> Ints:
    """Rows of the lowest scores, lowest first, at most MAX_CANDIDATES; ties are broken by `tie`, then by row."""
    if len(score) <= MAX_CANDIDATES:
        return np.lexsort((tie, score))
    bound = np.partition(score, MAX_CANDIDATES - 1)[MAX_CANDIDATES - 1]
    sure, equal = np.flatnonzero(score < bound), np.flatnonzero(score == bound)
    room = MAX_CANDIDATES - len(sure)
    if len(equal) > room:
        equal = equal[np.argpartition(tie[equal], room - 1)[:room]]
    rows = np.sort(np.concatenate((sure, equal)))
    return rows[np.lexsort((tie[rows], score[rows]))]


class RankedRows(NamedTuple):
    """The best workers of one table, best first."""

    rows: list[int]
    scores: Floats  # [workers]
    parts: Floats  # [workers, terms]


def rank_rows(rows: Ints, score: Column, columns: Sequence[Column | float]) -> RankedRows:
    """`rows` with their scores and terms. columns: one per term of the policy; a number holds for every worker."""
    parts = np.empty((len(rows), len(columns)))
    for term, column in enumerate(columns):
        parts[:, term] = column[rows] if isinstance(column, np.ndarray) else column
    return RankedRows(rows.tolist(), score[rows].astype(np.float64), parts)


def pairs(prefill: RankedRows, decode: RankedRows) -> list[Candidate]:
    """The best prefill workers with the best decode workers, by the sum of their scores."""
    num_decodes = min(len(decode.rows), max(PAIRED_ROWS, MAX_CANDIDATES // len(prefill.rows)))
    num_prefills = min(len(prefill.rows), max(PAIRED_ROWS, MAX_CANDIDATES // num_decodes))
    total = np.add.outer(prefill.scores[:num_prefills], decode.scores[:num_decodes]).ravel()
    candidates = []
    for index in np.argsort(total, kind="stable")[:MAX_CANDIDATES].tolist():
        p, d = divmod(index, num_decodes)
        parts = tuple((prefill.parts[p] + decode.parts[d]).tolist())
        candidates.append(Candidate(prefill.rows[p], decode.rows[d], float(total[index]), parts))
    return candidates


def single(ranked: RankedRows, *, is_local: bool) -> list[Candidate]:
    """Decode workers that compute the prompt themselves (`is_local`), or prefill workers alone, for a single token."""
    listed = zip(ranked.rows, ranked.scores.tolist(), map(tuple, ranked.parts.tolist()), strict=True)
    return [Candidate(None, row, *rest) if is_local else Candidate(row, None, *rest) for row, *rest in listed]


def matched_share(context: RoutingContext, table: WorkerTable) -> Floats:
    """Share of the prompt that each worker holds, or is expected to hold."""
    return table.expected / context.request.num_tokens


class IndependentChoice(RoutingPolicy):
    """A policy that ranks prefill workers by one rule and decode workers by another; local only if forced."""

    @abstractmethod
    def rank_prefill(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        """Prefill workers for a prompt that is decoded elsewhere. `table` is not empty."""

    @abstractmethod
    def rank_decode(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        """Decode workers for a prompt that a prefill worker computes."""

    def rank_local(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        """Decode workers that also compute the prompt."""
        return self.rank_decode(context, table)

    def rank(self, context: RoutingContext, prefills: WorkerTable, decodes: WorkerTable) -> list[Candidate]:
        if must_be_local(context, prefills):
            return single(self.rank_local(context, decodes), is_local=True) if len(decodes) else []
        if not len(prefills) or (context.request.needs_decode and not len(decodes)):
            return []
        if not context.request.needs_decode:
            return single(self.rank_prefill(context, prefills), is_local=False)
        return pairs(self.rank_prefill(context, prefills), self.rank_decode(context, decodes))


def must_be_local(context: RoutingContext, prefills: WorkerTable) -> bool:
    """Whether the request forces local prefill, or there are no prefill workers."""
    return context.request.force == "local" or (not len(prefills) and context.request.force != "remote")


class OneRule(IndependentChoice):
    """One rule for both roles: the first half of `term_names` is a prefill worker's, the second a decode worker's."""

    options_type: ClassVar[type[PolicyOptions]] = PolicyOptions

    def __init__(self, options: Options) -> None:
        self._options: Any = parse_options(self.options_type, self.name, options)

    @abstractmethod
    def order(self, context: RoutingContext, table: WorkerTable, stream: int) -> tuple[Ints, Column, Sequence[Column]]:
        """(the best rows, best first; the score of all rows; its terms). `stream`: PREFILL_STREAM or DECODE_STREAM."""

    def rank_prefill(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        rows, score, terms = self.order(context, table, PREFILL_STREAM)
        return rank_rows(rows, score, (*terms, *(0.0 for _ in terms)))

    def rank_decode(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        rows, score, terms = self.order(context, table, DECODE_STREAM)
        return rank_rows(rows, score, (*(0.0 for _ in terms), *terms))


class RoundRobin(OneRule):
    """The least recently chosen worker, separately for each role.

    Source: vLLM, examples/online_serving/disaggregated_serving/disagg_proxy_demo.py (commit 03a7284), `--roundrobin`:
    one cycle over the prefill instances, one over the decode instances; Ray Serve LLM 2.60's default
    (serve/experimental/round_robin_router.py).
    """

    name: ClassVar[str] = "round_robin"
    term_names: ClassVar[tuple[str, ...]] = ("prefill_turn", "decode_turn")

    def order(self, context: RoutingContext, table: WorkerTable, stream: int) -> tuple[Ints, Column, Sequence[Column]]:
        return best_rows(table.turn, np.arange(len(table))), table.turn, (table.turn,)


class LeastLoadedOptions(PolicyOptions):
    """by: the unit of a prefill worker's load; a decode worker's is its requests."""

    by: Literal["tokens", "requests"] = "tokens"


class LeastLoaded(OneRule):
    """The lowest load; ties go to the least recently chosen worker.

    Source: vLLM's disagg_proxy_demo.py (as for RoundRobin), `LoadBalancedScheduler`, its default: the prefill instance
    with the least prompt text, the decode instance with the fewest requests (`by: tokens`); Dynamo's router mode
    `least-loaded`: the fewest requests in both pools (`by: requests`).
    """

    name: ClassVar[str] = "least_loaded"
    term_names: ClassVar[tuple[str, ...]] = ("prefill_load", "decode_load")
    options_type = LeastLoadedOptions

    def load(self, table: WorkerTable, stream: int) -> Ints:
        in_tokens = stream == PREFILL_STREAM and self._options.by == "tokens"
        return table.queued_tokens if in_tokens else table.sequences

    def order(self, context: RoutingContext, table: WorkerTable, stream: int) -> tuple[Ints, Column, Sequence[Column]]:
        load = self.load(table, stream)
        return best_rows(load, table.turn), load, (load,)


class PowerOfTwoOptions(LeastLoadedOptions):
    by: Literal["tokens", "requests"] = "requests"


class PowerOfTwo(LeastLoaded):
    """Random pairs of workers, one after the other; of each pair the less loaded first.

    Source: Ray 2.60, serve/_private/request_router/pow_2_router.py: two replicas at random, the one with fewer ongoing
    requests, the first on a tie; when neither accepts, two others. SGLang's policy of that name compares tokens where
    it knows them.
    """

    name: ClassVar[str] = "power_of_two"
    term_names: ClassVar[tuple[str, ...]] = ("prefill_position", "decode_position")
    options_type = PowerOfTwoOptions

    def order(self, context: RoutingContext, table: WorkerTable, stream: int) -> tuple[Ints, Column, Sequence[Column]]:
        rows = two_by_two(context, self.load(table, stream), stream)
        position = positions(rows, len(table))
        return rows, position, (position,)


def two_by_two(context: RoutingContext, load: Ints, stream: int) -> Ints:
    """Rows in random order, of each two the less loaded first."""
    keys = draws(context.draw, len(load), stream)
    rows = best_rows(keys, keys)
    whole = len(rows) // 2 * 2
    first, second = rows[:whole:2], rows[1:whole:2]
    is_swapped = load[second] < load[first]
    rows[:whole:2], rows[1:whole:2] = np.where(is_swapped, second, first), np.where(is_swapped, first, second)
    return rows


def positions(rows: Ints, count: int) -> Floats:
    """The position in `rows` of each of `count` rows of a table; infinite for those that are not in it."""
    position = np.full(count, np.inf)
    position[rows] = np.arange(len(rows))
    return position


class PrefixAffinityOptions(PolicyOptions):
    """imbalanced_threshold: requests between the most and the least loaded worker. match_rate_threshold: share of the
    prompt.
    """

    imbalanced_threshold: float = Field(float("inf"), ge=0)
    match_rate_threshold: float = Field(0.1, ge=0, le=1)


class PrefixAffinity(OneRule):
    """The longest prefix; ties go to the worker with the fewest requests.

    Source: Ray 2.60, llm/_internal/serve/routing_policies/prefix_aware/prefix_aware_router.py, with its defaults: any
    load counts as balanced (no threshold); a match of less than 10 % is none, and then the replica with the smallest
    part of the prefix tree is taken. Prefill and decode are deployments with a router each, so the rule holds for both.
    Ray's tree holds the text of all prompts that this router has sent anywhere; here the prefix index answers
    (`WorkerTable.expected`).
    """

    name: ClassVar[str] = "prefix_affinity"
    term_names: ClassVar[tuple[str, ...]] = ("prefill_matched", "prefill_requests", "decode_matched", "decode_requests")
    options_type = PrefixAffinityOptions

    def order(self, context: RoutingContext, table: WorkerTable, stream: int) -> tuple[Ints, Column, Sequence[Column]]:
        load, matched = table.sequences, matched_share(context, table)
        if load.max() - load.min() > self._options.imbalanced_threshold:
            rows = two_by_two(context, load, stream)
            return rows, positions(rows, len(table)), (matched, load)
        if matched.max() < self._options.match_rate_threshold:
            return best_rows(table.turn, load), table.turn, (matched, load)
        return best_rows(-matched, load), -matched, (matched, load)


class Session(OneRule):
    """The workers of the session's earlier requests, as long as the set of workers does not change.

    Source: Ray 2.60, serve/experimental/consistent_hash_router.py: a session's hash on a ring of the replicas' hashes;
    a request without a session is hashed by its own id; the next replicas on the ring when the first does not accept.
    Here the worker with the lowest hash of (worker, session) wins (rendezvous hashing, Thaler and Ravishankar 1998): as
    evenly spread as a ring of many points, as few sessions moved when a worker comes or goes, and no state between two
    calls.
    """

    name: ClassVar[str] = "session"
    term_names: ClassVar[tuple[str, ...]] = ("prefill_distance", "decode_distance")

    def order(self, context: RoutingContext, table: WorkerTable, stream: int) -> tuple[Ints, Column, Sequence[Column]]:
        key = np.uint64(_hashed("session:" + (context.request.session or context.request.request_id)))
        words = mixed(np.fromiter(map(_hashed_name, table.names), np.uint64, len(table)) ^ key)
        distance = unit(words)
        return best_rows(distance, words), distance, (distance,)


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=1 << 16)
def _hashed_name(name: str) -> int:
    """A worker's hash: the same for every router and after every restart."""
    return _hashed("worker:" + name)


POLICIES: dict[str, type[RoutingPolicy]] = {
    policy.name: policy for policy in (Joint, RoundRobin, LeastLoaded, PowerOfTwo, PrefixAffinity, Session)
}


def build_policy(settings: RouterSettings, model: CostModel) -> RoutingPolicy:
    """The policy that the settings name, with its options. Raises ConfigError for an unknown policy or option."""
    policy = _imported(settings.policy) if ":" in settings.policy else POLICIES.get(settings.policy)
    if policy is None:
        near = get_close_matches(settings.policy, POLICIES, 1) or [*sorted(POLICIES), "module:Class"]
        raise ConfigError(f"router.policy: there is no {settings.policy}: did you mean {', '.join(near)}?")
    return policy.build(dict(settings.policy_options), model)


def _imported(path: str) -> type[RoutingPolicy]:
    """The class at `module:Class`. Raises ConfigError."""
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"router.policy: {path} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, RoutingPolicy)):
        raise ConfigError(f"router.policy: {path} is no subclass of {RoutingPolicy.__module__}.RoutingPolicy")
    return found
