"""Prompts: deterministic token ids, from lengths or from a trace's blocks. Pure.

Every draw depends on a seed and an index alone, so that a run can be repeated exactly against another server.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.cluster.workloads.trace import TraceEntry

_SHARED, _OWN, _BLOCK = 0, 1, 2  # keeps the three kinds of draws apart

_WORD_LIST = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city name team minute idea body back parent face level office door "
    "health person art war history party result change morning reason research girl guy moment air teacher force "
    "good new first last long great little own other old big high small large next early young important public bad"
)
_WORDS = _WORD_LIST.split()


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """How synthetic prompts are made: token ids in [low, high), the same `shared_tokens` in front of each."""

    input_tokens: int = 128
    shared_tokens: int = 0
    low: int = 1000
    high: int = 30000
    seed: int = 0


def _draw_tokens(spec: PromptSpec, kind: int, key: int, count: int) -> list[int]:
    """`count` token ids that depend on (seed, kind, key) alone; a longer draw starts with the shorter one."""
    import numpy as np  # here: `kvrelay bench --help` stays fast

    generator = np.random.default_rng([spec.seed, kind, key])
    tokens: list[int] = generator.integers(spec.low, spec.high, size=count).tolist()
    return tokens


def synthetic_prompt(spec: PromptSpec, index: int) -> list[int]:
    """Request `index`'s prompt: exactly `input_tokens` ids, the shared ones first."""
    shared = min(spec.shared_tokens, spec.input_tokens)
    own = _draw_tokens(spec, _OWN, index, spec.input_tokens - shared)
    return _draw_tokens(spec, _SHARED, 0, shared) + own


def trace_prompt(spec: PromptSpec, entry: TraceEntry, index: int) -> list[int]:
    """A trace entry's prompt: each hash id becomes its block of tokens; what no id covers is the request's own."""
    tokens: list[int] = []
    for hash_id in entry.hash_ids:
        if len(tokens) >= entry.input_tokens:
            break
        tokens += _draw_tokens(spec, _BLOCK, hash_id, entry.block_tokens)
    tokens = tokens[: entry.input_tokens]
    return tokens + _draw_tokens(spec, _OWN, index, entry.input_tokens - len(tokens))


def as_text(tokens: Sequence[int]) -> str:
    """One common English word per id, so that equal prefixes stay equal: about one token each."""
    return " ".join(_WORDS[token % len(_WORDS)] for token in tokens)
