"""Groups: n, best_of and beam search. Their members fork from the blocks of their leader's prompt, and merge into one
leader again when they are preempted; a step's rows become first tokens of every choice, and moves of beam searches.

Pure. Lives on the engine's thread, between the scheduler and the sampler.
"""

from array import array
from collections.abc import Callable

import msgspec

from kvrelay.engine.scheduling.beam import BeamCandidates, Hypothesis
from kvrelay.engine.scheduling.blocks import SequenceBlocks
from kvrelay.engine.scheduling.sequence import Sequence, SequenceGroup, State
from kvrelay.engine.scheduling.waiting_queue import Queues
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import TokenOutput
from kvrelay.types import FinishReason

EndSequence = Callable[[Sequence, FinishReason], None]
Likeliest = Callable[[list[int], list[Sequence]], list[BeamCandidates]]
"""What may follow each of these beams, whose logits are in these rows, likeliest first."""


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
    member.constraint = None if like.constraint is None else like.constraint.fresh()
    member.queue_rank = like.queue_rank  # it may have a prompt's worth to compute: its choice's earlier tokens
    return member


def merge_group(group: SequenceGroup, queues: Queues, blocks: SequenceBlocks) -> tuple[Sequence, list[Sequence]]:
    """(a leader that is to be queued, the members, which have ended): all blocks are released."""
    members, like = list(group.members), group.members[0]
    prompt = group.request.num_prompt_tokens
    outputs = {member.choice: member.token_ids[prompt:] for member in members}
    sampling = msgspec.structs.replace(group.request.sampling, prompt_logprobs=None)  # those have been sent
    group.request = msgspec.structs.replace(group.request, sampling=sampling)
    leader = Sequence(group.request, like.block_size, like.arrival, arrived_s=like.arrived_s)
    leader.scheduled_s, leader.num_cached, leader.is_pinned = like.scheduled_s, like.num_cached, like.is_pinned
    leader.has_begun, leader.num_paid = True, prompt
    leader.constraint = None if like.constraint is None else like.constraint.fresh()
    leader.group, group.leader = group, leader
    for member in members:
        blocks.finish(member, FinishReason.ABORT)
    group.outputs, group.num_paid = outputs, {member.choice: member.num_paid for member in members}
    group.candidates.clear()
    queues.sequences[leader.request_id] = leader
    return leader, members


