"""How many choices are computed and which are answered: n, best_of, beam search. Pure.

`best_of` has OpenAI's and vLLM's meaning: so many samples, of which the n with the largest summed log-probability are
answered. With `use_beam_search` it is the width, as in vLLM.
"""

from collections.abc import Sequence
from typing import Any

from kvrelay.errors import InvalidRequest
from kvrelay.plane.messages import Beams
from kvrelay.serve.api.schemas import ChatBody, Common

MAX_BEAMS = 16


def num_computed(body: Common) -> int:
    """Sequences that run for each prompt."""
    return max(body.n or 1, body.best_of or 1)


def num_sampled(body: Common) -> int:
    """Choices that the workers send for each prompt: of a beam search, those that are asked for."""
    return body.n or 1 if body.use_beam_search else num_computed(body)


def is_ranked(body: Common) -> bool:
    """Whether more samples are computed than answered."""
    return not body.use_beam_search and num_computed(body) > (body.n or 1)


def beams_of(body: Common) -> Beams | None:
    """The beam search that is asked for, if one is. The body has been checked."""
    if not body.use_beam_search:
        return None
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    return Beams(
        width=num_computed(body), num_returned=body.n or 1, length_penalty=penalty,
        early_stopping=body.early_stopping or False,
    )  # fmt: skip


def check_choices(body: Common) -> None:
    """Raise InvalidRequest where n, best_of and the fields of a beam search do not go together."""
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise InvalidRequest(f"best_of: must not be less than n, which is {body.n or 1}", "best_of")
    if body.use_beam_search:
        _check_beams(body)
        return
    if is_ranked(body) and body.stream:
        raise InvalidRequest("best_of: the best are known when all have ended: not with stream", "best_of")
    if is_ranked(body) and isinstance(body, ChatBody):
        raise InvalidRequest("best_of: not with chat completions", "best_of", 400, "unsupported_parameter")
    for name in ("length_penalty", "early_stopping"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name}: only with use_beam_search", name)


_NOT_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0.0), "repetition_penalty": (None, 1.0),
    "presence_penalty": (None, 0.0), "frequency_penalty": (None, 0.0), "logit_bias": (None, {}), "stop": (None, []),
    "logprobs": (None, False),
}  # fmt: skip


def _check_beams(body: Common) -> None:
    if num_computed(body) > MAX_BEAMS:
        field = "best_of" if (body.best_of or 0) > MAX_BEAMS else "n"
        raise InvalidRequest(f"{field}: a beam search has at most {MAX_BEAMS} beams", field)
    if body.stream:
        raise InvalidRequest("stream: a beam search has its results at its end: not with stream", "stream")
    for name, neutral in _NOT_WITH_BEAMS.items():
        if getattr(body, name, None) not in neutral:
            raise InvalidRequest(f"{name}: not with use_beam_search", name, 400, "unsupported_parameter")


def ranked(scores: Sequence[float], num_samples: int, num_kept: int) -> list[int]:
    """Indices of the samples to answer: of each prompt's `num_samples`, the best first; the earlier of equal ones."""
    kept: list[int] = []
    for first in range(0, len(scores), num_samples):
        order = sorted(range(first, first + num_samples), key=lambda index: (-scores[index], index))
        kept += order[:num_kept]
    return kept
