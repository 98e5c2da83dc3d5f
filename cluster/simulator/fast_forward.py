"""Decode steps without looking at every sequence each time, for whoever wants to know only what they lead to: the simulator. Pure.

Most sequences of a decode batch just get a token in a step: no block is filled or needed, nothing ends. For those it is known
how long that goes on, so they sleep until then; the scheduler plans and applies a step for the others alone, and a stretch in
which all sleep is passed at once. What sleepers came to meanwhile is noted when somebody looks (`refresh`), or wakes them.
All is left as single steps of everybody would leave it (tests/cluster/simulator/test_fast_forward.py).
"""

import heapq
from collections import Counter
from collections.abc import Collection

from kvrelay.engine.scheduling.scheduler import Scheduler, StepPlan
from kvrelay.engine.scheduling.sequence import Sequence

_BLOCKS_EACH = 2  # that one token of a sequence can take: the next block, and a copy of one that it shares


class FastForward:
    """The decode batch of one scheduler. `token`: what every sleeper gets, each step.

    Whoever changes or reads a sequence beside the scheduler's planning calls `wake` or `refresh` before it.
    """

    def __init__(self, scheduler: Scheduler, token: int) -> None:
        self._scheduler, self._token = scheduler, token
        scheduler.before_headroom = self.refresh
        self._step = 0
        self._parked: dict[Sequence, int] = {}  # up to which step it has its tokens
        self._ends: list[tuple[int, int, Sequence]] = []  # a heap: after which step, arrival, who wakes
        self._tenants: Counter[str] = Counter()  # of the sleepers
        self._context = 0  # tokens that they attend to in the next step

    @property
    def parked(self) -> Collection[Sequence]:
        """Whom `Scheduler.schedule_without` need not look at."""
        return self._parked

    @property
    def context_tokens(self) -> int:
        """That the sleepers attend to in the next step."""
        return self._context

    # ---- before a step

    def look(self) -> tuple[int, bool]:
        """(steps, whether somebody wakes for the last of them): so many bring every sequence a token and, but for that, do no more.

        No steps: the next must be planned, for who does not sleep. A last step for which somebody wakes is planned when the
        others have `passed`; nobody has to give way in it.
        """
        scheduler, parked = self._scheduler, self._parked
        running = scheduler.running
        if len(parked) < len(running):
            active = [seq for seq in running if seq not in parked]
            assert len(parked) + len(active) == len(running), "a sleeper left the batch"
            if self._may_preempt(len(active)):
                self.wake()
                return 0, False
            num_active = len(active) - sum(map(self._parks, active))
            if num_active or scheduler.waiting:
                return 0, False
        elif not parked or scheduler.waiting:
            return 0, False
        if scheduler.reserving:  # whoever is in line for a reservation is looked at between any two steps
            return 1, False
        is_roomy = not self._may_preempt(len(running))
        return self._ends[0][0] - self._step + is_roomy, is_roomy

    def _may_preempt(self, num_active: int) -> bool:
        """Whether somebody may have to give way in a step for which so many are active, or to stand back."""
        scheduler = self._scheduler
        return (
            len(scheduler.running) > scheduler.limits.token_budget
            or num_active * _BLOCKS_EACH > scheduler.pool.num_available
            or bool(scheduler.swapped or scheduler.groups.by_id)
        )

    def _parks(self, seq: Sequence) -> bool:
        """Whether the next step just brings it a token. Who has a last token coming must have said so by its `plain_until`.

        If the step needs a block, it gets that now, as it would when the step is planned.
        """
        computed, num_tokens = seq.num_computed, len(seq.token_ids)
        if num_tokens - computed != 1 or computed != seq.num_charged or computed < seq.num_given or not seq.is_pinned:
            return False
        if computed >= seq.writable_until:
            self._scheduler.ensure_block(seq)
        steps = min(seq.writable_until - 1 - computed, seq.plain_until - num_tokens)
        if steps <= 0 or seq.num_hashed_blocks != computed // seq.block_size:
            return False
        self._parked[seq] = self._step
        heapq.heappush(self._ends, (self._step + steps, seq.arrival, seq))
        self._tenants[seq.request.tenant] += 1
        self._context += num_tokens
        return True

    # ---- after it

    def passed(self, count: int) -> None:
        """Of the steps that `look` told of, so many are over, not counting the one for which somebody wakes."""
        self._scheduler.copied()
        self._scheduler.shares.serve(self._served(count))
        self._pass(count)

    def advance(self, plan: StepPlan) -> None:
        """A step is over: the sleepers have a token more, and the work of those that do not sleep is done."""
        self._scheduler.copied()
        self._scheduler.advance(*plan.work, others=self._served(1))
        self._pass(1)

    def _served(self, count: int) -> dict[str, int]:
        """Tokens of output in so many steps, by tenant."""
        return {tenant: count * number for tenant, number in self._tenants.items()}

    def _pass(self, count: int) -> None:
        ends, parked = self._ends, self._parked
        self._step += count
        self._context += count * len(parked)
        while ends and ends[0][0] <= self._step:
            seq = heapq.heappop(ends)[2]
            self._bring_up(seq, parked.pop(seq))
            self._context -= len(seq.token_ids)
            tenant = seq.request.tenant
            self._tenants[tenant] -= 1
            if not self._tenants[tenant]:
                del self._tenants[tenant]

    # ---- for whoever looks

    def refresh(self) -> None:
        """Every sequence is what it has come to."""
        parked = self._parked
        for seq, since in parked.items():
            if since != self._step:
                self._bring_up(seq, since)
                parked[seq] = self._step

    def wake(self) -> None:
        """The same, and none sleeps: they may be changed, or leave."""
        if self._parked:
            self.refresh()
            self._parked.clear()
            self._ends.clear()
            self._tenants.clear()
            self._context = 0

    def _bring_up(self, seq: Sequence, since: int) -> None:
        count = self._step - since
        seq.token_ids += [self._token] * count
        seq.num_computed += count
        seq.num_charged += count
