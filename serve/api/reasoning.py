"""Reasoning as a chat request asks for it: the template's variables, and how the output is read and limited.

Only requests that ask for something of it, or go to a model that reasons, come here.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from kvrelay.errors import InvalidRequest
from kvrelay.plane.messages import Thinking
from kvrelay.serve.api.endpoint import Front
from kvrelay.serve.api.schemas import ChatBody
from kvrelay.serve.chat.output import OutputFormat
from kvrelay.serve.chat.reasoning import ReasoningMarkers, ReasoningSplitter
from kvrelay.serve.requests.generation import Prompt

REASONING_FIELDS = frozenset(
    {"reasoning_effort", "enable_thinking", "thinking_token_budget", "include_reasoning", "chat_template_kwargs"}
)
"""The fields that lead here."""
_SWITCHES = ("enable_thinking", "thinking")  # as templates name it: Qwen and others, DeepSeek and Granite


@dataclass(frozen=True, slots=True)
class AskedReasoning:
    """What a body asks, with the names of the fields that do; None: nothing."""

    effort: str | None
    is_on: bool | None
    switch: str
    budget: int | None
    budget_field: str


def asked_reasoning(body: ChatBody) -> AskedReasoning:
    """From any of the spellings: of the body before those in chat_template_kwargs. Raises InvalidRequest."""
    kwargs = body.chat_template_kwargs or {}
    effort, switch = body.reasoning_effort, "reasoning_effort"
    if effort is None and isinstance(kwargs.get("reasoning_effort"), str):
        effort, switch = kwargs["reasoning_effort"], "chat_template_kwargs.reasoning_effort"
    is_on = None if effort is None else effort != "none"
    for name in _SWITCHES:
        if isinstance(kwargs.get(name), bool):
            is_on, switch = kwargs[name], f"chat_template_kwargs.{name}"
    if body.enable_thinking is not None:
        is_on, switch = body.enable_thinking, "enable_thinking"
    budget, field = body.thinking_token_budget, "thinking_token_budget"
    if budget is None and kwargs.get("thinking_budget") not in (None, -1):
        budget, field = kwargs["thinking_budget"], "chat_template_kwargs.thinking_budget"
        if type(budget) is not int or budget < 0:
            raise InvalidRequest(f"{field}: must be a number of tokens, or -1", field)
    return AskedReasoning(effort, is_on, switch, budget, field)


def template_variables(front: Front, body: ChatBody) -> dict[str, Any]:
    """What the chat template gets. Raises InvalidRequest when reasoning is demanded of a model that does not reason."""
    asked = asked_reasoning(body)
    variables: dict[str, Any] = {} if asked.effort is None else {"reasoning_effort": asked.effort}
    if asked.is_on is not None:
        variables |= dict.fromkeys(_SWITCHES, asked.is_on)
    known = frozenset() if front.codec.template is None else front.codec.template.variables
    if asked.is_on and front.reasoning is None and not known & {"reasoning_effort", *_SWITCHES}:
        raise _does_not_reason(asked.switch)
    return variables


def with_reasoning(front: Front, body: ChatBody, prompt: Prompt) -> Prompt:
    """The prompt, its output to be split; a budget ends reasoning, a grammar binds behind it. Raises InvalidRequest."""
    asked, markers = asked_reasoning(body), front.reasoning
    if markers is None:
        if asked.budget is not None:
            raise _does_not_reason(asked.budget_field)
        return prompt
    is_open = _is_open(markers, body, prompt.text)
    if is_open is False:
        return prompt
    budget, field = (0, asked.switch) if asked.is_on is False else (asked.budget, asked.budget_field)
    if budget is not None and body.use_beam_search:
        raise InvalidRequest(f"{field}: not with use_beam_search", field, 400, "unsupported_parameter")
    sampling, has_grammar = prompt.sampling, prompt.sampling.grammar is not None
    if has_grammar and len(markers.end) > 1:  # it would have to bind in the middle of a token
        budget = 0
    if has_grammar or budget is not None:
        thinking = Thinking(
            start=markers.start,
            end=markers.end,
            is_open=is_open is True,
            budget=budget,
            start_like=markers.start_like,
            end_like=markers.end_like,
        )
        sampling = msgspec.structs.replace(sampling, thinking=thinking)
    form = prompt.output or OutputFormat()
    splitter = partial(
        ReasoningSplitter, markers.form.start, markers.form.end, is_open=is_open is True, is_exact=has_grammar
    )
    output = replace(
        form,
        splitter=splitter,
        shows_reasoning=body.include_reasoning is not False,
        kept_ids=form.kept_ids | markers.kept_ids,
    )
    return replace(prompt, sampling=sampling, output=output)


def _is_open(markers: ReasoningMarkers, body: ChatBody, text: str) -> bool | None:
    """As ReasoningFormat.is_open; a message that is continued holds no reasoning but what it has begun."""
    if not body.continue_final_message:
        return markers.form.is_open(text)
    content = body.messages[-1].content
    texts = [content or ""] if not isinstance(content, list) else [part.text or "" for part in content]
    return markers.form.is_open_in("".join(texts))


def _does_not_reason(field: str) -> InvalidRequest:
    message = f"{field}: this model does not reason, as far as its chat template shows; see model.reasoning_parser"
    return InvalidRequest(message, field, 400, "unsupported_parameter")
