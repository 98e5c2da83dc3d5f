"""A queue of sequences that wait for admission: which is next; and both queues of a scheduler. Pure.

Within a class of priority, lower numbers first, the order is: preempted sequences, then deadlines, then tenants by
what they were served; within a tenant first come first served, overdue sequences (see `mark_overdue`) behind the
others. So that no sequence starves, every `oldest_every`-th admission is the sequence that came first: one that has E
sequences before it when it is queued is admitted after at most `oldest_every` x (E + 1) admissions.
"""

import itertools
import math
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple

from kvrelay.engine.scheduling.fair_share import TURNS_IN_CREDIT, FairShare
from kvrelay.engine.scheduling.sequence import Sequence, SequenceGroup, State

IsSkipped = Callable[[Sequence], bool]
_arrival = attrgetter("arrival")
MAX_PENALTY = 15.0
"""The most that an overdue sequence counts for, in sequences of average length."""


class _Place(NamedTuple):
    """A sequence's place in the queue; of two the lesser is before the other, but for the turns of tenants."""

    priority: int
    kind: int  # _BEGUN, _URGENT, _BY_SHARE
    value: float  # of urgent ones the deadline; by share: 1 for those that are overdue
    arrival: int
    ticket: int
    seq: Sequence


_BEGUN, _URGENT, _BY_SHARE = range(3)


