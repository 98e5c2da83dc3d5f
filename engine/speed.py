"""What an engine's steps have taken of late. Pure."""

from dataclasses import dataclass

FIRST_STEPS = 4  # of a kind: the fastest of them counts, for a worker's very first is far slower than those that follow


@dataclass(slots=True)
class Speed:
    """Moving averages of what steps took, for the router's predictions."""

    step_s: float = 0.0
    decode_step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    num_steps: int = 0
    batch_sequences: int = 0  # of the last step
    batch_tokens: int = 0
    num_decode_steps: int = 0  # that only decoded
    num_prefill_steps: int = 0  # with enough of prompts to tell their speed

    @property
    def compute_tokens_per_s(self) -> float:
        """Of a prompt: as measured, or, on a worker that has computed none, at least what its decode steps reach."""
        return self.prefill_tokens_per_s or self.decode_tokens_per_s

    def observe(self, num_tokens: int, num_decode: int, seconds: float, num_steps: int = 1) -> None:
        """So many steps in a row were like this one."""
        self.step_s = _blend(self.step_s, seconds, num_steps)
        if num_tokens == num_decode:
            is_first = self.num_decode_steps < FIRST_STEPS and 0 < seconds < self.decode_step_s
            self.decode_step_s = seconds if is_first else _blend(self.decode_step_s, seconds, num_steps)
            self.num_decode_steps += num_steps
            if seconds > 0:
                self.decode_tokens_per_s = max(0.95**num_steps * self.decode_tokens_per_s, num_decode / seconds)
        elif num_tokens - num_decode >= 64 and seconds > 0:
            rate = num_tokens / seconds
            is_first = self.num_prefill_steps < FIRST_STEPS and rate > self.prefill_tokens_per_s
            self.prefill_tokens_per_s = rate if is_first else _blend(self.prefill_tokens_per_s, rate, num_steps)
            self.num_prefill_steps += num_steps

    def observe_drafted(self, num_sequences: int, num_output: int, seconds: float) -> None:
        """A step that brought several tokens of a sequence counts as so many."""
        self.step_s = _blend(self.step_s, seconds)
        if num_output and seconds > 0:
            self.decode_step_s = _blend(self.decode_step_s, seconds * num_sequences / num_output)

    def note_batch(self, num_sequences: int, num_tokens: int, num_steps: int = 1) -> None:
        self.num_steps += num_steps
        self.batch_sequences, self.batch_tokens = num_sequences, num_tokens


def _blend(old: float, new: float, count: int = 1) -> float:
    """The average after `count` times `new`."""
    keep = 0.8**count
    return new if old == 0.0 else keep * old + (1 - keep) * new
