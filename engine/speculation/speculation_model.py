"""What an engine's draft model is worth: measures its passes and its tokens, and says for whom it drafts how many. Pure.

Beside `speculation.py`, which knows what verifying costs and what drafts from a sequence's own text bring.
"""

from collections.abc import Sequence

from kvrelay.engine.speculation.draft_choice import DraftCandidate, Pass, PassTimes, Prices, choose
from kvrelay.engine.speculation.speculation import MARGIN, Acceptance, DraftSource, Speculation, expected

_PRIOR_RATE = 0.7  # of a model of which nothing is known
_TRY_SHARE = 0.03  # of the time goes into seeing whether it would pay, while it is not expected to
_TRY_TOKENS = 2


class ModelSpeculation(DraftSource):
    """One engine's. share: of the draft model's weights in the other model's, by bytes."""

    def __init__(self, speculation: Speculation, share: float) -> None:
        super().__init__(_PRIOR_RATE, Acceptance(2 * _PRIOR_RATE, 2.0))
        self._speculation = speculation
        self.times = PassTimes(share)
        self._credit_s = 0.0  # for tries

    def observe_passes(self, num_running: int, passes: Sequence[Pass]) -> None:
        """What the model did before a step of so many sequences."""
        plain_s = self._speculation.times.plain(num_running)
        if plain_s is not None:
            for one in passes:
                self.times.observe(one, plain_s)

    def observe_step(self, seconds: float) -> None:
        self._credit_s += _TRY_SHARE * seconds

    def worth(self, num_sequences: int, acceptance: Acceptance, length: int) -> float:
        """What a draft from a sequence's own text is expected to bring, less what verifying it costs; tokens."""
        rate = self._speculation.rate(acceptance)
        plain_s, extra = self._speculation.times.plain(num_sequences), self._speculation.times.extra(num_sequences)
        if plain_s is None or extra is None:
            return expected(rate, length)
        return expected(rate, length) - MARGIN * num_sequences / plain_s * extra[1] * length

    def lengths(
        self, num_sequences: int, candidates: Sequence[DraftCandidate], *, has_drafts: bool, chunk: int
    ) -> list[int]:
        """Tokens that the model is to draft for each candidate of a step of `num_sequences` that `begins`.

        has_drafts: the step has some from sequences' own texts. chunk: most tokens of a text that the model computes before a step.
        """
        speculation, nothing = self._speculation, [0] * len(candidates)
        plain_s, extra = speculation.times.plain(num_sequences), speculation.times.extra(num_sequences)
        if not candidates or plain_s is None:
            return nothing
        if extra is None:  # what drafts cost is to be seen first
            return nothing if has_drafts else self._for_nearest(candidates, speculation.most)
        fixed_s, token_s = extra
        price = MARGIN * num_sequences / plain_s  # tokens for a second
        prices = Prices(
            fixed=0.0 if has_drafts else price * fixed_s,
            token=price * token_s,
            behind=price * self.times.behind(num_sequences, plain_s),
            one_pass=lambda count: price * self.times.one_pass(count, plain_s),
            near=speculation.most + 2,
        )
        found = choose(candidates, prices, speculation.most)
        if any(found) or has_drafts:
            return found
        return self._try(candidates, plain_s, chunk)

    def _try(self, candidates: Sequence[DraftCandidate], plain_s: float, chunk: int) -> list[int]:
        """For the one that is nearest, when there has been time enough; its text may take several tries."""
        num_behind = min(one.num_behind for one in candidates)
        cost_s = min(num_behind, chunk) * self.times.behind(1, plain_s) + _TRY_TOKENS * self.times.one_pass(1, plain_s)
        if self._credit_s < cost_s:
            return [0] * len(candidates)
        self._credit_s = 0.0
        return self._for_nearest(candidates, min(_TRY_TOKENS, self._speculation.most))

    @staticmethod
    def _for_nearest(candidates: Sequence[DraftCandidate], length: int) -> list[int]:
        nearest = min(range(len(candidates)), key=lambda index: candidates[index].num_behind)
        lengths = [0] * len(candidates)
        lengths[nearest] = min(length, candidates[nearest].most)
        return lengths
