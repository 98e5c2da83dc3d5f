"""What a sequence's output must keep to: its grammar, its thinking budget, allowed tokens and bad words.

All state follows from the output alone, which is replayed: so a sequence that was preempted, returned to prefill,
forked, or continued on another worker is where it was, and nothing of this is ever sent.
"""

import enum
from collections import defaultdict
from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from kvrelay.grammar.compiler import CompiledGrammar
from kvrelay.grammar.masks import Row, allow
from kvrelay.grammar.matcher import Masks, Matcher
from kvrelay.plane.messages import Sampling, Thinking

Mask = NDArray[np.int32]  # [words], a row of Masks


def mask_of(token_ids: Rows[int], vocab_size: int, *, is_banned: bool = False) -> Mask:
    """The mask that allows these tokens alone, or all but these."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[:vocab_size] = is_banned
    bits[np.asarray(token_ids, dtype=np.int64)] = not is_banned
    return np.packbits(bits, bitorder="little").view(np.int32)


class Rules:
    """What one request's sampling asks of its tokens. Never changes; the sequences of a group share it."""

    def __init__(self, params: Sampling, grammar: CompiledGrammar | None, eos_ids: Rows[int], vocab_size: int) -> None:
        self.params, self.grammar, self.eos_ids = params, grammar, frozenset(eos_ids)
        self.can_end = bool(eos_ids) and not params.ignore_eos  # by a token
        self.thinking: Thinking | None = params.thinking
        self.start_like = _like(self.thinking.start_like or self.thinking.start) if self.thinking else []
        self.end_like = _like(self.thinking.end_like or self.thinking.end) if self.thinking else []
        self.banned = frozenset(word[0] for word in params.bad_words if len(word) == 1)
        self.not_banned = mask_of(sorted(self.banned), vocab_size, is_banned=True)
        self.words: dict[int, list[tuple[int, ...]]] = defaultdict(list)  # by the token before the last
        for word in params.bad_words:
            if len(word) > 1:
                self.words[word[-2]].append(word)
        allowed = params.allowed_token_ids
        self.allowed = mask_of(allowed, vocab_size) if allowed else None
        self.no_end = mask_of([*eos_ids, *params.stop_token_ids], vocab_size, is_banned=True)
        self.no_eos = mask_of(list(eos_ids), vocab_size, is_banned=True)

    def completing(self, text: Rows[int], end: int) -> list[int]:
        """Tokens that would complete a bad word of several behind text[:end]."""
        words = self.words.get(text[end - 1], ()) if end and self.words else ()
        return [word[-1] for word in words if _ends_with(text, end, word[:-1])]


class Phase(enum.Enum):
    OPENING = "opening"  # reasoning may begin; with a grammar, only with the output's first token
    REASONING = "reasoning"
    BOUND = "bound"  # to the grammar


