"""From a launched step to its outputs: the tokens of plain rows, of groups, of drafted rows, and prompt
log-probabilities.

On a device that computes asynchronously tokens are drawn when the step is launched, where that needs nothing that is
not known yet, and collected later; otherwise they are drawn when the step is collected.
"""

from collections.abc import Callable, Iterable

import msgspec
import torch
from torch import Tensor

from kvrelay.engine.execution.in_flight import InFlightStep
from kvrelay.engine.execution.runner import Runner
from kvrelay.engine.execution.sampler import Sampler, token_logprobs
from kvrelay.engine.groups.beam_candidates import likeliest
from kvrelay.engine.groups.group_steps import EndSequence, GroupSteps
from kvrelay.engine.scheduling.plan import Scheduled, StepPlan
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.scheduling.sequence import Sequence, State
from kvrelay.engine.speculation.speculation_steps import DraftSteps
from kvrelay.kernels.async_backend import AsyncDevice, PendingTokens
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


_PROMPT_LOGPROB_ROWS = 64  # logits of a whole chunk at once would be 100 MB at vocabularies of 50k and 512 tokens


class StepSampling:
    """Draws the tokens of steps. device: None: calls return when they are computed."""

    def __init__(
        self, runner: Runner, sampler: Sampler, outputs: OutputProcessor, groups: GroupSteps, drafts: DraftSteps,
        scheduler: Scheduler, device: AsyncDevice | None, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._runner, self.sampler, self._outputs, self._groups = runner, sampler, outputs, groups
        self._drafts, self._scheduler, self._device, self._clock = drafts, scheduler, device, clock
        self.waited_s = 0.0  # for the device, since the last `collect`

    # ---- at launch

    def launched(self, step: InFlightStep, hidden: Tensor) -> None:
        """Draw the step's tokens now where that is possible; else keep `hidden` until it is collected."""
        if self._device is not None and not step.wants_prompt_logprobs and self._draws_alone(step):
            step.pending = self._device.pending(self._draw(step, hidden))
        else:
            step.hidden = hidden

    def _draws_alone(self, step: InFlightStep) -> bool:
        """Whether its tokens are drawn from its logits alone, and nothing else is asked of them."""
        if step.plan.num_drafted or self._scheduler.groups.by_id:
            return False
        return self.sampler.wants_tokens_alone(step.seqs)

    def _draw(self, step: InFlightStep, hidden: Tensor) -> Tensor:
        """One token for each of its rows, [R] int64 on the device."""
        if not step.rows:
            return _none_drawn(hidden)
        return self.sampler.draw(self._runner.logits(hidden, step.rows), step.seqs)

    # ---- when the step is collected

    def collect(self, step: InFlightStep) -> list[TokenOutput]:
        """The outputs of a step. Waits until the device has done it."""
        self.waited_s, outputs = 0.0, list[TokenOutput]()
        try:
            if step.pending is None:
                self._sample(step, outputs)
            else:
                self._take(step, self._wait(step.pending), outputs)
        finally:
            step.release_kept()
        return outputs

    def _wait(self, pending: PendingTokens) -> list[int]:
        begin_s = self._clock()
        tokens = pending.wait()
        self.waited_s += self._clock() - begin_s
        return tokens

    def _take(self, step: InFlightStep, tokens: list[int], outputs: list[TokenOutput]) -> None:
        """Append tokens that were drawn at launch, but not to sequences that have ended meanwhile."""
        drawn = [pair for pair in zip(step.seqs, tokens, strict=True) if pair[0].state is State.RUNNING]
        seqs = [seq for seq, _ in drawn]
        self._outputs.append_all(seqs, [token for _, token in drawn], [None] * len(seqs), outputs)

    def _sample(self, step: InFlightStep, outputs: list[TokenOutput]) -> None:
        """Draw the tokens of a step that has waited for what came before it."""
        plan, rows, seqs, hidden = step.plan, step.rows, step.seqs, step.hidden
        assert hidden is not None
        if step.wants_prompt_logprobs:
            self._collect_prompt_logprobs(plan, hidden)
        if self._device is not None and not plan.num_drafted:  # some may have ended with the step before
            pairs = [pair for pair in zip(rows, seqs, strict=True) if pair[1].state is State.RUNNING]
            rows, seqs = [row for row, _ in pairs], [seq for _, seq in pairs]
        if not rows:
            if self._device is not None:  # whatever the step uses may be reused next
                self._wait(self._device.pending(_none_drawn(hidden)))
            return
        logits = self._runner.logits(hidden, rows)
        if plan.num_drafted:
            self._sample_drafted(plan, seqs, logits, outputs)
        elif self._scheduler.groups.by_id:
            self._sample_groups(seqs, logits, outputs)
        else:
            tokens, logprobs = self.sampler.sample(logits, seqs)
            self._outputs.append_all(seqs, tokens, logprobs, outputs)

    def _sample_groups(self, seqs: list[Sequence], logits: Tensor, outputs: list[TokenOutput]) -> None:
        """Sample a step that has members of groups."""
        draws = self._groups.rows_of(seqs)
        if len(draws) != len(seqs) or any(seq.group is not None for seq in seqs):
            drawn = logits[torch.tensor([row for row, _ in draws], dtype=torch.int64, device=logits.device)]
        else:
            drawn = logits
        if draws:
            members = [seq for _, seq in draws]
            tokens, logprobs = self.sampler.sample(drawn, members)
            self._outputs.append_all(members, tokens, logprobs, outputs)
        now_s = self._clock()
        leaders = [seq for seq in seqs if seq.group is not None and seq is seq.group.leader]
        for output in self._groups.advance_beams(seqs, lambda rows, beams: likeliest(logits[rows], beams)):
            leader = next((seq for seq in leaders if seq.request_id == output.request_id), None)
            outputs.append(output if leader is None else with_first_token_facts(output, leader, now_s))
        self._groups.settle(leaders)

    def _sample_drafted(self, plan: StepPlan, seqs: list[Sequence], logits: Tensor, outputs: list[TokenOutput]) -> None:
        """Each row draws what it would draw if all drafts before it were right; the first wrong one ends its
        sequence's step.

        So the tokens are those of plain steps, one by one: see `uniform`.
        """
        items = [item for item in plan.work if item.samples]
        ahead = [index for item in items for index in range(1 + len(item.drafts))]
        tokens, logprobs = self.sampler.sample(logits, seqs, ahead)
        begin = 0
        for item in items:
            end = begin + 1 + len(item.drafts)
            if item.drafts:
                self.take_drafted(item, tokens[begin:end], logprobs[begin:end], outputs)
            else:
                self._outputs.append_all([item.seq], tokens[begin:end], logprobs[begin:end], outputs)
            begin = end

    def take_drafted(
        self, item: Scheduled, tokens: list[int], logprobs: list[TokenLogprob | None], outputs: list[TokenOutput]
    ) -> None:
        """Append a sequence's next token and those behind right drafts. tokens, logprobs: of its rows."""
        seq, num_accepted = item.seq, 0
        for index, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            self._scheduler.advance(Scheduled(seq, item.start + index, 1))
            self._outputs.append_all([seq], [token], [logprob], outputs)
            if index == len(item.drafts) or token != item.drafts[index]:
                break
            num_accepted += 1
            if seq.state is not State.RUNNING:
                break
        self._drafts.note(item, num_accepted)

    def _collect_prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> None:
        begin = 0
        for item in plan.work:
            count = item.seq.request.sampling.prompt_logprobs
            if count is not None:
                self._collect_logprobs_of(item, hidden, begin, count)
            begin += item.num_tokens

    def _collect_logprobs_of(self, item: Scheduled, hidden: Tensor, begin: int, count: int) -> None:
        """begin: the item's first row of `hidden`; count: likeliest tokens for each prompt token."""
        seq = item.seq
        last = min(item.start + item.num_tokens, seq.request.num_prompt_tokens - 1)
        is_done = seq.num_output > seq.request.num_output_tokens  # sent before a preemption
        if item.start >= last or is_done:
            return
        targets = seq.token_ids[item.start + 1 : last + 1]
        for offset in range(0, len(targets), _PROMPT_LOGPROB_ROWS):
            part = targets[offset : offset + _PROMPT_LOGPROB_ROWS]
            rows = list(range(begin + offset, begin + offset + len(part)))
            seq.prompt_logprobs += token_logprobs(self._runner.logits(hidden, rows), part, [count] * len(part))


def _none_drawn(hidden: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=hidden.device)
