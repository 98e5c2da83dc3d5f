"""Stand-ins for real checkpoints' tokenizer files: small vocabularies, the families' own structure.

Each builder writes tokenizer.json, tokenizer_config.json, config.json and generation_config.json as the
published folders have them (normaliser, pre-tokenizer, post-processor, decoder, added tokens, chat template).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog, don't they? I'LL see 123 4567",
    "Grüße aus München — naïve café",
    "你好，世界！日本語のテスト 🎉🙂",
    "def f(x):\n    return x  # code\n\n\n",
] * 3
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

QWEN_TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3_TEMPLATE = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA_TEMPLATE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""
MISTRAL_TEMPLATE = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
"""
NO_SYSTEM_TEMPLATE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{{ message['content'] }}{% endfor %}"
)
TEMPLATES = {
    "qwen2.5": QWEN_TEMPLATE,
    "llama3": LLAMA3_TEMPLATE,
    "gemma3": GEMMA_TEMPLATE,
    "mistral": MISTRAL_TEMPLATE,
    "tekken": MISTRAL_TEMPLATE.replace("[INST] ", "[INST]").replace('" " + ', ""),
}


def special(*names: str) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in names]


def byte_level(
    pattern: str,
    *,
    nfc: bool = False,
    ignore_merges: bool = False,
    corpus: Sequence[str] = CORPUS,
    vocab_size: int = 420,
) -> Tokenizer:
    """A byte-level BPE trained on `corpus`, its text cut by `pattern`."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def sentencepiece(control: list[str], pieces: list[str], **kwargs: Any) -> Tokenizer:
    """BPE with byte fallback: control tokens, 256 bytes, pieces in merge order, letters."""
    letters = ["▁", *"\nabcdefghijklmnopqrstuvwxyzHI.,!'?0123456789"]
    tokens = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    index = {token: at for at, token in enumerate(tokens)}
    merges = [(p[:i], p[i:]) for p in pieces for i in range(1, len(p)) if p[:i] in index and p[i:] in index]
    return Tokenizer(
        models.BPE(vocab=index, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True, **kwargs)
    )


def with_bos(tokenizer: Tokenizer, bos: str) -> Any:
    return processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


PIECES = ["th", "he", "the", "▁the", "▁▁", "▁▁▁", "ll", "el", "ello", "Hello", "▁H", "▁Hello", "in", "ing"]


def qwen25() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = byte_level(QWEN, nfc=True)
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.add_special_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_pad|>"))
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer, {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}


def llama3() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = byte_level(LLAMA3, ignore_merges=True)
    tokenizer.add_special_tokens(
        special("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    )
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(add_prefix_space=True, trim_offsets=False, use_regex=True),
            with_bos(tokenizer, "<|begin_of_text|>"),
        ]
    )
    return tokenizer, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}


def gemma3() -> tuple[Tokenizer, dict[str, Any]]:
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = sentencepiece(control, PIECES)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous", invert=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(special(*control))
    tokenizer.add_tokens([AddedToken("▁▁", special=False, normalized=False)])
    tokenizer.add_special_tokens(special("<image_soft_token>"))  # one more than the text models' embedding has
    tokenizer.post_processor = with_bos(tokenizer, "<bos>")
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return tokenizer, names


def mistral() -> tuple[Tokenizer, dict[str, Any]]:
    control = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    tokenizer = sentencepiece(control, PIECES)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    return _llama_decoder(tokenizer, control)


def llama2() -> tuple[Tokenizer, dict[str, Any]]:
    """The older form, with its dummy space from a normaliser (Llama 2, Mistral v0.1 and v0.2)."""
    control = ["<unk>", "<s>", "</s>"]
    tokenizer = sentencepiece(control, PIECES)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _llama_decoder(tokenizer, control)


def _llama_decoder(tokenizer: Tokenizer, control: list[str]) -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    tokenizer.add_special_tokens(special(*control))
    tokenizer.post_processor = with_bos(tokenizer, "<s>")
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def tekken() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = byte_level(TEKKEN, ignore_merges=True)
    tokenizer.add_special_tokens(special("<unk>", "<s>", "</s>", "[INST]", "[/INST]"))
    tokenizer.post_processor = with_bos(tokenizer, "<s>")
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


FAMILIES = {f.__name__: f for f in (llama3, gemma3, mistral, llama2, tekken)} | {"qwen2.5": qwen25}
EOS = {
    "qwen2.5": ["<|im_end|>", "<|endoftext|>"],
    "llama3": ["<|end_of_text|>", "<|eot_id|>"],
    "gemma3": ["<eos>", "<end_of_turn>"],
}


def write_family(name: str, folder: Path, *, template: str = "jinja", padding: int = 40) -> tuple[Path, Tokenizer]:
    """Write the family's files; `template` says where the chat template goes: jinja, string, list or none."""
    tokenizer, names = FAMILIES[name]()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        **names,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    source = TEMPLATES.get(name)
    if source and template == "jinja":
        (folder / "chat_template.jinja").write_text(source)
    elif source and template == "string":
        settings["chat_template"] = source
    elif source and template == "list":
        settings["chat_template"] = [
            {"name": "tool_use", "template": "{{ raise_exception('the wrong template') }}"},
            {"name": "default", "template": source},
        ]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    eos = [tokenizer.token_to_id(token) for token in EOS.get(name, [names["eos_token"]])]
    size = tokenizer.get_vocab_size() + (padding if name != "gemma3" else -1)
    config = {"vocab_size": size, "eos_token_id": eos[0]}
    (folder / "config.json").write_text(json.dumps({"text_config": config} if name == "gemma3" else config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos if len(eos) > 1 else eos[0]}))
    return folder, tokenizer
