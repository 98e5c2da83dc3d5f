"""One sequence in one engine: its tokens, its blocks, and the states that it may be in; and groups of them. Pure."""

import enum
import math
from array import array
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvrelay.engine.scheduling.beam import BeamCandidates, BeamRules, BeamSearch
from kvrelay.hashing import HASH_BYTES, HashChain, pack_tokens, root_hash
from kvrelay.kvcache.memory.jobs import Load
from kvrelay.kvcache.memory.swap import SwappedBlocks
from kvrelay.kvcache.pool.ledger import BlockIds
from kvrelay.plane.messages import SequenceRequest, TokenLogprob
from kvrelay.types import FinishReason


class State(enum.StrEnum):
    WAITING = "waiting"  # queued; holds no blocks
    RECEIVING = "receiving"  # decode: blocks reserved, KV on its way
    RUNNING = "running"  # in the batch
    SWAPPED = "swapped"  # pre-empted; its KV is in host memory, holds no blocks
    HELD = "held"  # prefill: done; its blocks are read by a transfer
    FINISHED = "finished"  # holds nothing


_LEGAL = {
    State.WAITING: {State.RUNNING, State.RECEIVING, State.FINISHED},
    State.RECEIVING: {State.RUNNING, State.FINISHED},
    State.RUNNING: {State.WAITING, State.SWAPPED, State.HELD, State.FINISHED},
    State.SWAPPED: {State.RUNNING, State.WAITING, State.FINISHED},
    State.HELD: {State.FINISHED},
    State.FINISHED: set(),
}


class SequenceConstraint(Protocol):
    """As far as it matters here: see engine/execution/constraints.py."""

    def fresh(self) -> "SequenceConstraint":
        """For another sequence of the same request."""

    def cut(self, output: list[int], drafts: list[int]) -> list[int]:
        """The drafts behind the whole output so far, up to the first that may not follow."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's token stream here. Owned and changed by the scheduler, but for what is marked as the runner's or
    the engine's.

    It has 41 attributes: all per-sequence state in one record, read by every part of a step.
    `num_computed` tokens have their KV in `blocks`; the rest of `token_ids` is still to compute.
    """

    request: SequenceRequest
    block_size: int
    arrival: int  # order of arrival in this engine
    hold: bool = False  # keep the blocks after the first token, for a transfer
    output_limit: int | None = None  # stop here even if the request wants more (a prefill worker: 1)
    token_ids: list[int] = field(default_factory=list)
    blocks: BlockIds = field(default_factory=lambda: array("i"))
    chain: HashChain = field(init=False)  # one hash for every tokens_per_hash tokens
    num_computed: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache
    num_hashed_blocks: int = 0  # blocks already offered to the prefix cache
    is_pinned: bool = field(init=False)  # its prompt's blocks have been, or the request does not ask for it
    num_held_blocks: int = 0  # decode: prompt blocks that were here before the transfer
    state: State = State.WAITING
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    arrived_s: float = 0.0
    scheduled_s: float | None = None
    num_chunks: int = 0
    row: int = -1  # the runner's: in its block tables; below zero: none
    num_tabled_blocks: int = 0  # the runner's: that are in that row
    num_given: int = field(init=False)  # tokens that came with the request
    writable_until: int = 0  # up to this token the block that is written next is there, and held by no other sequence
    plain_until: int = 0  # the engine's: with fewer tokens, what is not in `stop_ids` is just appended and sent
    stop_ids: frozenset[int] = frozenset()  # the engine's, while `plain_until` says something
    has_begun: bool = False  # it was admitted once; after a preemption it is queued again
    queue_rank: tuple[float, ...] = ()  # its rank when it was admitted: see waiting_queue.py
    overdue_tokens: int = (
        0  # uncached ones, when it was put behind those that can still have a first token in time; 0: it is not
    )
    num_passed: int = 0  # sequences that were begun while its prompt, which had begun, waited for its turn
    num_paid: int = 0  # tokens that its tenant need not pay for any more: see fair_share.py
    num_charged: int = 0  # tokens that its tenant has paid for, ahead too
    load: Load | None = None  # blocks that are being brought up from below the pool, or back
    num_loaded_blocks: int = 0  # of its prompt, brought up so
    swapped: SwappedBlocks | None = None  # its KV while it is SWAPPED
    prefill_tokens_per_s: float = 0.0  # of the worker that computed its prompt; 0: this one
    drafter: object = None  # where its drafts come from: see speculation.py
    constraint: SequenceConstraint | None = None  # which tokens may follow: its state is of its output so far
    group: "SequenceGroup | None" = None  # whose leader or member it is
    choice: int = 0  # a member's; of a beam search, its rank
    _block_chain: HashChain = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = self.request.token_ids.copy()
        self.num_given = len(self.token_ids)
        self.is_pinned = self.request.hints.pin_s <= 0 or not self.request.hints.keep
        self.chain = HashChain(root_hash(self.request.salt), self.request.block_hashes)
        self._block_chain = self.chain if self.hash_step == self.block_size else HashChain(self.chain.root)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def deadline_s(self) -> float:
        """When its first token is to be there, by the clock of `arrived_s`; infinite: no matter when."""
        limit_s = self.request.deadline_s
        return math.inf if limit_s is None else self.arrived_s + limit_s

    @property
    def stream_id(self) -> str:
        """The request that its tokens are for."""
        return self.request.request_id if self.group is None else self.group.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def max_output(self) -> int:
        limit = self.request.sampling.max_tokens
        if self.output_limit is None:
            return limit
        return min(limit, self.request.num_output_tokens + self.output_limit)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks needed to hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def hash_step(self) -> int:
        """Tokens that one hash of `chain` is for."""
        return self.request.tokens_per_hash or self.block_size

    def block_chain(self) -> HashChain:
        """The names of all full blocks, extended as the output grows: of the chain, those hashes that end a block."""
        step, chain, names = self.hash_step, self.chain, self._block_chain
        if len(chain) < self.num_tokens // step:
            chain.extend(pack_tokens(self.token_ids, len(chain) * step), step)
        stride = self.block_size // step
        if stride > 1:
            for index in range(len(names) * stride + stride - 1, len(chain), stride):
                names.data += chain.data[index * HASH_BYTES : (index + 1) * HASH_BYTES]
        return names

    def end_load(self) -> None:
        """Wait until nothing is loaded into its blocks any more."""
        load, self.load = self.load, None
        if load is not None:
            load.wait_over()

    def move_to(self, state: State) -> None:
        """Change state; an illegal change is our own bug."""
        assert state in _LEGAL[self.state], f"{self.request_id}: {self.state} -> {state}"
        self.state = state