class WaitingQueue:
    """Queued sequences of all classes. Both queues of an engine share the tenants' counters.

    At 256 sequences, MAX_WAITING, the next one is found in at most 30 µs: the places are a sorted list.
    """

    def __init__(self, shares: FairShare) -> None:
        self._shares = shares
        self._members: dict[int, Sequence] = {}  # by id(): members of a group came at once
        self._places: dict[int, _Place] = {}  # of those that are not skipped
        self._sorted: list[_Place] = []  # the same
        self._due: dict[int, Sequence] = {}  # queued sequences with a deadline
        self._skipped: dict[int, Sequence] = {}
        self._overdue: dict[int, Sequence] = {}
        self._tickets = itertools.count()
        self._since_oldest = 0  # admissions since the oldest sequence was admitted, less its penalty
        self._mean_tokens = 0.0  # of admitted sequences
        self.num_by_priority: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, seq: Sequence) -> bool:
        return self._members.get(id(seq)) is seq

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return iter(self._members.values())

    # ---- push and remove

    def push(self, seq: Sequence) -> None:
        """Queue a sequence. A preempted one (`has_begun`) goes to the front of its class."""
        assert id(seq) not in self._members
        if not self._members:
            self._since_oldest = 0
        self._members[id(seq)] = seq
        self._shares.joined(seq.request.tenant)
        self.num_by_priority[seq.request.priority] += 1
        self._stand(seq)
        if not seq.has_begun and seq.deadline_s < math.inf:
            self._due[id(seq)] = seq

    def _stand(self, seq: Sequence, *, is_urgent: bool = True) -> None:
        if seq.has_begun:
            kind, value = _BEGUN, 0.0
        elif is_urgent and seq.deadline_s < math.inf:
            kind, value = _URGENT, seq.deadline_s
        else:
            kind, value = _BY_SHARE, float(seq.overdue_tokens > 0)
        place = _Place(seq.request.priority, kind, value, seq.arrival, next(self._tickets), seq)
        self._places[id(seq)] = place
        insort(self._sorted, place)

    def _leave(self, seq: Sequence) -> None:
        if (place := self._places.pop(id(seq), None)) is not None:
            del self._sorted[bisect_left(self._sorted, place)]

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that is not admitted."""
        del self._members[id(seq)]
        self._skipped.pop(id(seq), None)
        self._due.pop(id(seq), None)
        self._overdue.pop(id(seq), None)
        self._leave(seq)
        priority = seq.request.priority
        self.num_by_priority[priority] -= 1
        if not self.num_by_priority[priority]:
            del self.num_by_priority[priority]
        self._shares.left(seq.request.tenant)

    def take(self, seq: Sequence) -> None:
        """Remove a sequence that is admitted."""
        self._since_oldest = -self._penalty(seq) if self._oldest() is seq else self._since_oldest + 1
        self._mean_tokens += 0.05 * (seq.num_tokens - self._mean_tokens)
        self.remove(seq)

    def _penalty(self, seq: Sequence) -> int:
        """Further admissions of others before the oldest sequence's next turn, after an overdue one of many tokens."""
        every = self._shares.rules.oldest_every
        if not seq.overdue_tokens or every is None:
            return 0
        return int(every * min(max(0.0, seq.overdue_tokens / max(self._mean_tokens, 1.0) - 1.0), MAX_PENALTY))

    def count_admission(self) -> None:
        """A sequence in the engine's other queue was admitted."""
        self._since_oldest += 1

    # ---- the next one

    @property
    def is_oldest_next(self) -> bool:
        """Whether the sequence that came first has the next turn, whatever the rank of the others."""
        every = self._shares.rules.oldest_every
        return every is not None and self._since_oldest >= every - 1

    def head(self, is_skipped: IsSkipped | None = None) -> Sequence | None:
        """The sequence whose turn it is. Skipped ones are left out until `return_ready`."""
        while (seq := self._first()) is not None and is_skipped is not None and is_skipped(seq):
            self._leave(seq)
            self._skipped[id(seq)] = seq
        return seq

    def mark_overdue(self, seq: Sequence, num_uncached: int) -> None:
        """It misses its TTFT target: from now on those of its tenant and class that can meet theirs go before it."""
        self._leave(seq)
        seq.overdue_tokens = max(1, num_uncached)
        self._overdue[id(seq)] = seq
        self._stand(seq)

    def restore_aged(self, now_s: float) -> None:
        """Overdue sequences that have been queued for `aged_s` are in order of arrival again."""
        aged_s = self._shares.rules.aged_s
        for seq in [seq for seq in self._overdue.values() if now_s - seq.arrived_s >= aged_s]:
            del self._overdue[id(seq)]
            seq.overdue_tokens = 0
            if id(seq) in self._places:
                self._leave(seq)
                self._stand(seq)

    def return_ready(self, is_skipped: IsSkipped) -> None:
        """Put sequences that are no longer skipped back into their places."""
        for seq in [seq for seq in self._skipped.values() if not is_skipped(seq)]:
            del self._skipped[id(seq)]
            self._stand(seq)

    def _first(self) -> Sequence | None:
        """A deadline of a tenant that leads by too much no longer counts: the sequence queues with the others."""
        if self.is_oldest_next:
            return self._oldest()
        shares = self._shares
        while self._sorted and (place := self._sorted[0]).kind == _URGENT:
            if shares.lead(place.seq.request.tenant) <= shares.rules.credit_tokens:
                break
            self._leave(place.seq)
            self._stand(place.seq, is_urgent=False)
        return self._sorted[0].seq if self._sorted and place.kind != _BY_SHARE else self._first_by_share()

    def _oldest(self) -> Sequence | None:
        return min((place.seq for place in self._sorted), key=_arrival, default=None)

    def _first_by_share(self) -> Sequence | None:
        """Of the first class: the first one of the tenant that was served the least."""
        firsts: dict[str, Sequence] = {}
        for place in self._sorted:
            if place.priority != self._sorted[0].priority or len(firsts) == len(self._shares.num_waiting):
                break
            firsts.setdefault(place.seq.request.tenant, place.seq)
        return min(firsts.values(), key=lambda seq: (self._shares.turn(seq.request.tenant), seq.arrival), default=None)

    def may_pass(self, seq: Sequence) -> bool:
        """Whether queued sequences that rank before a prompt that has begun may still pass it: only a few may."""
        every = self._shares.rules.oldest_every
        return every is None or seq.num_passed < every - 1

    def passes(self, seq: Sequence, begun: Sequence) -> bool:
        """Whether the queued `seq` goes before the rest of a prompt that has begun.

        It does if its class is before the other's; or is the same, and its tenant was served much less, or only the
        other is overdue.
        """
        priority, _, _, turn, _ = begun.queue_rank
        mine = self._shares.turn(seq.request.tenant) + TURNS_IN_CREDIT / 2
        is_in_time = begun.overdue_tokens > 0 and not seq.overdue_tokens
        return seq.request.priority < priority or (seq.request.priority == priority and (mine <= turn or is_in_time))

    def rank(self, seq: Sequence) -> tuple[float, ...]:
        """The rank of `seq` among the sequences of both queues and of the batch; the least is first."""
        if seq.has_begun:
            return seq.request.priority, 0, 0.0, 0.0, seq.arrival
        tenant, deadline_s = seq.request.tenant, seq.deadline_s
        if self._shares.lead(tenant) > self._shares.rules.credit_tokens:
            deadline_s = math.inf
        return seq.request.priority, 1, deadline_s, self._shares.turn(tenant), seq.arrival

    # ---- deadlines

    def next_deadline_s(self) -> float:
        """When the next queued sequence passes its deadline, by the clock of `Sequence.arrived_s`; infinite: never."""
        return min([seq.deadline_s for seq in self._due.values()], default=math.inf)

    def past_deadline(self, now_s: float) -> list[Sequence]:
        """Queued sequences that were never begun and should have their first token by now, each once.

        They stay queued: see `remove`.
        """
        overdue = sorted((seq for seq in self._due.values() if seq.deadline_s <= now_s), key=attrgetter("deadline_s"))
        for seq in overdue:
            del self._due[id(seq)]
        return overdue


