"""The scheduler: the life of every sequence of one engine, from its arrival to its end. Pure: no torch, no clock.

It takes new sequences. Its parts, each a class of its own: waiting_queue.py (where sequences are), admit.py (which
sequence may begin), plan.py (what a step computes), preempt.py (what happens when blocks run out), blocks.py (what
sequences hold, and their release).
"""

from collections import defaultdict
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from kvrelay.engine.scheduling.admit import Admission
from kvrelay.engine.scheduling.blocks import Headroom, SequenceBlocks
from kvrelay.engine.scheduling.fair_share import FairShare, QueueRules
from kvrelay.engine.scheduling.plan import StepPlan, StepPlanner
from kvrelay.engine.scheduling.preempt import MeasuredSpeeds, Preemption, PreemptionMode
from kvrelay.engine.scheduling.sequence import Scheduled, Sequence, State, begin_group, fault_of
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.engine.scheduling.waiting_queue import Queues, WaitingQueue, last_of
from kvrelay.kvcache.memory.swap import SwapArea
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import SequenceRequest
from kvrelay.types import MAX_WAITING, FinishReason


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What a scheduler needs to know. Counts are tokens and sequences.

    headroom: how much of the blocks that running sequences are expected to need is left free when one more is admitted.
    preemption: always this PreemptionMode, where it is possible; auto: the cheapest. token_bytes: KV bytes of a token.
    """

    token_budget: int = 512
    max_running: int = 64
    max_waiting: int = MAX_WAITING
    headroom: float = 0.0
    preemption: str = "auto"
    token_bytes: float = 0.0


class Scheduler:
    """Queues and transitions of all sequences of one engine: the face of the parts that it is made of.

    Its 22 attributes are those parts, what is queued where, and what became of arrivals.

    Args:
        fair_share: tenants' counters; default: with QueueRules' defaults.
        headroom: what admission leaves free; default: `config.headroom` of what is expected from outputs of this
            engine.
        speeds: measured ones, which the engine updates.
        area: where preempted sequences' KV may go; started.
        tiers: below the pool.
        eos_ids: the model's, for beam searches.
    """

    def __init__(
        self,
        pool: BlockPool,
        config: SchedulerConfig,
        *,
        fair_share: FairShare | None = None,
        headroom: Headroom | None = None,
        speeds: MeasuredSpeeds | None = None,
        area: SwapArea | None = None,
        tiers: LowerTiers | None = None,
        eos_ids: tuple[int, ...] = (),
    ) -> None:
        speeds, budget = speeds or MeasuredSpeeds(), config.token_budget
        self.pool, self.config, self.tiers, self._eos_ids = pool, config, tiers, eos_ids
        self.fair_share = fair_share = fair_share or FairShare(QueueRules())
        self.headroom = headroom = headroom or Headroom(config.headroom, pool.block_size)
        self.queues = queues = Queues(fair_share)
        self.sequences, self.running, self.groups = queues.sequences, queues.running, queues.groups
        self.waiting, self.reserving = queues.waiting, queues.reserving
        self.receiving, self.held, self.swapped = queues.receiving, queues.held, queues.swapped
        self.blocks = blocks = SequenceBlocks(pool, queues, headroom.lengths, area, tiers)
        only = None if config.preemption == "auto" else PreemptionMode(config.preemption)
        self.preemption = Preemption(
            queues, blocks, pool, speeds, area, tiers, token_bytes=config.token_bytes, only=only
        )
        self.admission = Admission(
            queues, pool, blocks, headroom, speeds, tiers, token_budget=budget, max_running=config.max_running
        )
        self.planner = StepPlanner(queues, pool, self.admission, self.preemption, blocks, speeds, token_budget=budget)
        self.num_overdue = self.num_displaced = self._num_arrivals = 0
        self.rejected: list[tuple[Sequence, str]] = []

    # ---- arrival

    def refusal(self, request: SequenceRequest) -> tuple[str, str] | None:
        """Why this request cannot be taken, as (reason, message), or None."""
        num_tokens, pool, config = len(request.token_ids), self.pool, self.config
        if request.request_id in self.sequences or request.request_id in self.groups:
            return "duplicate", f"{request.request_id} is already here"
        if not 0 < request.num_prompt_tokens <= num_tokens:
            return "invalid", "no prompt tokens, or more of them than tokens"
        if num_tokens + (request.sampling.max_tokens > 1) > pool.num_blocks * pool.block_size:
            return "too_long", f"{num_tokens} tokens do not fit {pool.num_blocks} blocks of {pool.block_size}"
        if self._is_full and self._displaceable(request) is None:
            return "full", f"{config.max_waiting} sequences are queued already"
        if request.group is None:
            return None
        return fault_of(request, block_size=pool.block_size, num_blocks=pool.num_blocks, max_running=config.max_running)

    @property
    def _is_full(self) -> bool:
        return self.queues.num_queued >= self.config.max_waiting

    def _displaceable(self, request: SequenceRequest) -> Sequence | None:
        """The last one of the tenant that takes the most places, if those are far more than the newcomer's tenant's."""
        largest = self.fair_share.most_waiting(request.tenant, request.weight)
        return None if largest is None else last_of(largest, self.waiting, self.reserving)

    def add(
        self, request: SequenceRequest, now_s: float, *, hold: bool = False, output_limit: int | None = None
    ) -> Sequence:
        """Queue a sequence to be computed here. The caller has checked `refusal`."""
        return self._queue(request, now_s, self.waiting, hold=hold, output_limit=output_limit)

    def add_reservation(self, request: SequenceRequest, now_s: float) -> Sequence:
        """Queue a sequence for blocks that a prefill worker will fill. The caller has checked `refusal`."""
        return self._queue(request, now_s, self.reserving)

    def _queue(
        self,
        request: SequenceRequest,
        now_s: float,
        queue: WaitingQueue,
        *,
        hold: bool = False,
        output_limit: int | None = None,
    ) -> Sequence:
        """Put a new sequence into a queue; meanwhile lower tiers fetch what the pool lacks of it."""
        self.fair_share.set_weight(request.tenant, request.weight)
        if self._is_full and (displaced := self._displaceable(request)) is not None:
            self._reject(displaced, "full")
            self.num_displaced += 1
        self._num_arrivals += 1
        seq = Sequence(
            request, self.pool.block_size, self._num_arrivals, hold=hold, output_limit=output_limit, arrived_s=now_s
        )
        self.headroom.observe_request(request.sampling.max_tokens)
        self.sequences[request.request_id] = seq
        if request.group is not None:
            self.groups[request.request_id] = begin_group(seq, self._eos_ids)
        queue.push(seq)
        if self.tiers is not None:
            self.tiers.arrived(seq, len(self.pool.match(seq.block_chain())))
        return seq

    def reject_overdue(self, now_s: float) -> None:
        """Reject queued sequences that should have had their first token by now and were never begun.

        No prefill is wasted on them.
        """
        overdue = self.admission.past_deadline(now_s)
        for seq in overdue:
            self._reject(seq, "deadline")
        self.num_overdue += len(overdue)

    def reject_queued(self) -> None:
        """Reject what is queued and was never begun: the worker stops, and another one computes it sooner."""
        for seq in [*self.waiting, *self.reserving]:
            if not seq.has_begun:
                self._reject(seq, "draining")

    def _reject(self, seq: Sequence, reason: str) -> None:
        self.blocks.finish(seq, FinishReason.ABORT)
        self.rejected.append((seq, reason))

    def take_rejected(self) -> list[tuple[Sequence, str]]:
        """(sequence, reason) of those rejected since the last call: "deadline", "full" or "draining"."""
        rejected, self.rejected = self.rejected, []
        return rejected

    # ---- reservations (decode)

    def grant_reservations(self) -> list[Sequence]:
        """Reserve blocks for as many queued reservations as there is room for, in order; returns them."""
        return self.admission.grant_reservations()

    def activate(self, request_id: str, token_ids: Rows[int]) -> Sequence | None:
        """The prompt's KV has arrived and was verified: decode from these first tokens. None: it is not here.

        What comes from a lower tier may still be on its way. Then the blocks are registered after their first step,
        which waits for it, and begins again if it is corrupt.
        """
        seq = self.queues.receiving.pop(request_id, None)
        if seq is None:
            return None
        seq.num_computed = seq.num_tokens
        seq.move_to(State.RUNNING)
        if seq.load is None:
            self.blocks.register(seq)
        seq.token_ids.extend(token_ids)
        self.queues.join_batch(seq)
        return seq

    # ---- steps

    def schedule(self) -> StepPlan:
        """Plan the next step. Blocks are taken here; tokens are applied by `advance`."""
        return self.planner.plan()

    def may_look_ahead(self) -> bool:
        """Whether the next step can be planned as if the tokens of the one in flight were known.

        Which tokens they are changes no decision, unless a sequence might be preempted whose blocks are being computed:
        each running one takes up to one block more for its next token, and one to write in instead of one that it
        shares; admission leaves one for each. Members of a group end, fork and wait for one another by their tokens. A
        swapped sequence comes back as others go.
        """
        queues = self.queues
        is_roomy = self.pool.num_available >= 2 * len(queues.running)
        return is_roomy and not (queues.swapped or self.groups)

    def advance(self, *work: Scheduled) -> None:
        """The KV of this work is in its blocks now. Pass a whole step's: its tenants then pay once each."""
        fair_share, blocks, size = self.fair_share, self.blocks, self.pool.block_size
        outputs: defaultdict[str, int] = defaultdict(int)  # nearly all of the work is single tokens of output
        for item in work:
            seq = item.seq
            paid, count = seq.num_charged, item.num_tokens
            computed = seq.num_computed = item.start + count
            if count == 1 and seq.num_given < computed == paid + 1:
                seq.num_charged = computed
                outputs[seq.request.tenant] += 1
            else:
                fair_share.advance(seq)
                fair_share.computed(seq.request.tenant, count)
            if computed // size > seq.num_hashed_blocks or not seq.is_pinned:
                blocks.register(seq)
        fair_share.serve(outputs)

    def preempt_group(self, group: tuple[Sequence, ...]) -> PreemptionMode:
        """Preempt these running sequences, all in the mode that costs the least; returns it."""
        return self.preemption.preempt_group(group)

    # ---- the end

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence: whatever it holds is released, or HELD for its transfer."""
        self.blocks.finish(seq, reason)

    def quarantine(self, seq: Sequence, reason: FinishReason) -> int:
        """End a receiving sequence whose blocks may still be written; returns its BlocksAside key."""
        self.blocks.stop_loading(seq)
        key = self.blocks.quarantine(seq)
        self.finish(seq, reason)
        return key

    # ---- what others may know

    @property
    def has_work(self) -> bool:
        """Whether a step may change something. A step that did not (StepResult.is_stuck) need not be repeated."""
        return bool(self.running or self.queues.has_demand)

    def check_idle(self) -> None:
        """Raise AssertionError if blocks are used although no sequence holds any: they leaked.

        Cheap: for every step.
        """
        queues = self.queues
        if not (queues.running or queues.receiving or queues.held):
            used, aside = self.pool.counts().used, len(self.blocks.aside().keys() | set(self.blocks.copy_sources))
            assert used == aside, (
                f"{used - aside} blocks leaked: no sequence holds any, {used} are used, {aside} set aside"
            )

    def check(self) -> None:
        """Raise AssertionError unless queues, sequences and the pool's references agree."""
        self.blocks.check()
        self.queues.check()
        self.preemption.check()
