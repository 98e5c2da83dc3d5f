"""Tiny checkpoints with the chat formats of real families: tools, reasoning, their tokens, random weights.

The vocabulary is a byte-level BPE trained on a little text and JSON, so that tokens cross the boundaries of a grammar,
with the family's own added tokens. The templates are written here and render prompts in the family's own words.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from kvrelay.engine.checkpoints.tiny import TINY_CONFIGS, random_weights
from tests.serve.text.family_folders import CORPUS, LLAMA3, QWEN, byte_level, special, with_bos

JSON_TEXT = [
    '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius", "days": 3}}',
    '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": false}',
    '{\n  "items": [{"id": 1, "ok": true}, {"id": -2.5e3, "ok": false}],\n  "none": null\n}',
    "You are a helpful assistant. What is the weather in Paris? Call a function for it.",
] * 3

_TOOLS_HEADER = (
    "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n"
    "You are provided with function signatures within <tools></tools> XML tags:\\n<tools>"
)
_TOOLS_FOOTER = (
    "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\\n<tool_call>\\n"
    '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n'
)
_TOOLS_LIST = "{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}"
_CHATML_CALLS = """
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function else call %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}"""
_CHATML_TOOL_RESULT = """
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}"""

QWEN25 = f"""{{%- set system = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}}
{{%- if messages[0].role == 'system' %}}{{%- set system = messages[0].content %}}{{%- endif %}}
{{{{- '<|im_start|>system\\n' + system }}}}
{{%- if tools %}}
    {{{{- "\\n\\n{_TOOLS_HEADER}" }}}}{_TOOLS_LIST}
    {{{{- "{_TOOLS_FOOTER}" }}}}
{{%- else %}}
    {{{{- '<|im_end|>\\n' }}}}
{{%- endif %}}
{{%- for message in messages %}}
    {{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}}
        {{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
    {{%- elif message.role == 'assistant' %}}
        {{{{- '<|im_start|>assistant\\n' + (message.content or '') }}}}{_CHATML_CALLS}{_CHATML_TOOL_RESULT}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}{{%- endif %}}
"""

QWEN3 = f"""{{%- if tools %}}
    {{{{- '<|im_start|>system\\n' }}}}
    {{%- if messages[0].role == 'system' %}}{{{{- messages[0].content + '\\n\\n' }}}}{{%- endif %}}
    {{{{- "{_TOOLS_HEADER}" }}}}{_TOOLS_LIST}
    {{{{- "{_TOOLS_FOOTER}" }}}}
{{%- elif messages[0].role == 'system' %}}
    {{{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}}}
{{%- endif %}}
{{%- set last = namespace(query=-1) %}}
{{%- for message in messages %}}
    {{%- if message.role == 'user' %}}{{%- set last.query = loop.index0 %}}{{%- endif %}}
{{%- endfor %}}
{{%- for message in messages %}}
    {{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}}
        {{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
    {{%- elif message.role == 'assistant' %}}
        {{%- set content = message.content or '' %}}
        {{%- set reasoning = message.reasoning_content or '' %}}
        {{%- if not reasoning and '</think>' in content %}}
            {{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}}
            {{%- set content = content.split('</think>')[-1].lstrip('\\n') %}}
        {{%- endif %}}
        {{{{- '<|im_start|>assistant\\n' }}}}
        {{%- if loop.index0 > last.query and (loop.last or reasoning) %}}
            {{{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}}}
        {{%- endif %}}
        {{{{- content }}}}{_CHATML_CALLS}{_CHATML_TOOL_RESULT}
{{%- if add_generation_prompt %}}
    {{{{- '<|im_start|>assistant\\n' }}}}
    {{%- if enable_thinking is defined and enable_thinking is false %}}
        {{{{- '<think>\\n\\n</think>\\n\\n' }}}}
    {{%- endif %}}
{{%- endif %}}
"""

LLAMA31 = """{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: ' + (date_string or '26 Jul 2024') + '\\n\\n' }}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- if tools %}
    {%- set first_user = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions, please respond with a JSON for a '
        + 'function call with its proper arguments that best answers the given prompt.\\n\\nRespond in the format '
        + '{"name": function name, "parameters": dictionary of argument name and its value}.'
        + 'Do not use variables.\\n\\n' }}
    {%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}
    {{- first_user + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ('tool', 'ipython') %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {{- message.content if message.content is string else message.content | tojson }}
        {{- '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments if call.arguments is string else call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CALLS = ("<tool_call>", "</tool_call>")
_THINKING = ("<tool_response>", "</tool_response>", "<think>", "</think>")
_LLAMA = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
    "<|python_tag|>",
)  # fmt: skip
# family: (config, pre-tokenizer, special tokens, plain added tokens, ends of a reply, template)
FAMILIES: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...], tuple[str, ...], str]] = {
    "qwen2.5": ("qwen2", QWEN, _CHATML, _CALLS, ("<|im_end|>", "<|endoftext|>"), QWEN25),
    "qwen3": ("qwen3", QWEN, _CHATML, _CALLS + _THINKING, ("<|im_end|>", "<|endoftext|>"), QWEN3),
    "llama3.1": ("llama", LLAMA3, _LLAMA, (), ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), LLAMA31),
}


def chat_checkpoint(family: str, folder: Path, *, seed: int = 0, **own: Any) -> Path:
    """Write a checkpoint folder of a family of FAMILIES, which every command can serve, and return it.

    own: keys of its config. The context is 8,192 tokens: one token is about two characters.
    """
    base, pattern, specials, added, ends, template = FAMILIES[family]
    tokenizer = byte_level(pattern, corpus=CORPUS + JSON_TEXT, vocab_size=640)
    tokenizer.add_special_tokens(special(*specials))
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    names = {"eos_token": ends[0], "pad_token": ends[-1], "bos_token": None}
    if "<|begin_of_text|>" in specials:
        names["bos_token"] = "<|begin_of_text|>"
        tokenizer.post_processor = with_bos(tokenizer, "<|begin_of_text|>")
    eos = [tokenizer.token_to_id(token) for token in ends]
    config = TINY_CONFIGS[base] | {
        "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64,
        "max_position_embeddings": 8192,
        "eos_token_id": eos[0],
        "pad_token_id": eos[-1],
        "bos_token_id": tokenizer.token_to_id(specials[0]),
    }
    random_weights(config | own, folder, seed=seed)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    (folder / "chat_template.jinja").write_text(template)
    return folder
