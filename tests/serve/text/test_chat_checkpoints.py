"""The tiny checkpoints with the families' chat formats: their prompts, and that their tokens are the families' own."""

import json

import pytest
from transformers import AutoTokenizer

from kvrelay.serve.text.tokenizer import Tokenizer
from tests.checkpoints import FAMILIES, chat_checkpoint

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
]
RENDERED = {  # what the published templates render after the description of the tools
    "qwen2.5": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3.1": '{"name": "add", "parameters": {"a": 1}}<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n'
    "2<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
}
RENDERED["qwen3"] = RENDERED["qwen2.5"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_renders_tools_calls_and_results_as_its_family(family, tmp_path):
    folder = chat_checkpoint(family, tmp_path / family)
    reference = AutoTokenizer.from_pretrained(folder)
    prompt = reference.apply_chat_template(TALK, tools=[TOOL], add_generation_prompt=True, tokenize=False)
    assert prompt.endswith(RENDERED[family]) and "Be short." in prompt and '"name": "add"' in prompt
    assert prompt.index("Be short.") < prompt.index("1 + 1?")


@pytest.mark.parametrize(
    "family, token", [("qwen2.5", "<tool_call>"), ("qwen3", "</think>"), ("llama3.1", "<|eom_id|>")]
)
def test_the_families_tokens_are_single_ones(family, token, tmp_path):
    folder = chat_checkpoint(family, tmp_path / family)
    tokenizer = Tokenizer(folder)
    assert len(tokenizer.encode(token)) <= 2  # Llama's begins every text with its own token
    assert json.loads((folder / "config.json").read_text())["vocab_size"] % 64 == 0
