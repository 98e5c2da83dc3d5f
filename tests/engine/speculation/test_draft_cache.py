"""A shadow knows what of its sequence's text is computed, whatever became of the drafts; a small pool goes round."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.engine.speculation.draft_cache import DraftCache
from kvrelay.hashing import block_hashes
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import KvHints, Sampling, SequenceRequest

pytestmark = pytest.mark.pure


BLOCK = 4


def sequence(name: str, tokens: list[int], *, keep: bool = True, **sampling) -> Sequence:
    request = SequenceRequest(
        request_id=name,
        token_ids=list(tokens),
        num_prompt_tokens=len(tokens),
        block_hashes=list(block_hashes(tokens, BLOCK)),
        sampling=Sampling(max_tokens=100, **sampling),
        hints=KvHints(keep=keep),
    )
    return Sequence(request, BLOCK, 0)


class Model:
    """Stands in for the draft model: it guesses `guess`, and computes what is behind and all guesses but the last."""

    def __init__(self, num_blocks: int = 16, vocab_size: int = 100) -> None:
        self.gone: list[Sequence] = []
        self.cache = DraftCache(BlockPool(num_blocks, block_size=BLOCK), vocab_size=vocab_size, forget=self.gone.append)

    def draft(self, seq: Sequence, guess: list[int], *needed: str) -> int | None:
        """The tokens that it had to compute first; None: there was no room."""
        shadow = self.cache.follow(seq)
        assert shadow is not None
        own, behind = shadow.seq, shadow.num_behind
        assert own.token_ids == seq.token_ids and own.num_computed + behind == seq.num_tokens and behind >= 1
        if not self.cache.grow(shadow, seq.num_tokens + len(guess) - 1, needed or (seq.request_id,)):
            return None
        own.token_ids += guess
        own.num_computed = len(own.token_ids) - 1
        return behind


def test_after_a_draft_that_was_right_two_tokens_are_behind_and_else_one():
    model, seq = Model(), sequence("r", [1, 2, 3])
    assert model.draft(seq, [4, 5, 6]) == 3
    seq.token_ids += [4, 5, 6, 7]
    assert model.cache.num_behind(seq) == 2 == model.draft(seq, [8, 9])
    seq.token_ids += [8, 50]
    assert model.cache.num_behind(seq) == 1 == model.draft(seq, [51, 52])
    seq.token_ids += [60]
    assert model.draft(seq, [1]) == 1


def test_a_draft_of_which_only_a_part_was_tried_leaves_the_last_token_to_compute():
    model, seq = Model(), sequence("r", [1, 2, 3])
    model.draft(seq, [4, 5, 6])
    seq.token_ids += [4]
    assert model.cache.num_behind(seq) == 1 == model.draft(seq, [5])


def test_what_was_not_drafted_for_is_behind():
    model, seq = Model(), sequence("r", [1, 2, 3])
    model.draft(seq, [4, 5])
    seq.token_ids += [9, 9, 9, 9]
    assert model.draft(seq, [4]) == 4


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.booleans()), min_size=1, max_size=12))
def test_whatever_becomes_of_drafts_the_shadow_has_the_text_and_no_block_is_lost(steps):
    model, seq, chance = Model(num_blocks=30), sequence("r", [1, 2, 3, 4, 5]), random.Random(1)
    for length, num_right, is_dropped in steps:
        guess = [chance.randrange(90) for _ in range(length)]
        assert model.draft(seq, guess) is not None
        model.cache.check([seq])
        seq.token_ids += [*guess[:num_right], 99]
        if is_dropped:
            model.cache.forget(seq)
    model.cache.forget(seq)
    model.cache.check([])
    assert model.cache.pool.counts().used == 0


def test_the_least_recently_drafted_sequence_loses_its_blocks():
    model = Model(num_blocks=4)
    first, second, third = (sequence(name, [number] * 7, keep=False) for number, name in enumerate("abc"))
    model.draft(first, [1])
    model.draft(second, [1])
    first.token_ids += [1]
    model.draft(first, [1])
    model.draft(third, [1])
    assert len(model.gone) == 1 and model.gone[0].request_id == "b"
    assert model.cache.num_behind(second) == 7 and model.cache.num_behind(first) == 1
    model.cache.check([first, third])


def test_a_needed_sequence_keeps_its_blocks():
    model = Model(num_blocks=4)
    first, second, third = (sequence(name, [number] * 7) for number, name in enumerate("abc"))
    model.draft(first, [1])
    model.draft(second, [1])
    assert model.draft(third, [1], "a", "b", "c") is None and not model.gone
    model.cache.check([first, second, third])


def test_what_comes_back_or_begins_alike_finds_its_full_blocks():
    model, text = Model(), list(range(10))
    seq = sequence("r", text)
    model.draft(seq, [50, 51, 52])
    seq.token_ids += [50, 51, 52]
    model.cache.forget(seq)
    assert model.draft(sequence("again", text), [1]) == 2
    assert model.draft(sequence("on", seq.token_ids), [1]) == 1
    assert model.draft(sequence("other", [7, *text]), [1]) == 11


def test_what_is_not_to_be_kept_is_not_found():
    model, text = Model(), list(range(10))
    for name in ("r", "again"):
        seq = sequence(name, text, keep=False)
        assert model.draft(seq, [1]) == 10
        model.cache.forget(seq)


def test_a_text_with_a_token_that_the_model_lacks_is_not_followed():
    model, seq = Model(vocab_size=10), sequence("r", [1, 2, 3])
    assert not model.cache.is_foreign(seq) and model.draft(seq, [4]) == 3
    seq.token_ids += [10]
    assert model.cache.follow(seq) is None and model.cache.is_foreign(seq)
    model.cache.check([seq])


def test_drafts_use_the_requests_sampling_without_logprobs():
    model = Model(vocab_size=10)
    seq = sequence("r", [1, 2], temperature=0.7, seed=3, logprobs=2, min_tokens=4, logit_bias={3: 1.0, 30: 2.0})
    shadow = model.cache.follow(seq)
    assert shadow is not None
    own = shadow.seq.request.sampling
    assert (own.temperature, own.seed, own.logprobs, own.min_tokens, own.logit_bias) == (0.7, 3, None, 0, {3: 1.0})


def test_a_shadow_without_its_sequence_is_noticed():
    model, seq = Model(), sequence("r", [1, 2])
    model.draft(seq, [1])
    with pytest.raises(AssertionError, match="no longer runs"):
        model.cache.check([])
