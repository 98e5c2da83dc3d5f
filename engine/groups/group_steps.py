"""What a step's rows mean for groups: first tokens of every choice, and the moves of beam searches. Pure.

Lives on the engine's thread, between the scheduler and the sampler. Single sequences are the engine's own.
"""

from collections.abc import Callable
from typing import Protocol

from kvrelay.engine.groups.beam import BeamCandidates, Hypothesis
from kvrelay.engine.groups.groups import member_of
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.scheduling.sequence import Sequence, SequenceGroup
from kvrelay.plane.messages import TokenOutput
from kvrelay.types import FinishReason


class EndSequence(Protocol):
    """End a sequence, wherever it is."""

    def __call__(self, seq: Sequence, reason: FinishReason) -> None: ...


class Likeliest(Protocol):
    """What may follow each of these beams, whose logits are in these rows, likeliest first."""

    def __call__(self, rows: list[int], beams: list[Sequence]) -> list[BeamCandidates]: ...


class GroupSteps:
    """Moves groups on, one step at a time."""

    def __init__(self, scheduler: Scheduler, end: EndSequence, forget: Callable[[Sequence], None]) -> None:
        self._scheduler, self._end, self._forget = scheduler, end, forget

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
            elif group.search is None:
                draws += [(row, member) for member in self._first_tokens(group, seq)]
        return draws

    def _first_tokens(self, group: SequenceGroup, leader: Sequence) -> list[Sequence]:
        """The members without a first token. A prefill worker's draw it again when a group is continued."""
        members = self._members(group, leader)
        if leader.output_limit is None:
            members = [member for member in members if not group.outputs[member.choice]]
        return members

    def _members(self, group: SequenceGroup, leader: Sequence) -> list[Sequence]:
        members = [member_of(group, leader, choice) for choice in sorted(group.outputs)]
        for member in members:
            member.num_chunks, member.prompt_logprobs = leader.num_chunks, leader.prompt_logprobs
            if leader.output_limit is None:
                member.token_ids += group.outputs[member.choice]
            self._scheduler.sequences[member.request_id] = member
        group.members = members
        return list(members)

    def settle(self, seqs: list[Sequence]) -> None:
        """The tokens are drawn and appended: leaders fork, or wait for their transfer."""
        for seq in seqs:
            if seq.group is not None and seq is seq.group.leader and seq.group.search is None:
                self._settle(seq.group, seq)

    def _settle(self, group: SequenceGroup, leader: Sequence) -> None:
        members, group.members = list(group.members), []
        if leader.output_limit is None:
            self._fork_members(group, leader, members)
            return
        for member in members:
            self._scheduler.finish(member, FinishReason.LENGTH)
        leader.hold = leader.hold and bool(members)
        self._end(leader, FinishReason.LENGTH)

    def _fork_members(self, group: SequenceGroup, leader: Sequence, members: list[Sequence]) -> None:
        self._forget(leader)
        for member in [member for member in members if member.choice in group.unwanted]:
            members.remove(member)
            self._scheduler.finish(member, FinishReason.ABORT)
        self._scheduler.groups.fork(group, members)

    def take_over(self, leader: Sequence, token_ids: list[int]) -> list[Sequence]:
        """A prefill worker has computed the prompt and drawn each live choice's first token; the members, which have
        parted.
        """
        group = leader.group
        assert group is not None
        members = self._members(group, leader)
        for member, token in zip(members, token_ids, strict=True):
            if member.num_output == 0:
                member.token_ids.append(token)
        group.members = []
        self._fork_members(group, leader, members)
        return list(members)

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
            outputs = self._results(group)
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
            outputs = self._results(group)
            for beam in list(group.members):
                self._end(beam, FinishReason.LENGTH)
            return outputs
        for beam in self._scheduler.groups.go_on(group, step.parents, step.token_ids):
            self._forget(beam)
        return []

    @staticmethod
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
                finish_reason=FinishReason.STOP if one.is_ended else FinishReason.LENGTH,
                stop_token=one.token_ids[-1] if one.is_ended else None,
                choice=choice,
                num_left=len(best) - choice - 1,
            )
            for choice, one in enumerate(best)
        ]
