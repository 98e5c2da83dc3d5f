"""Admission: whose turn it is, whether there is room for it, and the blocks that it gets. Pure.

A queued sequence is admitted when it is the head of its queue, the running-sequence limit allows it, and the pool has
its blocks and headroom for what runs already. Room for the other queue's head is reserved: neither starves. A prompt of
which this step computes a good part, for another sequence, waits one step and finds it cached (SGLang's in-batch prefix
caching, python/sglang/srt/managers/schedule_policy.py, defers by a fixed 32 tokens).
"""

from array import array
from collections.abc import Iterable

from kvrelay.engine.scheduling.blocks import Headroom, SequenceBlocks
from kvrelay.engine.scheduling.preempt import MeasuredSpeeds
from kvrelay.engine.scheduling.sequence import Scheduled, Sequence, State
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.engine.scheduling.waiting_queue import Queues, WaitingQueue, ranks_before
from kvrelay.hashing import HASH_BYTES, pack_tokens
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.pool.ledger import BlockIds
from kvrelay.kvcache.pool.radix import Match


class Admission:
    """Admits queued sequences, the head of each of an engine's two queues first, and gives them their blocks."""

    def __init__(
        self,
        queues: Queues,
        pool: BlockPool,
        blocks: SequenceBlocks,
        headroom: Headroom,
        speeds: MeasuredSpeeds,
        tiers: LowerTiers | None,
        *,
        token_budget: int,
        max_running: int,
    ) -> None:
        self._queues, self._pool, self._blocks, self._headroom = queues, pool, blocks, headroom
        self._speeds, self._tiers = speeds, tiers
        self._token_budget, self._max_running = token_budget, max_running
        self._now_s = 0.0  # as of the last `past_deadline`
        self.hit_tokens = self.query_tokens = 0

    def grant_reservations(self) -> list[Sequence]:
        """Reserve blocks for queued reservations, in order, while there is room; returns them, now RECEIVING."""
        queues, granted = self._queues, list[Sequence]()
        self.return_ready()
        while not queues.swapped and (seq := self.head(queues.reserving)) is not None:
            if not self._admit(seq, queues.reserving, leave_one=False):
                break
            seq.num_held_blocks = seq.num_cached // seq.block_size
            seq.move_to(State.RECEIVING)
            queues.receiving[seq.request_id] = seq
            granted.append(seq)
        return granted

    def admit_waiting(self, chunks: Iterable[Scheduled], before: Sequence | None = None) -> Sequence | None:
        """Admit the head of the waiting queue, which has its blocks then; None: there is none, or no room for it.

        Args:
            chunks: prompts that this step computes. A sequence that finds much of one cached in the next step waits
                for it.
            before: only a sequence that goes before this one, whose prompt has begun.
        """
        waiting = self._queues.waiting
        seq = self.head(waiting)
        if seq is None or (before is not None and not waiting.passes(seq, before)):
            return None
        return seq if self._admit(seq, waiting, leave_one=True, chunks=chunks) else None

    def _admit(self, seq: Sequence, queue: WaitingQueue, *, leave_one: bool, chunks: Iterable[Scheduled] = ()) -> bool:
        num_sequences, num_blocks = self._reserved_for_other(seq, queue)
        if chunks and finds_more_next_step(seq, chunks, self._pool, self._token_budget):
            return False
        if not self.fits_running(seq, num_sequences) or not self._give(seq, num_blocks, leave_one=leave_one):
            return False
        seq.queue_rank = queue.rank(seq)
        queue.take(seq)
        self._other(queue).count_admission()
        seq.has_begun = True
        self._queues.fair_share.admit(seq)
        return True

    def fits_running(self, seq: Sequence, num_reserved: int = 0) -> bool:
        """Whether `seq`, with its group, may run too, when so many running sequences are reserved for others."""
        taken = len(self._queues.running) + len(self._queues.receiving)
        if self._queues.groups:
            taken += self._queues.num_reserved
        return taken + num_sequences_of(seq) + num_reserved <= self._max_running

    # ---- whose turn it is

    def past_deadline(self, now_s: float) -> list[Sequence]:
        """Queued sequences that were never begun and should have their first token by now."""
        self._now_s = now_s
        self._queues.waiting.restore_aged(now_s)
        self._queues.reserving.restore_aged(now_s)
        return self._queues.waiting.past_deadline(now_s) + self._queues.reserving.past_deadline(now_s)

    def head(self, queue: WaitingQueue) -> Sequence | None:
        """Whose turn it is.

        A sequence that waits for blocks from a store is skipped, for as long as the settings allow.
        """
        if not len(queue):
            return None
        is_skipped = None if self._tiers is None else self._tiers.is_waiting
        seq = queue.head(is_skipped)
        while seq is not None and not queue.is_oldest_next:
            num_uncached = self._overdue_tokens(seq, is_reservation=queue is self._queues.reserving)
            if num_uncached is None:
                break
            queue.mark_overdue(seq, num_uncached)
            seq = queue.head(is_skipped)
        return seq

    def _overdue_tokens(self, seq: Sequence, *, is_reservation: bool) -> int | None:
        """Its uncached tokens if it misses its TTFT target even when it begins now. Found once for each sequence.

        A reservation is overdue, with all its tokens, once its target has passed.
        """
        request = seq.request
        if request.ttft_target_s is None or seq.overdue_tokens or request.deadline_s is not None:
            return None
        queued_s = self._now_s - seq.arrived_s
        if queued_s >= self._queues.fair_share.rules.aged_s:
            return None
        left_s = request.ttft_target_s - queued_s
        if is_reservation:
            return seq.num_tokens if left_s <= 0 else None
        if seq.has_begun:
            return None
        speed = self._speeds.compute_tokens_per_s
        if left_s > 0 and not speed:
            return None
        possible = left_s * speed - self._token_budget  # its last ones may share a step with others
        if seq.num_tokens <= possible:
            return None
        num_uncached = seq.num_tokens - len(self._pool.match(seq.block_chain())) * seq.block_size
        return num_uncached if num_uncached > possible else None

    def return_ready(self) -> None:
        """Sequences whose blocks have come from a store are no longer skipped."""
        if self._tiers is not None:
            for queue in (self._queues.waiting, self._queues.reserving):
                queue.return_ready(self._tiers.is_waiting)

    def _reserved_for_other(self, seq: Sequence, queue: WaitingQueue) -> tuple[int, int]:
        """(running sequences, blocks) to leave for the head of the other queue, if that goes before `seq`."""
        other_queue = self._other(queue)
        other = self.head(other_queue)
        if other is None or not ranks_before(other_queue, other, queue, seq):
            return 0, 0
        for_members = other.group.blocks_to_fork() if other.group is not None and will_fork(other) else 0
        # `seq` itself needs one spare block more, and each running sequence may take one before it is the other's turn
        return num_sequences_of(other), prompt_blocks(other) + for_members + 1 + len(self._queues.running)

    def _other(self, queue: WaitingQueue) -> WaitingQueue:
        return self._queues.reserving if queue is self._queues.waiting else self._queues.waiting

    # ---- blocks

    def _give(self, seq: Sequence, num_reserved: int, *, leave_one: bool) -> bool:
        """Give `seq` the cached blocks of its prefix and fresh ones for the rest of its tokens. False: no room.

        Args:
            num_reserved: blocks to leave for the head of the other queue.
            leave_one: at least the last token must be computed here, so the match stops before it.
        """
        wants_all_logits = seq.request.sampling.prompt_logprobs is not None
        most = 0 if wants_all_logits else (seq.num_tokens - leave_one) // seq.block_size
        match = self._pool.match(seq.block_chain(), most)
        num_lower = 0  # blocks after the match that the host tier has
        if self._tiers is not None and most > len(match):
            num_lower = self._tiers.num_below(seq, len(match), most)
        may_copy = leave_one and not wants_all_logits and not num_lower
        partial, num_partial = self._partial_block(seq, match) if may_copy else (array("i"), 0)
        blocks = self.take(seq, match.blocks + partial, num_reserved, num_to_copy=len(partial))
        if blocks is None and partial:  # the copied block may be the one that is missing
            num_partial, blocks = 0, self.take(seq, match.blocks, num_reserved)
        if blocks is None:
            return False
        self._pool.use(match, seq.request.hints.priority)
        seq.blocks = blocks
        seq.num_computed = seq.num_cached = (len(match) + num_lower) * seq.block_size + num_partial
        seq.num_hashed_blocks = len(match)
        if self._tiers is not None:
            if num_lower:
                self._tiers.bring_up(seq, len(match), blocks[len(match) : len(match) + num_lower])
            self._tiers.admitted(seq, len(match))
        self.hit_tokens += seq.num_cached
        self.query_tokens += seq.num_tokens
        return True

    def _partial_block(self, seq: Sequence, match: Match) -> tuple[BlockIds, int]:
        """(a block that begins with the next tokens of `seq`, how many of them), never its last token; or (none, 0)."""
        end = len(match) * seq.block_size
        rest = pack_tokens(seq.token_ids, end, min(end + seq.block_size, seq.num_tokens - 1))
        block, count = self._pool.partial_match(match, rest)
        return array("i", [block] if count else []), count

    def take(
        self, seq: Sequence, cached: BlockIds, num_reserved: int = 0, *, num_to_copy: int = 0
    ) -> "BlockIds | None":
        """These cached blocks and fresh ones for the rest of `seq`, all with a reference; None: no room.

        Leaves the headroom for running sequences free, so that admission rarely causes preemption.
        """
        pool, headroom, queues = self._pool, self._headroom, self._queues
        pool.acquire(cached)
        need = prompt_blocks(seq) - len(cached)
        spare = num_to_copy + num_reserved
        num_others = len(queues.running) + len(queues.receiving)
        if seq.group is not None or need + spare + headroom.at_most(num_others) > pool.num_available:
            spare += headroom.blocks(seq, need, [*queues.running, *queues.receiving.values()])
        if seq.group is not None and will_fork(seq):
            spare = max(spare, min(spare + seq.group.blocks_to_fork(), pool.num_blocks - need - len(cached)))
        is_short = need + spare > pool.num_available
        if is_short and not (num_reserved or queues.running or queues.receiving or queues.held or self._blocks.aside()):
            # only pins are in the way: end them early
            is_short = not pool.unpin_for(need + spare)
        fresh = None if is_short else pool.allocate(need)
        if fresh is None:
            pool.release(cached)
            return None
        return cached + fresh


