"""What limits the tokens of an output besides sampling: a grammar, words and tokens that are not allowed.

Only requests that ask for such limits come here.
"""

from dataclasses import replace
from typing import Any

import msgspec

from kvrelay.errors import InvalidRequest
from kvrelay.serve.api.endpoint import Front
from kvrelay.serve.api.parameters import check_token
from kvrelay.serve.api.schemas import Common
from kvrelay.serve.bodies.grammars import AskedGrammar, GrammarFields, asked_grammar
from kvrelay.serve.requests.generation import Prompt
from kvrelay.serve.text.tokenizer import Tokenizer

CONSTRAINTS = frozenset({*GrammarFields.model_fields, "bad_words", "allowed_token_ids"})
"""The fields that lead here."""


async def constrained(front: Front, body: Common, prompts: list[Prompt]) -> list[Prompt]:
    """The prompts with the body's constraints in their sampling. Raises InvalidRequest."""
    asked = await asked_grammar(body)
    fields: dict[str, Any] = {}
    if asked is not None:
        await check_grammar(front, body, asked)
        fields["grammar"] = asked.spec
    if body.bad_words:
        fields["bad_words"] = bad_words(front.codec, body.bad_words)
    if body.allowed_token_ids is not None:
        for token_id in body.allowed_token_ids:
            check_token(token_id, "allowed_token_ids", front.codec.vocab_size)
        fields["allowed_token_ids"] = tuple(dict.fromkeys(body.allowed_token_ids))
    return [replace(prompt, sampling=msgspec.structs.replace(prompt.sampling, **fields)) for prompt in prompts]


async def check_grammar(front: Front, body: Common, asked: AskedGrammar) -> None:
    """Whether workers will be able to use it, before any is asked. Raises InvalidRequest naming the field."""
    if body.use_beam_search:
        raise InvalidRequest(f"{asked.field}: not with use_beam_search", asked.field, 400, "unsupported_parameter")
    try:
        await front.check_grammar(asked.spec)
    except InvalidRequest as error:
        message = f"{asked.field}: {error.message}"
        raise InvalidRequest(message, asked.field, error.status, error.code) from error


def bad_words(codec: Tokenizer, words: list[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences of words, at a text's start and after a space. Raises InvalidRequest."""
    sequences: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        if not (bare := word.lstrip(" ")):
            raise InvalidRequest(f"bad_words[{index}]: only spaces", f"bad_words[{index}]")
        for text in (bare, f" {bare}"):
            if ids := codec.encode(text, add_special_tokens=False):
                sequences[tuple(ids)] = None
    return tuple(sequences)
