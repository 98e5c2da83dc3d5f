"""Which tokens of which sequences are computed in the next step, and who holds which blocks.

Pure: no torch, no clock. Owns the queues and, through the BlockPool, every block of the worker.
Who is next in line says line.py; a step is filled up to the token budget, running sequences first.
"""

import math
from array import array
from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

import msgspec
import numpy as np

from kvrelay.engine.groups.groups import Groups, fault_of
from kvrelay.engine.scheduling.fair_share import FairShare, QueueRules
from kvrelay.engine.scheduling.headroom import OutputLengths, growth_blocks
from kvrelay.engine.scheduling.pinning import Pinning
from kvrelay.engine.scheduling.preemption_policy import PreemptionMode
from kvrelay.engine.scheduling.preemptor import Preemptor
from kvrelay.engine.scheduling.prefix_sharing import begins_alike, is_spared, least_blocks
from kvrelay.engine.scheduling.sequence import Group, Sequence, State
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.engine.scheduling.waiting_queue import WaitingQueue, goes_first, last_of, victim
from kvrelay.hashing import pack_tokens
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.pool.ledger import BlockIds
from kvrelay.kvcache.pool.radix import Match
from kvrelay.plane.messages import SequenceRequest
from kvrelay.types import BlockId, FinishReason

ITL_SHARE = 0.8
"""Of the time that is wanted between two tokens, a step with prompts may take."""
MIN_PREFILL_CUT = 8
"""Prompts get at least this part of a step's tokens, whatever is wanted."""

_arrival = attrgetter("arrival")


def _nothing() -> None:
    """Everything is as it says."""


class Scheduled(msgspec.Struct, frozen=True, gc=False):
    """Compute tokens start : start + num_tokens of a sequence; sample if that reaches its end.

    drafts: guesses of what comes after its last token, computed behind it; a token is drawn after each of them.
    A struct because each step makes one for each sequence: 0.1 µs, where a frozen dataclass takes ten times that.
    """

    seq: Sequence
    start: int
    num_tokens: int
    drafts: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        return self.start + self.num_tokens == len(self.seq.token_ids) + len(self.drafts)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """`seq` goes on in a copy of a block that it shared: it is about to write there."""

    seq: Sequence
    source: BlockId
    target: BlockId


