"""The sanity baseline: the queue, and the request's own prefill several times over. Pure.

Ours, and nobody's product: near saturation a token that is computed needlessly delays all who come after it, so a request is charged
`weight` times what it computes. Prefixes that are on their way to a worker count as cached there.
"""

from typing import ClassVar

from pydantic import Field

from kvrelay.router.policies.base import Ask, Floats, Options, Side
from kvrelay.router.policies.checked import Checked, checked
from kvrelay.router.policies.picking import Ranked, TwoChoices, best_rows, ranked, uncached


class QueuePlusPrefillOptions(Checked):
    """weight: times the own prefill."""

    weight: float = Field(16.0, ge=0)


class QueuePlusPrefill(TwoChoices):
    """The least seconds of queue and `weight` times own prefill; the decode worker with the fewest sequences; equal ones in turn."""

    name: ClassVar[str] = "queue_plus_prefill"
    term_names: ClassVar[tuple[str, ...]] = ("queue_s", "weighted_prefill_s", "decode_sequences")

    def __init__(self, options: Options) -> None:
        self._weight = checked(QueuePlusPrefillOptions, self.name, options).weight

    def prefill(self, ask: Ask, side: Side) -> Ranked:
        queue_s, own_s = self._seconds(ask, side)
        score = queue_s + own_s
        return ranked(best_rows(score, side.turn), score, (queue_s, own_s, 0.0))

    def decode(self, ask: Ask, side: Side) -> Ranked:
        return ranked(best_rows(side.sequences, side.turn), side.sequences, (0.0, 0.0, side.sequences))

    def alone(self, ask: Ask, side: Side) -> Ranked:
        return self.prefill(ask, side)

    def _seconds(self, ask: Ask, side: Side) -> tuple[Floats, Floats]:
        rate = side.prefill_tokens_per_s
        return side.queued_tokens / rate, self._weight * uncached(ask, side, side.coming) / rate
