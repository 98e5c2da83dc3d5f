"""Which family a checkpoint belongs to, by its template and tokens."""

import json
from typing import get_args

import pytest

from kvrelay.serve.api.completions import template_messages
from kvrelay.serve.bodies.messages import Message
from kvrelay.serve.chat.families import TOOL_FORMATS, detect_tool_format
from kvrelay.serve.chat.tool_support import find_tools
from kvrelay.serve.text.tokenizer import ChoiceText, TextOptions, Tokenizer
from kvrelay.settings.choices import ToolParser
from tests.checkpoints import chat_checkpoint
from tests.serve.text.family_folders import write_family


def test_the_setting_has_all_families():
    assert set(get_args(ToolParser)) == {"auto", "none", *TOOL_FORMATS}


@pytest.mark.parametrize(
    ("family", "template"),
    [  # what only the published template has of it
        ("hermes", "<tools></tools> <tool_call>\n{\"name\": <function-name>"),
        ("qwen3_coder", "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>"),
        ("llama3", "<|start_header_id|>ipython respond in the format {\"name\": function name, \"parameters\": dict"),
        ("mistral", "[AVAILABLE_TOOLS] [TOOL_CALLS] [ [TOOL_RESULTS]"),
        ("mistral_args", "[AVAILABLE_TOOLS] [TOOL_CALLS] + name + [ARGS] + arguments"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n```json\n"),
        ("deepseek_v3_1", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>arguments"),
        ("deepseek_v3_2", "<｜DSML｜function_calls><｜DSML｜invoke name="),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>"),
        ("glm4", "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>"),
        ("minimax", "<minimax:tool_call><invoke name="),
        ("gemma3_function", "<start_function_call>call:"),
        ("gemma4", "<|tool_call>call:"),
        (None, "{% for message in messages %}<|im_start|>{{ message.role }}{% endfor %}"),
    ],
)  # fmt: skip
def test_templates_show_their_family(family, template):
    assert detect_tool_format(template) == family


@pytest.mark.parametrize(("checkpoint", "family"), [("qwen2.5", "hermes"), ("qwen3", "hermes"), ("llama3.1", "llama3")])
def test_checkpoints_show_their_family(checkpoint, family, tmp_path):
    codec = Tokenizer(chat_checkpoint(checkpoint, tmp_path))
    found = find_tools("auto", codec)
    assert found.format == TOOL_FORMATS[family]
    assert found.in_template
    assert find_tools("none", codec) is None
    assert find_tools("kimi_k2", codec).format == TOOL_FORMATS["kimi_k2"]


def test_markers_stay_in_the_text_and_other_special_tokens_do_not(tmp_path):
    codec = Tokenizer(chat_checkpoint("llama3.1", tmp_path))
    kept = find_tools("auto", codec).kept_ids
    ids = codec.encode("<|python_tag|>hi<|eom_id|>", add_special_tokens=False)
    from kvrelay.plane.messages import TokenOutput

    text = ChoiceText(codec, TextOptions(kept_ids=kept))
    output = TokenOutput(request_id="r", position=0, token_ids=ids, finish_reason="stop", stop_token=ids[-1])
    assert text.add(output).text == "<|python_tag|>hi"


def test_a_template_for_tools_is_used_with_tools(tmp_path):
    folder, _ = write_family("qwen2.5", tmp_path, template="list")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"][0]["template"] = "{{ tools | tojson }}<tool_call>{{ messages[0].content }}"
    path.write_text(json.dumps(config))
    codec = Tokenizer(folder)
    found = find_tools("auto", codec)
    assert (found.format, found.in_template) == (TOOL_FORMATS["hermes"], True)
    messages = [{"role": "user", "content": "hi"}]
    assert codec.chat_text(messages, tools=[{"a": 1}]) == '[{"a": 1}]<tool_call>hi'
    assert codec.chat_text(messages).startswith("<|im_start|>system")


def test_a_separate_file_for_tools_is_found(tmp_path):
    folder, _ = write_family("qwen2.5", tmp_path)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson }}[TOOL_CALLS]")
    assert find_tools("auto", Tokenizer(folder)).format == TOOL_FORMATS["mistral"]


@pytest.mark.parametrize("checkpoint", ["qwen2.5", "qwen3", "llama3.1"])
def test_calls_and_results_are_rendered_again(checkpoint, tmp_path):
    codec = Tokenizer(chat_checkpoint(checkpoint, tmp_path))
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": '{"zone": "ä"}'}}
    messages = [
        Message(role="user", content="hi"),
        Message.model_validate({"role": "assistant", "tool_calls": [call]}),
        Message(role="tool", tool_call_id="c", content="noon"),
    ]
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    text = codec.chat_text(template_messages(messages), tools=[tool])
    own = find_tools("auto", codec).format
    assert own.call_begin("now") + '{"zone": "ä"}' + own.call_end in text
    assert "noon" in text
