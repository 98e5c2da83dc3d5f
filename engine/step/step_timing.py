"""How long an engine's recent steps took. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

FIRST_STEPS = 4  # of a kind: the fastest of them counts, and the very first, which may take seconds, not at all
PREFILL_KEEP = 0.95  # of what was measured, at each further step with prompts


@dataclass(slots=True)
class StepTiming:
    """Moving averages of step times and speeds, for the router's predictions; 0: not known yet."""

    step_s: float = 0.0
    decode_step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    num_steps: int = 0
    batch_sequences: int = 0  # of the last step
    batch_tokens: int = 0
    num_observed: int = 0  # steps
    num_decode_steps: int = 0  # of those, that only decoded
    num_prefill_steps: int = 0  # with enough prompt tokens to measure their speed
    _prefill_tokens: float = 0.0
    _prefill_s: float = 0.0

    @property
    def compute_tokens_per_s(self) -> float:
        """Of a prompt: as measured, or, on a worker that has computed none, at least what its decode steps reach."""
        return self.prefill_tokens_per_s or self.decode_tokens_per_s

    def observe(self, num_tokens: int, num_decode: int, seconds: float, num_steps: int = 1) -> None:
        """So many steps in a row were like this one."""
        self.step_s = _learnt(self.step_s, seconds, self.num_observed, num_steps)
        self.num_observed += num_steps
        if num_tokens == num_decode:
            self.decode_step_s = _learnt(self.decode_step_s, seconds, self.num_decode_steps, num_steps)
            self.num_decode_steps += num_steps
            if seconds > 0:
                self.decode_tokens_per_s = max(0.95**num_steps * self.decode_tokens_per_s, num_decode / seconds)
        elif num_tokens - num_decode >= 64 and seconds > 0:
            self._observe_prefill(num_tokens, seconds, num_steps)
            self.num_prefill_steps += num_steps

    def _observe_prefill(self, num_tokens: int, seconds: float, num_steps: int) -> None:
        """All late tokens over all late seconds: a prompt's short last chunk, or one far into a long prompt, says
        little.
        """
        if self.num_prefill_steps < FIRST_STEPS:
            rate = _learnt(self.prefill_tokens_per_s, num_tokens / seconds, self.num_prefill_steps, num_steps, max)
            self.prefill_tokens_per_s, self._prefill_tokens = rate, float(num_tokens)
            self._prefill_s = num_tokens / rate if rate else 0.0
            return
        keep = PREFILL_KEEP**num_steps
        self._prefill_tokens = keep * self._prefill_tokens + num_tokens * num_steps
        self._prefill_s = keep * self._prefill_s + seconds * num_steps
        self.prefill_tokens_per_s = self._prefill_tokens / self._prefill_s

    def observe_drafted(self, num_sequences: int, num_output: int, seconds: float) -> None:
        """A step that brought several tokens of a sequence counts as so many."""
        self.step_s = _blend(self.step_s, seconds)
        if num_output and seconds > 0:
            self.decode_step_s = _blend(self.decode_step_s, seconds * num_sequences / num_output)

    def note_batch(self, num_sequences: int, num_tokens: int, num_steps: int = 1) -> None:
        self.num_steps += num_steps
        self.batch_sequences, self.batch_tokens = num_sequences, num_tokens


def _learnt(old: float, new: float, seen: int, count: int, best: Callable[[float, float], float] = min) -> float:
    """The average after `count` times `new`, which follow `seen` others; `best`: the faster of two."""
    if seen + count == 1:
        return 0.0
    if seen < FIRST_STEPS:
        return best(old, new) if old else new
    return _blend(old, new, count)


def _blend(old: float, new: float, count: int = 1) -> float:
    """The average after `count` times `new`."""
    keep = 0.8**count
    return new if old == 0.0 else keep * old + (1 - keep) * new