def num_sequences_of(seq: Sequence) -> int:
    """How many sequences run once `seq` is admitted: those of its group, if it leads one."""
    return seq.group.num_sequences if seq.group is not None and seq is seq.group.leader else 1


def will_fork(seq: Sequence) -> bool:
    """Whether `seq` leads a group whose members will continue here."""
    return seq.group is not None and seq is seq.group.leader and seq.output_limit is None


def prompt_blocks(seq: Sequence) -> int:
    """Blocks that admitting `seq` takes when nothing of it is cached."""
    return seq.blocks_for(seq.num_tokens + (seq.request.sampling.max_tokens > 1))


BUDGET_CUT = 32
"""A step's wait must save at least this part of a step's tokens: about what could be computed in a step's overhead."""


def finds_more_next_step(seq: Sequence, chunks: Iterable[Scheduled], pool: BlockPool, token_budget: int) -> bool:
    """Whether this step's chunks compute enough of the prefix of `seq`, after what is cached, that it should wait."""
    if not pool.is_caching or seq.request.sampling.prompt_logprobs is not None:
        return False
    chain, size = seq.block_chain(), seq.block_size
    first = chain.data[:HASH_BYTES]
    if len(first) < HASH_BYTES:  # not one full block
        return False
    alike = [one for one in chunks if one.seq.request.hints.keep and one.seq.block_chain().data[:HASH_BYTES] == first]
    if not alike:
        return False
    num_usable = (seq.num_tokens - 1) // size
    least = max(1, -(-token_budget // (BUDGET_CUT * size)))
    last = len(pool.match(chain, num_usable)) + least - 1
    if last >= num_usable:
        return False
    begin, end = last * HASH_BYTES, (last + 1) * HASH_BYTES
    digest = chain.data[begin:end]  # stands for all blocks before it, too
    return any(
        last < (one.start + one.num_tokens) // size and one.seq.block_chain().data[begin:end] == digest for one in alike
    )
