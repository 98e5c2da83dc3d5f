"""Steps of a random life: what the engine does with a plan, what a plan may be, and the bounds of time."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.preempt import MAX_RETURNS, PreemptionMode
from kvrelay.engine.scheduling.sequence import Scheduled, Sequence
from kvrelay.hashing import block_hashes
from tests.engine.scheduling.machine.life import F, H, R, S, V, W, World
from tests.engine.scheduling.machine.model import KINDS, ROLES, Record, key_after
from tests.engine.scheduling.machine.setup import BUDGET, SIZE, Setup, draw, token_of


@dataclass
class Life(World):
    """One scheduler from empty to empty."""

    best: dict[tuple[str, int], int] = field(default_factory=dict)  # tokens computed, of each choice
    num_idle: int = 0  # steps since one was computed for the first time

    def step(self) -> None:
        """Something happens."""
        kind = self.rng.choices(*KINDS[self.role])[0]
        getattr(self, kind)()
        self.adds_up()

    # ---- a step of the engine

    def compute(self) -> None:
        """Schedule, copy, write, sample, end what is done."""
        self.order.rejected(self.records, self.now_s)
        self.moved(frozenset({(W, F)}))
        self.swaps.begin_step()
        heads = self.order.heads(self.records.values())
        before = {record.seq: (record.seq.num_computed, record.seq.num_uncomputed) for record in self.running()}
        counts = self.pool.counts()  # what is cached before a named block that is held cannot go either
        is_held = counts.pinned > 0 or self.pool.num_available < counts.free + counts.cached
        is_ahead = self.may_be_planned_ahead()
        plan = self.sched.schedule()
        assert not (is_ahead and plan.preempted), "a step that may be planned ahead pre-empts"
        self.counts["planned ahead"] += is_ahead and bool(plan.work)
        self.check_plan(plan, before)
        self.check_preempted(plan, is_held=is_held)
        self.note_admitted(plan, heads)
        self.rows.difference_update(plan.preempted)
        self.moved(frozenset({(W, R), (S, R), (S, W), *self.ways_out(plan)}))
        self.take_handed_back()
        work = self.verified(plan)
        self.grows(work, is_disturbed=len(work) < len(plan.work))
        going = {item.seq for item in work}
        for copy in plan.copies:
            if copy.seq in going:
                self.content[copy.target] = list(self.content[copy.source])
        self.sched.blocks.copied()
        self.swaps.arrive()
        for item in work:
            item.seq.end_load()
        self.run(work)
        self.moved(frozenset({(R, H), (R, F)}))
        if self.setup.has_groups:
            for record in self.records.values():  # a search appends to its beams itself
                while len(record.keys) < record.seq.num_tokens:
                    record.keys.append(key_after(record.keys[-1], record.seq.token_ids[len(record.keys)]))

    def may_be_planned_ahead(self) -> bool:
        return self.sched.may_look_ahead()

    def running(self) -> list[Record]:
        return [record for record in self.records.values() if record.state is R]

    def note_admitted(self, plan: StepPlan, heads: list[Record]) -> None:
        """Who left the waiting line for the batch; a swapped one that has to begin anew may have come before its
        head.
        """
        records, preempted = self.records.values(), set(plan.preempted)
        came = [
            one
            for one in records
            if one.state is W and (one.seq.state is R or (one.seq in preempted and not is_gathered(one.seq)))
        ]
        has_new_head = any(one.state is S and one.seq.state is not S and one.seq.load is None for one in records)
        self.order.admitted(came, [] if has_new_head else heads, records)
        for record in came:
            self.bills.admitted(record)
            if record.seq.state is W:
                self.order.entered(record, records)

    def ways_out(self, plan: StepPlan) -> set:
        """Where those went that gave way: members that were gathered and who is handed back end here."""
        if not plan.preempted:
            return set()
        for record in list(self.records.values()):
            seq = record.seq
            if seq.state is F:
                assert is_gathered(seq) or seq in self.sched.preemption.returned, (
                    f"{seq.request_id} ended in the middle"
                )
                if is_gathered(seq):
                    self.counts["gathered"] += 1
                    self.bills.gathered(record)
        return {(R, W), (R, S), (R, F), (S, F), (W, F), (W, S)}

    def check_plan(self, plan: StepPlan, before: dict[Sequence, tuple[int, int]]) -> None:
        work = {item.seq: item for item in plan.work}
        assert len(work) == len(plan.work), "a sequence is scheduled twice"
        assert plan.num_tokens == sum(item.num_tokens for item in plan.work) <= BUDGET, "over the budget"
        assert all(item.num_tokens == 1 for item in plan.work[: plan.num_single])
        assert all(item.num_tokens > 1 for item in plan.work[plan.num_single :])
        for item in plan.work:
            seq = item.seq
            assert seq.state is R and item.start == seq.num_computed and item.num_tokens > 0
            assert seq not in before or item.start == before[seq][0]
            assert item.start + item.num_tokens <= seq.num_tokens
        for seq, (_, uncomputed) in before.items():
            assert seq in work or seq.state is not R or uncomputed != 1, "a decoding sequence was left out"
        back = [seq.arrival for seq in work if seq.load is not None]
        assert max(back, default=0) <= min((seq.arrival for seq in self.sched.swapped), default=max(back, default=0))
        assert not self.sched.swapped or all(seq in before or seq.load is not None for seq in work), (
            "a new one came before those that are swapped"
        )

    def check_preempted(self, plan: StepPlan, *, is_held: bool) -> None:
        """The right ones gave way, whole groups of them, and hold nothing."""
        if not plan.preempted:
            return
        gone, sched = set(plan.preempted), self.sched
        work = {item.seq for item in plan.work}
        for seq in gone:
            assert seq.state in (W, S, F) and not len(seq.blocks) and seq not in work
            assert seq.state is not S or seq.swapped is not None
        is_held = is_held or bool(sched.receiving or sched.held or sched.blocks.quarantined or any(self.probe_blocks))
        self.order.victims(list(gone), was_others=is_held)
        for group in {seq.group for seq in gone if seq.group is not None}:
            staying = [seq for seq in sched.running if seq.group is group]
            is_alone = group.search is None and all(seq.group is group for seq in sched.running) and not sched.receiving
            assert not staying or is_alone, "a part of a group gave way"

    def take_handed_back(self) -> None:
        """The ingress has a prefill worker compute them again."""
        for seq in self.sched.preemption.returned:
            request = seq.request
            assert seq.prefill_tokens_per_s > 0 and request.num_prefill_returns < MAX_RETURNS and not seq.hold
            assert seq.num_tokens > len(request.token_ids), "handed back without a token more"
            self.counts["handed back"] += 1
            if self.rng.random() < 0.8:
                again = msgspec.structs.replace(
                    request,
                    token_ids=list(seq.token_ids),
                    num_prefill_returns=request.num_prefill_returns + 1,
                    block_hashes=list(block_hashes(seq.token_ids, SIZE, request.salt)),
                )
                self.sched.preemption.returned = [one for one in self.sched.preemption.returned if one is not seq]
                self.submit(again, 1.0)
        self.sched.preemption.take_returned()

    def verified(self, plan: StepPlan) -> list[Scheduled]:
        """Without those that begin anew, since what was brought up for them, or back, is corrupt."""
        self.swaps.verify()
        bad = {item.seq for item in plan.work if item.seq.load is not None and not item.seq.load.wait_verified()}
        self.counts["corrupt"] += len(bad)
        plain = [item.seq for item in plan.work if item.seq.group is None]
        if plain and not self.rng.randrange(30):
            bad.add(self.rng.choice(plain))
        for seq in sorted(bad, key=lambda seq: (seq.arrival, seq.choice)):
            self.swaps.arrive()
            self.rows.discard(seq)
            self.sched.preemption.rewind(seq)
        self.moved(frozenset({(R, W)} if bad else ()))
        return [item for item in plan.work if item.seq not in bad]

    def run(self, work: list[Scheduled]) -> None:
        """Compute, then sample."""
        seqs = [item.seq for item in work if item.samples]
        for item in work:
            record = self.records[item.seq.request_id]
            end = item.start + item.num_tokens
            self.rows.add(item.seq)
            self.holds(record, item.start)
            self.write(record, item.start, end)
            self.sched.advance(item)
            self.bills.arrived(record, end)
            self.bills.computed[item.seq.request.tenant] += item.num_tokens
        for _, seq in self.groups.steps.rows_of(seqs):
            self.append(seq)
        if self.setup.has_groups:
            leaders = [seq for seq in seqs if seq.group is not None and seq is seq.group.leader]
            self.groups.advance_beams(seqs)
            self.groups.steps.settle(leaders)

    def append(self, seq: Sequence) -> None:
        token = token_of(seq.request.sampling.seed, seq.num_output)
        if seq.group is not None:
            self.groups.drawn(seq, token)
        seq.token_ids.append(token)
        if (record := self.records.get(seq.request_id)) is not None:
            self.said(record)
        self.end_if_done(seq)

    def grows(self, work: list[Scheduled], *, is_disturbed: bool) -> None:
        """The measure of progress: what is computed for the first time. Without it, only dropped prefixes are, and
        not for long.
        """
        has_grown = False
        for item in work:
            key, end = (item.seq.stream_id, item.seq.choice), item.start + item.num_tokens
            if end > self.best.get(key, 0):
                self.best[key], has_grown = end, True
        self.num_idle = 0 if has_grown or is_disturbed else self.num_idle + bool(work)
        most = sum(record.seq.num_tokens for record in self.records.values())
        assert not work or self.num_idle <= most, "nothing but dropped prefixes is computed"

    # ---- pre-empted from outside

    def preempt(self) -> None:
        """Some are taken off the batch between two steps, all in the same way."""
        chosen = [record for record in self.running() if record.seq.group is None][: self.rng.randint(1, 4)]
        if not chosen:
            return
        seqs = tuple(record.seq for record in chosen)
        self.rows.difference_update(seqs)
        way = self.sched.preempt_group(seqs)
        state = {PreemptionMode.SWAP: S, PreemptionMode.RECOMPUTE: W, PreemptionMode.RETURN_TO_PREFILL: F}[way]
        assert {seq.state for seq in seqs} == {state}
        self.moved(frozenset({(R, state)}))
        self.take_handed_back()

    # ---- bounds

    def others_behave(self) -> None:
        """Transfers end, held blocks and probe blocks come back."""
        while any(record.state is H for record in self.records.values()):
            self.transfer_out_ends()
        while self.quarantined:
            self.transport_lets_go()
        while self.probe_blocks:
            self.return_probe_blocks()
        while any(record.state is V for record in self.records.values()):
            self.transfer_lands()

    def siege(self) -> None:
        """Others arrive in every step, where they may go first; still the last one in line comes in within the
        bound.
        """
        waiting = [record for record in self.records.values() if record.state is W and not record.was_admitted]
        if not waiting:
            return
        last = max(waiting, key=lambda record: record.seq.arrival)
        most = self.rules.steps_in_line(list(self.records.values()))
        for count in range(most):
            self.others_behave()
            for number in (0, 1):
                in_other_line = number == 0 or not self.setup.has_classes
                reserved = float(last.is_reservation is not in_other_line) if self.role != "prefill" else 0.0
                self.arrive(SIZE, reserved, is_siege=True)
            self.grant()
            self.compute()
            self.adds_up()
            if last.was_admitted or last.state is F:
                self.counts["longest siege, %"] = max(self.counts["longest siege, %"], 100 * (count + 1) // most)
                return
        raise AssertionError(f"{last.seq.request_id} is in line after {most} steps")

    def all_end(self) -> None:
        """Nobody arrives any more: everything ends within the bound, and nothing is left."""
        most = self.rules.steps_to_end(list(self.records.values()))
        for count in range(most):
            if not self.records:
                self.counts["longest end, %"] = max(self.counts["longest end, %"], 100 * count // most)
                break
            self.others_behave()
            self.grant()
            self.compute()
            self.adds_up()
        self.others_behave()
        assert not self.records, f"{sorted(self.records)} are here after {most} steps"
        self.nothing_is_left()


def is_gathered(seq: Sequence) -> bool:
    """Whether it was a member that has ended so that its group can come back as one."""
    return seq.state is F and seq.group is not None and seq is not seq.group.leader


def lives(*, most_steps: int, wanted: Callable[[Setup], object] = bool) -> Counter:
    """One life after the other, of each role in turn, without Hypothesis, only in such surroundings; returns what
    happened.
    """
    counts: Counter = Counter()
    seed = 0
    while counts["steps"] < most_steps:
        rng, role, seed = random.Random(seed), ROLES[seed % len(ROLES)], seed + 1
        if not wanted(setup := draw(rng)):
            continue
        life = Life(role, rng, setup=setup, counts=counts)
        for _ in range(300):
            life.step()
        life.all_end()
        counts["steps"] += life.count
    return counts
