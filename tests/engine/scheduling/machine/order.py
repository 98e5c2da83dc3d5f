"""Who goes before whom, and what tenants pay: a plain model, held against the scheduler after each operation."""

import math
from collections import Counter
from collections.abc import Iterable

from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.scheduling.sequence import Sequence, State
from tests.engine.scheduling.machine.model import Record, Rules
from tests.engine.scheduling.machine.setup import SIZE, Setup

W, R, V = State.WAITING, State.RUNNING, State.RECEIVING


class Order:
    """Both lines, as their bounds of admissions have it."""

    def __init__(self, sched: Scheduler, setup: Setup, rules: Rules) -> None:
        self.sched, self.setup, self.rules = sched, setup, rules

    def entered(self, record: Record, records: Iterable[Record]) -> None:
        """It is in line from now on, perhaps again: whoever came later has one more before it."""
        record.num_admitted_since = record.num_before = 0
        for other in in_line(record, records):
            if other.seq.arrival <= record.seq.arrival:
                record.num_before += 1
            else:
                other.num_before += 1

    def heads(self, records: Iterable[Record]) -> list[Record]:
        """Who is next in each line, as far as deadlines do not depend on who had the turn before."""
        heads = []
        for is_reserving, line in ((False, self.sched.waiting), (True, self.sched.reserving)):
            found = [one for one in records if one.state is W and one.is_reserving is is_reserving]
            has_deadlines = any(not one.was_admitted and one.seq.deadline_s < math.inf for one in found)
            if line.is_oldest_next:
                heads += [min(found, key=lambda one: one.seq.arrival)] if found else []
            elif found and (self.setup.counts_exactly or not has_deadlines):
                heads.append(min(found, key=self._rank))
        return heads

    def _rank(self, record: Record) -> tuple[float, ...]:
        request, arrival = record.seq.request, record.seq.arrival
        if record.was_admitted:
            return request.priority, 0, 0.0, 0.0, arrival
        return request.priority, 1, record.seq.deadline_s, self.sched.fair_share.turn(request.tenant), arrival

    def admitted(self, came: list[Record], heads: list[Record], records: Iterable[Record]) -> None:
        """These left their line for a place in the batch, or for their transfer, in one operation."""
        for is_reserving in {record.is_reserving for record in came}:
            ours = [record for record in came if record.is_reserving is is_reserving]
            rest = [one for one in records if one.state is W and one.is_reserving is is_reserving and one not in ours]
            head = next((one for one in heads if one.is_reserving is is_reserving), None)
            is_next = head is None or any(one.seq.arrival == head.seq.arrival for one in ours)
            assert is_next, f"{head.seq.request_id} was next, not {ours[0].seq.request_id}"
            self._is_in_order(ours, [one for one in rest if one.seq.state is W])
        for record in came:
            record.was_admitted = True

    def _is_in_order(self, came: list[Record], rest: list[Record]) -> None:
        every, oldest = self.setup.line.oldest_every, min((one.seq.arrival for one in rest), default=math.inf)
        for one in came:
            for other in rest:
                is_passed = one.seq.arrival > other.seq.arrival and not one.was_admitted and not other.was_admitted
                other.num_overtaken += is_passed
                is_lower = other.seq.request.priority < one.seq.request.priority
                assert not is_lower or one.seq.arrival <= oldest, (
                    "a lower class came first, and not on the oldest's turn"
                )
        for other in rest:
            other.num_admitted_since += len(came)
            most = self.rules.most_overtakers(other)
            assert other.num_overtaken <= most, f"{other.seq.request_id} is overtaken more than {most} times"
            bound = every * (other.num_before + 1)
            assert other.num_admitted_since < bound, f"{other.seq.request_id} is in line after {bound} admissions"

    # ---- who has to go

    def rejected(self, records: dict[str, Record], now_s: float) -> None:
        """Whoever is late and was never begun is gone, nobody else is."""
        late = {one for one in records.values() if one.state is W and is_late(one, now_s)}
        before = self.sched.num_overdue
        assert (self.sched.queues.next_deadline_s() <= now_s) == bool(late)
        self.sched.reject_overdue(now_s)
        told = self.sched.take_rejected()
        assert {(records[seq.request_id], reason) for seq, reason in told} == {(one, "deadline") for one in late}
        assert self.sched.num_overdue == before + len(late)

    def displaced(self, records: dict[str, Record], newcomer: Sequence, *, was_full: bool) -> None:
        """A newcomer to a full line takes the place of the last one, of the lowest class, of who has far more
        places.
        """
        told = self.sched.take_rejected()
        assert len(told) == was_full, "a full line lets nobody in but for another"
        for seq, reason in told:
            tenant = seq.request.tenant
            lined = [one for one in records.values() if one.state is W and one.seq is not newcomer]
            own = [one.seq for one in lined if one.seq.request.tenant == tenant and not one.was_admitted]
            assert reason == "full" and seq is max(own, key=lambda one: (one.request.priority, one.arrival))
            places = Counter(one.seq.request.tenant for one in lined)
            assert self._weighed(tenant, places[tenant]) >= self._weighed(
                newcomer.request.tenant, places[newcomer.request.tenant] + 2
            )

    def _weighed(self, tenant: str, num_places: int) -> float:
        return num_places / self.setup.weights.get(tenant, 1.0)

    def victims(self, gone: list[Sequence], *, was_others: bool) -> None:
        """Only the last by class and arrival give way; nobody for whom nothing is in the way."""
        staying = self.sched.running
        first = min(queue_rank(seq) for seq in gone)
        for seq in staying:
            is_part = queue_rank(seq) == first and seq.group is not None
            assert queue_rank(seq) < first or is_part, "the wrong ones gave way"
        assert staying or was_others, "the first of all gave way, and nobody was in its way"


