"""A random life of one engine's scheduler, held against a plain model of who may be where and what each block
contains.

Stands in for engine, transports, probes and the swap area's memory: they write into the blocks that they were given,
as late as they are allowed to, so that a block that changes hands too early shows as wrong content. Blocks and lines
are
few: nearly every step is tight. What may happen in a step is in scheduler_step.py, who goes before whom in
scheduler_order.py.
"""

import random
from array import array
from collections import Counter, deque
from dataclasses import dataclass, field

from kvrelay.engine.scheduling.fair_share import FairShare
from kvrelay.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from kvrelay.engine.scheduling.sequence import Sequence, State
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import SequenceRequest
from kvrelay.types import FinishReason
from tests.engine.scheduling.machine.groups import GroupLife
from tests.engine.scheduling.machine.model import RESERVED, Record, Rules, by_classes, key_after, keys_of
from tests.engine.scheduling.machine.order import Bills, Order
from tests.engine.scheduling.machine.setup import BUDGET, LONGEST, SIZE, WAITING, Requests, Setup, draw, token_of
from tests.engine.scheduling.machine.swap import Slab, Swaps

GARBAGE = -1

W, V, R, S, H, F = (
    State.WAITING, State.RECEIVING, State.RUNNING, State.SWAPPED, State.HELD, State.FINISHED,
)  # fmt: skip
Moves = frozenset[tuple[State, State]]
END: Moves = frozenset((state, F) for state in (W, V, R, S, H))  # of an abort; all others only where they are told


