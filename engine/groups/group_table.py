"""The groups of one engine, by request id: n, best_of and beam search requests. Pure."""

from kvrelay.engine.groups.beam import BeamRules, BeamSearch
from kvrelay.engine.scheduling.sequence import Sequence, SequenceGroup, State
from kvrelay.plane.messages import SequenceRequest


def search_of(request: SequenceRequest, eos_ids: tuple[int, ...]) -> BeamSearch | None:
    """A new beam search, when the request asks for one."""
    if request.group is None or (beams := request.group.beams) is None:
        return None
    params = request.sampling
    end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
    rules = BeamRules(beams.width, params.max_tokens, end_ids, beams.length_penalty, beams.early_stopping)
    return BeamSearch(rules)


class GroupTable:
    """A group is in the table from its arrival until its last member has ended. eos_ids: end a beam search's
    hypotheses.
    """

    def __init__(self, eos_ids: tuple[int, ...] = ()) -> None:
        self._eos_ids = eos_ids
        self.by_id: dict[str, SequenceGroup] = {}

    @property
    def num_reserved(self) -> int:
        """Running sequences that members will be when their leaders fork, beside the leaders."""
        return sum(
            group.num_sequences - 1
            for group in self.by_id.values()
            if group.leader is not None and group.leader.state in (State.RUNNING, State.RECEIVING)
        )

    def begin(self, leader: Sequence) -> None:
        """A sequence has arrived: if its request is a group, it is the leader."""
        request = leader.request
        if (asked := request.group) is None:
            return
        group = leader.group = self.by_id[request.request_id] = SequenceGroup(
            request, leader, search_of(request, self._eos_ids)
        )
        emitted = asked.emitted or [[] for _ in asked.seeds]
        group.outputs = {k: list(tokens) for k, tokens in enumerate(emitted) if k not in asked.ended}
        if asked.beams is not None:
            group.outputs = {rank: [] for rank in range(asked.beams.width)}  # for the count of blocks

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
            f"a beam search of width {asked.beams.width} over up to {request.sampling.max_tokens} tokens may need "
            f"{need} blocks, and there are {num_blocks}: ask for fewer tokens or beams"
        )
    return None
