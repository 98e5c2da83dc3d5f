"""Decode steps that do not look at every sequence each time, where only their results matter: in the simulator. Pure.

Sequences that just get a token in a step are parked until something else happens to them: the scheduler plans the
active ones alone, and a stretch of steps in which all are parked is passed at once. The result is that of single steps
of all sequences (tests/cluster/simulator/test_fast_forward.py).
"""

import heapq
from collections import Counter
from collections.abc import Mapping

from kvrelay.engine.scheduling.blocks import Headroom
from kvrelay.engine.scheduling.fair_share import FairShare, QueueRules
from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.scheduling.sequence import Sequence

_BLOCKS_EACH = 2  # that one token of a sequence can take: the next block, and a copy of one that it shares


class ParkedSequences:
    """Running sequences that get one token in each step and nothing else. `token`: the one that all of them get."""

    def __init__(self, token: int) -> None:
        self._token = token
        self.step = 0
        self.since: dict[Sequence, int] = {}  # the step up to which each has its tokens
        self.tenants: Counter[str] = Counter()
        self.context_tokens = 0  # that they attend to in the next step
        self._ends: list[tuple[int, int, Sequence]] = []  # a heap: after which step, arrival, the one that wakes

    def __len__(self) -> int:
        return len(self.since)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self.since

    def park(self, seq: Sequence, steps: int) -> None:
        """For so many steps."""
        self.since[seq] = self.step
        heapq.heappush(self._ends, (self.step + steps, seq.arrival, seq))
        self.tenants[seq.request.tenant] += 1
        self.context_tokens += len(seq.token_ids)

    def steps_to_wake(self) -> int:
        return self._ends[0][0] - self.step

    def output_tokens(self, num_steps: int) -> dict[str, int]:
        """Their tokens of output in so many steps, by tenant."""
        return {tenant: num_steps * number for tenant, number in self.tenants.items()}

    def advance(self, num_steps: int) -> None:
        """So many steps are over: wake those that are due."""
        ends, since = self._ends, self.since
        self.step += num_steps
        self.context_tokens += num_steps * len(since)
        while ends and ends[0][0] <= self.step:
            seq = heapq.heappop(ends)[2]
            self._bring_up(seq, since.pop(seq))
            self.context_tokens -= len(seq.token_ids)
            tenant = seq.request.tenant
            self.tenants[tenant] -= 1
            if not self.tenants[tenant]:
                del self.tenants[tenant]

    def refresh(self) -> None:
        for seq, since in self.since.items():
            if since != self.step:
                self._bring_up(seq, since)
                self.since[seq] = self.step

    def wake_all(self) -> None:
        """Bring all of them up to date, and park none: they may be changed, or leave."""
        if self.since:
            self.refresh()
            self.since.clear()
            self._ends.clear()
            self.tenants.clear()
            self.context_tokens = 0

    def _bring_up(self, seq: Sequence, since: int) -> None:
        count = self.step - since
        seq.token_ids += [self._token] * count
        seq.num_computed += count
        seq.num_charged += count


class RefreshedHeadroom(Headroom):
    """Headroom that brings parked sequences up to date before it looks at the lengths of their outputs."""

    def __init__(self, share: float, block_size: int, parked: ParkedSequences) -> None:
        super().__init__(share, block_size)
        self._parked = parked

    def expected_growth(self, seq: Sequence, num_own: int, others: list[Sequence]) -> float:
        self._parked.refresh()
        return super().expected_growth(seq, num_own, others)


class FairShareWithParked(FairShare):
    """Counters to which the tokens of parked sequences are added together with those of the step's other sequences."""

    def __init__(self, rules: QueueRules) -> None:
        super().__init__(rules)
        self._parked_outputs: dict[str, int] = {}

    def add_parked(self, num_outputs: dict[str, int]) -> None:
        """The next `serve` is for these, too."""
        self._parked_outputs = num_outputs

    def serve(self, num_outputs: Mapping[str, int]) -> None:
        served, self._parked_outputs = self._parked_outputs, {}
        for tenant, count in num_outputs.items():
            served[tenant] = served.get(tenant, 0) + count
        super().serve(served)


class FastForward:
    """The decode batch of one scheduler, made with `parked`'s RefreshedHeadroom and with `fair_share`.

    Call `parked.wake_all` before a sequence is changed, and `parked.refresh` before one is read, other than by the
    scheduler's planning.
    """

    def __init__(self, scheduler: Scheduler, parked: ParkedSequences, fair_share: FairShareWithParked) -> None:
        self._scheduler, self._queues, self._planner = scheduler, scheduler.queues, scheduler.planner
        self._parked, self._fair_share = parked, fair_share

    # ---- before a step

    def look(self) -> tuple[int, bool]:
        """(steps, whether a sequence wakes for the last): so many bring every sequence a token and nothing else.

        No steps: the next must be planned, for the active sequences. A last step for which one wakes is planned when
        the others have `passed`; it preempts none.
        """
        parked, queues = self._parked, self._queues
        running = queues.running
        if len(parked) < len(running):
            active = [seq for seq in running if seq not in parked]
            assert len(parked) + len(active) == len(running), "a parked sequence left the batch"
            if self._may_preempt(len(active)):
                parked.wake_all()
                return 0, False
            num_active = len(active) - sum(map(self._parks, active))
            if num_active or queues.waiting:
                return 0, False
        elif not parked or queues.waiting:
            return 0, False
        if queues.reserving:  # queued reservations are looked at between any two steps
            return 1, False
        is_roomy = not self._may_preempt(len(running))
        return parked.steps_to_wake() + is_roomy, is_roomy

    def _may_preempt(self, num_active: int) -> bool:
        """Whether a step with so many active sequences may preempt one, or leave one out."""
        scheduler, queues = self._scheduler, self._queues
        return (
            len(queues.running) > scheduler.config.token_budget
            or num_active * _BLOCKS_EACH > scheduler.pool.num_available
            or bool(queues.swapped or scheduler.groups)
        )

    def _parks(self, seq: Sequence) -> bool:
        """Park `seq` if the next step just brings it a token. `plain_until` marks its last token.

        If the step needs a block, `seq` gets it now, as it would when the step is planned.
        """
        computed, num_tokens = seq.num_computed, len(seq.token_ids)
        if num_tokens - computed != 1 or computed != seq.num_charged or computed < seq.num_given or not seq.is_pinned:
            return False
        if computed >= seq.writable_until:
            preempted: list[Sequence] = []
            has_block = self._planner.ensure_block(seq, preempted)
            assert has_block and not preempted, "there was no block left"
        steps = min(seq.writable_until - 1 - computed, seq.plain_until - num_tokens)
        if steps <= 0 or seq.num_hashed_blocks != computed // seq.block_size:
            return False
        self._parked.park(seq, steps)
        return True

    def plan(self) -> StepPlan:
        parked, running = self._parked, self._queues.running
        plan = self._planner.plan_for([seq for seq in running if seq not in parked] if parked else running.copy())
        assert not (parked and plan.preempted), "a step preempted while not all sequences were looked at"
        return plan

    # ---- after it

    def passed(self, count: int) -> None:
        """Of the steps that `look` reported, so many are over, not counting the one for which a sequence wakes."""
        self._scheduler.blocks.copied()
        self._fair_share.serve(self._parked.output_tokens(count))
        self._parked.advance(count)

    def advance(self, plan: StepPlan) -> None:
        """A step is over: parked sequences have a token more, and the work of the active ones is done."""
        self._scheduler.blocks.copied()
        self._fair_share.add_parked(self._parked.output_tokens(1))
        self._scheduler.advance(*plan.work)
        self._parked.advance(1)
