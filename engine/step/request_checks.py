"""What an engine will not take: requests that no kernel can carry out. Pure.

Ingresses check what clients send; this is the engine's own check, so that a wrong or newer peer
costs a refusal and never the engine.
"""

import math

from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.hashing import HASH_BYTES
from kvrelay.plane.messages import MAX_PRIORITY, Sampling, SequenceRequest

MAX_TENANT_CHARS = 64
_MAX_INT = 2**63 - 1
MAX_BEAMS = 16


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
    if not 0 <= request.hints.pin_s < math.inf:
        return "pin_s must be finite and not negative"
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        return f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}"
    if request.deadline_s is not None and not 0 < request.deadline_s < math.inf:
        return "deadline_s must be finite and positive"
    if len(request.tenant) > MAX_TENANT_CHARS:
        return f"tenant: more than {MAX_TENANT_CHARS} characters"
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
    return None
