"""Groups in a random life: the real Groups, what it is given by an engine, and what each choice must have said."""

import random

from kvrelay.engine.scheduling.beam import BeamCandidates, Hypothesis
from kvrelay.engine.scheduling.groups import Groups
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.scheduling.sequence import Sequence, SequenceGroup, State, begin_group
from kvrelay.plane.messages import SequenceRequest, TokenOutput
from kvrelay.types import FinishReason
from tests.engine.scheduling.machine.model import key_after, keys_of
from tests.engine.scheduling.machine.setup import END_TOKEN, SIZE, token_of

R, F, H = State.RUNNING, State.FINISHED, State.HELD


class GroupLife:
    """All groups of one scheduler. `end`: the engine's way to end a sequence; `forget`: its row of the batch is
    free.
    """

    def __init__(self, sched: Scheduler, rng: random.Random, end, forget) -> None:
        self.sched, self.rng = sched, rng
        self.steps = Groups(sched.queues, sched.blocks, sched.pool, end, forget)
        self.said: dict[str, dict[int, list[int]]] = {}  # of each live choice, by request
        self.requests: dict[str, SequenceRequest] = {}
        self.num_results = 0

    def begin(self, request: SequenceRequest) -> None:
        """It is in line."""
        if (asked := request.group) is not None:
            self.requests[request.request_id] = request
            emitted = asked.emitted or [[] for _ in range(asked.num_sequences)]
            self.said[request.request_id] = {k: list(one) for k, one in enumerate(emitted) if k not in asked.ended}

    # ---- tokens

    def drawn(self, member: Sequence, token: int) -> None:
        """A member says this next: it must have said all that its choice said before, and no more."""
        leader = member.group.leader
        if (
            leader is not None and leader.output_limit is not None
        ):  # a prefill worker's says its first token, again perhaps
            return
        if leader is not None and member.choice in member.group.unwanted:  # gone before it has parted
            return
        said = self.said[member.stream_id][member.choice]
        prompt = member.request.num_prompt_tokens
        assert member.token_ids[prompt:] == said, f"{member.request_id} does not go on where choice {member.choice} was"
        said.append(token)

    def candidates(self, rows: list[int], beams: list[Sequence]) -> list[BeamCandidates]:
        """What may follow each beam depends on its tokens alone."""
        return [self._after(keys_of("", beam.token_ids)[-1]) for beam in beams]

    @staticmethod
    def _after(key: int) -> BeamCandidates:
        """Every token of a vocabulary that ends with END_TOKEN."""
        scored = [(token, -(hash((key, token)) % 997 + 1) / 100) for token in range(END_TOKEN + 1)]
        return sorted(scored, key=lambda one: (-one[1], one[0]))

    def advance_beams(self, seqs: list[Sequence]) -> None:
        self.results(self.steps.advance_beams(seqs, self.candidates))

    def results(self, outputs: list[TokenOutput]) -> None:
        """A search's results are those of one that is alone in the world."""
        for output in outputs:
            if output.finish_reason is None:
                continue
            self.num_results += 1
            best = self.alone(self.requests[output.request_id])
            expected = list(best[output.choice].token_ids) if output.choice < len(best) else []
            assert output.token_ids == expected, "a beam search found something else than alone"

    def alone(self, request: SequenceRequest) -> list[Hypothesis]:
        """The same search without any scheduler."""
        assert request.group is not None and request.group.beams is not None
        search = begin_group(Sequence(request, SIZE, 0), ()).search
        keys = keys_of("", request.token_ids)[-1:]
        while not search.is_done:
            step = search.step([self._after(key) for key in keys])
            keys = [key_after(keys[parent], token) for parent, token in zip(step.parents, step.token_ids, strict=True)]
        return search.best(request.group.num_choices)

    def begin_search(self, leader: Sequence) -> None:
        """Its prompt has come from a prefill worker, with what may follow it."""
        group = leader.group
        assert group is not None
        self.results(self.steps.begin_search(group, leader, self.candidates([0], [leader])[0]))

    def take_over(self, leader: Sequence) -> list[Sequence]:
        """Samples' prompt has come, with each live choice's first token."""
        group = leader.group
        assert group is not None
        seeds, said = group.request.group.seeds, self.said[group.request.request_id]
        tokens = [token_of(seeds[choice], 0) for choice in sorted(group.outputs)]
        for choice, token in zip(sorted(group.outputs), tokens, strict=True):
            if not group.outputs[choice] and choice in said:
                said[choice].append(token)
        return self.steps.take_over(leader, tokens)

    # ---- the end

    def choice_ends(self, seq: Sequence) -> None:
        """This choice has all it wanted, or nobody waits for it."""
        if seq.group is not None and seq.group.search is None:
            self.said[seq.stream_id].pop(seq.choice, None)

    def abort_choice(self) -> bool:
        """As the engine does it: of samples alone."""
        groups = [group for group in self.sched.groups.values() if group.search is None]
        if not groups:
            return False
        group = self.rng.choice(groups)
        said = self.said[group.request.request_id]
        if not said:
            return False
        choice = self.rng.choice(sorted(said))
        del said[choice]
        if group.leader is not None:
            group.unwanted.add(choice)
        for member in [member for member in group.members if member.choice == choice]:
            self.steps._end(member, FinishReason.ABORT)
        return True

    # ---- always

    def add_up(self) -> None:
        """No choice is lost, none is there twice, and beams are those of their search."""
        for name, group in self.sched.groups.items():
            assert group.leader is not None or group.members, f"{name} has neither leader nor members"
            if group.leader is not None:
                assert not group.members and group.leader.state is not F
                found = set(group.outputs) - group.unwanted
            else:
                choices = [member.choice for member in group.members]
                found = set(choices)
                assert len(choices) == len(found) and all(member.state is not F for member in group.members)
            if group.search is not None:
                self._are_beams(group)
            elif group.leader is None or group.leader.state is not H:
                assert found == set(self.said[name]), f"{name} has choices {found}, not {set(self.said[name])}"

    @staticmethod
    def _are_beams(group: SequenceGroup) -> None:
        assert group.search is not None
        if group.leader is None:
            prompt = group.request.num_prompt_tokens
            beams = [(beam.choice, beam.token_ids[prompt:]) for beam in group.members]
            assert beams == list(enumerate(group.search.outputs)), "a beam is not what its search has"
