"""A random life of one engine's scheduler, held against a plain model of who may be where and what each block contains.

Stands in for engine, transports and probes: they write into the blocks that they were given, as late as they are allowed to,
so that a block that changes hands too early shows as wrong content. Blocks and lines are few: nearly every step is tight.
"""

import random
from array import array
from collections import deque
from dataclasses import dataclass, field

from kvrelay.engine.scheduler import Scheduled, Scheduler, SchedulerLimits, StepPlan
from kvrelay.engine.sequence import Sequence, State
from kvrelay.hashing import block_hashes
from kvrelay.kvcache.block_pool import BlockPool
from kvrelay.types import FinishReason
from kvrelay.wire import KvHints, Sampling, SequenceRequest
from tests.spec.scheduler_model import KINDS, RESERVED, Record, Rules, key_after, keys_of

SIZE = 6  # tokens of a block: long enough for a beginning that is worth copying
BLOCKS = 11
BUDGET, WAITING = 12, 6
SEATS = (2, 4)
LONGEST = 36  # tokens of a prompt
ENDS = (FinishReason.STOP, FinishReason.LENGTH)
GARBAGE = -1

W, V, R, H, F = State.WAITING, State.RECEIVING, State.RUNNING, State.HELD, State.FINISHED
Moves = frozenset[tuple[State, State]]
NOTHING: Moves = frozenset()
END: Moves = frozenset({(W, F), (V, F), (R, F), (H, F)})  # of an abort; all others only where they are told


