"""Puts drafted tokens into a step's plan, and learns from what became of them. No torch.

Between `speculation.py`, which knows what pays, and the engine. A drafted token takes a row of the step and a slot of the
sequence's blocks; what was wrong is overwritten by the next step. Nobody is pre-empted for a draft.
"""

from kvrelay.engine.drafting import PromptLookup
from kvrelay.engine.scheduler import Scheduled, StepPlan
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.speculation import Acceptance, Speculation
from kvrelay.kvcache.block_pool import BlockPool

_MOST_IN_VAIN = 5  # then every 32nd step is asked about, as often as one is plain where drafts pay


class Drafter:
    """One sequence's: where its drafts come from, and how good they have been."""

    __slots__ = ("acceptance", "lookup")

    def __init__(self) -> None:
        self.lookup, self.acceptance = PromptLookup(), Acceptance()


class DraftSteps:
    """One engine's drafts. most: tokens for a sequence in one step."""

    def __init__(self, pool: BlockPool, *, most: int, token_budget: int, max_model_len: int) -> None:
        self._pool, self._token_budget, self._max_model_len = pool, token_budget, max_model_len
        self.speculation = Speculation(most)
        self._num_in_vain = 0  # steps, one after the other, that could have had drafts: nothing was found
        self._num_to_pass = 0  # steps that are not asked about

    def comes_next(self, running: list[Sequence]) -> bool:
        """Whether `widen` is to be asked about a step of these. If not, they have taken a plain one without it.

        For it to be asked, tokens must be known, which costs the time that the host could have worked ahead. So the more
        often nothing was found, the more steps pass before it is asked again.
        """
        if any(seq.num_uncomputed > 1 for seq in running):
            return False
        if self._num_to_pass:
            self._num_to_pass -= 1
            return False
        count, able = len(running), [seq for seq in running if _may_draft(seq)]
        return self.speculation.comes_next(count, [_drafter_of(seq).acceptance for seq in able])

    def note_plan(self, plan: StepPlan) -> None:
        """What `widen` has made of a plan."""
        self._num_in_vain = 0 if plan.num_drafted else min(self._num_in_vain + 1, _MOST_IN_VAIN)
        self._num_to_pass = 2**self._num_in_vain - 1

    def widen(self, plan: StepPlan) -> StepPlan:
        """The same plan, with as many drafted tokens as are expected to pay; not in steps that compute prompts, too."""
        if plan.num_single < len(plan.work) or not self.speculation.begins(len(plan.work)):
            return plan
        able = [item.seq for item in plan.work if item.samples and _may_draft(item.seq)]
        drafters = [_drafter_of(seq) for seq in able]
        lengths = self.speculation.lengths(len(plan.work), [drafter.acceptance for drafter in drafters])
        budget = self._token_budget - plan.num_tokens
        drafts: dict[int, tuple[int, ...]] = {}
        for seq, drafter, length in zip(able, drafters, lengths, strict=True):
            if length and (found := self._draft(seq, drafter, min(length, budget), num_running=len(plan.work))):
                drafts[id(seq)] = found
                budget -= len(found)
        if not drafts:
            return plan
        singles = [item for item in plan.work if id(item.seq) not in drafts]
        wide = [
            Scheduled(item.seq, item.start, 1 + len(drafts[id(item.seq)]), drafts[id(item.seq)])
            for item in plan.work
            if id(item.seq) in drafts
        ]
        return StepPlan((*singles, *wide), len(singles), plan.preempted, plan.copies, len(plan.work) - len(singles))

    def _draft(self, seq: Sequence, drafter: Drafter, most: int, *, num_running: int) -> tuple[int, ...]:
        """The tokens, with room in the sequence's blocks for them."""
        last = min(seq.max_output - seq.num_output, self._max_model_len - seq.num_tokens) - 1
        found = drafter.lookup.draft(seq.token_ids, max(0, min(most, last)))
        lacking = seq.blocks_for(seq.num_tokens + len(found)) - len(seq.blocks)
        if found and lacking > 0:
            fresh = self._pool.allocate(lacking) if lacking + num_running <= self._pool.num_available else None
            if fresh is None:
                found = found[: max(0, len(seq.blocks) * seq.block_size - seq.num_tokens)]
            else:
                seq.blocks += fresh
        return tuple(found)

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """How long a step took that only decoded."""
        if plan.num_decode == (count := len(plan.work)):
            self.speculation.times.observe(count, plan.num_tokens - count, seconds)

    def note(self, item: Scheduled, num_accepted: int) -> None:
        """So many of its drafted tokens were what would have been drawn."""
        self.speculation.observe(_drafter_of(item.seq).acceptance, num_accepted, len(item.drafts))


def _drafter_of(seq: Sequence) -> Drafter:
    if seq.drafter is None:
        seq.drafter = Drafter()
    assert isinstance(seq.drafter, Drafter)
    return seq.drafter


def _may_draft(seq: Sequence) -> bool:
    """Not with penalties, nor before `min_tokens`, nor for a group, nor while KV is on its way."""
    params = seq.request.sampling
    return not (
        params.has_penalties
        or seq.group is not None
        or seq.load is not None
        or seq.hold
        or seq.num_output < params.min_tokens
    )
