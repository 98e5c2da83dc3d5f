"""From logits to tokens and outputs: penalties, bias, the draw, log-probabilities, and when a stream ends.

Random numbers are stateless: token i of an output depends on (seed, i) alone, so a stream can be
continued on any worker and a batch's other rows do not matter.
"""

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.execution.masks import RowMasks, follow_output, is_complete
from kvrelay.engine.scheduling.beam import BeamCandidates
from kvrelay.engine.scheduling.groups import EndSequence
from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.kernels.backend import Backend, SamplingBatch
from kvrelay.kernels.common.logits import LogitChanges, LogProbabilities, packed_log_probabilities, unpacked
from kvrelay.kernels.common.sampling_search import to_device
from kvrelay.plane.messages import Sampling, Timings, TokenLogprob, TokenOutput
from kvrelay.types import FinishReason

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) for output positions: float64 [R]. seeds, positions: uint64 [R]; sums and products wrap.

    Source: splitmix64 (Steele et al., OOPSLA 2014).
    """
    z = seeds + np.uint64(_GOLDEN) * (positions + np.uint64(1))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    drawn: np.ndarray = ((z ^ (z >> np.uint64(31))) >> np.uint64(11)) / float(1 << 53)
    return drawn


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """Which of a batch's rows want log-probabilities, and how many of the likeliest each."""

    rows: list[int]
    counts: list[int]

    def of(self, logits: Tensor) -> tuple[Tensor | None, list[int], int]:
        """As AsyncDevice.pending takes them."""
        return (logits if self.rows else None), self.rows, max(self.counts, default=0)

    def beside(self, tokens: list[int], packed: Tensor | None) -> list[TokenLogprob | None]:
        """For each of the batch's drawn tokens; packed: see `packed_log_probabilities`."""
        result: list[TokenLogprob | None] = [None] * len(tokens)
        if packed is not None:
            entries = _entries([tokens[row] for row in self.rows], self.counts, unpacked(packed))
            for row, entry in zip(self.rows, entries, strict=True):
                result[row] = entry
        return result


@dataclass(frozen=True, slots=True)
class _Batch:
    """What these requests ask for, which is the same in every step of a batch.

    random, changed: rows that draw, and whose logits are changed first.
    short: rows that must not end early, each with the ids that would end it.
    memoryless: to no row does it matter which tokens came before.
    """

    params: list[Sampling]
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: np.ndarray
    random: list[int]
    changed: list[int]
    short: list[tuple[int, np.ndarray]]
    logprobs: WantedLogprobs
    memoryless: bool


def _batch_of(params: list[Sampling], eos_ids: tuple[int, ...]) -> _Batch:
    return _Batch(
        params=params,
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32),
        seeds=np.array([p.seed & _MASK64 for p in params if p.temperature > 0], dtype=np.uint64),
        random=[row for row, p in enumerate(params) if p.temperature > 0],
        changed=[row for row, p in enumerate(params) if p.has_penalties or p.logit_bias],
        short=[(row, _ends(p, eos_ids)) for row, p in enumerate(params) if p.min_tokens > 0],
        logprobs=WantedLogprobs(
            [row for row, p in enumerate(params) if p.logprobs is not None],
            [p.logprobs for p in params if p.logprobs is not None],
        ),
        memoryless=not any(p.has_penalties for p in params),
    )


def _ends(p: Sampling, eos_ids: tuple[int, ...]) -> np.ndarray:
    return np.array(sorted({*p.stop_token_ids, *eos_ids}), dtype=np.int64)


