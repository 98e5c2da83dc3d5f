"""Parameters of the cost model. Pure data."""

from dataclasses import dataclass


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
    decode_load_weight: float = 0.1  # of a step, per sequence on the decode worker
    stall_weight: float = 0.1  # of the prefill's time, per sequence that it stalls
    next_stall_weight: float = 1.0  # of the prefill's time, for the sequences that will arrive during it
    max_pressure: float = 8.0  # seconds of harm to queued requests per second of prefill, at most
    missed_s: float = 8.0  # cost of one missed target
    ttft_s: float = 5.0  # default TTFT target
    tpot_s: float = 0.1  # default TPOT target
    expected_output_tokens: int = 256  # mean output, and the most that a request is charged blocks for in advance
    local_prefill_tokens: int = 32  # up to so many uncached tokens fit beside a decode step without stalling it
