"""The cost of serving a request in one way, in seconds: predicted time to first token, and harm to others.

Functions of frozen data; never imports torch, Ray, sockets, a clock or a random source. Every function
returns named terms (see types.TERM_NAMES); a score is their plain sum.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kvrelay.router.types import WorkerLoad


@dataclass(frozen=True, slots=True)
class CostModel:
    """Weights, and what to assume of a worker before its first measurement."""

    default_prefill_tokens_per_s: float = 2000.0
    default_decode_step_s: float = 0.03
    default_kv_bytes_per_s: float = 4e9  # between processes of one host
    other_node_share: float = 0.25  # of that bandwidth, between hosts
    unhidden_share: float = 0.05  # of a transfer, even under a long prefill: its last layers
    handoff_s: float = 0.002
    decode_load_weight: float = 0.1  # of a step, per sequence already there
    stall_weight: float = 1.0  # of the prefill's time, per sequence that it holds up
    max_pressure: int = 8
    expected_output_tokens: int = 256  # most output that a request is charged blocks for in advance


class PrefillTerms(NamedTuple):
    """Seconds on the computing worker."""

    compute: float
    queue: float
    pressure: float


class DecodeTerms(NamedTuple):
    """Seconds on the decode worker, whoever computes the prompt."""

    load: float
    memory: float
    wait: float


def prefill_terms(load: WorkerLoad, *, uncached_tokens: int, pressure: int, rate: float) -> PrefillTerms:
    """Own work, the queue ahead, and the delay to those behind.

    `rate`, in tokens/s, serves a worker that has not measured its own. `pressure` is the shortest queue
    (requests) of any prefill worker: near saturation a cached prefix *is* capacity, so each token of own work
    counts once more for every request that will wait behind it; an idle worker anywhere makes it 0.
    """
    speed = load.prefill_tokens_per_s or rate
    compute = uncached_tokens / speed
    return PrefillTerms(compute, load.queued_tokens / speed, compute * pressure)


def decode_terms(load: WorkerLoad, *, blocks_now: int, blocks_later: int, model: CostModel) -> DecodeTerms:
    """The weight of the sequences and of the memory that are taken already.

    `blocks_now` is what must be reserved at once, `blocks_later` what it may grow to. The wait for
    missing blocks assumes a steady state, where as many blocks come free as the running sequences fill:
    sequences / block_size per step.
    """
    step_s = load.decode_step_s or model.default_decode_step_s
    missing = blocks_now * (1 + load.waiting) - load.free_blocks
    wait = missing * load.block_size * step_s / max(load.sequences, 1) if missing > 0 else 0.0
    memory = step_s * min(1.0, blocks_later / max(load.free_blocks, 1))
    return DecodeTerms(model.decode_load_weight * step_s * load.sequences, memory, wait)


def transfer_term(source: WorkerLoad, target: WorkerLoad, *, tokens: int, compute_s: float, model: CostModel) -> float:
    """The part of moving `tokens` of KV that computing the prompt does not hide."""
    bandwidth = target.kv_bytes_per_s or model.default_kv_bytes_per_s
    if source.node_id != target.node_id:
        bandwidth *= model.other_node_share
    seconds = tokens * target.kv_bytes_per_token / bandwidth
    share = model.unhidden_share
    return share * seconds + (1 - share) * max(0.0, seconds - compute_s)


def stall_term(load: WorkerLoad, *, compute_s: float, model: CostModel) -> float:
    """Delay to the decode worker's sequences, and to the one that will be next, while it computes a prompt."""
    return model.stall_weight * compute_s * (load.sequences + 1)
