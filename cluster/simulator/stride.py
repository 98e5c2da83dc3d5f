"""A stretch of a worker's steps that is computed without a look at it in between, and what steps bring. Pure."""

import math
from dataclasses import dataclass, field

from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.plane.messages import TokenOutput


@dataclass(slots=True)
class Stride:
    """What is being computed: one planned step, or `count` steps that only bring each sequence a token.

    plan: of the one step; with parked sequences (fast_forward.py), of the active ones. None: `count` steps, whose last
    may be planned when it is over.
    """

    began_s: float
    plan: StepPlan | None
    count: int
    first_s: float  # time of its first step
    more_s: float = 0.0  # by how much each step takes longer than the one before
    num_parked: int = 0
    waking: int = 0  # the number of the step for which a parked sequence wakes; 0: none

    def seconds(self, count: int) -> float:
        """Time of its first `count` steps."""
        return count * self.first_s + self.more_s * (count * (count - 1) / 2)

    def drop(self, count: int) -> None:
        """Remove its first `count` steps, which are not all."""
        self.began_s += self.seconds(count)
        self.first_s += count * self.more_s
        self.count -= count
        self.waking = max(0, self.waking - count)

    def steps_until(self, now_s: float) -> int:
        """The least number of its steps that end at `now_s` or later; at least one, at most all."""
        passed_s, first_s, more_s = now_s - self.began_s, self.first_s, self.more_s
        if more_s > 0:
            half = first_s - more_s / 2
            guess = (math.sqrt(half * half + 2 * more_s * max(passed_s, 0.0)) - half) / more_s
        else:
            guess = passed_s / first_s
        steps = min(max(1, math.ceil(guess)), self.count)
        while steps < self.count and self.seconds(steps) < passed_s:
            steps += 1
        while steps > 1 and self.seconds(steps - 1) >= passed_s:
            steps -= 1
        return steps


@dataclass(slots=True)
class StepEvents:
    """What steps brought: outputs that ingresses need (first tokens, ends), and requests that left without an end."""

    outputs: list[TokenOutput] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)  # request, reason
    returned_to_prefill: list[tuple[str, int]] = field(default_factory=list)  # request, its tokens of output
