"""Beam search: which beams continue which, which are done, when to stop. Pure: plain data in, plain data out.

The rules are those of Hugging Face's `generate(num_beams=...)`, rounding to float32 included, so that the results are
equal. Owns no sequence and no block: their owner forks and drops them as a `BeamStep` describes.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

EarlyStopping = bool | Literal["never"]
_WORST = -1.0e9  # of a number that is none: a broken model's search ends like any other
BeamCandidates = list[tuple[int, float]]  # (token, log-probability), likeliest first


@dataclass(frozen=True, slots=True)
class BeamRules:
    """What is asked for. `end_ids` end a hypothesis; so do `max_tokens` tokens."""

    width: int
    max_tokens: int
    end_ids: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    @property
    def num_candidates(self) -> int:
        """Continuations to look at: enough that `width` of them continue, whichever end."""
        return max(2, 1 + len(self.end_ids)) * self.width


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Output tokens, and their summed log-probability after the length penalty."""

    token_ids: tuple[int, ...]
    score: float
    is_ended: bool  # by one of the end ids, not by its length


@dataclass(frozen=True, slots=True)
class BeamStep:
    """Beam i continues beam parents[i] of before, with token_ids[i]. A beam that is no parent is dropped."""

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]
    is_done: bool


@dataclass(frozen=True, slots=True)
class _Beam:
    score: float
    token_ids: tuple[int, ...]


class BeamSearch:
    """One search. It begins with one beam, the prompt."""

    def __init__(self, rules: BeamRules) -> None:
        self.rules = rules
        self.is_done = False
        self._beams: list[_Beam] = [_Beam(0.0, ())]
        self._finished: list[Hypothesis] = []  # best first

    @property
    def outputs(self) -> list[list[int]]:
        """Each live beam's tokens, best first."""
        return [list(beam.token_ids) for beam in self._beams]

    def best(self, count: int) -> list[Hypothesis]:
        """The best `count` results of a search that is done."""
        return self._finished[:count]

    def step(self, candidates: list[BeamCandidates]) -> BeamStep:
        """Choose the next beams.

        `candidates[i]`: beam i's likeliest `num_candidates` continuations, or the whole vocabulary.
        """
        ranked = self._ranked(candidates)
        length = len(self._beams[0].token_ids) + 1
        going_on = []
        for place, (score, index, token) in enumerate(ranked):
            if token in self.rules.end_ids or length >= self.rules.max_tokens:
                if place < self.rules.width:  # the others are there so that enough beams are left
                    self._finish(score, index, token)
            else:
                going_on.append((score, index, token))
        going_on = going_on[: self.rules.width]
        self._beams = [_Beam(score, (*self._beams[index].token_ids, token)) for score, index, token in going_on]
        self._finished = sorted(self._finished, key=lambda one: -one.score)[: self.rules.width]
        self.is_done = not going_on or self._is_enough(length)
        return BeamStep(tuple(index for _, index, _ in going_on), tuple(token for *_, token in going_on), self.is_done)

    def _ranked(self, candidates: list[BeamCandidates]) -> list[tuple[float, int, int]]:
        """(score, beam, token) of the best continuations of all beams."""
        scored = [
            (_f32(beam.score + (_WORST if math.isnan(logprob) else logprob)), index, token)
            for index, (beam, tokens) in enumerate(zip(self._beams, candidates, strict=True))
            for token, logprob in tokens
            if logprob != -math.inf
        ]
        return sorted(scored, key=lambda one: (-one[0], one[1], one[2]))[: self.rules.num_candidates]

    def _finish(self, score: float, index: int, token: int) -> None:
        token_ids = (*self._beams[index].token_ids, token)
        self._finished.append(
            Hypothesis(token_ids, self._penalised(score, len(token_ids)), token in self.rules.end_ids)
        )

    def _penalised(self, score: float, length: int) -> float:
        return _f32(score / _f32(length**self.rules.length_penalty))

    def _is_enough(self, length: int) -> bool:
        """Whether nothing that still runs need be waited for."""
        if len(self._finished) < self.rules.width:
            return False
        if self.rules.early_stopping is True:
            return True
        is_longest_best = self.rules.early_stopping == "never" and self.rules.length_penalty > 0
        best_length = self.rules.max_tokens if is_longest_best else length
        return self._penalised(self._beams[0].score, best_length) <= self._finished[-1].score


def _f32(value: float) -> float:
    """As a float32 has it: sums, quotients and powers of such numbers are those of float32 arithmetic then."""
    return float(np.float32(value))
