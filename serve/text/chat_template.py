"""Renders a model's chat template: messages to the text that the model was trained on.

A template is code from the checkpoint, so it runs in jinja's immutable sandbox. Imports no
transformers: importing it in the ingress would cost seconds and memory.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from kvrelay.errors import InvalidRequest, ModelError

# Hugging Face always sets these, and templates say `tools is not none` without asking whether it is defined.
_DEFAULTS: dict[str, Any] = {"tools": None, "documents": None}
# What a template raises on purpose, and what its code runs into on messages that it did not foresee.
_REFUSALS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without HTML escapes, unlike jinja's own; the arguments are Hugging Face's, in their order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own attribute)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelError when the template does not compile."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError("chat_template.jinja", f"the template does not compile: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt's text. Raises InvalidRequest when the template refuses the messages."""
        try:
            return self._template.render(
                **{**_DEFAULTS, **self._special_tokens, **variables},
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
            )
        except _REFUSALS as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", "messages") from error
