"""Tool calls by a checkpoint's own `response_template`, read by transformers' streaming parser.

transformers is imported with the first such request (0.6 s, without torch); few checkpoints have a template.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvrelay.serve.chat.output import AfterReasoning, Content, ToolArguments, ToolCallStart
from kvrelay.serve.chat.tool_calls import random_call_id

_REASONING = ("thinking", "reasoning", "reasoning_content")


class TemplateParser:
    """One output's parser. A text that the template does not describe is content; nothing raises."""

    def __init__(
        self, template: Mapping[str, Any], tools: Sequence[Any], prompt: str, *, is_parallel: bool = True
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._is_parallel = is_parallel
        self._num_calls = 0
        self._held = ""  # of a region that is not whole yet
        self._is_broken = False
        try:
            self._parser = ResponseParser(dict(template), prefix=prompt, tools=list(tools))
        except (ValueError, KeyError, TypeError):
            self._is_broken = True

    def push(self, text: str) -> list[AfterReasoning]:
        """The parts that are certain with `text`."""
        if self._is_broken:
            return [Content(text)] if text else []
        self._held += text
        try:
            events = self._parser.feed(text)
        except Exception:  # whatever a template's own expressions lead to
            return self._give_up()
        return self._parts(events)

    def flush(self) -> list[AfterReasoning]:
        """The text ended: what was held back."""
        if self._is_broken:
            return []
        try:
            return self._parts(self._parser.finalize()[1])
        except Exception:
            return self._give_up()

    def _give_up(self) -> list[AfterReasoning]:
        self._is_broken, held, self._held = True, self._held, ""
        return [Content(held)] if held else []

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> list[AfterReasoning]:
        parts: list[AfterReasoning] = []
        for event in events:
            is_call = event["field"] == "tool_calls"
            if event["type"] == "region_chunk" and not is_call and event["field"] not in _REASONING:
                parts.append(Content(event["text"]))
            elif event["type"] == "region_close" and is_call:
                for call in event["value"] if isinstance(event["value"], list) else [event["value"]]:
                    parts += self._call(call)
            if event["type"] != "region_open" and not (is_call and event["type"] == "region_chunk"):
                self._held = ""
        return parts

    def _call(self, call: Any) -> list[AfterReasoning]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError("no call")
        index, self._num_calls = self._num_calls, self._num_calls + 1
        if index and not self._is_parallel:
            return []
        arguments = function.get("arguments") or {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return [
            ToolCallStart(index, str(call.get("id") or random_call_id()), function["name"]),
            ToolArguments(index, text),
        ]