def in_line(record: Record, records: Iterable[Record]) -> list[Record]:
    """The others in its line."""
    return [one for one in records if one is not record and one.state is W and one.is_reserving is record.is_reserving]


def is_late(record: Record, now_s: float) -> bool:
    return not record.was_admitted and record.seq.deadline_s <= now_s


def queue_rank(seq: Sequence) -> tuple[int, int]:
    return seq.request.priority, seq.arrival


class Bills:
    """What each tenant owes: every token once, whatever became of it since, and nothing for what was found."""

    def __init__(self, sched: Scheduler, setup: Setup) -> None:
        self.sched, self.setup = sched, setup
        self.owed: Counter[str] = Counter()  # weighted tokens
        self.computed: Counter[str] = Counter()
        self._seen: dict[str, float] = {}
        self._paid: dict[tuple[str, int], int] = {}  # of members that were gathered

    def admitted(self, record: Record) -> None:
        record.paid = max(record.paid, record.seq.num_cached)

    def parted(self, record: Record) -> None:
        """A member: its leader has paid for what it has, and it itself for what it said before it was gathered."""
        key = (record.seq.stream_id, record.seq.choice)
        record.paid = max(record.seq.num_computed, self._paid.pop(key, 0))

    def gathered(self, record: Record) -> None:
        self._paid[record.seq.stream_id, record.seq.choice] = record.paid

    def arrived(self, record: Record, end: int) -> None:
        """The KV of its first tokens is here."""
        self.owed[record.seq.request.tenant] += self.price(record, end)
        record.paid = max(record.paid, end)

    def price(self, record: Record, end: int) -> float:
        start, given = record.paid, len(record.seq.request.token_ids)
        num_given = max(0, min(end, given) - start)
        return num_given + self.setup.line.output_weight * max(0, end - start - num_given)

    def never_fall(self) -> None:
        shares = self.sched.fair_share
        for tenant in "abc" if self.setup.has_classes else ("",):
            now = shares.counter(tenant)
            assert now >= self._seen.get(tenant, 0.0), "a tenant's counter fell"
            self._seen[tenant] = now

    def are_right(self, records: Iterable[Record]) -> None:
        """Within a block for each sequence that runs: it may be charged when that is full; to the token when none
        runs.
        """
        shares, slack, ahead = self.sched.fair_share, Counter(), Counter()
        for record in records:
            if record.state in (R, V, State.HELD):
                tenant = record.seq.request.tenant
                slack[tenant] += SIZE
                ahead[tenant] += self.price(record, record.seq.num_tokens)
        for tenant in "abc" if self.setup.has_classes else ("",):
            weight = self.setup.weights.get(tenant, 1.0)
            charged = shares.counter(tenant) * weight - shares._credits.get(tenant, 0.0)
            least = self.owed[tenant] - slack[tenant] * self.setup.line.output_weight
            assert charged >= least - 1e-6, f"{tenant} was charged {charged}, not {least}"
            most = self.owed[tenant] + ahead[tenant]
            assert not self.setup.counts_exactly or charged <= most + 1e-6, (
                f"{tenant} was charged {charged}, not {most}"
            )
            behind = self.computed[tenant] - shares.computed_tokens.get(tenant, 0)
            assert 0 <= behind <= slack[tenant], "what was computed for a tenant is miscounted"
