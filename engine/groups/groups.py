"""The groups of one engine: how a leader parts into members that share its blocks, and how they become a leader again. Pure.

The scheduler owns queues and blocks; what is done to them for a group is done here, on its behalf.
"""

from array import array
from typing import Protocol

import msgspec

from kvrelay.engine.groups.beam import BeamRules, BeamSearch
from kvrelay.engine.scheduling.sequence import Group, Sequence, State
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import SequenceRequest
from kvrelay.types import FinishReason


class Queues(Protocol):
    """The scheduler, as far as it is used here."""

    pool: BlockPool
    sequences: dict[str, Sequence]

    def join_batch(self, seq: Sequence) -> None: ...
    def finish(self, seq: Sequence, reason: FinishReason) -> None: ...


def search_of(request: SequenceRequest, eos_ids: tuple[int, ...]) -> BeamSearch | None:
    """A new beam search, when the request asks for one."""
    if request.group is None or (beams := request.group.beams) is None:
        return None
    params = request.sampling
    end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
    rules = BeamRules(beams.width, params.max_tokens, end_ids, beams.length_penalty, beams.early_stopping)
    return BeamSearch(rules)


def member_of(group: Group, like: Sequence, choice: int) -> Sequence:
    """A new sequence for this choice with its output so far, without blocks. `like`: the leader, or the beam it forks from."""
    request, params = group.request, group.request.sampling
    asked = request.group
    seed = asked.seeds[choice] if asked is not None and asked.seeds else params.seed
    params = msgspec.structs.replace(params, seed=seed, prompt_logprobs=None)
    group.num_forks += 1
    own = msgspec.structs.replace(
        request, request_id=f"{request.request_id}#{group.num_forks}", sampling=params, block_hashes=[], group=None
    )
    member = Sequence(own, like.block_size, like.arrival, arrived_s=like.arrived_s)
    member.chain.data[:] = like.chain.data
    member.group, member.choice = group, choice
    member.scheduled_s, member.num_cached, member.is_pinned = like.scheduled_s, like.num_cached, like.is_pinned
    member.queue_rank = like.queue_rank  # it may have a prompt's worth to compute: what its choice said before
    return member


