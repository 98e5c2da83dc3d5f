"""Fields of a body that this server does not know: refused where they would change the answer, or misspell a known one;
else ignored, and reported in a header.
"""

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from kvrelay.errors import InvalidRequest

IGNORED_HEADER = "x-kvrelay-ignored"
MAX_HEADER_NAMES = 16
MAX_NAME_CHARS = 64
MAX_COUNTED = 64  # names in /metrics; further ones are counted as "other"
MAX_UNKNOWN = 32  # in one body
_ALIKE = 0.82  # of difflib's ratio: temperature and tempurature have 0.91, top_p and top_a 0.8

# Of OpenAI, vLLM, SGLang and others: they change nothing in the answer here.
WITHOUT_EFFECT = {
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "request_id", "rid", "cache_prompt", "custom_labels",
    "data_parallel_rank", "guided_decoding_backend", "ngram_corpus_id", "routed_dp_rank", "session_id",
    "skip_reading_prefix_cache", "spaces_between_special_tokens",
}  # fmt: skip

# They would change the answer, and are not supported.
_CHANGE_THE_ANSWER = (
    # OpenAI
    "audio", "moderation", "suffix", "web_search_options",
    # vLLM
    "extra_args", "logit_processors", "logits_processors", "logprob_token_ids", "lora_request",
    "max_repetition_pattern_size", "media_io_kwargs", "min_repetition_pattern_size", "mm_processor_kwargs",
    "prompt_embeds", "repetition_detection", "repetition_min_count", "return_tokens_as_token_ids", "vllm_xargs",
    # SGLang
    "custom_logit_processor", "custom_params", "images_config", "input_embeds", "input_ids", "lora_path",
    "max_dynamic_patch", "min_dynamic_patch", "no_stop_trim", "return_cached_tokens_details", "return_hidden_states",
    "return_meta_info", "return_prompt_token_ids", "return_routed_experts", "session_params", "stop_regex", "task",
    "use_audio_in_video",
    # others
    "assistant_prefix", "do_sample", "dry_multiplier", "dynatemp_range", "epsilon_cutoff", "eta_cutoff",
    "max_new_tokens", "max_output_tokens", "max_tool_calls", "mirostat", "mirostat_mode", "n_predict",
    "no_repeat_ngram_size", "num_beams", "num_predict", "reasoning", "reasoning_format", "repeat_penalty", "samplers",
    "sampling_params", "smoothing_factor", "stop_sequences", "stop_words", "tfs", "tfs_z", "thinking",
    "thinking_budget", "top_a", "top_n_sigma", "typical", "typical_p", "xtc_probability",
)  # fmt: skip
_NEUTRAL: tuple[Any, ...] = (False, 0, "", [], {})
REFUSED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_CHANGE_THE_ANSWER, _NEUTRAL),
    "detokenize": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "truncation_side": ("left",),
    "verbosity": ("medium",),
}
"""Refused unless null, or of one of these values."""


def refuse_or_ignore(
    data: Mapping[str, Any], known: frozenset[str], known_elsewhere: frozenset[str]
) -> tuple[str, ...]:
    """The names to ignore and report, in the body's order.

    known: of this body. known_elsewhere: of any body; it would be of effect at another endpoint.

    Raises InvalidRequest for a field that would change the answer, or is nearly a known one's name.
    """
    ignored: list[str] = []
    for name, value in data.items():
        if name in known or name in WITHOUT_EFFECT or value is None:
            continue
        if name in REFUSED:
            if value not in REFUSED[name]:
                raise unsupported(name)
        elif name in known_elsewhere:
            if value not in _NEUTRAL:
                raise InvalidRequest(f"{name}: not a field of this endpoint", name, 400, "unsupported_parameter")
        elif (near := _nearest(name, known)) is not None:
            shown = _shown(name)
            raise InvalidRequest(f"{shown}: unknown field; did you mean {near}?", shown, 400, "unknown_parameter")
        elif len(ignored) == MAX_UNKNOWN:
            raise InvalidRequest(f"the body has more than {MAX_UNKNOWN} unknown fields", None, 400, "unknown_parameter")
        else:
            ignored.append(name)
    return tuple(ignored)


def unsupported(name: str) -> InvalidRequest:
    """The error for a field that is known, and not supported."""
    return InvalidRequest(f"{name}: not supported by this server", name, 400, "unsupported_parameter")


def unknown(name: str) -> InvalidRequest:
    """The error for a field that is not known, where those are refused."""
    return InvalidRequest(f"{_shown(name)}: unknown field", _shown(name), 400, "unknown_parameter")


@lru_cache(maxsize=1024)
def _nearest(name: str, known: frozenset[str]) -> str | None:
    """The known name that this one misspells: in camel case, with hyphens, or with wrong letters."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name[:MAX_NAME_CHARS]).lower().replace("-", "_").strip("_ ")
    if plain in known:
        return plain
    near = difflib.get_close_matches(plain, known, n=1, cutoff=_ALIKE)
    return near[0] if near else None


def _shown(name: str) -> str:
    """A name from a client as it may stand in a header, a metric or an error."""
    return re.sub(r"[^A-Za-z0-9_.-]", "?", name[:MAX_NAME_CHARS])


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The response header that lists the ignored fields."""
    shown = [_shown(name) for name in names[:MAX_HEADER_NAMES]]
    return {IGNORED_HEADER: ", ".join([*shown, "..."] if len(names) > MAX_HEADER_NAMES else shown)}


def count_ignored(names: Sequence[str], counts: Counter[str]) -> None:
    """Count each ignored field by its name; at most MAX_COUNTED different ones."""
    for name in map(_shown, names):
        counts[name if name in counts or len(counts) < MAX_COUNTED else "other"] += 1
