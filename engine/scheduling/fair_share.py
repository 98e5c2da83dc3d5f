"""What each tenant has been served: virtual token counters, by which queues share turns fairly. Pure.

A counter grows by the weighted tokens that the engine computes for its tenant; the tenant with the least goes first.
Source: Virtual Token Counter (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024).
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvrelay.engine.scheduling.sequence import Sequence

CREDIT_TOKENS = 4096.0  # weighted; a tenant may save up so many, and lead by as many and have its deadlines honoured
TURNS_IN_CREDIT = 4
MAX_IDLE = 4096  # tenants that are remembered while they have nothing here
MAX_NAMED = 32  # tenants with a figure of their own in metrics, beside those that have a weight


@dataclass(frozen=True, slots=True)
class QueueRules:
    """How queued sequences are ordered: see docs/scheduling.md."""

    oldest_every: int | None = 16  # every so many admissions, the one that came first is next; None: never
    output_weight: float = 2.0  # of an output token, against 1 of a prompt token: its share of a step's time
    credit_tokens: float = CREDIT_TOKENS
    aged_s: float = math.inf  # an overdue sequence that is queued so long no longer yields to those in time


def queue_rules(max_queue_s: float) -> QueueRules:
    """The defaults, and `aged_s` for the setting `router.max_queue_s`."""
    return QueueRules(aged_s=max_queue_s / 2)


class FairShare:
    """The counters of one engine, which both of its queues share. A counter never falls."""

    def __init__(self, rules: QueueRules) -> None:
        self.rules = rules
        self.num_waiting: Counter[str] = Counter()  # queued sequences, by tenant
        self.computed_tokens: dict[str, int] = {}
        self.other_tokens = 0  # computed for tenants without a count of their own
        self._weights: dict[str, float] = {}  # of tenants whose weight is not 1: as many as the operator has given one
        self._counters: dict[str, float] = {}
        self._credits: dict[str, float] = {}  # paid for and not computed: the next tokens are paid from it
        self._idle: dict[str, None] = {}  # tenants that have nothing queued, in the order in which they left
        self._last_left = ""
        self._level = 0.0  # the highest that the least counter of a queued tenant has been

    def set_weight(self, tenant: str, weight: float) -> None:
        """Its share of the service from now on, as its newest request has it."""
        if weight == 1.0:
            self._weights.pop(tenant, None)
        else:
            self._weights[tenant] = weight

    # ---- queued

    def joined(self, tenant: str) -> None:
        """One more of its sequences is queued.

        A tenant that had none is lifted: it has saved up `credit_tokens` at most.
        """
        if not self.num_waiting[tenant]:
            self._counters[tenant] = max(self.counter(tenant), self.level() - self.rules.credit_tokens, 0.0)
            self._idle.pop(tenant, None)
        self.num_waiting[tenant] += 1

    def left(self, tenant: str) -> None:
        """One of its sequences left its queue."""
        self.num_waiting[tenant] -= 1
        if self.num_waiting[tenant]:
            return
        del self.num_waiting[tenant]
        self._last_left = tenant
        self._idle[tenant] = None
        while len(self._idle) > MAX_IDLE:
            forgotten = next(iter(self._idle))
            del self._idle[forgotten]
            self._counters.pop(forgotten, None)
            self._credits.pop(forgotten, None)

    def counter(self, tenant: str) -> float:
        """Weighted tokens that it was served, divided by its weight, or what it was lifted to."""
        return self._counters.get(tenant, 0.0)

    def turn(self, tenant: str) -> float:
        """The order of tenants, least first: counters in steps, so that those served alike come as they arrive."""
        quantum = self.rules.credit_tokens / TURNS_IN_CREDIT
        return self.counter(tenant) // quantum if quantum else self.counter(tenant)

    def level(self) -> float:
        """How much a tenant that always had something queued has been served: the highest that the least counter has
        been.

        Not the least itself: newcomers with savings would lower it, each for the next, and come before one another.
        """
        queued = [self._counters[tenant] for tenant in self.num_waiting]
        self._level = max(self._level, min(queued) if queued else self.counter(self._last_left))
        return self._level

    def lead(self, tenant: str) -> float:
        """How far it is ahead of the level."""
        return self.counter(tenant) - self.level()

    # ---- what is paid

    def admit(self, seq: Sequence) -> None:
        """Pay for all that is to be computed of it: else one tenant could take all of a step.

        What was cached is free: it costs no step's time. What was paid for before a pre-emption is not paid again.
        """
        seq.num_paid = max(seq.num_paid, seq.num_cached)
        self._charge(seq.request.tenant, self._price(seq, seq.num_paid, seq.num_tokens))
        seq.num_charged = max(seq.num_paid, seq.num_tokens)

    def advance(self, seq: Sequence) -> None:
        """Pay for what was computed beyond that: its output."""
        if seq.num_computed > seq.num_charged:
            self._charge(seq.request.tenant, self._price(seq, seq.num_charged, seq.num_computed))
            seq.num_charged = seq.num_computed

    def serve(self, num_outputs: Mapping[str, int]) -> None:
        """Pay for these output tokens, by tenant, which the sequences' `num_charged` already includes."""
        for tenant, count in num_outputs.items():
            self._charge(tenant, self.rules.output_weight * count)
            self.computed(tenant, count)

    def give_back(self, seq: Sequence) -> None:
        """It leaves the batch: what was paid ahead and not computed is to its tenant's credit."""
        seq.num_paid = max(seq.num_paid, min(seq.num_computed, seq.num_charged))
        if seq.num_charged > seq.num_paid:
            tenant = seq.request.tenant
            credit = self._price(seq, seq.num_paid, seq.num_charged)
            if tenant in self._counters:
                self._credits[tenant] = self._credits.get(tenant, 0.0) + credit
            seq.num_charged = seq.num_paid

    def _price(self, seq: Sequence, start: int, end: int) -> float:
        """Of its tokens start .. end - 1. Output that came with the request, from another worker, counts as prompt."""
        num_given = max(0, min(end, seq.num_given) - start)
        return num_given + self.rules.output_weight * max(0, end - start - num_given)

    def _charge(self, tenant: str, price: float) -> None:
        credit = self._credits.pop(tenant, 0.0)
        if credit > price:
            self._credits[tenant] = credit - price
            return
        self._counters[tenant] = self.counter(tenant) + (price - credit) / self._weights.get(tenant, 1.0)
        if not self.num_waiting.get(tenant):
            self._idle.setdefault(tenant)

    def most_waiting(self, newcomer: str, weight: float) -> str | None:
        """The tenant that takes the most places, for its weight; None: not two more than `newcomer` would take."""
        largest = max(self.num_waiting, key=self._places_taken, default=newcomer)
        return largest if self._places_taken(largest) >= (self.num_waiting[newcomer] + 2) / weight else None

    def _places_taken(self, tenant: str) -> float:
        return self.num_waiting[tenant] / self._weights.get(tenant, 1.0)

    def computed(self, tenant: str, num_tokens: int) -> None:
        """Count what was computed, again after a pre-emption, too.

        Of bounded size: later tenants without a weight are counted together.
        """
        is_named = tenant in self.computed_tokens or tenant in self._weights or len(self.computed_tokens) < MAX_NAMED
        if is_named:
            self.computed_tokens[tenant] = self.computed_tokens.get(tenant, 0) + num_tokens
        else:
            self.other_tokens += num_tokens
