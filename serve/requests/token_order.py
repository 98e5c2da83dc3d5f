"""Puts one sequence's outputs in order: each position once, none lost, none doubled. Pure."""

from kvrelay.errors import ProtocolError
from kvrelay.plane.messages import TokenLogprob, TokenOutput


def _without_first(output: TokenOutput, count: int) -> TokenOutput:
    """`output` without its first `count` tokens, which were delivered before."""
    return TokenOutput(
        request_id=output.request_id,
        position=output.position + count,
        token_ids=output.token_ids[count:],
        logprobs=output.logprobs[count:],
        finish_reason=output.finish_reason,
        stop_token=output.stop_token,
        choice=output.choice,
    )


def _merged(outputs: list[TokenOutput], request_id: str) -> TokenOutput:
    """Consecutive outputs as one. Facts of the first token come from the output that has them."""
    first, last = outputs[0], outputs[-1]
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    for output in outputs:
        tokens += output.token_ids
        logprobs += output.logprobs
    return TokenOutput(
        request_id=request_id,
        position=first.position,
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        stop_token=last.stop_token,
        cached_tokens=first.cached_tokens,
        prompt_logprobs=first.prompt_logprobs,
        timings=first.timings,
        choice=first.choice,
    )


class TokenOrder:
    """Outputs are added as they arrive, in any order; `take` returns the next ones, merged.

    `tokens` is the sequence's output so far, delivered or ready. At most `limit` positions are
    accepted: more is the worker's fault.
    """

    def __init__(self, request_id: str, limit: int) -> None:
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self._request_id, self._limit = request_id, limit
        self._ready: list[TokenOutput] = []
        self._early: dict[int, TokenOutput] = {}

    def add(self, output: TokenOutput) -> None:
        """Take one output. Raises ProtocolError when it lies past the output's end."""
        if output.position + len(output.token_ids) > self._limit or output.position < 0:
            raise ProtocolError(f"position {output.position} is past the limit of {self._limit} tokens")
        if output.position > len(self.tokens):
            known = self._early.get(output.position)
            if known is None or len(known.token_ids) <= len(output.token_ids):
                self._early[output.position] = output
            return
        self._append(output)
        while self._early and (first := min(self._early)) <= len(self.tokens):
            self._append(self._early.pop(first))

    def _append(self, output: TokenOutput) -> None:
        if self.finish_reason is not None:
            return
        seen = len(self.tokens) - output.position
        if seen > 0:
            if seen > len(output.token_ids) or (seen == len(output.token_ids) and output.finish_reason is None):
                return
            output = _without_first(output, seen)
        self._ready.append(output)
        self.tokens += output.token_ids
        self.finish_reason = output.finish_reason

    def take(self) -> TokenOutput | None:
        """Everything that is ready, as one output, or None."""
        if not self._ready:
            return None
        outputs, self._ready = self._ready, []
        return _merged(outputs, self._request_id)

    def forget_early(self) -> None:
        """A new attempt computes everything after `tokens` again."""
        self._early.clear()


class GroupOrder:
    """A TokenOrder for each choice of a group. The whole ends when every choice has ended or was dropped."""

    def __init__(self, request_id: str, limit: int, num_choices: int) -> None:
        self._orders = [TokenOrder(request_id, limit) for _ in range(num_choices)]
        self._dropped: set[int] = set()

    @property
    def tokens(self) -> list[int]:
        """All choices' outputs so far, one after the other."""
        return [token for order in self._orders for token in order.tokens]

    @property
    def finish_reason(self) -> str | None:
        """The last choice's, once all have ended."""
        if len(self.ended) < len(self._orders):
            return None
        return self._orders[-1].finish_reason or "stop"

    @property
    def ended(self) -> tuple[int, ...]:
        """Choices that have ended or were dropped."""
        done = (index for index, order in enumerate(self._orders) if order.finish_reason is not None)
        return tuple(sorted({*done, *self._dropped}))

    @property
    def emitted(self) -> list[list[int]]:
        """Each choice's output so far."""
        return [list(order.tokens) for order in self._orders]

    def add(self, output: TokenOutput) -> None:
        """Take one output. Raises ProtocolError when it is no choice's, or lies past its end."""
        if not 0 <= output.choice < len(self._orders):
            raise ProtocolError(f"choice {output.choice} of {len(self._orders)}")
        if output.choice not in self._dropped:
            self._orders[output.choice].add(output)

    def take(self) -> TokenOutput | None:
        """Everything that is ready of one choice, as one output, or None."""
        for order in self._orders:
            if (output := order.take()) is not None:
                return output
        return None

    def drop(self, choice: int) -> None:
        """This choice needs no more tokens."""
        self._dropped.add(choice)

    def forget_early(self) -> None:
        """A new attempt computes everything after each choice's tokens again."""
        for order in self._orders:
            order.forget_early()
