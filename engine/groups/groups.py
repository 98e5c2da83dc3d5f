"""Forks and merges of groups: members continue from the blocks of their leader's prompt, and become one leader again.

Pure.
"""

from array import array

import msgspec

from kvrelay.engine.groups.group_table import GroupTable
from kvrelay.engine.scheduling.blocks import Release
from kvrelay.engine.scheduling.sequence import Sequence, SequenceGroup, State
from kvrelay.engine.scheduling.waiting_queue import Queues
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.types import FinishReason


def member_of(group: SequenceGroup, like: Sequence, choice: int) -> Sequence:
    """A new sequence for this choice with its output so far, without blocks.

    `like`: the leader, or the beam it forks from.
    """
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
    member.queue_rank = like.queue_rank  # it may have a prompt's worth to compute: its choice's earlier tokens
    return member


class Groups:
    """The groups of one engine, and what is done to queues and blocks for them."""

    def __init__(self, table: GroupTable, pool: BlockPool, queues: Queues, release: Release) -> None:
        self._pool, self._queues, self._release = pool, queues, release
        self.table = table
        self.by_id = table.by_id

    def fork(self, group: SequenceGroup, members: list[Sequence]) -> None:
        """The leader's prompt is computed: these continue from its blocks, each with at least one token of output."""
        leader = group.leader
        assert leader is not None and leader.num_computed == group.request.num_prompt_tokens
        for member in members:
            member.blocks = leader.blocks[: leader.blocks_for(leader.num_computed)]
            self._pool.acquire(member.blocks)
            member.num_computed, member.num_hashed_blocks = leader.num_computed, leader.num_hashed_blocks
            member.has_begun = True
            self._use_cached(member)
            paid = max(member.num_computed, group.num_paid.get(member.choice, 0))  # the leader has paid for the prompt
            member.num_paid = member.num_charged = paid
            self._enter(member)
        group.members, group.leader, group.outputs, group.num_paid = members, None, {}, {}
        leader.group = None
        self._release.finish(leader, FinishReason.LENGTH)
        if not members:
            del self.by_id[group.request.request_id]

    def _use_cached(self, member: Sequence) -> None:
        """What it had computed before a preemption may still be cached."""
        size, pool = member.block_size, self._pool
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

    def merge(self, group: SequenceGroup) -> tuple[Sequence, list[Sequence]]:
        """(a leader that is to be queued, the members, which have ended): all blocks are released."""
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
            self._release.finish(member, FinishReason.ABORT)
        group.outputs, group.num_paid = outputs, {member.choice: member.num_paid for member in members}
        group.candidates.clear()
        self._queues.sequences[leader.request_id] = leader
        return leader, members

    # ---- beams

    def go_on(self, group: SequenceGroup, parents: tuple[int, ...], token_ids: tuple[int, ...]) -> list[Sequence]:
        """Beam i continues beam parents[i] with token_ids[i]; returns the beams that are dropped."""
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
            self._release.finish(beam, FinishReason.ABORT)
        return dropped

    def _fork(self, group: SequenceGroup, parent: Sequence, rank: int) -> Sequence:
        child = member_of(group, parent, rank)
        child.token_ids[:] = parent.token_ids
        child.num_computed, child.num_hashed_blocks = parent.num_computed, parent.num_hashed_blocks
        child.has_begun, child.num_paid, child.num_charged = True, parent.num_computed, parent.num_computed
        child.blocks = parent.blocks[: parent.blocks_for(parent.num_computed)]
        parent.writable_until = 0
        self._pool.acquire(child.blocks)
        self._enter(child)
        return child