class Constraint:
    """One sequence's. Used by one thread at a time: the engine's, or the one that fills masks beside its step."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._output: list[int] = []  # replayed so far
        self._phase, self._num_reasoned = _first_phase(rules), 0
        self._matcher: Matcher | None = None  # once it is needed
        self._num_taken = 0  # tokens that the matcher has
        self.problem: str | None = None  # why the sequence cannot be continued

    def fresh(self) -> "Constraint":
        """Of a sequence with the same rules, for which nothing was replayed yet."""
        return Constraint(self._rules)

    @property
    def num_seen(self) -> int:
        """Output tokens that were replayed."""
        return len(self._output)

    @property
    def is_done(self) -> bool:
        """Whether the output is complete: the grammar's end was drawn, or nothing can follow and no token ends it."""
        if self._matcher is None or self._phase is not Phase.BOUND:
            return False
        return self._matcher.has_ended or (self._matcher.is_over and not self._rules.can_end)

    # ---- replay

    def follow(self, token_ids: Rows[int]) -> None:
        """These tokens come behind those seen so far. What the grammar refuses becomes `problem`."""
        for token in token_ids:
            self._output.append(token)
            if self.problem is None:
                self._follow(token)

    def _follow(self, token: int) -> None:
        before, num_output = self._phase, len(self._output)
        self._phase, self._num_reasoned = self._after(before, self._num_reasoned, self._output, num_output)
        if self._rules.grammar is None or before is Phase.REASONING:
            return
        matcher = self._use_matcher()
        if self._phase is Phase.REASONING:  # what was taken for the grammar's was the marker
            matcher.rollback(self._num_taken)
            self._num_taken = 0
            return
        if before is Phase.BOUND or self._num_taken == num_output - 1:
            num_taken = matcher.accept([token])
            self._num_taken += num_taken
        else:
            num_taken = 0
        if self._phase is Phase.BOUND and not num_taken:
            self.problem = matcher.problem or "the output does not match its grammar"

    def _after(self, phase: Phase, num_reasoned: int, text: Rows[int], end: int) -> tuple[Phase, int]:
        """The phase behind text[:end], whose last token is new, and the tokens of reasoning so far."""
        thinking, has_grammar = self._rules.thinking, self._rules.grammar is not None
        if thinking is None or phase is Phase.BOUND:
            return phase, num_reasoned
        if phase is Phase.REASONING:
            if _ends_like(text, end, self._rules.end_like):
                return (Phase.BOUND if has_grammar else Phase.OPENING), num_reasoned
            return phase, num_reasoned + 1
        start = thinking.start
        if not has_grammar:
            return (Phase.REASONING if start and _ends_like(text, end, self._rules.start_like) else phase), num_reasoned
        if end > len(start) or text[end - 1] != start[end - 1]:
            return Phase.BOUND, num_reasoned
        return (Phase.REASONING if end == len(start) else phase), num_reasoned

    def _use_matcher(self) -> Matcher:
        if self._matcher is None:
            assert self._rules.grammar is not None
            self._matcher = self._rules.grammar.matcher()
        return self._matcher

    # ---- drafts

    def cut(self, output: Rows[int], drafts: list[int]) -> list[int]:
        """The drafts behind the whole output so far, up to the first that may not follow."""
        self.follow(output[self.num_seen :])
        return drafts[: self.num_permitted(drafts)]

    def num_permitted(self, drafts: Rows[int]) -> int:
        """How many of these tokens, in order, may come next."""
        rules = self._rules
        if self.problem is not None or (self._phase is Phase.OPENING and rules.grammar is not None):
            return 0
        text, begin = [*self._output, *drafts], len(self._output)
        phase, num_reasoned, bound_at = self._phase, self._num_reasoned, 0
        for index, token in enumerate(drafts):
            end = begin + index
            if not self._permits(token, phase, num_reasoned, text, end):
                return self._accepted(drafts[:index], phase, bound_at)
            before = phase
            phase, num_reasoned = self._after(phase, num_reasoned, text, end + 1)
            if phase is Phase.BOUND and before is not phase:
                bound_at = index + 1
        return self._accepted(drafts, phase, bound_at)

    def _permits(self, token: int, phase: Phase, num_reasoned: int, text: list[int], end: int) -> bool:
        """Whether it may come behind text[:end], but for the grammar."""
        rules = self._rules
        if (forced := self._forced(phase, num_reasoned, text, end)) is not None:
            return token == forced
        if token in rules.eos_ids and self._bars_eos(phase):
            return False
        allowed = rules.params.allowed_token_ids
        return (not allowed or token in allowed) and token not in rules.banned | set(rules.completing(text, end))

    def _accepted(self, drafts: Rows[int], phase: Phase, bound_at: int) -> int:
        if phase is not Phase.BOUND or self._rules.grammar is None:
            return len(drafts)
        return bound_at + self._use_matcher().valid_prefix(drafts[bound_at:])

    # ---- masks

    def matcher_row(self, drafts: Rows[int], row: int) -> Row | None:
        """What the grammar fills of the masks from `row` on, one before each of the drafts and one behind them."""
        if self._rules.grammar is None or self.problem is not None:
            return None
        if self._phase is Phase.BOUND or self._is_undecided:
            return self._use_matcher(), drafts, row
        text, begin = [*self._output, *drafts], len(self._output)
        state: tuple[Phase, int] = self._phase, self._num_reasoned
        for end in range(begin + 1, len(text) + 1):
            state = self._after(*state, text, end)
            if state[0] is Phase.BOUND:
                return self._use_matcher(), drafts[end - begin :], row + end - begin
        return None

    def restrict(self, masks: Masks, drafts: Rows[int]) -> list[bool]:
        """Complete the masks [1 + drafts, words], whose rows of the grammar are filled; returns which are needed."""
        if self._matcher is not None and self._matcher.problem is not None:
            self.problem = self._matcher.problem
        if self.problem is not None:
            return [False] * len(masks)
        text, begin = [*self._output, *drafts] if drafts else self._output, len(self._output)
        phase, num_reasoned = self._phase, self._num_reasoned
        needed: list[bool] = []
        for index, mask in enumerate(masks):
            if index:
                phase, num_reasoned = self._after(phase, num_reasoned, text, begin + index)
            needed.append(self._restrict(mask, phase, num_reasoned, text, begin + index))
        if not needed[0] and self.is_bound:
            self.problem = "no token can follow in this output's grammar"
        return needed

    @property
    def is_bound(self) -> bool:
        """Whether the grammar decides what comes next."""
        return self._rules.grammar is not None and self._phase is Phase.BOUND

    def _restrict(self, mask: Mask, phase: Phase, num_reasoned: int, text: list[int], end: int) -> bool:
        """Complete the mask of what follows text[:end]; whether it is needed. One that would allow nothing is not."""
        rules = self._rules
        if (forced := self._forced(phase, num_reasoned, text, end)) is not None:
            mask[:] = 0
            allow(mask, forced)
            return True
        has_grammar = rules.grammar is not None and phase is not Phase.REASONING
        if rules.grammar is not None and phase is Phase.OPENING:
            if not self._is_undecided:
                mask[:] = 0
            assert rules.thinking is not None
            allow(mask, rules.thinking.start[end])
        restrictions = self._restrictions(phase, text, end)
        if not has_grammar:
            if not restrictions:
                return False
            mask[:] = restrictions.pop(0)
        for one in restrictions:
            if (both := mask & one).any():
                mask[:] = both
        return bool(mask.any())

    def _restrictions(self, phase: Phase, text: list[int], end: int) -> list[Mask]:
        """Masks, of which each that would leave nothing together with those before it yields."""
        rules, params = self._rules, self._rules.params
        found: list[Mask] = []
        if self._bars_eos(phase):
            found.append(rules.no_eos)
        if rules.allowed is not None:
            found.append(rules.allowed)
        if (completing := rules.completing(text, end)) or rules.banned:
            mask = rules.not_banned.copy()
            for token in completing:
                mask.view(np.uint32)[token // 32] &= ~np.uint32(1 << (token % 32))
            found.append(mask)
        if end < params.min_tokens and (found or rules.grammar is not None):  # else the sampler sees to it
            found.append(rules.no_end)
        return found

    @property
    def _is_undecided(self) -> bool:
        """Whether the output may be the grammar's or the beginning of the marker of reasoning."""
        return self._phase is Phase.OPENING and self._num_taken == len(self._output)

    def _bars_eos(self, phase: Phase) -> bool:
        """An end inside reasoning would leave the grammar without its output; one that ends nothing is no output."""
        return self._rules.grammar is not None and (phase is Phase.REASONING or self._rules.params.ignore_eos)

    def _forced(self, phase: Phase, num_reasoned: int, text: list[int], end: int) -> int | None:
        """The next token of the end marker, once the budget is spent."""
        thinking = self._rules.thinking
        if phase is not Phase.REASONING or thinking is None or thinking.budget is None:
            return None
        if num_reasoned < thinking.budget:
            return None
        marker = thinking.end
        written = next(n for n in range(len(marker) - 1, -1, -1) if _ends_with(text, end, marker[:n]))
        return marker[written]


def _first_phase(rules: Rules) -> Phase:
    thinking = rules.thinking
    if thinking is not None and thinking.is_open:
        return Phase.REASONING
    if thinking is None or (not thinking.start and rules.grammar is not None):
        return Phase.BOUND
    return Phase.OPENING


def _ends_with(text: Rows[int], end: int, marker: tuple[int, ...]) -> bool:
    """Whether text[:end] ends with the marker."""
    return end >= len(marker) and tuple(text[end - len(marker) : end]) == marker


def _like(marker: Rows[int | Rows[int]]) -> list[frozenset[int]]:
    """The tokens that stand for each of a marker's."""
    return [frozenset((one,) if isinstance(one, int) else one) for one in marker]


def _ends_like(text: Rows[int], end: int, like: Rows[frozenset[int]]) -> bool:
    """Whether text[:end] ends with a marker, in any of its tokens."""
    return end >= len(like) and all(text[end - 1 - back] in like[-1 - back] for back in range(len(like)))
