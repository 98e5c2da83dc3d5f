"""A step that was launched and is not collected yet. No torch of its own.

Where the device computes by itself (kernels/async_backend.py), the next step is planned and launched while it works on this
one; then this one's tokens are taken, which is the one wait of a step. To the scheduler, while it plans that next step, each
sequence that a token is being drawn for has one more token (`shown`): how many there are decides everything that it decides.
Outside of that, sequences hold tokens that are known, and nothing else.

What a flight may still write or read goes to nobody before it is collected: see `InFlightStep.keep`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from kvrelay.engine.scheduling.scheduler import Scheduler, StepPlan
from kvrelay.engine.scheduling.sequence import Sequence, State
from kvrelay.engine.step.runner import Drawn
from kvrelay.kernels.async_backend import PendingTokens
from kvrelay.types import BlockId

_UNKNOWN = 0  # stands for a token that is being drawn; the device replaces it, and it is gone before anybody else looks


@dataclass(slots=True, eq=False)
class InFlightStep:
    """One launched step. rows: of `hidden`, those that tokens are drawn from; seqs: whose they are, one for each.

    pending: the tokens; None: they are drawn when the step is collected, from `hidden`.
    """

    plan: StepPlan
    rows: list[int]
    seqs: list[Sequence]
    launched_s: float
    hidden: Tensor | None = None
    pending: PendingTokens | None = None
    wants_prompt_logprobs: bool = False  # somebody wants log-probabilities of the prompt
    _kept: list[int] = field(default_factory=list)  # keys for Scheduler.unquarantine
    _shown: dict[int, int] = field(default_factory=dict)  # row by id, of sequences that show a token more

    @property
    def is_wanted(self) -> bool:
        """Whether any of its sequences is still here to go on."""
        return any(item.seq.state is State.RUNNING for item in self.plan.work)

    # ---- the blocks

    def keep(self, seq: Sequence, scheduler: Scheduler) -> None:
        """`seq` is about to give its blocks back: if the step computes it, they stay taken until `let_go`."""
        if any(item.seq is seq for item in self.plan.work):
            self._kept.append(scheduler.keep(seq.blocks))

    def keep_blocks(self, blocks: Iterable[BlockId], scheduler: Scheduler) -> None:
        """The step reads these, which nobody else may hold."""
        self._kept += [scheduler.keep((block,)) for block in blocks]

    def let_go(self, scheduler: Scheduler) -> None:
        """The device has done the step."""
        while self._kept:
            scheduler.unquarantine(self._kept.pop())

    # ---- the tokens

    @contextmanager
    def shown(self, is_last: Callable[[Sequence], bool]) -> Iterator[None]:
        """Meanwhile its sequences have the tokens that are being drawn, but for those that end with them for certain.

        Such a sequence has nothing to compute then, so that it is passed over.
        """
        for row, seq in enumerate(self.seqs):
            if seq.state is State.RUNNING and not is_last(seq):
                self._shown[id(seq)] = row
                seq.token_ids.append(_UNKNOWN)
        try:
            yield
        finally:
            self.hide()

    def hide(self) -> None:
        """The end of `shown`, which may come early."""
        for seq in self.seqs:
            if id(seq) in self._shown:
                seq.token_ids.pop()
        self._shown.clear()

    def drawn(self) -> Drawn | None:
        """Where a step that is launched now finds the tokens that are `shown`."""
        return None if self.pending is None or not self._shown else Drawn(self.pending.tokens, dict(self._shown))


def sampled(plan: StepPlan) -> tuple[list[int], list[Sequence]]:
    """(row of its last token among the step's, sequence) of all whose end the step reaches, as two lists."""
    singles, chunks = plan.work[: plan.num_single], plan.work[plan.num_single :]
    seqs = [item.seq for item in singles if item.start + 1 == len(item.seq.token_ids)]
    rows = list(range(len(singles)))
    if len(seqs) < len(singles):  # the budget ended in the middle of one
        rows = [row for row, item in enumerate(singles) if item.samples]
    end = len(singles)
    for item in chunks:
        end += item.num_tokens
        if item.samples:
            rows += range(end - 1 - len(item.drafts), end)
            seqs += [item.seq] * (1 + len(item.drafts))
    return rows, seqs
