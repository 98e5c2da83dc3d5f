"""A step that was launched and is not collected yet. No torch of its own.

Where the device computes asynchronously (kernels/async_backend.py), the next step is planned and launched while it
works on this one; then this one's tokens are collected, which is the one wait of a step. While the scheduler plans
that next step, each sequence whose token is being drawn has a placeholder token: the number of tokens decides
everything that the scheduler decides. At any other time sequences hold only tokens that are known.

Blocks that the step may still write or read are not reused before it is collected: see `InFlightStep.keep`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from kvrelay.engine.execution.runner import DrawnTokens
from kvrelay.engine.scheduling.blocks import BlocksAside
from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.sequence import Sequence, State
from kvrelay.kernels.async_backend import PendingTokens

_PLACEHOLDER = 0  # for a token that is being drawn; the device replaces it, and it is gone before it is read here


@dataclass(slots=True, eq=False)
class InFlightStep:
    """One launched step.

    rows: of `hidden`, from which tokens are drawn; seqs: the sequence of each row.
    pending: the tokens; None: they are drawn when the step is collected, from `hidden`.
    """

    plan: StepPlan
    rows: list[int]
    seqs: list[Sequence]
    launched_s: float
    aside: BlocksAside
    hidden: Tensor | None = None
    pending: PendingTokens | None = None
    wants_prompt_logprobs: bool = False
    _kept: list[int] = field(default_factory=list)  # keys for BlocksAside.unquarantine
    _placeholders: dict[int, int] = field(default_factory=dict)  # row by id(), of sequences with a placeholder token

    @property
    def is_wanted(self) -> bool:
        """Whether any of its sequences still runs."""
        return any(item.seq.state is State.RUNNING for item in self.plan.work)

    # ---- the blocks

    def keep(self, seq: Sequence) -> None:
        """`seq` is about to release its blocks: if the step computes it, they stay taken until `release_kept`."""
        if any(item.seq is seq for item in self.plan.work):
            self._kept.append(self.aside.keep(seq.blocks))

    def keep_blocks(self, blocks: Iterable[int]) -> None:
        """The step reads these blocks, which may have no other holder."""
        self._kept += [self.aside.keep((block,)) for block in blocks]

    def release_kept(self) -> None:
        """The device has done the step."""
        while self._kept:
            self.aside.unquarantine(self._kept.pop())

    # ---- the tokens

    @contextmanager
    def with_placeholders(self, is_last: Callable[[Sequence], bool]) -> Iterator[None]:
        """Meanwhile its sequences have a placeholder for the token that is being drawn, unless they end with it for
        certain.

        A sequence that ends with it has nothing to compute then, so the scheduler passes over it.
        """
        for row, seq in enumerate(self.seqs):
            if seq.state is State.RUNNING and not is_last(seq):
                self._placeholders[id(seq)] = row
                seq.token_ids.append(_PLACEHOLDER)
        try:
            yield
        finally:
            self.remove_placeholders()

    def remove_placeholders(self) -> None:
        """The end of `with_placeholders`, which may come early."""
        for seq in self.seqs:
            if id(seq) in self._placeholders:
                seq.token_ids.pop()
        self._placeholders.clear()

    def drawn(self) -> DrawnTokens | None:
        """Where a step that is launched now finds the tokens of the placeholders."""
        if self.pending is None or not self._placeholders:
            return None
        return DrawnTokens(self.pending.tokens, dict(self._placeholders))


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