class Groups:
    """By request id. A group is here from its arrival until its last member has ended."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self.by_id: dict[str, Group] = {}
        self.eos_ids: tuple[int, ...] = ()  # of the model, for beam searches

    @property
    def num_reserved(self) -> int:
        """Seats that members will take when their leaders fork, beside those of the leaders."""
        return sum(
            group.num_sequences - 1
            for group in self.by_id.values()
            if group.leader is not None and group.leader.state in (State.RUNNING, State.RECEIVING)
        )

    def begin(self, leader: Sequence) -> None:
        """If the request is a group, its leader has arrived."""
        request = leader.request
        if (asked := request.group) is None:
            return
        group = leader.group = self.by_id[request.request_id] = Group(request, leader, search_of(request, self.eos_ids))
        emitted = asked.emitted or [[] for _ in asked.seeds]
        group.outputs = {k: list(tokens) for k, tokens in enumerate(emitted) if k not in asked.ended}
        if asked.beams is not None:
            group.outputs = {rank: [] for rank in range(asked.beams.width)}  # for the count of blocks

    def fork(self, group: Group, members: list[Sequence]) -> None:
        """The leader's prompt is computed: these go on from its blocks, each with at least one token of output."""
        leader, queues = group.leader, self._queues
        assert leader is not None and leader.num_computed == group.request.num_prompt_tokens
        for member in members:
            member.blocks = leader.blocks[: leader.blocks_for(leader.num_computed)]
            queues.pool.acquire(member.blocks)
            member.num_computed, member.num_hashed_blocks = leader.num_computed, leader.num_hashed_blocks
            member.has_begun = True
            self._use_cached(member)
            paid = max(member.num_computed, group.num_paid.get(member.choice, 0))  # the leader has paid for the prompt
            member.num_paid = member.num_charged = paid
            self._enter(member)
        group.members, group.leader, group.outputs, group.num_paid = members, None, {}, {}
        leader.group = None
        queues.finish(leader, FinishReason.LENGTH)
        if not members:
            del self.by_id[group.request.request_id]

    def _use_cached(self, member: Sequence) -> None:
        """What it had computed before a pre-emption may be in the pool still."""
        size, pool = member.block_size, self._queues.pool
        if member.num_tokens - 1 < (len(member.blocks) + 1) * size:
            return
        match = pool.match(member.block_chain(), (member.num_tokens - 1) // size)
        if len(match) * size <= member.num_computed:
            return
        pool.acquire(match.blocks)
        pool.release(member.blocks)
        member.blocks = array("i", match.blocks)
        member.num_computed, member.num_hashed_blocks = len(match) * size, len(match)

    def _enter(self, member: Sequence) -> None:
        member.move_to(State.RUNNING)
        self._queues.sequences[member.request_id] = member
        self._queues.join_batch(member)

    def merge(self, group: Group) -> tuple[Sequence, list[Sequence]]:
        """(a leader that is to be put in line, the members, which are gone): all blocks are given back."""
        members, like = list(group.members), group.members[0]
        prompt = group.request.num_prompt_tokens
        outputs = {member.choice: member.token_ids[prompt:] for member in members}
        sampling = msgspec.structs.replace(group.request.sampling, prompt_logprobs=None)  # those have been sent
        group.request = msgspec.structs.replace(group.request, sampling=sampling)
        leader = Sequence(group.request, like.block_size, like.arrival, arrived_s=like.arrived_s)
        leader.scheduled_s, leader.num_cached, leader.is_pinned = like.scheduled_s, like.num_cached, like.is_pinned
        leader.has_begun, leader.num_paid = True, prompt
        leader.group, group.leader = group, leader
        for member in members:
            self._queues.finish(member, FinishReason.ABORT)
        group.outputs, group.num_paid = outputs, {member.choice: member.num_paid for member in members}
        group.candidates.clear()
        self._queues.sequences[leader.request_id] = leader
        return leader, members

    def ended(self, seq: Sequence) -> None:
        """A leader or a member has ended."""
        group = seq.group
        if group is None:
            return
        if seq is group.leader:
            group.leader = None
        elif seq in group.members:
            group.members.remove(seq)
        if group.leader is None and not group.members:
            self.by_id.pop(group.request.request_id, None)

    # ---- beams

    def go_on(self, group: Group, parents: tuple[int, ...], token_ids: tuple[int, ...]) -> list[Sequence]:
        """Beam i goes on from beam parents[i] with token_ids[i]; returns the beams that are dropped."""
        before, after = list(group.members), []
        group.candidates.clear()
        free = dict(enumerate(before))  # whose own sequence has not been taken over by its first child
        for rank in range(len(parents) - 1, -1, -1):
            parent = before[parents[rank]]
            is_first = parents.index(parents[rank]) == rank
            child = free.pop(parents[rank]) if is_first else self._fork(group, parent, rank)
            after.append((rank, child))
        after.reverse()
        for (rank, child), token in zip(after, token_ids, strict=True):
            child.choice = rank
            child.token_ids.append(token)
        dropped = list(free.values())
        group.members = [child for _, child in after]
        for beam in dropped:
            beam.group = None
            self._queues.finish(beam, FinishReason.ABORT)
        return dropped

    def _fork(self, group: Group, parent: Sequence, rank: int) -> Sequence:
        child = member_of(group, parent, rank)
        child.token_ids[:] = parent.token_ids
        child.num_computed, child.num_hashed_blocks = parent.num_computed, parent.num_hashed_blocks
        child.has_begun, child.num_paid, child.num_charged = True, parent.num_computed, parent.num_computed
        child.blocks = parent.blocks[: parent.blocks_for(parent.num_computed)]
        parent.writable_until = 0
        self._queues.pool.acquire(child.blocks)
        self._enter(child)
        return child


def fault_of(request: SequenceRequest, *, block_size: int, num_blocks: int, max_running: int) -> tuple[str, str] | None:
    """Why a group can never run here, as (reason, message), or None."""
    if (asked := request.group) is None:
        return None
    if asked.num_sequences > max_running:
        return "invalid", f"{asked.num_sequences} sequences in a group, but {max_running} run at once here"
    if asked.beams is None:
        return None
    prompt = request.num_prompt_tokens
    own = -(-(prompt + request.sampling.max_tokens) // block_size) - prompt // block_size
    need = prompt // block_size + asked.beams.width * (own + 1)  # one each while a shared block is copied
    if need > num_blocks:
        return "too_long", (
            f"a beam search of width {asked.beams.width} over up to {request.sampling.max_tokens} tokens may need {need} "
            f"blocks, and there are {num_blocks}: ask for fewer tokens or beams"
        )
    return None