class Sampler:
    """Draws one token for each of a step's finished rows."""

    def __init__(self, backend: Backend, eos_ids: tuple[int, ...]) -> None:
        self._backend, self._eos_ids = backend, eos_ids
        self._is_immediate = backend.asynchronous is None
        self._last = _batch_of([], eos_ids)  # for the next step, which most often has the same rows

    def sample(
        self, logits: Tensor, seqs: Rows[Sequence], ahead: Rows[int] | None = None, masks: RowMasks | None = None
    ) -> tuple[list[int], list[TokenLogprob | None]]:
        """One token for each row of float32 logits [R, vocab], and its log-probabilities if asked for.

        ahead: [R], drafted tokens between the sequence's last one and the row's; None: nowhere any.
        masks: of constrained rows; theirs know of min_tokens, too.
        Log-probabilities are those of the model, before penalties, masks and temperature.
        """
        batch = self._batch(seqs, ahead, masks)
        if self._is_immediate and not self._last.changed and logits.device.type == "cpu":
            tokens = self._draw_without(self._bans(seqs, masks), logits, batch)
        else:
            tokens = self._backend.sample_on_device(self._adjusted(logits, seqs, masks), batch)
        wanted = self._last.logprobs
        if (device := self._backend.asynchronous) is not None:
            pending = device.pending(tokens, *wanted.of(logits))
            drawn, packed = pending.wait(), pending.packed
        else:
            drawn, (_, rows, most) = tokens.tolist(), wanted.of(logits)
            packed = packed_log_probabilities(logits, tokens, rows, most) if rows else None
        return drawn, wanted.beside(drawn, packed)

    def is_memoryless(self, seqs: Rows[Sequence]) -> bool:
        """Whether these rows can be drawn before the tokens before them are known."""
        self._note(seqs)
        return self._last.memoryless

    def draw(
        self, logits: Tensor, seqs: Rows[Sequence], masks: RowMasks | None = None
    ) -> tuple[Tensor, WantedLogprobs]:
        """As `sample`: tokens [R] int64, left on the device, and what is wanted beside them.

        Of rows that are not memoryless the tokens before must be known.
        """
        batch = self._batch(seqs, masks=masks)
        return self._backend.sample_on_device(self._adjusted(logits, seqs, masks), batch), self._last.logprobs

    def _note(self, seqs: Rows[Sequence]) -> None:
        params = [seq.request.sampling for seq in seqs]
        if params != self._last.params:  # the very same objects in most steps: quickly seen
            self._last = _batch_of(params, self._eos_ids)

    def _adjusted(self, logits: Tensor, seqs: Rows[Sequence], masks: RowMasks | None) -> Tensor:
        """With bias, penalties and the min_tokens mask."""
        bans = self._bans(seqs, masks)
        if not self._last.changed and not bans:
            return logits
        changes = LogitChanges(logits.shape[1])
        for row in self._last.changed:
            self._note_changes(changes, row, seqs[row])
        for row, ids in bans:
            changes.ban(row, ids.tolist())
        return changes.applied(logits)

    def _bans(self, seqs: Rows[Sequence], masks: RowMasks | None) -> list[tuple[int, np.ndarray]]:
        """What rows without a mask must not draw yet."""
        last = self._last
        bans = [(row, ids) for row, ids in last.short if seqs[row].num_output < last.params[row].min_tokens]
        return bans if masks is None or not bans else [ban for ban in bans if masks.rows[ban[0]] < 0]

    def _draw_without(self, bans: list[tuple[int, np.ndarray]], logits: Tensor, batch: SamplingBatch) -> Tensor:
        """The draw with a few places of the logits banned meanwhile: a copy of all rows would take longer than it."""
        if not bans:
            return self._backend.sample_on_device(logits, batch)
        values = logits.numpy()
        kept = [values[row, ids] for row, ids in bans]
        try:
            for row, ids in bans:
                values[row, ids] = -np.inf
            return self._backend.sample_on_device(logits, batch)
        finally:
            for (row, ids), numbers in zip(bans, kept, strict=True):
                values[row, ids] = numbers

    def _batch(
        self, seqs: Rows[Sequence], ahead: Rows[int] | None = None, masks: RowMasks | None = None
    ) -> SamplingBatch:
        self._note(seqs)
        last, draws = self._last, self._draws(seqs, ahead)
        if masks is None:
            return SamplingBatch(last.temperature, last.top_k, last.top_p, last.min_p, draws)
        return SamplingBatch(
            last.temperature, last.top_k, last.top_p, last.min_p, draws, masks=masks.masks, mask_rows=masks.rows
        )

    def _draws(self, seqs: Rows[Sequence], ahead: Rows[int] | None) -> Tensor:
        """Each row's random number; 0 for rows that draw none."""
        draws, rows = np.zeros(len(seqs)), self._last.random
        if rows:
            positions = [seqs[row].num_output + (0 if ahead is None else ahead[row]) for row in rows]
            draws[rows] = uniforms(self._last.seeds, np.array(positions, dtype=np.uint64))
        return torch.from_numpy(draws)

    def _note_changes(self, changes: LogitChanges, row: int, seq: Sequence) -> None:
        p = seq.request.sampling
        if p.repetition_penalty != 1.0:
            changes.penalise(row, seq.token_ids, p.repetition_penalty)
        if seq.num_output and (p.presence_penalty or p.frequency_penalty):
            output = seq.token_ids[seq.request.num_prompt_tokens :]
            changes.lower(row, output, p.presence_penalty, p.frequency_penalty)
        if p.logit_bias:
            changes.bias(row, p.logit_bias)


