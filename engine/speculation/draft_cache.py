"""The draft model's own KV pool: which of its blocks hold which sequence. Pure: no torch.

Each sequence has a *shadow*: its text as far as the draft model has it, with blocks of its own. KV of wrong drafts is
overwritten. The pool is small: when no block is left, the sequence that was drafted for least recently loses its blocks
and is recomputed at its next draft. Full blocks stay in the prefix cache as in any pool, so that returning sequences
and common prefixes are not computed again.
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
    """State of one sequence. `seq` has the same text, drafts behind it, and blocks of this pool.

    num_sure: its tokens that are the target sequence's; num_checked: of those, tokens checked to be in the vocabulary.
    is_foreign: one was not.
    """

    of: Sequence
    seq: Sequence
    num_sure: int
    num_checked: int = 0
    is_foreign: bool = False

    @property
    def num_behind(self) -> int:
        """Tokens to compute before there is a draft: at least the last one, even if a draft that was cut off had it."""
        return max(1, len(self.of.token_ids) - min(self.seq.num_computed, self.num_right()))

    @property
    def num_drafted(self) -> int:
        """Drafted tokens behind the text, right after `follow`."""
        return len(self.seq.token_ids) - self.num_sure

    def num_right(self) -> int:
        """Tokens that equal the target sequence's, which may have continued along the draft or not."""
        own, text, count = self.seq.token_ids, self.of.token_ids, self.num_sure
        while count < len(own) and count < len(text) and own[count] == text[count]:
            count += 1
        return count

    def learn(self) -> None:
        """Adopt the tokens that the sequence got since, and keep the KV of right drafts."""
        own, right = self.seq, self.num_right()
        own.token_ids[right:] = self.of.token_ids[right:]
        own.num_computed = min(own.num_computed, right, len(own.token_ids) - 1)
        self.num_sure = len(own.token_ids)


class DraftCache:
    """The shadows of one engine's sequences, and their blocks.

    Args:
        vocab_size: of the draft model; texts with other tokens cannot be drafted for.
        forget: called with a shadow's sequence whose blocks are freed.
    """

    def __init__(self, pool: BlockPool, *, vocab_size: int, forget: Callable[[Sequence], None]) -> None:
        self.pool, self._vocab_size, self._forget = pool, vocab_size, forget
        self._shadows: dict[str, Shadow] = {}  # least recently drafted for first

    def __len__(self) -> int:
        return len(self._shadows)

    def num_behind(self, seq: Sequence) -> int:
        """Tokens of its text that are not computed, not counting what the prefix cache may have."""
        shadow = self._shadows.get(seq.request_id)
        return seq.num_tokens if shadow is None else shadow.num_behind

    def is_foreign(self, seq: Sequence) -> bool:
        """Whether it has a token that the draft model does not have."""
        shadow = self._shadows.get(seq.request_id)
        return shadow is not None and shadow.is_foreign

    def follow(self, seq: Sequence) -> Shadow | None:
        """The sequence's shadow with its current text. None: it has a token that the draft model does not have."""
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
        """Allocate blocks for this many of its tokens. Shadows of requests that are not in `needed` may lose theirs."""
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
        """The sequence ended or was preempted."""
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
        """Raise AssertionError unless each shadow belongs to a live sequence, and every used block to a shadow."""
        ids = {id(seq) for seq in live}
        for name, shadow in self._shadows.items():
            assert id(shadow.of) in ids, f"{name} is drafted for, but no longer runs"
        held = {block for shadow in self._shadows.values() for block in shadow.seq.blocks}
        assert self.pool.counts().used == len(held), "blocks of the draft model's pool are held by no sequence"
        self.pool.check()


def _plain(request: SequenceRequest, vocab_size: int) -> SequenceRequest:
    """The request with only what affects sampling: no logprobs, and a draft may end the output."""
    bias = {token: value for token, value in request.sampling.logit_bias.items() if token < vocab_size}
    sampling = msgspec.structs.replace(
        request.sampling, logprobs=None, prompt_logprobs=None, min_tokens=0, logit_bias=bias
    )
    return msgspec.structs.replace(request, sampling=sampling, group=None)
