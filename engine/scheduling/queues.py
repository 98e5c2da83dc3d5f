"""Every sequence of one engine, by state. Pure; owns no block."""

from bisect import insort
from collections import deque
from operator import attrgetter

from kvrelay.engine.scheduling.fair_share import FairShare
from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.engine.scheduling.waiting_queue import WaitingQueue

_arrival = attrgetter("arrival")


class Queues:
    """The sequences of one engine. Each is in exactly one queue, the one of its state."""

    def __init__(self, fair_share: FairShare) -> None:
        self.waiting = WaitingQueue(fair_share)
        self.reserving = WaitingQueue(fair_share)  # decode: queued for a reservation
        self.running: list[Sequence] = []  # in order of arrival
        self.receiving: dict[str, Sequence] = {}
        self.held: dict[str, Sequence] = {}
        self.swapped: deque[Sequence] = deque()  # in order of arrival
        self.sequences: dict[str, Sequence] = {}  # all of the above

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
    def num_queued(self) -> int:
        return len(self.waiting) + len(self.reserving)

    @property
    def has_work(self) -> bool:
        """Whether a step may change something. A step that did not (StepResult.is_stuck) need not be repeated."""
        return bool(self.running or self.waiting or self.reserving or self.swapped)

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
