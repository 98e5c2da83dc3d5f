"""How each family of models writes tool calls, as data, and which family a checkpoint belongs to.

A format is what its chat template renders for past calls; models are trained to write the same. The parser reads it
with any whitespace (tool_calls.py), the grammar of a forced call allows exactly this (tool_grammar.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Arguments = Literal["json", "qwen_xml", "glm_xml", "minimax_xml", "deepseek_xml"]  # the styles of a structural tag


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`open`, calls with `separator` between them, `close`. A call: `begin`, its name, `middle`, arguments, `end`.

    Where there is a `key`, a call is a JSON object {"name": …, key: arguments} between `begin` and `end`.
    """

    begin: str
    end: str
    middle: str = ""
    key: str = ""
    open: str = ""
    close: str = ""
    separator: str = ""
    arguments: Arguments = "json"
    string_mark: str = ""  # around strings of arguments whose keys have no quotes (Gemma)
    also: tuple[str, ...] = ()  # other texts that calls begin with
    name_prefix: str = ""  # before the name, and not a part of it
    id_form: Literal["openai", "mistral", "kimi"] = "openai"

    @property
    def is_object(self) -> bool:
        return self.key != ""

    @property
    def at_start(self) -> bool:
        """Whether a text that begins with { may be a call without any marker."""
        return not (self.open or self.begin)

    @property
    def trigger(self) -> str:
        """The text that calls begin with, and nothing else does; "" where there is none."""
        return (self.open or self.begin).removesuffix("[").strip()

    @property
    def triggers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.trigger, *self.also)))

    def call_begin(self, name: str) -> str:
        """All that stands before the arguments of a call of `name`."""
        if self.is_object:
            return f'{self.begin}{{"name": "{name}", "{self.key}": '
        index = ":0" if self.id_form == "kimi" else ""
        return self.begin + self.name_prefix + name + index + self.middle

    @property
    def call_end(self) -> str:
        """All that stands after the arguments of a call."""
        return ("}" if self.is_object else "") + self.end

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that a tokenizer may have as special tokens, and that the parser has to see."""
        return (self.open, self.close, self.begin, self.middle, self.end, self.string_mark, *self.also, "[CALL_ID]")


_DEEPSEEK_OPEN, _DEEPSEEK_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL, _DEEPSEEK_END, _DEEPSEEK_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat("<tool_call>\n", "\n</tool_call>", key="arguments", separator="\n"),
    "llama3": ToolFormat(
        "", "", key="parameters", separator="; ", also=("<|python_tag|>",)
    ),
    "mistral": ToolFormat(
        "", "", key="arguments", open="[TOOL_CALLS] [", close="]", separator=", ", id_form="mistral"
    ),
    "mistral_args": ToolFormat("[TOOL_CALLS]", "", "[ARGS]", id_form="mistral"),
    "qwen3_coder": ToolFormat(
        "<tool_call>\n<function=", "\n</function>\n</tool_call>", ">\n", separator="\n", arguments="qwen_xml"
    ),
    "deepseek_v3": ToolFormat(
        f"{_DEEPSEEK_CALL}function{_DEEPSEEK_SEP}", f"\n```{_DEEPSEEK_END}", "\n```json\n",
        open=_DEEPSEEK_OPEN, close=_DEEPSEEK_CLOSE, separator="\n",
    ),
    "deepseek_v3_1": ToolFormat(
        _DEEPSEEK_CALL, _DEEPSEEK_END, _DEEPSEEK_SEP, open=_DEEPSEEK_OPEN, close=_DEEPSEEK_CLOSE
    ),
    "deepseek_v3_2": ToolFormat(
        '<｜DSML｜invoke name="', "\n</｜DSML｜invoke>", '">\n', open="<｜DSML｜function_calls>\n",
        close="\n</｜DSML｜function_calls>", separator="\n", arguments="deepseek_xml",
    ),
    "kimi_k2": ToolFormat(
        "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
        open="<|tool_calls_section_begin|>", close="<|tool_calls_section_end|>", name_prefix="functions.",
        id_form="kimi",
    ),
    "glm4": ToolFormat("<tool_call>", "\n</tool_call>", "\n", separator="\n", arguments="glm_xml"),
    "minimax": ToolFormat(
        '<invoke name="', "\n</invoke>", '">\n', open="<minimax:tool_call>\n", close="\n</minimax:tool_call>",
        separator="\n", arguments="minimax_xml",
    ),
    "gemma3_function": ToolFormat(
        "<start_function_call>call:", "<end_function_call>", string_mark="<escape>"
    ),
    "gemma4": ToolFormat("<|tool_call>call:", "<tool_call|>", string_mark='<|"|>'),
}  # fmt: skip
DEFAULT_FORMAT = "hermes"  # for templates that know no tools: see tool_messages.py

# Texts of a chat template that only this family's has, all of them; the first family that fits.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v3_2", ("｜DSML｜",)),
    ("deepseek_v3", (_DEEPSEEK_OPEN, "```json")),
    ("deepseek_v3_1", (_DEEPSEEK_OPEN,)),
    ("minimax", ("<minimax:tool_call>",)),
    ("gemma4", ("<|tool_call>",)),
    ("gemma3_function", ("<start_function_call>",)),
    ("glm4", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("llama3", ("<|start_header_id|>", "parameters")),
    ("llama3", ("<|python_tag|>",)),
)


def detect_tool_format(template: str) -> str | None:
    """The name of the format that a checkpoint's chat template renders calls in; None: unknown."""
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), None)