@dataclass
class Life:
    """One scheduler from empty to empty."""

    role: str
    rng: random.Random
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        self.pool = BlockPool(BLOCKS, block_size=SIZE, pin_share=0.3)
        self.num_seats = self.rng.choice(SEATS)
        self.sched = Scheduler(self.pool, SIZE, SchedulerLimits(BUDGET, self.num_seats, WAITING))
        self.seen: deque[list[int]] = deque(maxlen=6)  # tokens of those that ended last
        self.records: dict[str, Record] = {}
        self.content = [[GARBAGE] * SIZE for _ in range(BLOCKS)]
        self.quarantined: dict[int, array] = {}
        self.lent: list[list[int]] = []
        self.now_s = 0.0
        self.count = 0
        self.num_arrived = 0
        self.ended: dict[str, int] = {}  # by reason

    # ---- one operation

    def step(self) -> None:
        """Something happens."""
        kind = self.rng.choices(*KINDS[self.role])[0]
        getattr(self, kind)()
        self.adds_up()

    def moved(self, allowed: Moves) -> None:
        """Every sequence is where it was, or went where this operation may bring it."""
        for record in list(self.records.values()):
            state = record.seq.state
            if state is record.state:
                continue
            assert (record.state, state) in allowed, f"{record.seq.request_id}: {record.state} -> {state}"
            record.state = state
            if state is F:
                assert not len(record.seq.blocks) and record.seq.finish_reason is not None
                self.seen.append(record.seq.token_ids)
                self.ended[str(record.seq.finish_reason)] = self.ended.get(str(record.seq.finish_reason), 0) + 1
                del self.records[record.seq.request_id]

    def pick(self, *states: State) -> Record | None:
        found = [record for record in self.records.values() if record.state in states]
        return self.rng.choice(found) if found else None

    # ---- arrivals

    def arrive(self, longest: int = LONGEST, reserved: float | None = None) -> None:
        rng = self.rng
        self.num_arrived += 1
        ids = [rng.randrange(2) for _ in range(rng.randint(1, longest))]
        known = [*self.seen, *(record.seq.token_ids for record in self.records.values())]
        if known and rng.random() < 0.6:  # goes on from another's beginning
            ids = [*(same := rng.choice(known)[: rng.randint(1, longest)]), *ids[: longest - len(same)]]
        num_prompt = rng.randint(max(1, len(ids) - 3), len(ids))  # the rest is output: a stream that goes on here
        salt = rng.choice(("", "", "b"))
        hints = KvHints(
            keep=rng.random() < 0.9, priority=rng.choice((0, 0, 1)), pin_s=rng.choice((0.0, 0.0, 0.0, 4.0)),
            session=rng.choice(("", "s")),
        )  # fmt: skip
        request = SequenceRequest(
            request_id=f"r{self.num_arrived}", token_ids=ids, num_prompt_tokens=num_prompt, salt=salt, hints=hints,
            block_hashes=list(block_hashes(ids, SIZE, salt)) if rng.random() < 0.8 else [],
            sampling=Sampling(
                max_tokens=len(ids) - num_prompt + rng.choice((1, 6, 18, 30)), prompt_logprobs=0 if rng.random() < 0.1 else None
            ),
        )  # fmt: skip
        self.submit(request, RESERVED[self.role] if reserved is None else reserved)

    def submit(self, request: SequenceRequest, reserved: float) -> Record | None:
        sched, in_line = self.sched, len(self.sched.waiting) + len(self.sched.reserving)
        refusal = sched.refusal(request)
        if in_line >= WAITING:
            assert refusal is not None and refusal[0] in ("full", "too_long")
        if refusal is not None:
            return None
        is_reservation = self.rng.random() < reserved
        if is_reservation:
            seq, hold = sched.add_reservation(request, self.now_s), False
        else:
            hold = self.role == "prefill" or (self.role == "both" and self.rng.random() < 0.4)
            seq = sched.add(request, self.now_s, hold=hold, output_limit=1 if hold else None)
        record = self.records[request.request_id] = Record(
            seq, W, is_reservation, keys_of(request.salt, seq.token_ids), hold
        )
        assert sched.refusal(request)[0] == "duplicate"
        return record

    # ---- transfers into this engine

    def grant(self) -> None:
        before = set(self.sched.reserving)
        granted = self.sched.grant_reservations()
        assert set(granted) == before - set(self.sched.reserving)
        for seq in granted:
            record = self.records[seq.request_id]
            assert seq.state is V and len(seq.blocks) * SIZE >= seq.num_tokens
            self.admitted(record)
            self.holds(record, seq.num_held_blocks * SIZE)
        self.moved(frozenset({(W, V)}))

    def transfer_lands(self) -> None:
        """What was computed elsewhere is here, and the first token with it."""
        record = self.pick(V)
        if record is None:
            assert self.sched.activate("nobody", [1]) is None
            return
        seq = record.seq
        self.write(record, seq.num_held_blocks * SIZE, seq.num_tokens)
        assert self.sched.activate(seq.request_id, [self.rng.randrange(2)]) is seq
        self.sampled(record)
        self.moved(frozenset({(V, R)}))
        self.end_if_done(record)

    def transfer_is_lost(self) -> None:
        """Its blocks may still be written, for a while."""
        record = self.pick(V)
        if record is None:
            return
        blocks = array("i", record.seq.blocks)
        key = self.sched.quarantine(record.seq, FinishReason.ERROR)
        assert key not in self.quarantined
        self.quarantined[key] = blocks[record.seq.num_held_blocks :]
        self.moved(END)

    def transport_lets_go(self) -> None:
        if self.quarantined:
            key = self.rng.choice(list(self.quarantined))
            self.scribble(self.quarantined.pop(key))
            self.sched.unquarantine(key)

    def scribble(self, blocks: "array | list[int]") -> None:
        for block in blocks:
            self.content[block] = [GARBAGE] * SIZE

    # ---- steps

    def compute(self) -> None:
        """A step of the engine: schedule, copy, write, sample, end what is done."""
        running = {record.seq: record.seq.num_uncomputed for record in self.records.values() if record.state is R}
        admitted = [record for record in self.records.values() if record.state is W]
        computed = {record.seq: record.seq.num_computed for record in self.records.values()}
        plan = self.sched.schedule()
        self.check_plan(plan, running, computed)
        for record in sorted(admitted, key=lambda record: record.seq.arrival):
            if record.seq.state is R:
                self.admitted(record)
        self.moved(frozenset({(W, R), *(((R, W),) if plan.preempted else ())}))
        for copy in plan.copies:
            self.content[copy.target] = list(self.content[copy.source])
        self.sched.copied()
        work = self.rewind_one(plan)
        for item in work:
            self.run(item)
        self.moved(frozenset({(R, H), (R, F)}))

    def check_plan(self, plan: StepPlan, running: dict[Sequence, int], computed: dict[Sequence, int]) -> None:
        work = {item.seq: item for item in plan.work}
        assert len(work) == len(plan.work), "a sequence is scheduled twice"
        assert plan.num_tokens == sum(item.num_tokens for item in plan.work) <= BUDGET, "over the budget"
        assert all(item.num_tokens == 1 for item in plan.work[: plan.num_single])
        assert all(item.num_tokens > 1 for item in plan.work[plan.num_single :])
        assert len(self.sched.running) + len(self.sched.receiving) <= self.num_seats, "more seats than there are"
        for seq in plan.preempted:
            assert seq.state is W and not len(seq.blocks) and seq not in work and seq in running
        if plan.preempted:
            assert self.rules.are_victims(list(plan.preempted), self.sched.running), "the wrong ones gave way"
        for item in plan.work:
            assert item.seq.state is R and item.start == item.seq.num_computed
            assert item.seq not in running or item.start == computed[item.seq]
        for seq, uncomputed in running.items():
            assert seq in work or seq in plan.preempted or uncomputed > 1, "a decoding sequence was left out"

    def rewind_one(self, plan: StepPlan) -> list[Scheduled]:
        """Now and then a sequence has to begin anew before it is computed: what was brought up for it is corrupt."""
        work = list(plan.work)
        if work and not self.rng.randrange(30):
            bad = self.rng.choice(work)
            self.sched.rewind(bad.seq)
            self.moved(frozenset({(R, W)}))
            work.remove(bad)
        return work

    def run(self, item: Scheduled) -> None:
        record, samples = self.records[item.seq.request_id], item.samples
        self.holds(record, item.start)
        self.write(record, item.start, item.start + item.num_tokens)
        self.sched.advance(item)
        if samples:
            item.seq.token_ids.append(self.rng.randrange(2))
            self.sampled(record)
            self.end_if_done(record)

    def holds(self, record: Record, num_tokens: int) -> None:
        """Its blocks contain what its first tokens stand for."""
        for index in range(-(-num_tokens // SIZE)):
            wanted = record.keys[index * SIZE : min((index + 1) * SIZE, num_tokens)]
            found = self.content[record.seq.blocks[index]][: len(wanted)]
            assert found == wanted, f"{record.seq.request_id}: block {index} holds something else"

    def write(self, record: Record, start: int, end: int) -> None:
        for block in set(record.seq.blocks[start // SIZE : -(-end // SIZE)]):
            assert self.pool.num_holders(block) == 1, "written while others hold it"
        for position in range(start, end):
            self.content[record.seq.blocks[position // SIZE]][position % SIZE] = record.keys[position]

    def sampled(self, record: Record) -> None:
        record.outputs += 1
        record.keys.append(key_after(record.keys[-1], record.seq.token_ids[-1]))

    def end_if_done(self, record: Record) -> None:
        seq = record.seq
        stops = not self.rng.randrange(40)
        if seq.num_output >= seq.max_output or stops or seq.num_tokens >= BLOCKS * SIZE:
            self.sched.finish(seq, FinishReason.STOP if stops else FinishReason.LENGTH)
            assert (seq.state is H) == record.hold, "what a transfer needs is held, nothing else is"
            self.moved(frozenset({(R, H), (R, F)}))

    def admitted(self, record: Record) -> None:
        """It came in: whoever of its line came before it and is still there was overtaken."""
        if record.was_admitted:
            return
        record.was_admitted = True
        for other in self.records.values():
            is_behind = other.state is W and other.seq.state is W and not other.was_admitted
            if is_behind and other.is_reservation == record.is_reservation and other.seq.arrival < record.seq.arrival:
                other.num_overtaken += 1
                most = self.rules.most_overtakers(other)
                assert other.num_overtaken <= most, f"{other.seq.request_id} is overtaken more than {most} times"

    # ---- the ends

    def transfer_out_ends(self) -> None:
        record = self.pick(H)
        if record is not None:
            self.holds(record, record.seq.num_computed)
            self.sched.finish(record.seq, FinishReason.LENGTH)
            self.moved(frozenset({(H, F)}))

    def abort(self) -> None:
        """At any time, in any state."""
        record = self.pick(W, V, R, H)
        if record is not None:
            self.sched.finish(record.seq, self.rng.choice((FinishReason.ABORT, FinishReason.ERROR)))
            assert record.seq.state is F
            self.sched.finish(record.seq, FinishReason.ABORT)  # again: nothing happens
            self.moved(END)

    # ---- others that take blocks

    def lend(self) -> None:
        before = self.pool.counts()
        blocks = self.sched.lend(self.rng.randint(0, 5))
        assert not blocks or not (self.sched.waiting or self.sched.reserving)
        assert self.pool.counts().cached == before.cached, "something cached was lent"
        self.lent.append(blocks)

    def take_back(self) -> None:
        if self.lent:
            blocks = self.lent.pop(self.rng.randrange(len(self.lent)))
            self.scribble(blocks)
            self.sched.take_back(blocks)

    def tick(self) -> None:
        self.now_s += self.rng.randrange(4)
        self.pool.tick(self.now_s)

    def end_pins(self) -> None:
        self.sched.pinning.end(f"s{self.rng.randrange(3)}" if self.rng.random() < 0.7 else "s")

    # ---- bounds

    def others_behave(self) -> None:
        """Transfers end, what is held or lent comes back."""
        while any(record.state is H for record in self.records.values()):
            self.transfer_out_ends()
        while self.quarantined:
            self.transport_lets_go()
        while self.lent:
            self.take_back()
        while any(record.state is V for record in self.records.values()):
            self.transfer_lands()

    def siege(self) -> None:
        """Others arrive in the other line in every step; still the last one in line comes in within the bound."""
        waiting = [record for record in self.records.values() if record.state is W and not record.was_admitted]
        if not waiting:
            return
        last = max(waiting, key=lambda record: record.seq.arrival)
        reserved = RESERVED[self.role] if self.role != "both" else float(not last.is_reservation)
        most = self.rules.steps_in_line(list(self.records.values()))
        for _ in range(most):
            self.others_behave()
            self.arrive(SIZE, reserved)
            self.arrive(SIZE, reserved)
            self.grant()
            self.compute()
            self.adds_up()
            if last.was_admitted:
                return
        raise AssertionError(f"{last.seq.request_id} is in line after {most} steps")

    def all_end(self) -> None:
        """Nobody arrives any more: everything ends within the bound, and nothing is left."""
        most = self.rules.steps_to_end(list(self.records.values()))
        for _ in range(most):
            if not self.records:
                break
            self.others_behave()
            self.grant()
            self.compute()
            self.adds_up()
        self.others_behave()
        assert not self.records, f"{sorted(self.records)} are here after {most} steps"
        self.nothing_is_left()

    def nothing_is_left(self) -> None:
        sched, counts = self.sched, self.pool.counts()
        sched.check()
        assert not (
            sched.sequences or sched.waiting or sched.reserving or sched.running or sched.receiving or sched.held
        )
        assert not (sched.quarantined or sched.lent or sched.has_work or sched.queued_tokens)
        assert counts.used == 0 and counts.free + counts.cached == BLOCKS
        self.pool.reset_cache()
        assert self.pool.counts().free == BLOCKS

    # ---- always

    def adds_up(self) -> None:
        self.count += 1
        sched, counts = self.sched, self.pool.counts()
        assert counts.free + counts.used + counts.cached == BLOCKS
        lines = (sched.waiting, sched.reserving, sched.running, sched.receiving, sched.held)
        assert sum(map(len, lines)) == len(sched.sequences) == len(self.records)
        in_state = {
            W: len(sched.waiting) + len(sched.reserving),
            V: len(sched.receiving),
            R: len(sched.running),
            H: len(sched.held),
        }
        for record in self.records.values():
            in_state[record.state] -= 1
        assert not any(in_state.values()), "a line has somebody in another state"
        if self.count % 8 == 0:
            sched.check()
            held = [set(blocks) for blocks in self.lent] + [set(sched.quarantined[key]) for key in self.quarantined]
            assert sched.lent == {block for blocks in self.lent for block in blocks}
            for record in self.records.values():
                for blocks in held:
                    fresh = set(record.seq.blocks[record.seq.num_held_blocks :]) if record.state is V else set()
                    assert not fresh & blocks, "a block has two writers"
