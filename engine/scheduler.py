"""Which tokens of which sequences are computed in the next step, and who holds which blocks.

Pure: no torch, no clock. Owns the queues and, through the BlockPool, every block of the worker.
First come, first served; a step is filled up to the token budget, running sequences first.
"""

from array import array
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.engine.groups import Groups, fault_of
from kvrelay.engine.lower_tiers import LowerTiers
from kvrelay.engine.pinning import Pinning
from kvrelay.engine.sequence import Group, Sequence, State
from kvrelay.hashing import pack_tokens
from kvrelay.kvcache.block_pool import BlockPool
from kvrelay.kvcache.radix import BlockTable, Match
from kvrelay.types import BlockId, FinishReason
from kvrelay.wire import SequenceRequest


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Compute tokens start : start + num_tokens of a sequence; sample if that reaches its end."""

    seq: Sequence
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.start + self.num_tokens == self.seq.num_tokens


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """`seq` goes on in a copy of a block that it shared: it is about to write there."""

    seq: Sequence
    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work: single-token rows first, then chunks. Before them, the copies, in this order."""

    work: tuple[Scheduled, ...]
    num_single: int
    preempted: tuple[Sequence, ...]
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.work)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Counts are tokens, sequences and sequences."""

    token_budget: int
    max_running: int
    max_waiting: int


class Scheduler:
    """Queues and transitions of all sequences of one engine."""

    def __init__(self, pool: BlockPool, block_size: int, limits: SchedulerLimits) -> None:
        self.pool, self.block_size, self.limits = pool, block_size, limits
        self.waiting: deque[Sequence] = deque()
        self.reserving: deque[Sequence] = deque()  # in line for a reservation
        self.running: list[Sequence] = []  # in order of arrival
        self.receiving: dict[str, Sequence] = {}
        self.held: dict[str, Sequence] = {}
        self.sequences: dict[str, Sequence] = {}  # all of the above
        self.quarantined: dict[int, BlockTable] = {}  # by arrival: blocks that a transport may still write
        self.lent: set[BlockId] = set()  # to the KV plane's probes
        self.num_preemptions = 0
        self.hit_tokens = 0
        self.query_tokens = 0
        self.tiers: LowerTiers | None = None  # below the pool
        self.pinning = Pinning(pool, lambda: self.tiers)
        self.groups = Groups(self)
        self._arrivals = 0
        self._copies: list[BlockCopy] = []  # of the step that is being planned
        self._sources: list[BlockId] = []  # of copies that are not made yet: held

    # ---- arrival

    def refusal(self, request: SequenceRequest) -> tuple[str, str] | None:
        """Why this request cannot be taken, as (reason, message), or None."""
        num_tokens = len(request.token_ids)
        if request.request_id in self.sequences or request.request_id in self.groups.by_id:
            return "duplicate", f"{request.request_id} is already here"
        if not request.token_ids or not 0 < request.num_prompt_tokens <= num_tokens:
            return "invalid", "no prompt tokens, or more of them than tokens"
        if num_tokens + (request.sampling.max_tokens > 1) > self.pool.num_blocks * self.block_size:
            return "too_long", f"{num_tokens} tokens do not fit {self.pool.num_blocks} blocks of {self.block_size}"
        if len(self.waiting) + len(self.reserving) >= self.limits.max_waiting:
            return "full", f"{self.limits.max_waiting} sequences are in line already"
        return fault_of(
            request,
            block_size=self.block_size,
            num_blocks=self.pool.num_blocks,
            max_running=self.limits.max_running,
        )

    def _new(self, request: SequenceRequest, now_s: float, *, hold: bool, output_limit: int | None) -> Sequence:
        self._arrivals += 1
        seq = Sequence(request, self.block_size, self._arrivals, hold=hold, output_limit=output_limit, arrived_s=now_s)
        self.sequences[request.request_id] = seq
        self.groups.begin(seq)
        return seq

    def add(
        self, request: SequenceRequest, now_s: float, *, hold: bool = False, output_limit: int | None = None
    ) -> Sequence:
        """Put a sequence in line to be computed here. The caller has checked `refusal`."""
        seq = self._new(request, now_s, hold=hold, output_limit=output_limit)
        self.waiting.append(seq)
        self._ask_below(seq)
        return seq

    # ---- reservations (decode)

    def add_reservation(self, request: SequenceRequest, now_s: float) -> Sequence:
        """Put a sequence in line for blocks that a prefill worker will fill."""
        seq = self._new(request, now_s, hold=False, output_limit=None)
        self.reserving.append(seq)
        self._ask_below(seq)
        return seq

    def _ask_below(self, seq: Sequence) -> None:
        """Have what the pool lacks brought nearer while the sequence is in line."""
        if self.tiers is not None:
            self.tiers.arrived(seq, len(self.pool.match(seq.block_chain())))

    def _first(self, line: deque[Sequence]) -> Sequence | None:
        """Whose turn it is: who waits for blocks from a store stands back, for as long as the settings say."""
        if self.tiers is None:
            return line[0] if line else None
        return next((seq for seq in line if not self.tiers.is_waiting(seq)), None)

    def grant_reservations(self) -> list[Sequence]:
        """Reserve blocks, first come first served, for as many in line as there is room; returns them."""
        granted: list[Sequence] = []
        while (seq := self._first(self.reserving)) is not None:
            owed = self._owed(seq, self.waiting)
            if not self._has_seat(owed, seq) or not self._take_prompt_blocks(seq, owed, leave_one=False):
                break
            self.reserving.remove(seq)
            seq.num_held_blocks = seq.num_cached // self.block_size
            seq.move_to(State.RECEIVING)
            self.receiving[seq.request_id] = seq
            granted.append(seq)
        return granted

    def activate(self, request_id: str, token_ids: list[int]) -> Sequence | None:
        """The prompt's KV has arrived and was verified; decode on from these first tokens.

        What comes from below the pool may still be on its way: then the blocks are named after their first step, which waits
        for it and begins anew if it is corrupt.
        """
        seq = self.receiving.pop(request_id, None)
        if seq is None:
            return None
        seq.num_computed = seq.num_tokens
        seq.move_to(State.RUNNING)
        if seq.load is None:
            self.name_arrived(seq)
        seq.token_ids.extend(token_ids)
        self.seat(seq)
        return seq

    def name_arrived(self, seq: Sequence) -> None:
        """The prompt's blocks can be found by others from now on."""
        self._name_full_blocks(seq)
        self._pin(seq)

    def seat(self, seq: Sequence) -> None:
        """It is in the batch from now on."""
        self.running.append(seq)
        self.running.sort(key=lambda other: other.arrival)

    def _has_seat(self, owed: int, seq: Sequence) -> bool:
        """Whether `seq`, with its group, may join; the last seat is left to whom blocks are owed."""
        taken = len(self.running) + len(self.receiving) + self.groups.owed_seats
        wanted = seq.group.num_seats if seq.group is not None and seq is seq.group.leader else 1
        return taken + wanted + bool(owed) <= self.limits.max_running

    def _owed(self, seq: Sequence, other_line: deque[Sequence]) -> int:
        """Blocks to leave for the head of the other line if it came before `seq`: neither line starves the other."""
        if not other_line or other_line[0].arrival > seq.arrival:
            return 0
        return self._blocks_at_most(other_line[0]) + 1  # `seq` itself raises what must stay spare

    @staticmethod
    def _blocks_at_most(seq: Sequence) -> int:
        """Blocks that admitting `seq` takes when nothing of it is cached."""
        return seq.blocks_for(seq.num_tokens + (seq.request.sampling.max_tokens > 1))

    def _take_prompt_blocks(self, seq: Sequence, owed: int, *, leave_one: bool) -> bool:
        """Give `seq` the cached blocks of its prefix and fresh ones for the rest of its tokens.

        leave_one: at least the last token must be computed here, so the match stops before it.
        Keeps one spare block for each running sequence, so that admission does not cause preemption,
        and `owed` blocks for the head of the other line.
        """
        wants_all_logits = seq.request.sampling.prompt_logprobs is not None
        match = self.pool.match(
            seq.block_chain(), 0 if wants_all_logits else (seq.num_tokens - leave_one) // self.block_size
        )
        below = self._num_below(
            seq, match, most=0 if wants_all_logits else (seq.num_tokens - leave_one) // self.block_size
        )
        has_tail = leave_one and not wants_all_logits and not below
        tail, num_tail = self._tail(seq, match) if has_tail else (array("i"), 0)
        blocks = self._take(seq, match.blocks + tail, owed, num_to_copy=len(tail))
        if blocks is None and tail:  # the copied block may be the one that is missing
            num_tail, blocks = 0, self._take(seq, match.blocks, owed, num_to_copy=0)
        if blocks is None:
            return False
        self.pool.use(match, seq.request.hints.priority)
        seq.blocks = blocks
        seq.num_computed = seq.num_cached = (len(match) + below) * self.block_size + num_tail
        seq.num_hashed_blocks = len(match)
        if self.tiers is not None:
            if below:
                self.tiers.bring_up(seq, len(match), blocks[len(match) : len(match) + below])
            self.tiers.admitted(seq, len(match))
        self.hit_tokens += seq.num_cached
        self.query_tokens += seq.num_tokens
        return True

    def _num_below(self, seq: Sequence, match: Match, *, most: int) -> int:
        """Blocks after the match that the host tier has."""
        return self.tiers.num_below(seq, len(match), most) if self.tiers is not None and most > len(match) else 0

    def _take(self, seq: Sequence, hit: BlockTable, owed: int, *, num_to_copy: int) -> "BlockTable | None":
        """These cached blocks and fresh ones for the rest of `seq`, all with a reference; None: no room."""
        self.pool.acquire(hit)
        need = self._blocks_at_most(seq) - len(hit)
        spare = len(self.running) + len(self.receiving) + num_to_copy + owed
        if seq.group is not None and seq is seq.group.leader and seq.output_limit is None:
            spare = max(spare, min(spare + seq.group.blocks_to_part(), self.pool.num_blocks - need - len(hit)))
        is_short = need + spare > self.pool.num_available
        if is_short and not owed and not self._holds_blocks:  # pins alone are in the way: they end before their time
            is_short = not self.pool.unpin_for(need + spare)
        fresh = None if is_short else self.pool.allocate(need)
        if fresh is None:
            self.pool.release(hit)
            return None
        return hit + fresh

    def _tail(self, seq: Sequence, match: Match) -> tuple[BlockTable, int]:
        """(a block that begins with the next tokens of `seq`, how many of them), never up to its last token; or (none, 0)."""
        end = len(match) * self.block_size
        rest = pack_tokens(seq.token_ids, end, min(end + self.block_size, seq.num_tokens - 1))
        block, count = self.pool.tail(match, rest)
        return array("i", [block] if count else []), count

    @property
    def _holds_blocks(self) -> bool:
        """Whether some blocks will come back without anything being done about it."""
        return bool(self.running or self.receiving or self.held or self.quarantined or self.lent) or (
            self.tiers is not None and bool(self.tiers.tiers.held_blocks())
        )

    # ---- a step

    def schedule(self) -> StepPlan:
        """Plan the next step. Blocks are taken here; tokens are applied by `advance`."""
        budget = self.limits.token_budget
        singles: list[Scheduled] = []
        chunks: list[Scheduled] = []
        preempted: list[Sequence] = []
        self.copied()
        self._copies = []
        for seq in sorted(self.running, key=lambda seq: seq.num_uncomputed > 1):  # single tokens, then chunks
            if seq.state is not State.RUNNING or budget <= 0 or not seq.num_uncomputed:  # a beam waits for the others
                continue
            if not self._grow(seq, preempted) or not self._own_next(seq, preempted):
                continue
            take = min(seq.num_uncomputed, budget)
            (singles if take == 1 else chunks).append(Scheduled(seq, seq.num_computed, take))
            budget -= take
        if not preempted:
            budget = self._admit(budget, singles, chunks, preempted)
        gone = set(map(id, preempted))
        work = [item for item in singles + chunks if id(item.seq) not in gone]
        num_single = sum(1 for item in singles if id(item.seq) not in gone)
        copies = tuple(copy for copy in self._copies if id(copy.seq) not in gone)
        return StepPlan(tuple(work), num_single, tuple(preempted), copies)

    def _admit(self, budget: int, singles: list[Scheduled], chunks: list[Scheduled], preempted: list[Sequence]) -> int:
        while budget > 0 and (seq := self._first(self.waiting)) is not None:
            owed = self._owed(seq, self.reserving)
            if not self._has_seat(owed, seq) or not self._take_prompt_blocks(seq, owed, leave_one=True):
                break
            self.waiting.remove(seq)
            seq.move_to(State.RUNNING)
            self.seat(seq)
            has_own = self._own_next(seq, preempted)
            assert has_own, "a block for the copy was left over"
            take = min(seq.num_uncomputed, budget)
            (singles if take == 1 else chunks).append(Scheduled(seq, seq.num_computed, take))
            budget -= take
        return budget

    def _grow(self, seq: Sequence, preempted: list[Sequence]) -> bool:
        """Make room for every token of `seq`; the latest arrivals give way. False if `seq` itself did."""
        while (need := seq.blocks_for(seq.num_tokens) - len(seq.blocks)) > 0:
            fresh = self.pool.allocate(need)
            if fresh is not None:
                seq.blocks += fresh
            elif not self._make_room(seq, preempted):
                return False
        return True

    def _own_next(self, seq: Sequence, preempted: list[Sequence]) -> bool:
        """Copy on write: have the block that `seq` goes on in for itself. False if `seq` itself gave way for the room."""
        index, offset = divmod(seq.num_computed, self.block_size)
        if not offset or self.pool.is_own(source := BlockId(seq.blocks[index])):
            return True
        while (target := self.pool.writable(source)) is None:
            if not self._make_room(seq, preempted):
                return False
        if target != source:  # the others may have gone meanwhile
            seq.blocks[index] = target
            self._copies.append(BlockCopy(seq, source, target))
            self.pool.acquire((source,))  # else it could go to a sequence whose blocks are written at once: from below
            self._sources.append(source)
        return True

    def copied(self) -> None:
        """The last plan's copies are made: their sources may be used for something else."""
        while self._sources:
            self.pool.release((self._sources.pop(),))

    def _make_room(self, seq: Sequence, preempted: list[Sequence]) -> bool:
        """The latest arrival gives way, with its group. False if that is `seq` itself."""
        gone = self._give_way(self.running[-1])
        preempted += gone
        return all(one is not seq for one in gone)

    def _give_way(self, victim: Sequence) -> list[Sequence]:
        """All members of a group give way at once, unless it runs alone: then one, which goes on when the others have ended."""
        group = victim.group
        if group is None or victim is group.leader or self._runs_alone(group):
            self._preempt(victim)
            return [victim]
        leader, gone = self.groups.gather(group)
        self.waiting.appendleft(leader)
        self.num_preemptions += 1
        return gone

    def _runs_alone(self, group: Group) -> bool:
        """Whether no others' end will make room for it. Beams were admitted because they can all be held at once."""
        return group.search is None and not self.receiving and all(seq.group is group for seq in self.running)

    def _preempt(self, seq: Sequence) -> None:
        """All or nothing: drop the blocks, compute the tokens again later. Cached blocks shorten that."""
        self.running.remove(seq)
        self._leave_below(seq)
        self.pool.release(seq.blocks)
        seq.blocks = array("i")
        seq.num_computed = seq.num_hashed_blocks = 0
        seq.prompt_logprobs.clear()  # they come again with the prompt
        seq.move_to(State.WAITING)
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def rewind(self, seq: Sequence) -> None:
        """What was to be brought up for it is not what was saved: begin anew, without that."""
        self._preempt(seq)

    def _leave_below(self, seq: Sequence) -> None:
        """Nothing is written into its blocks any more, and nothing is fetched for it."""
        if self.tiers is not None:
            self.tiers.gone(seq)

    def advance(self, item: Scheduled) -> None:
        """The KV of this work is in its blocks now."""
        item.seq.num_computed += item.num_tokens
        self._name_full_blocks(item.seq)
        self._pin(item.seq)

    def _name_full_blocks(self, seq: Sequence) -> None:
        full = seq.num_computed // self.block_size
        if full <= seq.num_hashed_blocks:
            return
        if (hints := seq.request.hints).keep:
            first, size = seq.num_hashed_blocks, self.block_size
            tokens = pack_tokens(seq.token_ids, first * size, full * size)
            self.pool.name(seq.block_chain(), seq.blocks, first, full, tokens, priority=hints.priority)
            if self.tiers is not None:
                self.tiers.filled(seq, first, full)
        seq.num_hashed_blocks = full

    def _pin(self, seq: Sequence) -> None:
        """The prompt's KV is here: keep it for as long as the request asks."""
        hints, prompt = seq.request.hints, seq.request.num_prompt_tokens
        if hints.pin_s > 0 and hints.keep and not seq.is_pinned and seq.num_computed >= prompt:
            self.pinning.pin_prompt(seq)

    # ---- the end

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """The one release path: whatever `seq` holds goes back, or is HELD for its transfer."""
        if seq.state is State.FINISHED:
            return
        if seq.state is State.RUNNING:
            self.running.remove(seq)
            seq.finish_reason = reason
            if seq.hold and reason in (FinishReason.LENGTH, FinishReason.STOP):
                seq.move_to(State.HELD)
                self.held[seq.request_id] = seq
                return
        self._unqueue(seq)
        self._leave_below(seq)
        self.groups.ended(seq)
        seq.finish_reason = seq.finish_reason or reason
        seq.move_to(State.FINISHED)
        self.pool.release(seq.blocks)
        seq.blocks = array("i")
        del self.sequences[seq.request_id]

    def quarantine(self, seq: Sequence, reason: FinishReason) -> int:
        """End a receiving sequence whose blocks may still be written; returns the key for `unquarantine`."""
        self._leave_below(seq)
        self.quarantined[seq.arrival] = seq.blocks
        seq.blocks = array("i")
        self.finish(seq, reason)
        return seq.arrival

    def unquarantine(self, key: int) -> None:
        """Nothing can write those blocks any more: they may be used again."""
        self.pool.release(self.quarantined.pop(key))

    # ---- blocks that no sequence holds

    def lend(self, count: int) -> list[BlockId]:
        """Up to `count` blocks without content worth keeping; none while a sequence is in line for blocks.

        Leaves one for each running sequence, so that a probe pre-empts nobody.
        """
        spare = self.pool.counts().free - len(self.running) - len(self.receiving)
        count = max(0, min(count, spare))
        blocks = None if self.waiting or self.reserving else self.pool.allocate(count)
        lent = [BlockId(block) for block in blocks or ()]
        self.lent.update(lent)
        return lent

    def take_back(self, blocks: Iterable[BlockId]) -> None:
        """The borrower is done with these."""
        returned = list(blocks)
        self.lent.difference_update(returned)
        self.pool.release(returned)

    def _unqueue(self, seq: Sequence) -> None:
        self.receiving.pop(seq.request_id, None)
        self.held.pop(seq.request_id, None)
        for queue in (self.waiting, self.reserving):
            if seq in queue:
                queue.remove(seq)

    # ---- what others may know

    @property
    def has_work(self) -> bool:
        """Whether a step may bring something about; a step that did not (StepResult.is_stuck) need not be tried again."""
        return bool(self.running or self.waiting or self.reserving)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens in line or begun, not yet computed."""
        return sum(seq.num_uncomputed for seq in self.waiting) + sum(
            seq.num_uncomputed for seq in self.running if seq.num_uncomputed > 1
        )

    def ready_blocks(self, item: Scheduled) -> tuple[int, list[BlockId]]:
        """(first index, ids) of the blocks that `item` completes: full ones, and the tail with the prompt's end."""
        seq, end = item.seq, item.start + item.num_tokens
        first = item.start // self.block_size
        last = seq.blocks_for(end) if end == seq.num_tokens else end // self.block_size
        return first, [BlockId(block) for block in seq.blocks[first:last]]

    def check(self) -> None:
        """Raise AssertionError unless queues, sequences and the pool's references agree."""
        self.pool.check()
        holders = Counter(self.pool.pinned)
        for seq in self.sequences.values():
            holders.update(seq.blocks)
        for blocks in self.quarantined.values():
            holders.update(blocks)
        holders.update(self.lent)
        holders.update(self._sources)
        if self.tiers is not None:
            holders.update(self.tiers.tiers.held_blocks())
        for block, count in holders.items():
            assert count == self.pool.num_holders(block), f"block {block}: {count} holders, other references"
        used = self.pool.counts().used
        assert used == sum(count > (block in self.pool.pinned) for block, count in holders.items()), (
            "a used block has no sequence"
        )
        queued = [*self.waiting, *self.reserving, *self.running, *self.receiving.values(), *self.held.values()]
        assert sorted(map(id, queued)) == sorted(map(id, self.sequences.values())), "a sequence is in no queue or two"
        assert all(not seq.blocks for seq in [*self.waiting, *self.reserving]), "a waiting sequence holds blocks"
