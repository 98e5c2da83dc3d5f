"""Which tokens of which sequences are computed in the next step, and who holds which blocks.

Pure: no torch, no clock. Owns the queues and, through the BlockPool, every block of the worker.
First come, first served; a step is filled up to the token budget, running sequences first.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.engine.sequence import Sequence, State
from kvrelay.kvcache.block_pool import BlockPool
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
class StepPlan:
    """One step's work: single-token rows first, then chunks."""

    work: tuple[Scheduled, ...]
    num_single: int
    preempted: tuple[Sequence, ...]

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
        self.quarantined: dict[int, list[BlockId]] = {}  # by arrival: blocks that a transport may still write
        self.lent: set[BlockId] = set()  # to the KV plane's probes
        self.num_preemptions = 0
        self.hit_tokens = 0
        self.query_tokens = 0
        self._arrivals = 0

    # ---- arrival

    def refusal(self, request: SequenceRequest) -> tuple[str, str] | None:
        """Why this request cannot be taken, as (reason, message), or None."""
        num_tokens = len(request.token_ids)
        if request.request_id in self.sequences:
            return "duplicate", f"{request.request_id} is already here"
        if not request.token_ids or not 0 < request.num_prompt_tokens <= num_tokens:
            return "invalid", "no prompt tokens, or more of them than tokens"
        if num_tokens + (request.sampling.max_tokens > 1) > self.pool.num_blocks * self.block_size:
            return "too_long", f"{num_tokens} tokens do not fit {self.pool.num_blocks} blocks of {self.block_size}"
        if len(self.waiting) + len(self.reserving) >= self.limits.max_waiting:
            return "full", f"{self.limits.max_waiting} sequences are in line already"
        return None

    def _new(self, request: SequenceRequest, now_s: float, *, hold: bool, output_limit: int | None) -> Sequence:
        self._arrivals += 1
        seq = Sequence(request, self.block_size, self._arrivals, hold=hold, output_limit=output_limit, arrived_s=now_s)
        self.sequences[request.request_id] = seq
        return seq

    def add(
        self, request: SequenceRequest, now_s: float, *, hold: bool = False, output_limit: int | None = None
    ) -> Sequence:
        """Put a sequence in line to be computed here. The caller has checked `refusal`."""
        seq = self._new(request, now_s, hold=hold, output_limit=output_limit)
        self.waiting.append(seq)
        return seq

    # ---- reservations (decode)

    def add_reservation(self, request: SequenceRequest, now_s: float) -> Sequence:
        """Put a sequence in line for blocks that a prefill worker will fill."""
        seq = self._new(request, now_s, hold=False, output_limit=None)
        self.reserving.append(seq)
        return seq

    def grant_reservations(self) -> list[Sequence]:
        """Reserve blocks, first come first served, for as many in line as there is room; returns them."""
        granted: list[Sequence] = []
        while self.reserving:
            seq = self.reserving[0]
            owed = self._owed(seq, self.waiting)
            if not self._has_seat(owed) or not self._take_prompt_blocks(seq, owed, leave_one=False):
                break
            self.reserving.popleft()
            seq.num_held_blocks = seq.num_cached // self.block_size
            seq.move_to(State.RECEIVING)
            self.receiving[seq.request_id] = seq
            granted.append(seq)
        return granted

    def activate(self, request_id: str, token_ids: list[int]) -> Sequence | None:
        """The prompt's KV has arrived and was verified; decode on from these first tokens."""
        seq = self.receiving.pop(request_id, None)
        if seq is None:
            return None
        seq.num_computed = seq.num_tokens
        seq.move_to(State.RUNNING)
        self._name_full_blocks(seq)
        seq.token_ids.extend(token_ids)
        self._seat(seq)
        return seq

    def _seat(self, seq: Sequence) -> None:
        self.running.append(seq)
        self.running.sort(key=lambda other: other.arrival)

    def _has_seat(self, owed: int) -> bool:
        """Whether one more may join; the last seat is left to whom blocks are owed."""
        return len(self.running) + len(self.receiving) + bool(owed) < self.limits.max_running

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
        hashes = [] if wants_all_logits else seq.full_hashes()
        if leave_one:
            hashes = hashes[: (seq.num_tokens - 1) // self.block_size]
        hit = self.pool.match(hashes)
        self.pool.acquire(hit)
        need = self._blocks_at_most(seq) - len(hit)
        spare = len(self.running) + len(self.receiving)
        fits = need + spare + owed <= self.pool.num_available
        fresh = self.pool.allocate(need) if fits else None
        if fresh is None:
            self.pool.release(hit)
            return False
        seq.blocks = hit + fresh
        seq.num_computed = seq.num_cached = len(hit) * self.block_size
        seq.num_hashed_blocks = len(hit)
        self.hit_tokens += seq.num_cached
        self.query_tokens += seq.num_tokens
        return True

    # ---- a step

    def schedule(self) -> StepPlan:
        """Plan the next step. Blocks are taken here; tokens are applied by `advance`."""
        budget = self.limits.token_budget
        singles: list[Scheduled] = []
        chunks: list[Scheduled] = []
        preempted: list[Sequence] = []
        for seq in sorted(self.running, key=lambda seq: seq.num_uncomputed > 1):  # single tokens, then chunks
            if seq.state is not State.RUNNING or budget <= 0:
                continue
            if not self._grow(seq, preempted):
                continue
            take = min(seq.num_uncomputed, budget)
            (singles if take == 1 else chunks).append(Scheduled(seq, seq.num_computed, take))
            budget -= take
        if not preempted:
            budget = self._admit(budget, singles, chunks)
        gone = set(map(id, preempted))
        work = [item for item in singles + chunks if id(item.seq) not in gone]
        num_single = sum(1 for item in singles if id(item.seq) not in gone)
        return StepPlan(tuple(work), num_single, tuple(preempted))

    def _admit(self, budget: int, singles: list[Scheduled], chunks: list[Scheduled]) -> int:
        while self.waiting and budget > 0:
            seq = self.waiting[0]
            owed = self._owed(seq, self.reserving)
            if not self._has_seat(owed) or not self._take_prompt_blocks(seq, owed, leave_one=True):
                break
            self.waiting.popleft()
            seq.move_to(State.RUNNING)
            self._seat(seq)
            take = min(seq.num_uncomputed, budget)
            (singles if take == 1 else chunks).append(Scheduled(seq, seq.num_computed, take))
            budget -= take
        return budget

    def _grow(self, seq: Sequence, preempted: list[Sequence]) -> bool:
        """Make room for every token of `seq`; the latest arrivals give way. False if `seq` itself did."""
        while len(seq.blocks) < seq.blocks_for(seq.num_tokens):
            fresh = self.pool.allocate(1)
            if fresh is not None:
                seq.blocks += fresh
                continue
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """All or nothing: drop the blocks, compute the tokens again later. Cached blocks shorten that."""
        self.running.remove(seq)
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.num_computed = seq.num_hashed_blocks = 0
        seq.prompt_logprobs.clear()  # they come again with the prompt
        seq.move_to(State.WAITING)
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def advance(self, item: Scheduled) -> None:
        """The KV of this work is in its blocks now."""
        item.seq.num_computed += item.num_tokens
        self._name_full_blocks(item.seq)

    def _name_full_blocks(self, seq: Sequence) -> None:
        full = seq.num_computed // self.block_size
        if full <= seq.num_hashed_blocks:
            return
        hashes = seq.full_hashes()
        for index in range(seq.num_hashed_blocks, full):
            self.pool.cache(seq.blocks[index], hashes[index])
        seq.num_hashed_blocks = full

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
        seq.finish_reason = seq.finish_reason or reason
        seq.move_to(State.FINISHED)
        self.pool.release(seq.blocks)
        seq.blocks = []
        del self.sequences[seq.request_id]

    def quarantine(self, seq: Sequence, reason: FinishReason) -> int:
        """End a receiving sequence whose blocks may still be written; returns the key for `unquarantine`."""
        self.quarantined[seq.arrival] = seq.blocks
        seq.blocks = []
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
        blocks = [] if self.waiting or self.reserving else self.pool.allocate(max(0, min(count, spare)))
        self.lent.update(blocks or ())
        return blocks or []

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
        return first, seq.blocks[first:last]

    def check(self) -> None:
        """Raise AssertionError unless queues, sequences and the pool's references agree."""
        self.pool.check()
        holders: dict[BlockId, int] = {}
        for seq in self.sequences.values():
            for block in seq.blocks:
                holders[block] = holders.get(block, 0) + 1
        for blocks in self.quarantined.values():
            for block in blocks:
                holders[block] = holders.get(block, 0) + 1
        holders.update(dict.fromkeys(self.lent, 1))
        assert len(holders) == self.pool.counts().used, "a used block has no sequence"
        queued = [*self.waiting, *self.reserving, *self.running, *self.receiving.values(), *self.held.values()]
        assert sorted(map(id, queued)) == sorted(map(id, self.sequences.values())), "a sequence is in no queue or two"
        assert all(not seq.blocks for seq in [*self.waiting, *self.reserving]), "a waiting sequence holds blocks"
