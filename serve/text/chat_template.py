"""Chat templates: Hugging Face's Jinja dialect, in a sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox

from kvrelay.errors import InvalidRequest, ModelError

# Hugging Face always defines these, and templates rely on it (`tools is not none`).
_DEFAULTS: dict[str, Any] = {"tools": None, "documents": None}
# What a template raises on purpose, and what its code raises on messages that it did not foresee.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


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
    """One compiled template and the special tokens that it may name; a checkpoint's code, so it runs in a sandbox."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], place: str = "chat_template.jinja") -> None:
        """Raises ModelError, which names the place, when the template does not compile."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._special_tokens = dict(special_tokens)
        self.source = source
        try:
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(place, f"the chat template does not compile: {error}") from error

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


@lru_cache(maxsize=32)
def template_of_request(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    """A template that came with a request; many requests bring the same. Raises InvalidRequest."""
    try:
        return ChatTemplate(source, dict(special_tokens))
    except ModelError as error:
        raise InvalidRequest(f"chat_template: {error}", "chat_template") from error
