"""Measures a draft model's passes and accepted tokens, and decides how many tokens it drafts for which sequences. Pure.

`speculation.py` has the cost of verifying and the acceptance of prompt lookup.
"""

from collections.abc import Sequence

from kvrelay.engine.speculation.draft_choice import DraftCandidate, Pass, PassTimes, Prices, choose
from kvrelay.engine.speculation.speculation import MARGIN, Acceptance, DraftSource, Speculation, expected

_PRIOR_RATE = 0.7  # acceptance before any draft
_TRY_SHARE = 0.03  # of the time is spent on trial drafts while drafts are not expected to pay
_TRY_TOKENS = 2


class ModelSpeculation(DraftSource):
    """One engine's draft model. share: its weights relative to the target model's, by bytes."""

    def __init__(self, speculation: Speculation, share: float) -> None:
        super().__init__(_PRIOR_RATE, Acceptance(2 * _PRIOR_RATE, 2.0))
        self._speculation = speculation
        self.times = PassTimes(share)
        self._credit_s = 0.0  # for trial drafts

    def observe_passes(self, num_running: int, passes: Sequence[Pass]) -> None:
        """Record the passes before a step of this many sequences."""
        plain_s = self._speculation.times.plain(num_running)
        if plain_s is not None:
            for one in passes:
                self.times.observe(one, plain_s)

    def observe_step(self, seconds: float) -> None:
        self._credit_s += _TRY_SHARE * seconds

    def worth(self, num_sequences: int, acceptance: Acceptance, length: int) -> float:
        """The expected tokens of a prompt lookup draft less the cost of verifying it, in tokens."""
        rate = self._speculation.rate(acceptance)
        plain_s, extra = self._speculation.times.plain(num_sequences), self._speculation.times.extra(num_sequences)
        if plain_s is None or extra is None:
            return expected(rate, length)
        return expected(rate, length) - MARGIN * num_sequences / plain_s * extra[1] * length

    def lengths(
        self, num_sequences: int, candidates: Sequence[DraftCandidate], *, has_drafts: bool, chunk: int
    ) -> list[int]:
        """Tokens that the model drafts for each candidate of a step of `num_sequences` that `begins`.

        has_drafts: the step has prompt lookup drafts. chunk: most tokens of text that the model computes before a step.
        """
        speculation, nothing = self._speculation, [0] * len(candidates)
        plain_s, extra = speculation.times.plain(num_sequences), speculation.times.extra(num_sequences)
        if not candidates or plain_s is None:
            return nothing
        if extra is None:  # the cost of drafts is not measured yet
            return nothing if has_drafts else self._for_nearest(candidates, speculation.most)
        fixed_s, token_s = extra
        price = MARGIN * num_sequences / plain_s  # tokens per second
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
        """A trial draft for the nearest candidate, once its time is saved up; its text may take several trials."""
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
