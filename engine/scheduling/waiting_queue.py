"""A queue of sequences that wait for admission: which is next; and both queues of a scheduler. Pure.

Within a class of priority, lower numbers first, the order is: preempted sequences, then deadlines, then tenants by
what they were served; within a tenant first come first served, overdue sequences (see `mark_overdue`) behind the
others. So that no sequence starves, every `oldest_every`-th admission is the sequence that came first: one that has E
sequences before it when it is queued is admitted after at most `oldest_every` x (E + 1) admissions.
"""

import heapq
import itertools
import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from kvrelay.engine.scheduling.fair_share import TURNS_IN_CREDIT, FairShare
from kvrelay.engine.scheduling.sequence import Sequence, SequenceGroup, State

IsSkipped = Callable[[Sequence], bool]
MAX_PENALTY = 15.0
"""The most that an overdue sequence counts for, in sequences of average length."""
_BEHIND = 1 << 50
"""More than any arrival."""


@dataclass(slots=True, eq=False)
class _Place:
    """A sequence's place. A new one each time it is queued, so that entries of old ones are void."""

    seq: Sequence
    ticket: int
    is_live: bool = True


class _Heap:
    """Places by a key, least first. Void entries are dropped when they come up, and swept when they are most of it."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, _Place]] = []

    def push(self, key: float, place: _Place, num_live: int) -> None:
        heapq.heappush(self._entries, (key, place.ticket, place))
        if len(self._entries) > 64 + 2 * num_live:
            self._entries = [entry for entry in self._entries if entry[2].is_live]
            heapq.heapify(self._entries)

    def first(self) -> _Place | None:
        entries = self._entries
        while entries and not entries[0][2].is_live:
            heapq.heappop(entries)
        return entries[0][2] if entries else None

    def pop(self) -> _Place:
        return heapq.heappop(self._entries)[2]


class _Class:
    """The sequences of one class of priority."""

    def __init__(self, shares: FairShare) -> None:
        self._shares = shares
        self._begun, self._urgent = _Heap(), _Heap()
        self._queues: dict[str, _Heap] = {}
        self._tenants: list[tuple[float, int, str]] = []  # (counter, arrival) as last seen: a heap, one entry a tenant

    def push(self, place: _Place, num_live: int) -> None:
        if place.seq.has_begun:
            self._begun.push(place.seq.arrival, place, num_live)
        elif place.seq.deadline_s < math.inf:
            self._urgent.push(place.seq.deadline_s, place, num_live)
        else:
            self._queue(place, num_live)

    def _queue(self, place: _Place, num_live: int) -> None:
        tenant = place.seq.request.tenant
        if (queue := self._queues.get(tenant)) is None:
            queue = self._queues[tenant] = _Heap()
            heapq.heappush(self._tenants, (self._shares.turn(tenant), place.seq.arrival, tenant))
        queue.push(place.seq.arrival + _BEHIND * (place.seq.overdue_tokens > 0), place, num_live)
        if len(self._tenants) > 64 + 2 * num_live:
            self._queues = {name: queue for name, queue in self._queues.items() if queue.first() is not None}
            self._tenants = [entry for entry in self._tenants if entry[2] in self._queues]
            heapq.heapify(self._tenants)

    def first(self, num_live: int) -> _Place | None:
        """The next one.

        A deadline of a tenant that leads by too much no longer counts: the sequence queues with the others.
        """
        if (place := self._begun.first()) is not None:
            return place
        while (place := self._urgent.first()) is not None:
            if self._shares.lead(place.seq.request.tenant) <= self._shares.rules.credit_tokens:
                return place
            self._queue(self._urgent.pop(), num_live)
        return self._first_by_share()

    def _first_by_share(self) -> _Place | None:
        """Counters only grow, and arrivals, so an entry that is right and on top is the least."""
        tenants = self._tenants
        while tenants:
            turn, arrival, tenant = tenants[0]
            place = self._queues[tenant].first()
            if place is None:
                heapq.heappop(tenants)
                del self._queues[tenant]
            elif (now := self._shares.turn(tenant)) > turn or place.seq.arrival > arrival:
                heapq.heapreplace(tenants, (now, place.seq.arrival, tenant))
            else:
                return place
        return None


class WaitingQueue:
    """Queued sequences of all classes. Both queues of an engine share the tenants' counters.

    Pushing and removing cost O(log n), looking at the next one O(1), amortised.
    """

    def __init__(self, shares: FairShare) -> None:
        self._shares = shares
        self._members: dict[int, Sequence] = {}  # by id(): members of a group came at once
        self._places: dict[int, _Place] = {}  # of those that are not skipped
        self._due: dict[int, _Place] = {}  # of queued sequences with a deadline
        self._skipped: dict[int, Sequence] = {}
        self._classes: dict[int, _Class] = {}
        self._oldest, self._deadlines = _Heap(), _Heap()
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
            due = self._due[id(seq)] = _Place(seq, next(self._tickets))
            self._deadlines.push(seq.deadline_s, due, len(self))

    def _stand(self, seq: Sequence) -> None:
        place = self._places[id(seq)] = _Place(seq, next(self._tickets))
        priority = seq.request.priority
        if (one := self._classes.get(priority)) is None:
            one = self._classes[priority] = _Class(self._shares)
        one.push(place, len(self))
        self._oldest.push(seq.arrival, place, len(self))

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that is not admitted."""
        del self._members[id(seq)]
        self._skipped.pop(id(seq), None)
        for places in (self._places, self._due):
            if (place := places.pop(id(seq), None)) is not None:
                place.is_live = False
        priority = seq.request.priority
        self.num_by_priority[priority] -= 1
        if not self.num_by_priority[priority]:
            del self.num_by_priority[priority]
        self._shares.left(seq.request.tenant)

    def take(self, seq: Sequence) -> None:
        """Remove a sequence that is admitted."""
        oldest = self._oldest.first()
        is_oldest = oldest is not None and oldest.seq is seq
        self._since_oldest = -self._penalty(seq) if is_oldest else self._since_oldest + 1
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
        while (place := self._first()) is not None:
            if is_skipped is None or not is_skipped(place.seq):
                return place.seq
            place.is_live = False
            del self._places[id(place.seq)]
            self._skipped[id(place.seq)] = place.seq
        return None

    def mark_overdue(self, seq: Sequence, num_uncached: int) -> None:
        """It misses its TTFT target: from now on those of its tenant and class that can meet theirs go before it."""
        self._places[id(seq)].is_live = False
        seq.overdue_tokens = max(1, num_uncached)
        self._stand(seq)

    def return_ready(self, is_skipped: IsSkipped) -> None:
        """Put sequences that are no longer skipped back into their places."""
        for seq in [seq for seq in self._skipped.values() if not is_skipped(seq)]:
            del self._skipped[id(seq)]
            self._stand(seq)

    def _first(self) -> _Place | None:
        if self.is_oldest_next:
            return self._oldest.first()
        for priority in sorted(self._classes):
            if (place := self._classes[priority].first(len(self))) is not None:
                return place
            del self._classes[priority]
        return None

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
        place = self._deadlines.first()
        return math.inf if place is None else place.seq.deadline_s

    def past_deadline(self, now_s: float) -> list[Sequence]:
        """Queued sequences that were never begun and should have their first token by now.

        They stay queued: see `remove`.
        """
        overdue: list[Sequence] = []
        while self.next_deadline_s() <= now_s:
            overdue.append(self._deadlines.pop().seq)
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


_arrival = attrgetter("arrival")


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