class Groups:
    """Forks groups and moves them on, one step at a time. end, forget: of a sequence that the engine computes."""

    def __init__(
        self,
        queues: Queues,
        blocks: SequenceBlocks,
        pool: BlockPool,
        end: EndSequence,
        forget: Callable[[Sequence], None],
    ) -> None:
        self._queues, self._blocks, self._pool, self._end, self._forget = queues, blocks, pool, end, forget

    # ---- samples

    def rows_of(self, seqs: list[Sequence]) -> list[tuple[int, Sequence]]:
        """(row, sequence) of every token that is to be drawn: a leader's row serves each of its choices.

        Beams draw none.
        """
        draws: list[tuple[int, Sequence]] = []
        for row, seq in enumerate(seqs):
            group = seq.group
            if group is None or (seq is not group.leader and group.search is None):
                draws.append((row, seq))
            elif group.search is None:  # a prefill worker's members draw it again when a group is continued
                is_prefill, outputs = seq.output_limit is not None, group.outputs
                members = self._members(group, seq)
                draws += [(row, member) for member in members if is_prefill or not outputs[member.choice]]
        return draws

    def _members(self, group: SequenceGroup, leader: Sequence) -> list[Sequence]:
        members = [member_of(group, leader, choice) for choice in sorted(group.outputs)]
        for member in members:
            member.num_chunks, member.prompt_logprobs = leader.num_chunks, leader.prompt_logprobs
            if leader.output_limit is None:
                member.token_ids += group.outputs[member.choice]
            self._queues.sequences[member.request_id] = member
        group.members = members
        return list(members)

    def settle(self, leaders: list[Sequence]) -> None:
        """The tokens are drawn and appended: these leaders fork, or wait for their transfer."""
        for leader in leaders:
            group = leader.group
            if group is None or group.search is not None or leader is not group.leader:
                continue
            members, group.members = group.members, []
            if leader.output_limit is None:
                self._fork_members(group, leader, members)
                continue
            for member in members:
                self._blocks.finish(member, FinishReason.LENGTH)
            leader.hold = leader.hold and bool(members)
            self._end(leader, FinishReason.LENGTH)

    def take_over(self, leader: Sequence, token_ids: list[int]) -> list[Sequence]:
        """A prefill worker has computed the prompt and drawn each live choice's first token; returns the members."""
        group = leader.group
        assert group is not None
        members = self._members(group, leader)
        for member, token in zip(members, token_ids, strict=True):
            if member.num_output == 0:
                member.token_ids.append(token)
        group.members = []
        self._fork_members(group, leader, members)
        return list(members)

    def _fork_members(self, group: SequenceGroup, leader: Sequence, members: list[Sequence]) -> None:
        """The leader's prompt is computed: these continue from its blocks, each with at least one token of output."""
        assert leader is group.leader and leader.num_computed == group.request.num_prompt_tokens
        self._forget(leader)
        for member in [member for member in members if member.choice in group.unwanted]:
            members.remove(member)
            self._blocks.finish(member, FinishReason.ABORT)
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
        self._blocks.finish(leader, FinishReason.LENGTH)
        if not members:
            del self._queues.groups[group.request.request_id]

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

    # ---- beams

    def advance_beams(self, seqs: list[Sequence], likeliest: Likeliest) -> list[TokenOutput]:
        """Row i is of seqs[i]; searches whose beams have all come move on."""
        rows = [row for row, seq in enumerate(seqs) if seq.group is not None and seq.group.search is not None]
        if not rows:
            return []
        outputs: list[TokenOutput] = []
        for row, candidates in zip(rows, likeliest(rows, [seqs[row] for row in rows]), strict=True):
            seq = seqs[row]
            group = seq.group
            assert group is not None
            if seq is group.leader and any(group.outputs.values()):  # it had parted before a pre-emption
                self._fork_members(group, seq, self._members(group, seq))
                continue
            if seq is group.leader:
                outputs += self.begin_search(group, seq, candidates)
                continue
            group.candidates[seq.choice] = candidates
            if len(group.candidates) == len(group.members):
                outputs += self._advance(group)
        return outputs

    def begin_search(self, group: SequenceGroup, leader: Sequence, candidates: BeamCandidates) -> list[TokenOutput]:
        """The prompt is computed, and these may follow it."""
        search = group.search
        assert search is not None
        search.step([candidates])
        if search.is_done:
            outputs = _results(group)
            leader.hold = False
            self._end(leader, FinishReason.LENGTH)
            return outputs
        first = TokenOutput(request_id=leader.request_id, position=0, token_ids=[])
        if leader.output_limit is not None:
            self._end(leader, FinishReason.LENGTH)
            return [TokenOutput(request_id=leader.request_id, position=0, token_ids=[], candidates=candidates)]
        group.outputs = dict(enumerate(search.outputs))
        self._fork_members(group, leader, self._members(group, leader))
        return [first]

    def _advance(self, group: SequenceGroup) -> list[TokenOutput]:
        search = group.search
        assert search is not None
        step = search.step([group.candidates[rank] for rank in range(len(group.members))])
        if step.is_done:
            outputs = _results(group)
            for beam in list(group.members):
                self._end(beam, FinishReason.LENGTH)
            return outputs
        for beam in self.go_on(group, step.parents, step.token_ids):
            self._forget(beam)
        return []

    def go_on(self, group: SequenceGroup, parents: tuple[int, ...], token_ids: tuple[int, ...]) -> list[Sequence]:
        """Beam i continues beam parents[i] with token_ids[i]; returns the beams that are dropped."""
        before, after = list(group.members), list[Sequence]()
        group.candidates.clear()
        free = dict(enumerate(before))  # whose own sequence has not been taken over by its first child
        for rank, parent in reversed(list(enumerate(parents))):
            is_first = parents.index(parent) == rank
            after.insert(0, free.pop(parent) if is_first else self._fork(group, before[parent], rank))
        for rank, (child, token) in enumerate(zip(after, token_ids, strict=True)):
            child.choice = rank
            child.token_ids.append(token)
        dropped = list(free.values())
        group.members = after
        for beam in dropped:
            beam.group = None
            self._blocks.finish(beam, FinishReason.ABORT)
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


def _results(group: SequenceGroup) -> list[TokenOutput]:
    request, search = group.request, group.search
    assert request.group is not None and search is not None
    count = request.group.num_choices
    best = search.best(count)
    best += [Hypothesis((), 0.0, is_ended=False)] * (count - len(best))  # nothing may follow: every choice must end
    return [
        TokenOutput(
            request_id=request.request_id,
            position=0,
            token_ids=list(one.token_ids),
            choice=choice,
            finish_reason=FinishReason.STOP if one.is_ended else FinishReason.LENGTH,
            stop_token=one.token_ids[-1] if one.is_ended else None,
            num_left=len(best) - choice - 1,
        )
        for choice, one in enumerate(best)
    ]
