"""The masks of a step's constrained rows: computed for the whole batch, in a thread beside the model where it runs on
the host.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.execution.constraints import Constraint, Rules
from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.sequence import Sequence, State
from kvrelay.grammar.compiler import CompiledGrammar, GrammarCompiler
from kvrelay.grammar.masks import Row, fill_masks
from kvrelay.grammar.matcher import Masks
from kvrelay.plane.messages import Sampling


@dataclass(frozen=True, slots=True)
class RowMasks:
    """masks: [K, words] int32. rows: [R] int32, each row's of `masks`; -1: it is not constrained."""

    masks: Tensor
    rows: Tensor

    def of(self, rows: Rows[int]) -> "RowMasks":
        """For these of the rows."""
        return RowMasks(self.masks, self.rows[torch.tensor(rows, dtype=torch.int64)])


logger = logging.getLogger(__name__)

Job = tuple[Constraint, list[int], tuple[int, ...], int]  # its new tokens, its drafts, and its first row in the step
WaitMasks = Callable[[], RowMasks | None]  # None: no row needs one


class Constraints:
    """Those of one engine's sequences. grammars: compiles them; None: requests with a grammar are refused."""

    def __init__(self, grammars: GrammarCompiler | None, *, eos_ids: tuple[int, ...], vocab_size: int) -> None:
        self.grammars, self._eos_ids, self._vocab_size = grammars, eos_ids, vocab_size
        self._executor: ThreadPoolExecutor | None = None  # once it is needed

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()

    def make(self, params: Sampling, grammar: CompiledGrammar | None = None) -> Constraint:
        """The constraint of a new sequence. grammar: compiled already; None: it is compiled here, if there is one.

        Raises InvalidRequest.
        """
        if params.grammar is not None and grammar is None:
            assert self.grammars is not None, "the caller has checked Requests.refusal"
            grammar = self.grammars.compile(params.grammar)
        return Constraint(Rules(params, grammar, self._eos_ids, self._vocab_size))

    # ---- a step

    def begin(self, plan: StepPlan, seqs: list[Sequence]) -> WaitMasks:
        """Begin to fill the masks of a step whose rows are of these sequences, in a thread of their own.

        Returns what waits for them. Until then nothing else may touch these sequences' constraints.
        """
        jobs = _jobs(plan, seqs)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="masks")
        filled: Future[RowMasks | None] = self._executor.submit(self._fill, jobs, len(seqs))
        return filled.result

    def later(self, plan: StepPlan, seqs: list[Sequence]) -> WaitMasks:
        """As `begin`, but filled in the call that waits for them: some of these tokens are not known yet."""
        return lambda: self._fill(_jobs(plan, seqs), len(seqs))

    def _fill(self, jobs: list[Job], num_rows: int) -> RowMasks | None:
        rows, count, fills = np.full(num_rows, -1, dtype=np.int32), 0, list[Row]()
        for constraint, unseen, drafts, _ in jobs:
            constraint.follow(unseen)
            if (fill := constraint.matcher_row(drafts, count)) is not None:
                fills.append(fill)
            count += 1 + len(drafts)
        masks = np.zeros((count, -(-self._vocab_size // 32)), dtype=np.int32)
        if fills:
            try:
                fill_masks(fills, masks)
            except Exception:  # of a library: which of them?
                self._fill_alone(jobs, masks)
        begin = 0
        for constraint, _, drafts, row in jobs:
            for index, is_needed in enumerate(constraint.restrict(masks[begin : begin + 1 + len(drafts)], drafts)):
                rows[row + index] = begin + index if is_needed else -1
            begin += 1 + len(drafts)
        return RowMasks(torch.from_numpy(masks), torch.from_numpy(rows)) if (rows >= 0).any() else None

    @staticmethod
    def _fill_alone(jobs: list[Job], masks: Masks) -> None:
        """Fill the masks one by one; sequences whose grammar cannot have a problem."""
        count = 0
        for constraint, _, drafts, _ in jobs:
            if (fill := constraint.matcher_row(drafts, count)) is not None:
                try:
                    fill_masks([fill], masks)
                except Exception as error:
                    logger.exception("a grammar's masks cannot be computed")
                    constraint.problem = f"the grammar's masks cannot be computed: {error}"
            count += 1 + len(drafts)


def _jobs(plan: StepPlan, seqs: list[Sequence]) -> list[Job]:
    """For each constrained sequence; one with drafts has a row for each of them, too."""
    drafts_of = {id(item.seq): item.drafts for item in plan.work[plan.num_single :] if item.drafts}
    jobs: list[Job] = []
    row = 0
    while row < len(seqs):
        seq = seqs[row]
        drafts = drafts_of.get(id(seq), ())
        if isinstance(constraint := seq.constraint, Constraint) and seq.state is State.RUNNING:
            jobs.append((constraint, _unseen(seq, constraint), drafts, row))
        row += 1 + len(drafts)
    return jobs


def _unseen(seq: Sequence, constraint: Constraint) -> list[int]:
    return seq.token_ids[seq.request.num_prompt_tokens + constraint.num_seen :]


def follow_output(seq: Sequence) -> bool:
    """A constrained sequence has a new token. False: it cannot be continued."""
    constraint = seq.constraint
    assert isinstance(constraint, Constraint)
    constraint.follow(_unseen(seq, constraint))
    return constraint.problem is None


def is_complete(seq: Sequence) -> bool:
    """Whether a constrained sequence is complete, as far as `follow_output` has come."""
    return isinstance(seq.constraint, Constraint) and seq.constraint.is_done


def problem_of(seq: Sequence) -> str:
    """Why a constrained sequence cannot be continued; empty: it can."""
    return (isinstance(seq.constraint, Constraint) and seq.constraint.problem) or ""
