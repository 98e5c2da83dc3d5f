"""Which blocks of a draft model's own KV pool hold what of which sequence. Pure: no torch.

A sequence is followed by a *shadow*: its text as far as the draft model knows it, with blocks of its own. What the draft model
computed of a wrong draft is overwritten. The pool is small: who was not drafted for the longest gives its blocks back when there
are none left, and is computed anew when its turn comes. Full blocks stay findable as in any pool, so that what comes back, or begins like
another, is not computed again.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.hashing import pack_tokens
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import SequenceRequest


@dataclass(slots=True)
class Shadow:
    """What is known of one sequence. `seq` has the same text, drafts behind it, and this pool's blocks.

    num_sure: tokens of it that are the followed sequence's; num_checked: of those, known to be of the vocabulary.
    is_foreign: one was not.
    """

    of: Sequence
    seq: Sequence
    num_sure: int
    num_checked: int = 0
    is_foreign: bool = False

    @property
    def num_behind(self) -> int:
        """Tokens to compute before there is a draft: at least the last, even where it was computed as a draft that was cut off."""
        return max(1, len(self.of.token_ids) - min(self.seq.num_computed, self.num_right()))

    @property
    def num_drafted(self) -> int:
        """Tokens behind the text, when the sequence has just been followed."""
        return len(self.seq.token_ids) - self.num_sure

    def num_right(self) -> int:
        """Tokens that are the followed sequence's: it may have gone on, along what was drafted or not."""
        own, text, count = self.seq.token_ids, self.of.token_ids, self.num_sure
        while count < len(own) and count < len(text) and own[count] == text[count]:
            count += 1
        return count

    def learn(self) -> None:
        """What was drafted is right up to here, and the sequence has gone on."""
        own, right = self.seq, self.num_right()
        own.token_ids[right:] = self.of.token_ids[right:]
        own.num_computed = min(own.num_computed, right, len(own.token_ids) - 1)
        self.num_sure = len(own.token_ids)


class DraftCache:
    """The shadows of one engine's sequences, and their blocks.

    Args:
        vocab_size: of the draft model: a text with other tokens cannot be followed.
        forget: told of a shadow whose blocks go back.
    """

    def __init__(self, pool: BlockPool, *, vocab_size: int, forget: Callable[[Sequence], None]) -> None:
        self.pool, self._vocab_size, self._forget = pool, vocab_size, forget
        self._shadows: dict[str, Shadow] = {}  # those that were drafted for last come last

    def __len__(self) -> int:
        return len(self._shadows)

    def num_behind(self, seq: Sequence) -> int:
        """Tokens of its text that are not computed, as far as is known without looking for its beginning."""
        shadow = self._shadows.get(seq.request_id)
        return seq.num_tokens if shadow is None else shadow.num_behind

    def is_foreign(self, seq: Sequence) -> bool:
        """Whether it was found not to be one that can be followed."""
        shadow = self._shadows.get(seq.request_id)
        return shadow is not None and shadow.is_foreign

    def follow(self, seq: Sequence) -> Shadow | None:
        """The sequence's shadow, with its text of now. None: the draft model does not know some token of it."""
        shadow = self._shadows.pop(seq.request_id, None)
        if shadow is None:
            shadow = self._begin(seq)
        else:
            assert shadow.of is seq, f"{seq.request_id}: the shadow of another was not forgotten"
            shadow.learn()
        self._shadows[seq.request_id] = shadow
        shadow.is_foreign |= any(token >= self._vocab_size for token in seq.token_ids[shadow.num_checked :])
        shadow.num_checked = seq.num_tokens
        if shadow.is_foreign:
            return None
        self._name_full_blocks(shadow)
        return shadow

    def _begin(self, seq: Sequence) -> Shadow:
        own = Sequence(_plain(seq.request, self._vocab_size), seq.block_size, seq.arrival)
        own.token_ids = list(seq.token_ids)
        match = self.pool.match(own.block_chain(), (own.num_tokens - 1) // own.block_size)
        self.pool.acquire(match.blocks)
        self.pool.use(match)
        own.blocks = match.blocks[:]
        own.num_computed = len(match) * own.block_size
        own.num_hashed_blocks = len(match)
        return Shadow(seq, own, own.num_tokens)

    def _name_full_blocks(self, shadow: Shadow) -> None:
        own, size = shadow.seq, shadow.seq.block_size
        first, full = own.num_hashed_blocks, own.num_computed // size
        if full > first and own.request.hints.keep:
            tokens = pack_tokens(own.token_ids, first * size, full * size)
            self.pool.insert(own.block_chain(), own.blocks, first, full, tokens)
            own.num_hashed_blocks = full

    def grow(self, shadow: Shadow, num_tokens: int, needed: Collection[str]) -> bool:
        """Have blocks for so many of its tokens. Who is not among the `needed` requests may lose its own for that."""
        own = shadow.seq
        while (lacking := own.blocks_for(num_tokens) - len(own.blocks)) > 0:
            if (fresh := self.pool.allocate(lacking)) is not None:
                own.blocks += fresh
            elif (oldest := next((name for name in self._shadows if name not in needed), None)) is not None:
                self._drop(oldest)
            else:
                return False
        return True

    def forget(self, seq: Sequence) -> None:
        """It ended, or gave its place up."""
        shadow = self._shadows.get(seq.request_id)
        if shadow is not None and shadow.of is seq:
            self._drop(seq.request_id)

    def _drop(self, request_id: str) -> None:
        shadow = self._shadows.pop(request_id)
        shadow.learn()
        self._name_full_blocks(shadow)
        own = shadow.seq
        self._forget(own)
        self.pool.release(own.blocks)

    def check(self, live: Collection[Sequence]) -> None:
        """Raise AssertionError unless each shadow is a live sequence's, and every block in use a shadow's."""
        ids = {id(seq) for seq in live}
        for name, shadow in self._shadows.items():
            assert id(shadow.of) in ids, f"{name} is drafted for, but no longer runs"
        held = {block for shadow in self._shadows.values() for block in shadow.seq.blocks}
        assert self.pool.counts().used == len(held), "blocks of the draft model's pool are held by no sequence"
        self.pool.check()


def _plain(request: SequenceRequest, vocab_size: int) -> SequenceRequest:
    """What tells how tokens are drawn, and no more: nothing of it is told, and a draft may be the end."""
    bias = {token: value for token, value in request.sampling.logit_bias.items() if token < vocab_size}
    sampling = msgspec.structs.replace(
        request.sampling, logprobs=None, prompt_logprobs=None, min_tokens=0, logit_bias=bias
    )
    return msgspec.structs.replace(request, sampling=sampling, group=None)
