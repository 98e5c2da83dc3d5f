"""The step in flight, and what ends or forgets a sequence beside the scheduler: its rows, its drafts, the blocks in
use.
"""

from kvrelay.engine.execution.in_flight import InFlightStep
from kvrelay.engine.execution.runner import Runner
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.engine.speculation.speculation_steps import DraftSteps
from kvrelay.types import FinishReason


class Batch:
    """The sequences that an engine computes, and the step in flight, if any: launched, and not collected yet."""

    def __init__(self, scheduler: Scheduler, runner: Runner, drafts: DraftSteps) -> None:
        self._scheduler, self._runner, self._drafts = scheduler, runner, drafts
        self.in_flight: InFlightStep | None = None

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence. Blocks that the step in flight uses stay taken until it is collected."""
        if self.in_flight is not None:
            self.in_flight.keep(seq)
        self.forget(seq)
        self._scheduler.finish(seq, reason)

    def forget(self, seq: Sequence) -> None:
        """The sequence is off the batch: give its row back, and its drafts' blocks."""
        self._runner.forget(seq)
        self._drafts.forget(seq)
