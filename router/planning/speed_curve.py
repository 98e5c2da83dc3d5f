"""Step time of an engine by what the step computes: the model that simulator and planner share. Pure.

A step reads all weights once or multiplies all its tokens with them, whichever takes longer; in addition, prefill
attends to earlier tokens, and decoding sequences read their context.
"""

from dataclasses import dataclass
from typing import NamedTuple


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