class Scheduled(msgspec.Struct, frozen=True, gc=False):
    """Compute tokens start : start + num_tokens of a sequence; sample if that reaches its end.

    drafts: guesses of what comes after its last token, computed behind it; a token is drawn after each of them.
    A struct because each step makes one for each sequence: 0.1 µs, where a frozen dataclass takes ten times that.
    """

    seq: Sequence
    start: int
    num_tokens: int
    drafts: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        return self.start + self.num_tokens == len(self.seq.token_ids) + len(self.drafts)


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """Sequences that continue one prompt. The leader computes it; then the members share its blocks and the leader is
    gone.

    A group that is preempted becomes a leader again; `outputs` are then its members' tokens.
    """

    request: SequenceRequest
    leader: Sequence | None
    search: BeamSearch | None = None
    members: list[Sequence] = field(default_factory=list)  # those that have not ended
    outputs: dict[int, list[int]] = field(default_factory=dict)  # while there is a leader: of each live choice
    num_paid: dict[int, int] = field(default_factory=dict)  # tokens of each of them that are paid for
    candidates: dict[int, BeamCandidates] = field(default_factory=dict)  # of beams that wait for the others, by rank
    unwanted: set[int] = field(default_factory=set)  # choices that were aborted
    num_forks: int = 0

    @property
    def num_sequences(self) -> int:
        """Sequences that will run when the leader has parted; on a prefill worker it never does."""
        return len(self.outputs) if self.leader is not None and self.leader.output_limit is None else 1

    def blocks_to_fork(self) -> int:
        """Blocks that the members will need at once, beside the leader's."""
        assert self.leader is not None
        blocks_for, prompt = self.leader.blocks_for, self.request.num_prompt_tokens
        return sum(blocks_for(prompt + len(tokens) + 1) for tokens in self.outputs.values()) - self.num_sequences * (
            prompt // self.leader.block_size
        )


def begin_group(leader: Sequence, eos_ids: tuple[int, ...]) -> SequenceGroup:
    """The group whose leader has arrived. eos_ids: end a beam search's hypotheses, too, unless they are ignored."""
    request, asked, params = leader.request, leader.request.group, leader.request.sampling
    assert asked is not None
    group = leader.group = SequenceGroup(request, leader)
    if (beams := asked.beams) is None:
        emitted = asked.emitted or [[] for _ in asked.seeds]
        group.outputs = {choice: list(tokens) for choice, tokens in enumerate(emitted) if choice not in asked.ended}
        return group
    end_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_ids)
    rules = BeamRules(beams.width, params.max_tokens, end_ids, beams.length_penalty, beams.early_stopping)
    group.search = BeamSearch(rules)
    group.outputs = {rank: [] for rank in range(beams.width)}  # for the count of blocks
    return group


def fault_of(request: SequenceRequest, *, block_size: int, num_blocks: int, max_running: int) -> tuple[str, str] | None:
    """Why a group can never run here, as (reason, message), or None."""
    asked = request.group
    assert asked is not None
    if asked.num_sequences > max_running:
        return "invalid", f"{asked.num_sequences} sequences in a group, but {max_running} run at once here"
    if asked.beams is None:
        return None
    prompt = request.num_prompt_tokens
    own = -(-(prompt + request.sampling.max_tokens) // block_size) - prompt // block_size
    need = prompt // block_size + asked.beams.width * (own + 1)  # one each while a shared block is copied
    if need > num_blocks:
        return "too_long", (
            f"a beam search of width {asked.beams.width} over up to {request.sampling.max_tokens} tokens may need "
            f"{need} blocks, and there are {num_blocks}: ask for fewer tokens or beams"
        )
    return None
