"""Speed curves, which the simulator uses too, and inputs and outputs of the planner. Pure data; tokens, seconds, bytes,
and requests per second.
"""

from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from kvrelay.errors import ConfigError


class StepWork(NamedTuple):
    """What one step computes; means may be fractions.

    prompt_tokens: of chunks. prompt_pairs: (token, earlier token) pairs of chunks, each token with itself. sequences:
    that decode a token each. context_tokens: that those sequences attend to, in all.
    """

    prompt_tokens: float = 0
    prompt_pairs: float = 0
    sequences: float = 0
    context_tokens: float = 0


@dataclass(frozen=True, slots=True)
class SpeedCurve:
    """Seconds. Fitted by `kvrelay profile --fit`, or made of published figures."""

    overhead_s: float  # per step, constant
    weights_s: float  # to read all weights once
    token_s: float  # to multiply one token with them
    pair_s: float  # of prefill attention, per pair
    context_s: float  # of decode attention, per context token
    sequence_s: float = 0.0  # per decoding sequence: sampling, bookkeeping

    def step_s(self, work: StepWork) -> float:
        """Seconds of a step with that work."""
        tokens = work.prompt_tokens + work.sequences
        return (
            self.overhead_s
            + max(self.weights_s, tokens * self.token_s)
            + work.prompt_pairs * self.pair_s
            + work.context_tokens * self.context_s
            + work.sequences * self.sequence_s
        )

    def scaled(self, factor: float) -> "SpeedCurve":
        return SpeedCurve(*(factor * seconds for seconds in astuple(self)))

    def decode_step_s(self, sequences: float, context_tokens: float) -> float:
        """Seconds of a step that only decodes."""
        return self.step_s(StepWork(0, 0, sequences, context_tokens))

    def prefill_s(self, num_tokens: float, cached_tokens: float = 0, chunk_tokens: int = 512) -> float:
        """Seconds of one prompt computed alone in chunks, after its cached prefix."""
        computed = num_tokens - cached_tokens
        chunks, rest = divmod(computed, chunk_tokens)
        total = chunks * self.step_s(StepWork(chunk_tokens)) + pairs_of(computed, cached_tokens) * self.pair_s
        return total + (self.step_s(StepWork(rest)) if rest else 0.0)


def pairs_of(computed: float, cached: float) -> float:
    """(token, earlier token) pairs of so many computed tokens after so many cached ones."""
    return computed * cached + computed * (computed + 1) / 2


@dataclass(frozen=True, slots=True)
class Workload:
    """A steady load. The squared coefficients of variation (cv2) are variance over squared mean; 1.0: exponential."""

    rate: float  # requests per s that arrive, refused ones included
    input_tokens: float  # mean
    output_tokens: float  # mean, at least 1
    cached_share: float = 0.0  # of prompt tokens, which are not computed
    input_cv2: float = 1.0
    output_cv2: float = 1.0
    burstiness: float = 1.0  # cv2 of the gaps between arrivals; 1.0: Poisson

    def at(self, rate: float) -> "Workload":
        """The same requests, `rate` of them per second."""
        return replace(self, rate=rate)


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """One worker of either role: speed and capacity."""

    prefill: SpeedCurve
    decode: SpeedCurve
    pool_tokens: int
    token_budget: int
    max_running: int
    kv_bytes_per_token: int = 0
    link_bytes_per_s: float = float("inf")  # KV bandwidth between two workers
    workers_per_node: int = 1
    prefill_slowdown: tuple[float, ...] = ()
    """Of steps, while 1, 2... workers of the machine compute; empty: they do not slow each other."""
    decode_slowdown: tuple[float, ...] = ()

    @property
    def most_crowded(self) -> int:
        """Number of workers of a machine beyond which crowding does not grow."""
        return max(1, min(self.workers_per_node, max(len(self.prefill_slowdown), len(self.decode_slowdown))))

    def crowded(self, workers: int) -> "WorkerModel":
        """The same worker among so many in all, on as few machines as hold them, all computing."""
        crowd = min(max(workers, 1), self.most_crowded)
        factors = (
            each[min(crowd, len(each)) - 1] if each else 1.0 for each in (self.prefill_slowdown, self.decode_slowdown)
        )
        return replace(self.slowed(*factors), prefill_slowdown=(), decode_slowdown=())

    def slowed(self, prefill: float, decode: float) -> "WorkerModel":
        """The same worker with each curve's times multiplied."""
        return replace(self, prefill=self.prefill.scaled(prefill), decode=self.decode.scaled(decode))


@dataclass(frozen=True, slots=True)
class PlanningTarget:
    """`share` of the requests are to have a TTFT of at most ttft_s, and a mean time per token of at most tpot_s.
    refuses_late: a request whose first token would be late is refused, so it does not delay the others.
    """

    ttft_s: float
    tpot_s: float
    share: float = 0.9
    refuses_late: bool = False


class WorkerCounts(NamedTuple):
    """Workers of each role; aggregated ones count as decode workers."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class CountLimits:
    """Bounds of the counts, inclusive. `total`: of both roles together. max_prefill 0: decode workers compute the
    prompts, too (aggregated).
    """

    min_prefill: int = 1
    max_prefill: int = 64
    min_decode: int = 1
    max_decode: int = 64
    total: int = 128

    def __post_init__(self) -> None:
        low = 0 if self.is_aggregated else 1
        if not low <= self.min_prefill <= self.max_prefill or not 0 < self.min_decode <= self.max_decode:
            raise ConfigError(
                f"planner: counts from {self.min_prefill} to {self.max_prefill} prefill and "
                f"{self.min_decode} to {self.max_decode} decode workers"
            )
        if self.min_prefill + self.min_decode > self.total:
            raise ConfigError(f"planner: max_workers {self.total} is below min_prefill + min_decode")

    @property
    def is_aggregated(self) -> bool:
        return self.max_prefill == 0

    def clipped(self, counts: WorkerCounts, *, within_total: bool = False) -> WorkerCounts:
        """The nearest counts within the bounds; where both together exceed `total`, prefill is reduced first."""
        prefill = min(max(counts.prefill, self.min_prefill), self.max_prefill)
        decode = min(max(counts.decode, self.min_decode), self.max_decode)
        if within_total and prefill + decode > self.total:
            prefill = max(self.min_prefill, self.total - decode)
            decode = min(decode, self.total - prefill)
        return WorkerCounts(prefill, decode)


@dataclass(frozen=True, slots=True)
class Interval:
    """Observations of one interval. None: not observed.

    Sums are over the requests that arrived (input) or had their first token (cached, ended, output) in the interval.
    """

    start_s: float
    end_s: float
    arrivals: int = 0  # refused ones included
    input_tokens: int = 0
    input_squares: float = 0.0  # of each prompt's tokens, squared
    cached_tokens: int = 0
    ended: int = 0
    output_tokens: int = 0
    queued: int = 0  # prompts queued for prefill, at the end
    ttft_kept: float | None = None  # share of the judged requests that had their first token within the target
    tpot_kept: float | None = None
    judged: int = 0  # requests that had their first token, or were refused for want of workers: they kept no target
    prefill_slowness: float | None = None  # measured prefill time over the curve's
    decode_slowness: float | None = None
    is_changing: bool = False  # workers are starting or draining
    refuses_late: bool = False  # the ingresses refuse requests whose first token would be late
    prefills_on_decode: bool = False  # and have decode workers compute prompts while these have time to spare

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s