def token_logprobs(logits: Tensor, tokens: Rows[int], counts: Rows[int]) -> list[TokenLogprob]:
    """Log-probability and rank of tokens[r] under row r of float32 logits [R, vocab], and the counts[r] likeliest."""
    chosen = to_device(torch.tensor(tokens, dtype=torch.int64), logits.device)
    packed = packed_log_probabilities(logits, chosen, range(len(tokens)), max(counts, default=0))
    ranks = 1 + (logits > logits.gather(1, chosen.unsqueeze(1))).sum(dim=1, keepdim=True)
    numbers = torch.cat((packed, ranks.double()), dim=1).cpu()
    entries = _entries(tokens, counts, unpacked(numbers[:, :-1]))
    return [
        msgspec.structs.replace(entry, rank=rank)
        for entry, rank in zip(entries, numbers[:, -1].long().tolist(), strict=True)
    ]


def _entries(tokens: Rows[int], counts: Rows[int], found: LogProbabilities) -> list[TokenLogprob]:
    return [
        TokenLogprob(token, value, list(zip(row_ids[:count], row_values[:count], strict=True)))
        for token, value, count, row_ids, row_values in zip(
            tokens, found.own, counts, found.top_ids, found.top, strict=True
        )
    ]


def likeliest(logits: Tensor, seqs: list[Sequence]) -> list[BeamCandidates]:
    """Each beam's likeliest continuations, as many as its search looks at. logits: [R, vocab], a row for each beam."""
    logp = torch.log_softmax(logits.float(), dim=-1)
    most = 1
    for row, seq in enumerate(seqs):
        search = seq.group.search if seq.group is not None else None
        assert search is not None
        most = max(most, search.rules.num_candidates)
        if seq.num_output < seq.request.sampling.min_tokens and search.rules.end_ids:
            logp[row, torch.tensor(sorted(search.rules.end_ids), device=logp.device)] = -math.inf
    values, ids = logp.topk(min(most, logp.shape[-1]), dim=-1)
    return [
        list(zip(row_ids, row_values, strict=True))
        for row_ids, row_values in zip(ids.tolist(), values.tolist(), strict=True)
    ]


class OutputProcessor:
    """The output processor of one engine. max_model_len: tokens that a sequence may have."""

    def __init__(
        self, end: EndSequence, clock: Callable[[], float], *, eos_ids: Iterable[int], max_model_len: int
    ) -> None:
        self._end, self._clock = end, clock
        self._eos, self._max_model_len = frozenset(eos_ids), max_model_len
        self._unsent: list[TokenOutput] = []
        self.broken: list[Sequence] = []  # whose constraint has a problem: the engine ends them

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
            elif (output := self._append(seq, token, logprob, now_s)) is not None:
                send(output)

    def _append(self, seq: Sequence, token: int, logprob: TokenLogprob | None, now_s: float) -> TokenOutput | None:
        """None: the sequence is broken."""
        request, token_ids = seq.request, seq.token_ids
        position = len(token_ids) - request.num_prompt_tokens
        is_first = len(token_ids) == len(request.token_ids)
        token_ids.append(token)
        if seq.constraint is not None and not follow_output(seq):
            self.broken.append(seq)
            return None
        reason = self._finish_reason(seq)
        if reason is not None:
            seq.hold = False  # nothing is left to decode elsewhere
            self._end(seq, reason)
        elif seq.output_limit is not None and seq.num_output >= seq.max_output:
            self._end(seq, FinishReason.LENGTH)  # a prefill worker's one token: the stream goes on elsewhere
        elif (seq.group, request.sampling.logprobs, seq.output_limit, seq.constraint) == (None, None, None, None):
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
            stop_token=token if reason is FinishReason.STOP and self._ends(request.sampling, token) else None,
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

    def _ends(self, params: Sampling, token: int) -> bool:
        """Whether a stream may end with this token, which is then no part of its text."""
        return token in params.stop_token_ids or (token in self._eos and not params.ignore_eos)

    def _finish_reason(self, seq: Sequence) -> FinishReason | None:
        """Why the stream ends with its last token, or None. A prefill worker's own limit does not end it."""
        params, token, num_tokens = seq.request.sampling, seq.token_ids[-1], len(seq.token_ids)
        num_output = num_tokens - seq.request.num_prompt_tokens
        if params.max_tokens > 0:
            if num_output > params.min_tokens and self._ends(params, token):
                return FinishReason.STOP
            if seq.constraint is not None and is_complete(seq):
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