def ranks_before(queue: WaitingQueue, seq: Sequence, other_queue: WaitingQueue, other: Sequence) -> bool:
    """Whether the head of one queue comes before the head of the other, for room that both need."""
    if queue.is_oldest_next and other_queue.is_oldest_next:
        return seq.arrival < other.arrival
    if queue.is_oldest_next or other_queue.is_oldest_next:
        return queue.is_oldest_next
    return queue.rank(seq) < queue.rank(other)


def last_of(tenant: str, *queues: WaitingQueue) -> Sequence | None:
    """Of a tenant's queued sequences that were never begun, the one of the lowest priority that came last."""
    own = (seq for queue in queues for seq in queue if seq.request.tenant == tenant and not seq.has_begun)
    return max(own, key=lambda seq: (seq.request.priority, seq.arrival), default=None)


def victim(running: list[Sequence], for_seq: Sequence) -> Sequence:
    """The running sequence to preempt so that `for_seq` can continue: of the lowest priority, then the latest arrival.

    Never one of a higher priority than `for_seq`: then it is `for_seq` itself.
    """
    return max(
        (seq for seq in running if seq.request.priority >= for_seq.request.priority),
        key=lambda seq: (seq.request.priority, seq.arrival),
    )


class Queues:
    """The sequences of one engine, each in exactly one queue, the one of its state; and its groups."""

    def __init__(self, fair_share: FairShare) -> None:
        self.fair_share = fair_share
        self.waiting = WaitingQueue(fair_share)
        self.reserving = WaitingQueue(fair_share)  # decode: queued for a reservation
        self.running: list[Sequence] = []  # in order of arrival
        self.receiving: dict[str, Sequence] = {}
        self.held: dict[str, Sequence] = {}
        self.swapped: deque[Sequence] = deque()  # in order of arrival
        self.sequences: dict[str, Sequence] = {}  # all of the above
        self.groups: dict[str, SequenceGroup] = {}  # until their last members have ended

    def join_batch(self, seq: Sequence) -> None:
        """Add a sequence to the running ones."""
        insort(self.running, seq, key=_arrival)

    def push_swapped(self, seq: Sequence) -> None:
        place = next((at for at, other in enumerate(self.swapped) if other.arrival > seq.arrival), len(self.swapped))
        self.swapped.insert(place, seq)

    def remove_parked(self, seq: Sequence) -> None:
        """Remove a sequence that does not run from its queue, if it is in one."""
        self.receiving.pop(seq.request_id, None)
        self.held.pop(seq.request_id, None)
        for queue in (self.waiting, self.reserving, self.swapped):
            if seq in queue:
                queue.remove(seq)

    @property
    def num_reserved(self) -> int:
        """Running sequences that members will be when their leaders fork, beside the leaders."""
        leaders = ((group, group.leader) for group in self.groups.values())
        begun = (State.RUNNING, State.RECEIVING)
        return sum(group.num_sequences - 1 for group, leader in leaders if leader is not None and leader.state in begun)

    def end_in_group(self, seq: Sequence) -> None:
        """The leader or a member of a group has ended."""
        group = seq.group
        assert group is not None
        if seq is group.leader:
            group.leader = None
        elif seq in group.members:
            group.members.remove(seq)
        if group.leader is None and not group.members:
            self.groups.pop(group.request.request_id, None)

    @property
    def num_queued(self) -> int:
        return len(self.waiting) + len(self.reserving)

    @property
    def has_demand(self) -> bool:
        """Whether a sequence is queued for blocks."""
        return bool(self.waiting or self.reserving or self.swapped)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are not computed yet, of queued and of running sequences."""
        begun = [len(seq.token_ids) - seq.num_computed for seq in self.running]
        return sum([seq.num_uncomputed for seq in self.waiting]) + sum([count for count in begun if count > 1])

    def overdue(self) -> tuple[int, int]:
        """(prompts, their uncached tokens) that are overdue: they yield to prompts that can still meet their target."""
        overdue = [seq.overdue_tokens for seq in self.waiting if seq.overdue_tokens]
        return len(overdue), sum(overdue)

    def next_deadline_s(self) -> float:
        """When the next queued sequence passes its deadline, by the clock of `Sequence.arrived_s`; infinite: never."""
        return min(self.waiting.next_deadline_s(), self.reserving.next_deadline_s())

    def check(self) -> None:
        """Raise AssertionError unless each sequence is in one queue and no queued sequence holds blocks."""
        waiting = [*self.waiting, *self.reserving, *self.swapped]
        queued = [*waiting, *self.running, *self.receiving.values(), *self.held.values()]
        assert sorted(map(id, queued)) == sorted(map(id, self.sequences.values())), "a sequence is in no queue or two"
        assert all(not seq.blocks for seq in waiting), "a waiting sequence holds blocks"
