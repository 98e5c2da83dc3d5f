"""llm-d's weighted scorers: first the decode worker, which computes a prompt itself that it nearly holds; then the prefill worker. Pure.

Source: llm-d/llm-d-inference-scheduler (commit 520af47), deploy/config/pd-epp-config.yaml: prefix-cache-scorer of weight 2 and
queue-scorer of weight 1 in both profiles, max-score-picker (equal ones by chance), prefix-based-pd-decider with nonCachedTokens 16.
The prefix scorer gives the share of the prompt's blocks, of the first 256 at most; the queue scorer (longest - own) / (longest -
shortest) of the lines, 1 where all are alike; the kv-cache-utilization-scorer the free share. nonCachedTokens 0 never disaggregates.

Scores here are what a worker falls short of each scorer's best, so that the least is the best. The decode worker is chosen before
the prefill worker, whatever that one's score: a way's score is the decode worker's, and only in its terms stands the prefill worker's.
"""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from kvrelay.router.policies.base import MAX_WAYS, Ask, Floats, Ints, Options, Side, Way
from kvrelay.router.policies.checked import Checked, checked
from kvrelay.router.policies.picking import (
    DECODE_STREAM,
    EACH,
    PREFILL_STREAM,
    Ranked,
    best_rows,
    draws,
    is_local,
    local_ways,
    prefill_only,
    ranked,
)


class LlmDOptions(Checked):
    """Weights of the scorers. precise: what workers have announced instead of what was sent there; without a limit of blocks."""

    prefix_weight: float = Field(2.0, ge=0)
    queue_weight: float = Field(1.0, ge=0)
    kv_utilization_weight: float = Field(0.0, ge=0)
    non_cached_tokens: int = Field(16, ge=0)
    max_prefix_blocks: int = Field(256, ge=1)
    precise: bool = False


class LlmD:
    """The best weighted score of each profile."""

    name: ClassVar[str] = "llm_d"
    term_names: ClassVar[tuple[str, ...]] = (
        "decode_prefix",
        "decode_queue",
        "decode_kv_utilization",
        "prefill_prefix",
        "prefill_queue",
        "prefill_kv_utilization",
    )

    def __init__(self, options: Options) -> None:
        self._options = checked(LlmDOptions, self.name, options)

    def rank(self, ask: Ask, prefills: Side, decodes: Side) -> list[Way]:
        """See base.Policy."""
        if is_local(ask, prefills):
            return local_ways(self._decode(ask, decodes)) if len(decodes) else []
        if not len(prefills) or (ask.request.needs_decode and not len(decodes)):
            return []
        if not ask.request.needs_decode:
            return prefill_only(self._prefill(ask, prefills))
        return self._staged(ask, self._prefill(ask, prefills), self._decode(ask, decodes), decodes)

    def _staged(self, ask: Ask, prefill: Ranked, decode: Ranked, decodes: Side) -> list[Way]:
        """Of each decode worker in turn: local, or with each of the best prefill workers."""
        is_remote = np.full(len(decodes), True) if ask.request.force == "remote" else self._is_remote(ask, decodes)
        each = max(EACH, MAX_WAYS // len(decode.rows))
        ways = []
        for own in local_ways(decode):
            if not is_remote[own.decode]:
                ways.append(own)
                continue
            for row, parts in zip(prefill.rows[:each], prefill.parts[:each], strict=True):
                both = np.add(parts, own.parts).tolist()
                ways.append(own._replace(prefill=row, parts=tuple(both)))
        return ways[:MAX_WAYS]

    def _is_remote(self, ask: Ask, side: Side) -> NDArray[np.bool_]:
        """Of each decode worker: whether a prefill worker computes the prompt for it."""
        least = self._options.non_cached_tokens
        lacking = ask.request.num_tokens - self._matched_blocks(ask, side) * side.block_size
        return (lacking >= least) & (least > 0)

    def _decode(self, ask: Ask, side: Side) -> Ranked:
        short = self._short(ask, side)
        score = short[0] + short[1] + short[2]
        rows = best_rows(score, draws(ask.draw, len(side), DECODE_STREAM))
        return ranked(rows, score, (*short, 0.0, 0.0, 0.0))

    def _prefill(self, ask: Ask, side: Side) -> Ranked:
        short = self._short(ask, side)
        score = short[0] + short[1] + short[2]
        rows = best_rows(score, draws(ask.draw, len(side), PREFILL_STREAM))
        return ranked(rows, score, (0.0, 0.0, 0.0, *short))

    def _short(self, ask: Ask, side: Side) -> tuple[Floats, Floats, Floats]:
        """What each worker falls short of the best by: prefix, queue and memory, weighted."""
        options = self._options
        blocks = -(-ask.request.num_tokens // side.block_size)
        total = blocks if options.precise else np.minimum(blocks, options.max_prefix_blocks)
        line = side.waiting - side.waiting.min()
        return (
            options.prefix_weight * (1 - self._matched_blocks(ask, side) / total),
            options.queue_weight * line / max(int(line.max()), 1),
            options.kv_utilization_weight * (1 - side.free_blocks / side.num_blocks),
        )

    def _matched_blocks(self, ask: Ask, side: Side) -> Ints:
        """Of the prompt's, as this setting of llm-d would know them."""
        matched: Ints = (side.held if self._options.precise else side.coming) // side.block_size
        return matched if self._options.precise else np.minimum(matched, self._options.max_prefix_blocks)
