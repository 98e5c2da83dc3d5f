"""Requests of one engine: what it takes, from their arrival to a transfer's first tokens, and their abort; and what
no kernel can carry out. No torch.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Rows

from kvrelay.engine.execution.launch import StepLoads
from kvrelay.engine.execution.runner import InFlightStep, Runner
from kvrelay.engine.execution.sampler import OutputProcessor
from kvrelay.engine.scheduling.beam import BeamCandidates
from kvrelay.engine.scheduling.groups import Groups
from kvrelay.engine.scheduling.preempt import MeasuredSpeeds
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.engine.speculation.speculation import DraftSteps
from kvrelay.hashing import HASH_BYTES
from kvrelay.plane.messages import MAX_PRIORITY, Sampling, SequenceRequest
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


MAX_TENANT_CHARS = 64
_MAX_INT = 2**63 - 1
MAX_BEAMS = 16
MAX_BAD_WORDS = 1 << 14  # token sequences: each word of a client may be several
MAX_GRAMMAR_CHARS = 4 << 20  # far above what ingresses take


def request_fault(request: SequenceRequest, block_size: int, vocab_size: int) -> str | None:
    """Why `request` makes no sense for a model of `vocab_size` tokens, or None."""
    token_ids = request.token_ids
    if not token_ids or not 0 < request.num_prompt_tokens <= len(token_ids):
        return "no prompt tokens, or more of them than tokens"
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return "a token id is outside the vocabulary"
    step = request.tokens_per_hash or block_size
    if step < 1 or block_size % step:
        return f"hashes of every {step} tokens name no blocks of {block_size}"
    if len(request.block_hashes) > len(token_ids) // step:
        return "more block hashes than full blocks"
    if any(len(digest) != HASH_BYTES for digest in request.block_hashes):
        return f"a block hash is not {HASH_BYTES} bytes long"
    if not (0 <= request.hints.pin_s < math.inf and 0 <= (request.hints.pin_share or 0.0) <= 1):
        return "pin_s must be finite and not negative, pin_share a share"
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        return f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}"
    if request.deadline_s is not None and not 0 < request.deadline_s < math.inf:
        return "deadline_s must be finite and positive"
    if len(request.tenant) > MAX_TENANT_CHARS:
        return f"tenant: more than {MAX_TENANT_CHARS} characters"
    if not 0 < request.weight < math.inf:
        return "weight must be finite and positive"
    if (fault := group_fault(request, vocab_size)) is not None:
        return fault
    return sampling_fault(request.sampling, vocab_size)


def group_fault(request: SequenceRequest, vocab_size: int) -> str | None:
    """Why the group of `request` makes no sense, or None."""
    if (group := request.group) is None:
        return None
    if len(request.token_ids) != request.num_prompt_tokens or request.sampling.max_tokens < 1:
        return "a group begins with its prompt alone and asks for tokens"
    if (beams := group.beams) is not None:
        if group.seeds or group.emitted or group.ended:
            return "a beam search has no seeds and is not continued"
        if not 1 <= beams.num_returned <= beams.width <= MAX_BEAMS:
            return f"a beam search returns 1 to its width, and that is at most {MAX_BEAMS}"
        if request.sampling.is_constrained:
            return "a beam search cannot be constrained: its beams are ranked by the model alone"
        if max(2, 2 + len(request.sampling.stop_token_ids)) * beams.width > vocab_size:
            return "more candidates of a beam search than tokens in the vocabulary"
        return None if math.isfinite(beams.length_penalty) else "length_penalty is not a finite number"
    if not group.num_choices or group.num_sequences < 1 or (group.emitted and len(group.emitted) != group.num_choices):
        return "a group without choices, or output of others than those"
    if any(not 0 <= choice < group.num_choices for choice in group.ended):
        return "a choice that is not in the group has ended"
    if any(not 0 <= token < vocab_size for tokens in group.emitted for token in tokens):
        return "a token id is outside the vocabulary"
    return None


def rejection_message(seq: Sequence, reason: str, now_s: float) -> str:
    """The message for a queued sequence that was rejected, by the reason of `Arrivals.take_rejected`."""
    waited_s = now_s - seq.arrived_s
    if reason == "deadline":
        return f"no first token within {seq.request.deadline_s:g} s: still queued after {waited_s:.3g} s"
    if reason == "draining":
        return f"the worker stops; still queued after {waited_s:.3g} s"
    return f"its place in the queue went to a tenant with fewer sequences, after {waited_s:.3g} s"


def sampling_fault(params: Sampling, vocab_size: int) -> str | None:
    """The first field of `params` that cannot be carried out, or None."""
    reals = (
        params.temperature, params.top_p, params.min_p, params.repetition_penalty, params.presence_penalty,
        params.frequency_penalty, *params.logit_bias.values(),
    )  # fmt: skip
    if not all(map(math.isfinite, reals)):
        return "a sampling parameter is not a finite number"
    if params.temperature < 0 or params.repetition_penalty <= 0:
        return "temperature must not be negative, repetition_penalty must be positive"
    if not -_MAX_INT <= params.top_k <= _MAX_INT:
        return "top_k is too large"
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and not 0 <= count <= vocab_size:
            return f"{name}: {count} of {vocab_size} tokens"
    if any(not 0 <= token < vocab_size for token in (*params.logit_bias, *params.stop_token_ids)):
        return "logit_bias or stop_token_ids: a token id is outside the vocabulary"
    return constraint_fault(params, vocab_size) if params.is_constrained else None


def constraint_fault(params: Sampling, vocab_size: int) -> str | None:
    """The first field that constrains the output and cannot be carried out, or None."""
    if any(not 0 <= token < vocab_size for token in params.allowed_token_ids):
        return "allowed_token_ids: a token id is outside the vocabulary"
    if len(params.bad_words) > MAX_BAD_WORDS:
        return f"bad_words: more than {MAX_BAD_WORDS}"
    if any(not word or not all(0 <= token < vocab_size for token in word) for word in params.bad_words):
        return "bad_words: an empty one, or a token id outside the vocabulary"
    if params.grammar is not None and len(params.grammar.text) > MAX_GRAMMAR_CHARS:
        return f"grammar: more than {MAX_GRAMMAR_CHARS} characters"
    if (thinking := params.thinking) is None:
        return None
    if not thinking.end or any(not 0 <= token < vocab_size for token in (*thinking.start, *thinking.end)):
        return "thinking: no end marker, or a token id outside the vocabulary"
    return "thinking: a negative budget" if thinking.budget is not None and thinking.budget < 0 else None


class Requests:
    """Called between two steps, on the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        batch: Batch,
        groups: Groups,
        loads: StepLoads,
        outputs: OutputProcessor,
        speeds: MeasuredSpeeds,
        clock: Callable[[], float],
        *,
        vocab_size: int,
        max_model_len: int,
        has_grammars: bool,
    ) -> None:
        self._scheduler, self._batch, self._groups, self._loads = scheduler, batch, groups, loads
        self._outputs, self._speeds, self._clock = outputs, speeds, clock
        self._vocab_size, self._max_model_len, self._has_grammars = vocab_size, max_model_len, has_grammars

    def refusal(self, request: SequenceRequest) -> tuple[str, str] | None:
        """(reason, message) when this request cannot be taken, else None."""
        num_tokens, longest = len(request.token_ids), self._max_model_len
        if num_tokens >= longest + (request.sampling.max_tokens <= 1):
            return "too_long", f"{num_tokens} tokens, but the longest sequence is {longest}"
        if request.group is not None and request.group.beams is not None:
            most = num_tokens + request.sampling.max_tokens
            if most > longest:
                return "too_long", f"up to {most} tokens, but the longest sequence is {longest}"
        fault = request_fault(request, self._scheduler.pool.block_size, self._vocab_size)
        if fault is None and request.sampling.grammar is not None and not self._has_grammars:
            fault = "this engine compiles no grammars"
        return ("invalid", fault) if fault is not None else self._scheduler.refusal(request)

    def activate(self, request_id: str, token_ids: list[int], candidates: Rows[tuple[int, float]] = ()) -> bool:
        """The reservation's blocks hold the prompt's KV. False when the sequence is no longer here.

        Args:
            token_ids: the first token; of a group, each live choice's.
            candidates: of a beam search, what may follow the prompt.
        """
        is_group = request_id in self._scheduler.groups
        seq = self._scheduler.activate(request_id, [] if is_group else token_ids)
        if seq is None:
            return False
        if is_group:
            self._activate_group(seq, token_ids, list(candidates))
        else:
            self._outputs.end_too_long([seq])
        return True

    def _activate_group(self, leader: Sequence, token_ids: list[int], candidates: BeamCandidates) -> None:
        """A group's members begin at once, so what is loaded from a lower tier is waited for here."""
        group, is_loading = leader.group, leader.load is not None
        assert group is not None
        if not self._loads.wait_for(leader):
            return
        if is_loading:
            self._scheduler.blocks.register(leader)
        if group.search is None:
            self._outputs.end_too_long(self._groups.take_over(leader, token_ids))
        else:
            outputs = self._groups.begin_search(group, leader, candidates)
            self._outputs.send_later([output for output in outputs if output.finish_reason is not None])

    def abort(self, request_id: str) -> bool:
        """Free everything that the request holds. False when it is not here."""
        seqs = self._sequences_of(request_id)
        for seq in seqs:
            self._batch.end(seq, FinishReason.ABORT)
        return bool(seqs)

    def _sequences_of(self, request_id: str) -> list[Sequence]:
        if (group := self._scheduler.groups.get(request_id)) is not None and group.leader is None:
            return list(group.members)
        seq = self._scheduler.sequences.get(request_id)
        return [] if seq is None else [seq]

    def abort_choice(self, request_id: str, choice: int) -> None:
        """This choice of a group is no longer wanted."""
        group = self._scheduler.groups.get(request_id)
        if group is None or group.search is not None:
            return
        if group.leader is not None:
            group.unwanted.add(choice)
        for member in [member for member in group.members if member.choice == choice]:
            self._batch.end(member, FinishReason.ABORT)

    def quarantine(self, request_id: str) -> int | None:
        """Like abort for a receiving sequence, but its blocks stay taken until `unquarantine` of the key."""
        seq = self._scheduler.receiving.get(request_id)
        return None if seq is None else self._scheduler.quarantine(seq, FinishReason.ERROR)

    def unquarantine(self, key: int) -> None:
        """Nothing writes those blocks any more."""
        self._scheduler.blocks.unquarantine(key)

    def note_transfer_speed(self, bytes_per_s: float, latency_s: float) -> None:
        """How fast KV comes from prefill workers: for the choice of a preemption mode."""
        self._speeds.transfer_bytes_per_s, self._speeds.transfer_latency_s = bytes_per_s, latency_s

    def pin_ahead(self, seq: Sequence, num_in_pool: int, ttl_s: float) -> None:
        """Keep a prompt's first blocks, which are in the pool, for a request that is yet to come."""
        self._scheduler.pool.tick(self._clock())
        self._scheduler.blocks.pinning.pin_ahead(seq, num_in_pool, ttl_s)

    def end_pins(self, session: str) -> None:
        """End the pins made for this session, and make none for it any more."""
        self._scheduler.pool.tick(self._clock())
        self._scheduler.blocks.pinning.end(session)