class StepPlan(msgspec.Struct, frozen=True):
    """One step's work: single-token rows first, then those with drafts, then chunks. Before them, the copies, in this order."""

    work: tuple[Scheduled, ...]
    num_single: int
    preempted: tuple[Sequence, ...]
    copies: tuple[BlockCopy, ...] = ()
    num_drafted: int = 0  # sequences with drafts

    @property
    def num_decode(self) -> int:
        """Sequences that decode."""
        return self.num_single + self.num_drafted

    @property
    def num_tokens(self) -> int:
        chunks = self.work[self.num_single :]
        return self.num_single + (sum(item.num_tokens for item in chunks) if chunks else 0)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Counts are tokens, sequences and sequences.

    headroom: how much of the blocks that running sequences are expected to need is left free when one more is admitted.
    """

    token_budget: int
    max_running: int
    max_waiting: int
    headroom: float = 0.0


class Scheduler:
    """Queues and transitions of all sequences of one engine."""

    def __init__(
        self, pool: BlockPool, block_size: int, limits: SchedulerLimits, rules: QueueRules | None = None
    ) -> None:
        self.pool, self.block_size, self.limits = pool, block_size, limits
        self.shares = FairShare(rules or QueueRules())
        self.waiting = WaitingQueue(self.shares)
        self.reserving = WaitingQueue(self.shares)  # in line for a reservation
        self.rejected: list[tuple[Sequence, str]] = []  # for (reason); the engine tells, and empties it
        self.running: list[Sequence] = []  # in order of arrival
        self.receiving: dict[str, Sequence] = {}
        self.held: dict[str, Sequence] = {}
        self.swapped: deque[Sequence] = deque()  # in order of arrival
        self.returned_to_prefill: list[Sequence] = []  # ended here, to go on elsewhere; the engine takes them
        self.sequences: dict[str, Sequence] = {}  # all of the above
        self.quarantined: dict[int, BlockIds] = {}  # by arrival, or below zero: blocks that others may still write
        self.probe_blocks: set[BlockId] = set()  # to the KV plane's probes
        self.num_preemptions = self.num_overdue = self.num_displaced = 0
        self._now_s = 0.0  # when somebody was last looked for who is late
        self.hit_tokens = 0
        self.query_tokens = 0
        self.tiers: LowerTiers | None = None  # below the pool
        self.before_headroom: Callable[[], object] = _nothing  # before lengths of outputs are looked at: see leap.py
        self.pinning = Pinning(pool, lambda: self.tiers)
        self.preemptor = Preemptor(pool, block_size)
        self.lengths = OutputLengths()
        self.groups = Groups(self)
        self._arrivals = self._num_kept = self._longest_output = 0
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
        if self._is_full and self._displaceable(request.tenant) is None:
            return "full", f"{self.limits.max_waiting} sequences are in line already"
        return fault_of(
            request,
            block_size=self.block_size,
            num_blocks=self.pool.num_blocks,
            max_running=self.limits.max_running,
        )

    @property
    def _is_full(self) -> bool:
        return len(self.waiting) + len(self.reserving) >= self.limits.max_waiting

    def _displaceable(self, tenant: str) -> Sequence | None:
        """Whom a newcomer of this tenant displaces from a full line: the last of whoever takes the most places, far more than it."""
        largest = self.shares.most_waiting(tenant)
        if largest is None:
            return None
        return last_of(largest, self.waiting, self.reserving)

    def _reject(self, seq: Sequence, reason: str) -> None:
        self.finish(seq, FinishReason.ABORT)
        self.rejected.append((seq, reason))

    def reject_overdue(self, now_s: float) -> None:
        """Who was to have its first token by now and was never begun leaves the line: no prefill is wasted on it."""
        self._now_s = now_s
        for line in (self.waiting, self.reserving):
            for seq in line.past_deadline(now_s):
                self._reject(seq, "deadline")
                self.num_overdue += 1

    def next_deadline_s(self) -> float:
        """When `reject_overdue` is due, by the clock of `Sequence.arrived_s`; infinite: never."""
        return min(self.waiting.next_deadline_s(), self.reserving.next_deadline_s())

    def _new(self, request: SequenceRequest, now_s: float, *, hold: bool, output_limit: int | None) -> Sequence:
        if self._is_full and (displaced := self._displaceable(request.tenant)) is not None:
            self._reject(displaced, "full")
            self.num_displaced += 1
        self._arrivals += 1
        seq = Sequence(request, self.block_size, self._arrivals, hold=hold, output_limit=output_limit, arrived_s=now_s)
        self._longest_output = max(self._longest_output, request.sampling.max_tokens)
        self.sequences[request.request_id] = seq
        self.groups.begin(seq)
        return seq

    def add(
        self, request: SequenceRequest, now_s: float, *, hold: bool = False, output_limit: int | None = None
    ) -> Sequence:
        """Put a sequence in line to be computed here. The caller has checked `refusal`."""
        seq = self._new(request, now_s, hold=hold, output_limit=output_limit)
        self.waiting.push(seq)
        self._ask_below(seq)
        return seq

    # ---- reservations (decode)

    def add_reservation(self, request: SequenceRequest, now_s: float) -> Sequence:
        """Put a sequence in line for blocks that a prefill worker will fill."""
        seq = self._new(request, now_s, hold=False, output_limit=None)
        self.reserving.push(seq)
        self._ask_below(seq)
        return seq

    def _ask_below(self, seq: Sequence) -> None:
        """Have what the pool lacks brought nearer while the sequence is in line."""
        if self.tiers is not None:
            self.tiers.arrived(seq, len(self.pool.match(seq.block_chain())))

    def _first(self, line: WaitingQueue) -> Sequence | None:
        """Whose turn it is: who waits for blocks from a store stands back, for as long as the settings say."""
        if not len(line):
            return None
        is_skipped = None if self.tiers is None else self.tiers.is_waiting
        seq = line.head(is_skipped)
        while seq is not None and not line.is_oldest_next:
            num_uncached = self._too_many_tokens(seq) if line is self.waiting else self._is_past_target(seq)
            if num_uncached is None:
                break
            line.mark_overdue(seq, num_uncached)
            seq = line.head(is_skipped)
        return seq

    def _too_many_tokens(self, seq: Sequence) -> int | None:
        """Those to compute, if they keep its first token from being there when it is wanted, even if it is begun now; once."""
        request = seq.request
        if request.ttft_target_s is None or seq.overdue_tokens or seq.has_begun or request.deadline_s is not None:
            return None
        left_s = seq.arrived_s + request.ttft_target_s - self._now_s
        speed = self.preemptor.measured.compute_tokens_per_s
        if left_s > 0 and not speed:
            return None
        possible = left_s * speed - self.limits.token_budget  # its last ones may share a step with others
        if seq.num_tokens <= possible:
            return None
        num_uncached = seq.num_tokens - len(self.pool.match(seq.block_chain())) * self.block_size
        return num_uncached if num_uncached > possible else None

    def _is_past_target(self, seq: Sequence) -> int | None:
        """The tokens of a reservation if the time in which its first token is wanted has passed; once."""
        request = seq.request
        if request.ttft_target_s is None or seq.overdue_tokens or request.deadline_s is not None:
            return None
        return seq.num_tokens if seq.arrived_s + request.ttft_target_s <= self._now_s else None

    def _return_ready(self) -> None:
        """Who waits for a store no longer has its turn."""
        if self.tiers is not None:
            for line in (self.waiting, self.reserving):
                line.return_ready(self.tiers.is_waiting)

    def _admitted(self, seq: Sequence, line: WaitingQueue, other_line: WaitingQueue) -> None:
        seq.queue_rank = line.rank(seq)
        line.take(seq)
        other_line.count_admission()
        seq.has_begun = True
        self.shares.admit(seq)

    def grant_reservations(self) -> list[Sequence]:
        """Reserve blocks, in the line's order, for as many as there is room; returns them."""
        granted: list[Sequence] = []
        self._return_ready()
        while not self.swapped and (seq := self._first(self.reserving)) is not None:
            seats, owed = self._reserved_for(seq, self.reserving, self.waiting)
            if not self._fits_running(seats, seq) or not self._take_prompt_blocks(seq, owed, leave_one=False):
                break
            self._admitted(seq, self.reserving, self.waiting)
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
            self.cache_received(seq)
        seq.token_ids.extend(token_ids)
        self.join_batch(seq)
        return seq

    def cache_received(self, seq: Sequence) -> None:
        """The prompt's blocks can be found by others from now on."""
        self._cache_full_blocks(seq)
        self._pin(seq)

    def join_batch(self, seq: Sequence) -> None:
        """It is in the batch from now on."""
        insort(self.running, seq, key=_arrival)

    def _fits_running(self, owed: int, seq: Sequence) -> bool:
        """Whether `seq`, with its group, may join; so many of the last seats are left to whom they are owed."""
        taken = len(self.running) + len(self.receiving) + self.groups.num_reserved
        return taken + self._num_sequences_of(seq) + owed <= self.limits.max_running

    @staticmethod
    def _num_sequences_of(seq: Sequence) -> int:
        return seq.group.num_sequences if seq.group is not None and seq is seq.group.leader else 1

    def _reserved_for(self, seq: Sequence, line: WaitingQueue, other_line: WaitingQueue) -> tuple[int, int]:
        """(seats, blocks) to leave for the head of the other line if it goes before `seq`: neither line starves the other."""
        other = self._first(other_line)
        if other is None or not goes_first(other_line, other, line, seq):
            return 0, 0
        to_part = other.group.blocks_to_fork() if other.group is not None and self._will_fork(other) else 0
        blocks = self._blocks_at_most(other) + to_part + 1  # `seq` itself raises what must stay spare
        return self._num_sequences_of(other), blocks

    @staticmethod
    def _will_fork(seq: Sequence) -> bool:
        """Whether it leads a group whose members will go on here."""
        return seq.group is not None and seq is seq.group.leader and seq.output_limit is None

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

    def _take(self, seq: Sequence, hit: BlockIds, owed: int, *, num_to_copy: int) -> "BlockIds | None":
        """These cached blocks and fresh ones for the rest of `seq`, all with a reference; None: no room."""
        self.pool.acquire(hit)
        need = self._blocks_at_most(seq) - len(hit)
        spare = num_to_copy + owed
        if seq.group is not None or need + spare + self._most_headroom() > self.pool.num_available:
            spare += self._headroom(seq, need)
        if seq.group is not None and self._will_fork(seq):
            spare = max(spare, min(spare + seq.group.blocks_to_fork(), self.pool.num_blocks - need - len(hit)))
        is_short = need + spare > self.pool.num_available
        if is_short and not owed and not self._holds_blocks:  # pins alone are in the way: they end before their time
            is_short = not self.pool.unpin_for(need + spare)
        fresh = None if is_short else self.pool.allocate(need)
        if fresh is None:
            self.pool.release(hit)
            return None
        return hit + fresh

    def _most_headroom(self) -> int:
        """`_headroom` is at most that: as if every output got as long as any request has allowed."""
        num_others = len(self.running) + len(self.receiving)
        blocks = (num_others + 1) * self._longest_output / self.block_size
        return max(num_others, math.ceil(self.limits.headroom * blocks))

    def _headroom(self, seq: Sequence, num_own: int) -> int:
        """Blocks to leave free when `seq` joins with so many of its own: one for each that runs, or what they are expected to need."""
        others = [*self.running, *self.receiving.values()]
        if not others or not self.limits.headroom:
            return len(others)
        self.before_headroom()
        everyone = [seq, *others]
        count = len(everyone)
        so_far = np.fromiter((one.num_output for one in everyone), np.float64, count)
        most = np.fromiter((one.max_output for one in everyone), np.float64, count)
        own = np.fromiter((len(one.blocks) - one.num_cached // self.block_size for one in everyone), np.float64, count)
        own[0] = num_own
        need = growth_blocks(self.lengths.remaining(so_far, most), np.maximum(own, 0.0), self.block_size)
        return max(len(others), math.ceil(self.limits.headroom * need))

    def _tail(self, seq: Sequence, match: Match) -> tuple[BlockIds, int]:
        """(a block that begins with the next tokens of `seq`, how many of them), never up to its last token; or (none, 0)."""
        end = len(match) * self.block_size
        rest = pack_tokens(seq.token_ids, end, min(end + self.block_size, seq.num_tokens - 1))
        block, count = self.pool.partial_match(match, rest)
        return array("i", [block] if count else []), count

    @property
    def _holds_blocks(self) -> bool:
        """Whether some blocks will come back without anything being done about it."""
        return bool(self.running or self.receiving or self.held or self.quarantined or self.probe_blocks) or (
            self.tiers is not None and bool(self.tiers.tiers.held_blocks())
        )

    # ---- a step

    def schedule(self) -> StepPlan:
        """Plan the next step. Blocks are taken here; tokens are applied by `advance`."""
        return self.schedule_without(())

    def schedule_without(self, parked: Collection[Sequence]) -> StepPlan:
        """The same for all but these, which run, just get a token and need nothing for it; their share of the budget is theirs.

        The caller knows that nobody has to give way in this step, if any sleeps: see leap.py.
        """
        active = [seq for seq in self.running if seq not in parked] if parked else self.running.copy()
        budget = self.limits.token_budget - (len(self.running) - len(active))
        singles: list[Scheduled] = []
        chunks: list[Scheduled] = []
        preempted: list[Sequence] = []
        self.copied()
        self._return_ready()
        others = self._schedule_decodes(active, budget, singles, preempted)
        budget -= len(singles)
        if others or self.waiting:
            budget = min(budget, self._itl_capped_tokens(len(parked) + len(singles)))
        num_passing = 0
        for seq in sorted(others, key=self._chunk_order):
            if seq.num_uncomputed > 1 and not preempted and not self.swapped and self.waiting.may_pass(seq):
                num_running = len(self.running)
                budget = self._admit(budget, singles, chunks, preempted, before=seq)
                num_passing += len(self.running) - num_running
            seq.num_passed += num_passing
            if budget <= 0:
                continue
            if seq.state is State.RUNNING and seq.num_uncomputed and self._has_room(seq, preempted):
                budget -= self._plan(seq, budget, singles, chunks)
                if seq.overdue_tokens:
                    seq.num_passed = 0  # it gives way between any two of its chunks
        if not preempted:
            budget = self._bring_back(budget, singles, chunks, preempted)
        if not preempted and not self.swapped:
            self._admit(budget, singles, chunks, preempted)
        if not preempted:
            return StepPlan((*singles, *chunks), len(singles), (), tuple(self._copies))
        assert not parked, "somebody gave way in a step in which others were not looked at"
        gone = set(map(id, preempted))
        singles = [item for item in singles if id(item.seq) not in gone]
        work = (*singles, *(item for item in chunks if id(item.seq) not in gone))
        copies = tuple(copy for copy in self._copies if id(copy.seq) not in gone)
        return StepPlan(work, len(singles), tuple(preempted), copies)

    def _schedule_decodes(
        self, seqs: list[Sequence], budget: int, singles: list[Scheduled], preempted: list[Sequence]
    ) -> list[Sequence]:
        """Schedule those that lack one token, as far as the budget goes; returns the others.

        Runs for every sequence in every step: short of a block's end it calls nothing.
        """
        running, work = State.RUNNING, Scheduled
        others: list[Sequence] = []
        for seq in seqs:
            start = seq.num_computed
            if len(seq.token_ids) - start != 1:
                others.append(seq)
            elif (
                budget > 0 and seq.state is running and (start < seq.writable_until or self._has_block(seq, preempted))
            ):
                singles.append(work(seq, start, 1))
                budget -= 1
        return others

    def _itl_capped_tokens(self, num_decoding: int) -> int:
        """Of prompts, in a step after which those that decode still have their next tokens as soon as they are wanted."""
        speed = self.preemptor.measured.compute_tokens_per_s
        target_s = min((seq.request.tpot_target_s or math.inf for seq in self.running), default=math.inf)
        if not num_decoding or target_s == math.inf or not speed:
            return self.limits.token_budget
        return max(int(ITL_SHARE * target_s * speed) - num_decoding, self.limits.token_budget // MIN_PREFILL_CUT)

    def _has_block(self, seq: Sequence, preempted: list[Sequence]) -> bool:
        """As `_has_room`; until that block is full the question need not be asked again.

        Nobody comes to share a block that is not full but by a fork, and none is taken from who stays in the batch.
        """
        if not self._has_room(seq, preempted):
            return False
        seq.writable_until = (seq.num_computed // self.block_size + 1) * self.block_size
        return True

    def ensure_block(self, seq: Sequence) -> None:
        """`_has_block` for a sequence that lacks one token. The caller knows that nobody has to give way for it."""
        preempted: list[Sequence] = []
        has_block = self._has_block(seq, preempted)
        assert has_block and not preempted, "there was no block left"

    def _has_room(self, seq: Sequence, preempted: list[Sequence]) -> bool:
        """Have blocks for every token of `seq`, the next one for itself. False if `seq` itself gave way for that."""
        return self._grow(seq, preempted) and self._own_next(seq, preempted)

    def _chunk_order(self, seq: Sequence) -> tuple[bool, tuple[float, ...]]:
        """Of what has more than a token to compute: the order in which the line had it."""
        return self.waiting.may_pass(seq), seq.queue_rank

    def _admit(
        self, budget: int, singles: list[Scheduled], chunks: list[Scheduled], preempted: list[Sequence],
        before: Sequence | None = None,
    ) -> int:  # fmt: skip
        """Begin whoever is next in line while there is room; `before`: only those that go before this prompt, which has begun."""
        while budget > 0 and (seq := self._first(self.waiting)) is not None:
            if before is not None and not self.waiting.passes(seq, before):
                break
            seats, owed = self._reserved_for(seq, self.waiting, self.reserving)
            if self._is_spared(seq, chunks):
                break
            if not self._fits_running(seats, seq) or not self._take_prompt_blocks(seq, owed, leave_one=True):
                break
            self._admitted(seq, self.waiting, self.reserving)
            budget -= self._join(seq, budget, singles, chunks, preempted)
        return budget

    def _is_spared(self, seq: Sequence, chunks: list[Scheduled]) -> bool:
        """Whether what this step computes anyway is the beginning of `seq`, which finds it in the next step."""
        if not chunks or not self.pool.is_caching or seq.request.sampling.prompt_logprobs is not None:
            return False
        chain, size = seq.block_chain(), self.block_size
        alike = [
            item for item in chunks if item.seq.request.hints.keep and begins_alike(chain, item.seq.block_chain())
        ]  # fmt: skip
        if not alike:
            return False
        computed = [(item.seq.block_chain(), (item.start + item.num_tokens) // size) for item in alike]
        num_usable = (seq.num_tokens - 1) // size
        least = least_blocks(self.limits.token_budget, size)
        return is_spared(chain, len(self.pool.match(chain, num_usable)), num_usable, least, computed)

    def _join(
        self, seq: Sequence, budget: int, singles: list[Scheduled], chunks: list[Scheduled], preempted: list[Sequence]
    ) -> int:
        """It has its blocks, and is in the batch from now on; returns the tokens that it takes of this step."""
        seq.move_to(State.RUNNING)
        self.join_batch(seq)
        has_own = self._own_next(seq, preempted)
        assert has_own, "a block for the copy was left over"
        return self._plan(seq, budget, singles, chunks)

    @staticmethod
    def _plan(seq: Sequence, budget: int, singles: list[Scheduled], chunks: list[Scheduled]) -> int:
        """Schedule as much of it as the budget allows; returns how many tokens."""
        take = min(seq.num_uncomputed, budget)
        (singles if take == 1 else chunks).append(Scheduled(seq, seq.num_computed, take))
        return take

    def _bring_back(
        self, budget: int, singles: list[Scheduled], chunks: list[Scheduled], preempted: list[Sequence]
    ) -> int:
        """Swapped sequences go on, those that came first before the others, and all of them before new ones."""
        while budget > 0 and self.swapped and self._fits_running(0, self.swapped[0]):
            seq = self.swapped[0]
            hit = self.preemptor.hit(seq)
            if hit is None:
                self.swapped.popleft()
                self._compute_anew(seq)
                continue
            blocks = self._take(seq, hit, 0, num_to_copy=0)
            if blocks is None:
                break
            self.swapped.popleft()
            seq.blocks = blocks
            self.preemptor.bring_back(seq, len(hit))
            budget -= self._join(seq, budget, singles, chunks, preempted)
        return budget

    def _grow(self, seq: Sequence, preempted: list[Sequence]) -> bool:
        """Make room for every token of `seq`; others may give way. False if `seq` itself did."""
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
        """The last plan's copies are made: their sources may be used for something else, and hold nobody's tokens but their own."""
        self._copies = []
        while self._sources:
            self.pool.release((self._sources.pop(),))

    def _make_room(self, seq: Sequence, preempted: list[Sequence]) -> bool:
        """Somebody gives way, with its group. False if `seq` itself did."""
        gone = self._give_way(victim(self.running, seq))
        preempted += gone
        return all(one is not seq for one in gone)

    def _give_way(self, loser: Sequence) -> list[Sequence]:
        """All members of a group give way at once, unless it runs alone: then one, which goes on when the others have ended.

        Beams are not swapped but gathered: they move in step, and some of them might not come back while others hold blocks.
        """
        group = loser.group
        if group is None or loser is group.leader or self._runs_alone(group):
            self.preempt_group((loser,))
            return [loser]
        members = tuple(one for one in group.members if one.state is State.RUNNING)
        if group.search is None and self._mode_for(members) is PreemptionMode.SWAP and self._swap_out(members):
            return list(members)
        leader, gone = self.groups.merge(group)
        self.waiting.push(leader)
        self._count(PreemptionMode.RECOMPUTE, len(gone))
        return gone

    def _runs_alone(self, group: Group) -> bool:
        """Whether no others' end will make room for it. Beams were admitted because they can all be held at once."""
        return group.search is None and not self.receiving and all(seq.group is group for seq in self.running)

    def preempt_group(self, group: "tuple[Sequence, ...]") -> PreemptionMode:
        """All or nothing: these running sequences give every block back, all of them in the way that costs the least."""
        way = self._mode_for(group)
        if way is PreemptionMode.SWAP:
            if self._swap_out(group):
                return way
            way = PreemptionMode.RECOMPUTE
        for seq in group:
            if way is PreemptionMode.RETURN_TO_PREFILL:
                self.finish(seq, FinishReason.ABORT)
                self.returned_to_prefill.append(seq)
            else:
                self._take_out(seq, State.WAITING)
        self._count(way, len(group))
        return way

    def _mode_for(self, group: "tuple[Sequence, ...]") -> PreemptionMode:
        return self.preemptor.mode_for(group, num_others=len(self.running) - len(group), tiers=self.tiers)

    def _swap_out(self, group: "tuple[Sequence, ...]") -> bool:
        """Save their KV and take them off the batch. False, and nothing changed: there is no room for it."""
        if not self.preemptor.swap_out(group, {copy.target: copy.source for copy in self._copies}):
            return False
        for seq in group:
            self._take_out(seq, State.SWAPPED)
        self._count(PreemptionMode.SWAP, len(group))
        return True

    def _count(self, way: PreemptionMode, num_sequences: int) -> None:
        self.preemptor.num_by_mode[way] += num_sequences
        self.num_preemptions += num_sequences

    def _take_out(self, seq: Sequence, state: State) -> None:
        """Off the batch: its blocks go back; WAITING: what they held is lost."""
        self.running.remove(seq)
        self._leave_below(seq)
        self.pool.release(seq.blocks)
        seq.blocks = array("i")
        seq.writable_until = seq.plain_until = 0
        self.shares.give_back(seq)
        if state is State.WAITING:
            self._compute_anew(seq)
            return
        seq.num_hashed_blocks = 0
        seq.move_to(State.SWAPPED)
        place = next((at for at, other in enumerate(self.swapped) if other.arrival > seq.arrival), len(self.swapped))
        self.swapped.insert(place, seq)

    def _compute_anew(self, seq: Sequence) -> None:
        """In line again, at the front. Cached blocks shorten what is to be computed."""
        self.preemptor.recomputed_tokens += seq.num_computed
        self.preemptor.drop(seq)
        seq.num_computed = seq.num_hashed_blocks = 0
        seq.prompt_logprobs.clear()  # they come again with the prompt
        seq.move_to(State.WAITING)
        self.waiting.push(seq)

    def rewind(self, seq: Sequence) -> None:
        """What was to be brought up for it, or back, is not what was saved: begin anew, without that."""
        self._take_out(seq, State.WAITING)
        self.num_preemptions += 1

    def _leave_below(self, seq: Sequence) -> None:
        """Nothing is written into its blocks any more, and nothing is fetched for it."""
        LowerTiers.settle(seq)
        if self.tiers is not None:
            self.tiers.gone(seq)

    def advance(self, *work: Scheduled, others: Mapping[str, int] | None = None) -> None:
        """The KV of this work is in its blocks now. A step's is told at once: its tenants then pay once each.

        others: by tenant, single tokens of output that it computed beside, which are in their sequences already, or will be.
        """
        shares, size = self.shares, self.block_size
        outputs: defaultdict[str, int] = defaultdict(int, others or ())  # the same, as nearly all of the work is
        for item in work:
            seq = item.seq
            paid, count = seq.num_charged, item.num_tokens
            computed = seq.num_computed = item.start + count
            if count == 1 and seq.num_given < computed == paid + 1:
                seq.num_charged = computed
                outputs[seq.request.tenant] += 1
            else:
                shares.advance(seq)
                shares.computed(seq.request.tenant, count)
            if computed // size > seq.num_hashed_blocks:
                self._cache_full_blocks(seq)
            if not seq.is_pinned:
                self._pin(seq)
        shares.serve(outputs)

    def _cache_full_blocks(self, seq: Sequence) -> None:
        full = seq.num_computed // self.block_size
        if full <= seq.num_hashed_blocks:
            return
        if (hints := seq.request.hints).keep:
            first, size = seq.num_hashed_blocks, self.block_size
            tokens = pack_tokens(seq.token_ids, first * size, full * size)
            self.pool.insert(seq.block_chain(), seq.blocks, first, full, tokens, priority=hints.priority)
            if self.tiers is not None:
                self.tiers.filled(seq, first, full)
        seq.num_hashed_blocks = full

    def _pin(self, seq: Sequence) -> None:
        """The prompt's KV is here: keep it for as long as the request asks."""
        if not seq.is_pinned and seq.num_computed >= seq.request.num_prompt_tokens:
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
        self.shares.give_back(seq)
        self.preemptor.drop(seq)
        if seq.num_output and reason in (FinishReason.LENGTH, FinishReason.STOP):
            self.lengths.observe(seq.num_output)
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

    def keep(self, blocks: Iterable[int]) -> int:
        """These blocks are used by a step that is not over: they stay taken until `unquarantine` of the key."""
        table = array("i", blocks)
        self.pool.acquire(table)
        self._num_kept += 1
        self.quarantined[-self._num_kept] = table
        return -self._num_kept

    def unquarantine(self, key: int) -> None:
        """Nothing can write those blocks any more: they may be used again."""
        self.pool.release(self.quarantined.pop(key))

    # ---- blocks that no sequence holds

    def take_probe_blocks(self, count: int) -> list[BlockId]:
        """Up to `count` blocks without content worth keeping; none while a sequence is in line for blocks.

        Leaves one for each running sequence, so that a probe pre-empts nobody.
        """
        spare = self.pool.counts().free - len(self.running) - len(self.receiving)
        count = max(0, min(count, spare))
        blocks = None if self.waiting or self.reserving or self.swapped else self.pool.allocate(count)
        probe_blocks = [BlockId(block) for block in blocks or ()]
        self.probe_blocks.update(probe_blocks)
        return probe_blocks

    def return_probe_blocks(self, blocks: Iterable[BlockId]) -> None:
        """The borrower is done with these."""
        returned = list(blocks)
        self.probe_blocks.difference_update(returned)
        self.pool.release(returned)

    def _unqueue(self, seq: Sequence) -> None:
        self.receiving.pop(seq.request_id, None)
        self.held.pop(seq.request_id, None)
        for queue in (self.waiting, self.reserving, self.swapped):
            if seq in queue:
                queue.remove(seq)

    # ---- what others may know

    @property
    def has_work(self) -> bool:
        """Whether a step may bring something about; a step that did not (StepResult.is_stuck) need not be tried again."""
        return bool(self.running or self.waiting or self.reserving or self.swapped)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens in line or begun, not yet computed."""
        begun = [len(seq.token_ids) - seq.num_computed for seq in self.running]
        return sum([seq.num_uncomputed for seq in self.waiting]) + sum([count for count in begun if count > 1])

    def overdue(self) -> tuple[int, int]:
        """(prompts, their uncached tokens) in line behind those that can still have a first token in time."""
        late = [seq.overdue_tokens for seq in self.waiting if seq.overdue_tokens]
        return len(late), sum(late)

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
        holders.update(self.probe_blocks)
        holders.update(self._sources)
        if self.tiers is not None:
            holders.update(self.tiers.tiers.held_blocks())
        for block, count in holders.items():
            assert count == self.pool.num_holders(block), f"block {block}: {count} holders, other references"
        used = self.pool.counts().used
        assert used == sum(count > (block in self.pool.pinned) for block, count in holders.items()), (
            "a used block has no sequence"
        )
        queued = [
            *self.waiting, *self.reserving, *self.swapped, *self.running, *self.receiving.values(), *self.held.values(),
        ]  # fmt: skip
        assert sorted(map(id, queued)) == sorted(map(id, self.sequences.values())), "a sequence is in no queue or two"
        waiting = [*self.waiting, *self.reserving, *self.swapped]
        assert all(not seq.blocks for seq in waiting), "a waiting sequence holds blocks"
        if self.preemptor.area is not None:
            self.preemptor.area.check([seq.swapped for seq in self.sequences.values() if seq.swapped is not None])
