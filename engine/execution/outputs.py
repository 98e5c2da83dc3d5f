"""Appends drawn tokens to their sequences: what ends with them, and what is sent. No torch.

Lives on the engine's thread, between the sampler and the scheduler.
"""

from collections.abc import Callable, Iterable

import msgspec

from kvrelay.engine.groups.group_steps import EndSequence
from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.plane.messages import Timings, TokenLogprob, TokenOutput
from kvrelay.types import FinishReason


class OutputProcessor:
    """The output processor of one engine. max_model_len: tokens that a sequence may have."""

    def __init__(
        self, end: EndSequence, clock: Callable[[], float], *, eos_ids: Iterable[int], max_model_len: int
    ) -> None:
        self._end, self._clock = end, clock
        self._eos, self._max_model_len = frozenset(eos_ids), max_model_len
        self._unsent: list[TokenOutput] = []

    def send_later(self, outputs: Iterable[TokenOutput]) -> None:
        """Outputs that no step has brought: the next one's result has them."""
        self._unsent += outputs

    def take_unsent(self) -> list[TokenOutput]:
        """Those since the last call."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def append_all(
        self, seqs: list[Sequence], tokens: list[int], logprobs: list[TokenLogprob | None], outputs: list[TokenOutput]
    ) -> None:
        """One token for each of these sequences; `outputs` gets what is to be sent."""
        now_s, send = self._clock(), outputs.append
        for seq, token, logprob in zip(seqs, tokens, logprobs, strict=True):
            token_ids = seq.token_ids
            count = len(token_ids)
            if count < seq.plain_until and token not in seq.stop_ids:  # as nearly always
                token_ids.append(token)
                request = seq.request
                position = count - request.num_prompt_tokens
                send(TokenOutput(request_id=request.request_id, position=position, token_ids=[token]))
            else:
                send(self._append(seq, token, logprob, now_s))

    def _append(self, seq: Sequence, token: int, logprob: TokenLogprob | None, now_s: float) -> TokenOutput:
        request, token_ids = seq.request, seq.token_ids
        position = len(token_ids) - request.num_prompt_tokens
        is_first = len(token_ids) == len(request.token_ids)
        token_ids.append(token)
        reason = self._finish_reason(seq)
        if reason is not None:
            seq.hold = False  # nothing is left to decode elsewhere
            self._end(seq, reason)
        elif seq.output_limit is not None and seq.num_output >= seq.max_output:
            self._end(seq, FinishReason.LENGTH)  # a prefill worker's one token: the stream goes on elsewhere
        elif seq.group is None and request.sampling.logprobs is None and seq.output_limit is None:
            self._set_plain_until(seq)
        wanted = request.sampling.max_tokens > 0
        output = TokenOutput(
            request_id=seq.stream_id,
            choice=seq.choice,
            num_left=_num_left(seq),
            position=position,
            token_ids=[token] if wanted else [],
            logprobs=[logprob] if logprob is not None and wanted else [],
            finish_reason=reason,
            stop_token=token if reason is FinishReason.STOP else None,
        )
        return with_first_token_facts(output, seq, now_s) if is_first else output

    def end_too_long(self, seqs: Iterable[Sequence]) -> None:
        """`end_if_too_long` for all of these; the outputs are sent later."""
        self.send_later(end for seq in seqs if (end := self.end_if_too_long(seq)) is not None)

    def end_if_too_long(self, seq: Sequence) -> TokenOutput | None:
        """End a sequence that came with its last token; returns what is to be sent of that. None: it continues.

        This engine's context may be shorter than that of the one which drew the token.
        """
        if (reason := self._finish_reason(seq)) is None:
            return None
        self._end(seq, reason)
        return TokenOutput(
            request_id=seq.stream_id,
            position=seq.num_output,
            token_ids=[],
            finish_reason=reason,
            choice=seq.choice,
            num_left=_num_left(seq),
        )

    def is_last(self, seq: Sequence) -> bool:
        """Whether a sequence ends with the token that comes next, whatever it is."""
        num_tokens = len(seq.token_ids)
        if num_tokens < seq.plain_until:
            return False
        return seq.num_output + 1 >= seq.max_output or num_tokens + 1 >= self._max_model_len

    def _set_plain_until(self, seq: Sequence) -> None:
        """Until `plain_until` no token but those in `stop_ids` can end the stream."""
        params = seq.request.sampling
        seq.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        seq.plain_until = min(seq.request.num_prompt_tokens + params.max_tokens, self._max_model_len) - 1

    def _finish_reason(self, seq: Sequence) -> FinishReason | None:
        """Why the stream ends with its last token, or None. A prefill worker's own limit does not end it."""
        params, token, num_tokens = seq.request.sampling, seq.token_ids[-1], len(seq.token_ids)
        num_output = num_tokens - seq.request.num_prompt_tokens
        ends = token in params.stop_token_ids or (token in self._eos and not params.ignore_eos)
        if ends and params.max_tokens > 0 and num_output > params.min_tokens:
            return FinishReason.STOP
        if num_output >= params.max_tokens or num_tokens >= self._max_model_len:
            return FinishReason.LENGTH
        return None


def with_first_token_facts(output: TokenOutput, seq: Sequence, now_s: float) -> TokenOutput:
    """The output with what only a stream's first output carries."""
    scheduled_s = seq.scheduled_s if seq.scheduled_s is not None else now_s
    timings = Timings(queue_s=scheduled_s - seq.arrived_s, compute_s=now_s - scheduled_s, num_chunks=seq.num_chunks)
    return msgspec.structs.replace(
        output, cached_tokens=seq.num_cached, prompt_logprobs=seq.prompt_logprobs, timings=timings
    )


def _num_left(seq: Sequence) -> int:
    return len(seq.group.members) if seq.group is not None else 0