@dataclass
class World:
    """One scheduler with all around it, and what must be so at any time."""

    role: str
    rng: random.Random
    rules: Rules | None = None
    setup: Setup | None = None
    counts: Counter = field(default_factory=Counter)  # of what has happened

    def __post_init__(self) -> None:
        setup = self.setup = self.setup or draw(self.rng)
        self.rules = self.rules or (by_classes(setup.line.oldest_every) if setup.has_classes else Rules())
        self.pool = BlockPool(setup.num_blocks, block_size=SIZE, pin_share=0.3)
        self.content = [[GARBAGE] * SIZE for _ in range(setup.num_blocks)]
        self.swaps = Swaps(setup, self.content, self.rng)
        config = SchedulerConfig(
            BUDGET, setup.num_sequences, WAITING, setup.headroom, setup.only or "auto", token_bytes=Slab.block_bytes / 6
        )
        self.sched = Scheduler(
            self.pool, config, fair_share=FairShare(setup.line), speeds=self.swaps.speeds, area=self.swaps.area
        )
        self.order, self.bills = Order(self.sched, setup, self.rules), Bills(self.sched, setup)
        self.rows: set[Sequence] = set()  # of the batch that is being computed
        self.groups = GroupLife(self.sched, self.rng, self.end, self.rows.discard)
        self.requests = Requests(setup)
        self.seen: deque[list[int]] = deque(maxlen=6)  # tokens of those that ended last
        self.records: dict[str, Record] = {}
        self.quarantined: dict[int, array] = {}
        self.probe_blocks: list[list[int]] = []
        self.now_s, self.count = 0.0, 0

    # ---- sequences

    def pick(self, *states: State) -> Record | None:
        found = [record for record in self.records.values() if record.state in states]
        return self.rng.choice(found) if found else None

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """As the engine does it."""
        self.rows.discard(seq)
        self.sched.finish(seq, reason)

    def moved(self, allowed: Moves) -> None:
        """Every sequence is where it was, or went where this operation may bring it; members came, or a leader
        again.
        """
        for name, record in list(self.records.items()):
            state = record.seq.state
            if state is record.state:
                continue
            assert (record.state, state) in allowed, f"{name}: {record.state} -> {state}"
            self.counts[record.state, state] += 1
            record.state = state
            if state is F:
                assert not len(record.seq.blocks) and record.seq.finish_reason is not None
                assert record.seq.swapped is None and record.seq.load is None
                self.seen.append(record.seq.token_ids)
                del self.records[name]
            elif state is W:
                self.order.entered(record, self.records.values())
        if self.sched.groups:
            self.find_new()

    def find_new(self) -> None:
        """Members that have parted, and leaders of those that were gathered."""
        for name, seq in self.sched.sequences.items():
            if name in self.records and self.records[name].seq is seq:
                continue
            group = seq.group
            assert group is not None and seq.state is (W if seq is group.leader else R)
            salt, prompt = seq.request.salt, seq.request.num_prompt_tokens
            record = Record(seq, seq.state, False, keys_of(salt, seq.token_ids), was_admitted=True)
            if seq is group.leader:
                record.paid = prompt
                self.order.entered(record, self.records.values())
            else:
                self.bills.parted(record)
            self.records[name] = record

    # ---- blocks

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

    def scribble(self, blocks: "array | list[int]") -> None:
        for block in blocks:
            self.content[block] = [GARBAGE] * SIZE

    # ---- arrivals

    def arrive(self, longest: int = LONGEST, reserved: float | None = None, *, is_siege: bool = False) -> None:
        known = [*self.seen, *(record.seq.token_ids for record in self.records.values())]
        request = self.requests.draw(self.rng, known, longest, is_siege=is_siege)
        self.submit(request, RESERVED[self.role] if reserved is None else reserved)

    def submit(self, request: SequenceRequest, reserved: float) -> Record | None:
        sched, rng = self.sched, self.rng
        was_full = len(sched.waiting) + len(sched.reserving) >= WAITING
        refusal = sched.refusal(request)
        if refusal is not None:
            assert (refusal[0] != "full") or was_full
            self.counts[refusal[0]] += 1
            return None
        is_reservation = rng.random() < reserved
        if is_reservation:
            seq, hold = sched.add_reservation(request, self.now_s), False
            seq.prefill_tokens_per_s = rng.choice((0.0, 1e2, 1e6))
        else:
            hold = self.role == "prefill" or (self.role == "both" and rng.random() < 0.25)
            seq = sched.add(request, self.now_s, hold=hold, output_limit=1 if hold else None)
        keys = keys_of(request.salt, seq.token_ids)
        record = self.records[request.request_id] = Record(seq, W, is_reservation, keys, hold)
        self.order.displaced(self.records, seq, was_full=was_full)
        self.moved(frozenset({(W, F)}))
        self.order.entered(record, self.records.values())
        self.groups.begin(request)
        assert sched.refusal(request)[0] == "duplicate"
        return record

    # ---- transfers into this engine

    def grant(self) -> None:
        heads = self.order.heads(self.records.values())
        granted = self.sched.grant_reservations()
        assert not granted or not self.sched.swapped, "a reservation came before those that are swapped"
        came = [self.records[seq.request_id] for seq in granted]
        assert {record for record in self.records.values() if record.seq.state is V} >= set(came)
        self.order.admitted(came, heads, self.records.values())
        for record in came:
            self.bills.admitted(record)
            assert record.seq.state is V and len(record.seq.blocks) * SIZE >= record.seq.num_tokens
            self.holds(record, record.seq.num_held_blocks * SIZE)
        self.moved(frozenset({(W, V)}))

    def transfer_lands(self) -> None:
        """What was computed elsewhere is here, and the first token with it: of a group, each choice's."""
        record = self.pick(V)
        if record is None:
            assert self.sched.activate("nobody", [1]) is None
            return
        seq, group = record.seq, record.seq.group
        self.write(record, seq.num_held_blocks * SIZE, seq.num_tokens)
        self.bills.arrived(record, seq.num_tokens)
        token = token_of(seq.request.sampling.seed, seq.num_output)
        assert self.sched.activate(seq.request_id, [token] if group is None else []) is seq
        if group is None:
            self.said(record)
            self.moved(frozenset({(V, R)}))
            self.end_if_done(seq)
        elif group.search is not None:
            self.groups.begin_search(seq)
        else:
            for member in self.groups.take_over(seq):
                self.end_if_done(member)
        self.moved(frozenset({(R, F)} if group is None else {(V, F)}))

    def transfer_is_lost(self) -> None:
        """Its blocks may still be written, for a while."""
        record = self.pick(V)
        if record is None:
            return
        blocks = array("i", record.seq.blocks)
        key = self.sched.quarantine(record.seq, FinishReason.ERROR)
        assert key not in self.quarantined
        self.quarantined[key] = blocks[record.seq.num_held_blocks :]
        self.moved(frozenset({(V, F)}))

    def transport_lets_go(self) -> None:
        if self.quarantined:
            key = self.rng.choice(list(self.quarantined))
            self.scribble(self.quarantined.pop(key))
            self.sched.blocks.unquarantine(key)

    # ---- tokens

    def said(self, record: Record) -> None:
        record.keys.append(key_after(record.keys[-1], record.seq.token_ids[-1]))

    def end_if_done(self, seq: Sequence) -> None:
        stops = not self.rng.randrange(120)
        is_last = seq.num_output >= seq.max_output or seq.num_tokens >= self.setup.num_blocks * SIZE
        if is_last or stops:
            self.groups.choice_ends(seq)
            self.end(seq, FinishReason.STOP if stops else FinishReason.LENGTH)
            if (record := self.records.get(seq.request_id)) is not None:
                assert (seq.state is H) == record.hold, "what a transfer needs is held, nothing else is"

    # ---- the ends

    def transfer_out_ends(self) -> None:
        record = self.pick(H)
        if record is not None:
            self.holds(record, record.seq.num_computed)
            self.end(record.seq, FinishReason.LENGTH)
            self.moved(frozenset({(H, F)}))

    def abort(self) -> None:
        """At any time, in any state: a group goes with all its members."""
        record = self.pick(W, V, R, S, H)
        if record is None:
            return
        group = record.seq.group
        ending = [record.seq] if group is None or group.leader is not None else list(group.members)
        for seq in ending:
            self.end(seq, self.rng.choice((FinishReason.ABORT, FinishReason.ERROR)))
            assert seq.state is F
            self.sched.finish(seq, FinishReason.ABORT)  # again: nothing happens
        self.moved(END)
        assert group is None or group.request.request_id not in self.sched.groups

    def abort_choice(self) -> None:
        if self.setup.has_groups and self.groups.abort_choice():
            self.moved(END)

    # ---- others that take blocks, and time

    def take_probe_blocks(self) -> None:
        before = self.pool.counts()
        blocks = self.sched.blocks.take_probe_blocks(self.rng.randint(0, 5))
        assert not blocks or not (self.sched.waiting or self.sched.reserving or self.sched.swapped)
        assert self.pool.counts().cached == before.cached, "a cached block was used by a probe"
        self.probe_blocks.append(blocks)

    def return_probe_blocks(self) -> None:
        if self.probe_blocks:
            blocks = self.probe_blocks.pop(self.rng.randrange(len(self.probe_blocks)))
            self.scribble(blocks)
            self.sched.blocks.return_probe_blocks(blocks)

    def tick(self) -> None:
        self.now_s += self.rng.randrange(4)
        self.pool.tick(self.now_s)

    def end_pins(self) -> None:
        self.sched.blocks.pinning.end(f"s{self.rng.randrange(3)}" if self.rng.random() < 0.7 else "s")

    def rot(self) -> None:
        """Some of what was swapped out is not what was saved any more."""
        record = self.pick(S)
        if record is not None and record.seq.swapped.rows and self.setup.is_checked:
            self.swaps.slab.rot(self.rng.choice(record.seq.swapped.rows))

    # ---- always

    def adds_up(self) -> None:
        self.count += 1
        sched, counts = self.sched, self.pool.counts()
        assert counts.free + counts.used + counts.cached == self.setup.num_blocks
        sched.check_idle()
        in_state = {
            W: len(sched.waiting) + len(sched.reserving), V: len(sched.receiving), R: len(sched.running),
            S: len(sched.swapped), H: len(sched.held),
        }  # fmt: skip
        assert sum(in_state.values()) == len(sched.sequences) == len(self.records)
        for record in self.records.values():
            in_state[record.state] -= 1
        assert not any(in_state.values()), "a line has somebody in another state"
        seats = len(sched.running) + len(sched.receiving) + sched.queues.num_reserved
        assert seats <= self.setup.num_sequences, "more seats than there are"
        assert self.rows <= set(sched.running), "a row has nobody"
        self.bills.never_fall()
        if self.setup.has_groups:
            self.groups.add_up()
        if self.count % 8 == 0:
            self.looks_closer()

    def looks_closer(self) -> None:
        sched = self.sched
        sched.check()
        self.bills.are_right(self.records.values())
        assert [seq.arrival for seq in sched.swapped] == sorted(seq.arrival for seq in sched.swapped)
        held = [set(blocks) for blocks in self.probe_blocks] + [
            set(sched.blocks.quarantined[key]) for key in self.quarantined
        ]
        assert sched.blocks.probe_blocks == {block for blocks in self.probe_blocks for block in blocks}
        for record in self.records.values():
            fresh = set(record.seq.blocks[record.seq.num_held_blocks :]) if record.state is V else set()
            assert not any(fresh & blocks for blocks in held), "a block has two writers"

    def nothing_is_left(self) -> None:
        sched, counts = self.sched, self.pool.counts()
        self.looks_closer()
        assert not (sched.sequences or sched.waiting or sched.reserving or sched.running or sched.receiving)
        assert not (sched.held or sched.swapped or sched.groups or sched.preemption.returned or sched.rejected)
        assert not (
            sched.blocks.quarantined
            or sched.blocks.probe_blocks
            or sched.has_work
            or sched.queues.queued_tokens
            or self.rows
        )
        assert not sched.fair_share.num_waiting and sched.queues.next_deadline_s() == float("inf")
        assert counts.used == 0 and counts.free + counts.cached == self.setup.num_blocks
        self.swaps.nothing_is_left()
        self.pool.reset_cache()
        assert self.pool.counts().free == self.setup.num_blocks
