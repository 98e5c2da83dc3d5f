"""What the structural tags of tools allow: calls of the family's form, nothing else, whatever the model prefers."""

import functools
import json

import jsonschema
import numpy as np
import pytest
import tokenizers

from kvrelay.errors import InvalidRequest
from kvrelay.grammar.compiler import GrammarCompiler
from kvrelay.grammar.limits import in_tag
from kvrelay.grammar.masks import fill_masks
from kvrelay.plane.messages import GrammarSpec
from kvrelay.serve.chat.families import TOOL_FORMATS
from kvrelay.serve.chat.tool_grammar import ANY_ARGUMENTS, arguments_schema, tag_begin, tool_tag
from tests.checkpoints import chat_checkpoint
from tests.scale import scaled
from tests.serve.chat.calls import TOOLS, parse, rendered, written

CHECKED = {name: arguments_schema(schema, name) for name, schema in TOOLS.items()}
WEATHER = {"city": "Paris", "days": 3, "high": 1.5, "options": {"a": 1}, "tags": ["x"], "note": None, "unit": "C"}
XML_CLOSERS = {"minimax_xml": "</parameter>", "glm_xml": "</arg_value>", "deepseek_xml": "</｜DSML｜parameter>"}
each_family = pytest.mark.parametrize("family", TOOL_FORMATS)


class Model:
    """A vocabulary with Qwen's markers, and a model of random weights."""

    def __init__(self, folder):
        chat_checkpoint("qwen3", folder)
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        self.eos = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        self.compiler = GrammarCompiler(folder, self.vocab_size, self.eos)
        self.matcher = functools.cache(self._compiled)

    def _compiled(self, tag):
        return self.compiler.compile(GrammarSpec("structural_tag", tag))

    def tokens(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def accepts(self, tag, text):
        tokens = [*self.tokens(text), self.eos[0]]
        return self.matcher(tag).matcher().accept(tokens) == len(tokens)

    def sample(self, tag, seed, most=600):
        """Text of an output at temperature 1, None when it did not end. Without a tag: nothing is masked."""
        random = np.random.default_rng(seed)
        matcher = None if tag is None else self.matcher(tag).matcher()
        closers = [
            self.tokens(end)
            for style, end in [*XML_CLOSERS.items(), ("qwen_xml", "</parameter>")]
            if style in (tag or "")
        ]
        out, tokens = np.zeros((1, self.compiler.num_words), np.int32), []
        for _ in range(most):
            logits = random.normal(size=self.vocab_size) * 2
            logits[self.closing()] += min(len(tokens) / 15, 12)  # or it would never end
            if matcher is not None:
                fill_masks([(matcher, (), 0)], out)
                allowed = np.unpackbits(out[0].view(np.uint8), bitorder="little")[: self.vocab_size].astype(bool)
                logits[~allowed] = -np.inf
            whole = [closer for closer in closers if matcher.valid_prefix(closer) == len(closer)]
            if whole and len(tokens) % 8 == 7:  # a raw text would go on and on
                matcher.accept(whole[0])
                tokens += whole[0]
                continue
            token = int(np.argmax(logits + random.gumbel(size=self.vocab_size)))
            if token in self.eos:
                return self.tokenizer.decode(tokens, skip_special_tokens=False)
            tokens.append(token)
            assert matcher is None or matcher.accept([token]) == 1
        return None

    @functools.cache  # noqa: B019 (one for the module)
    def closing(self):
        tokens = [self.tokenizer.id_to_token(index) or "" for index in range(self.vocab_size)]
        return [index for index, token in enumerate(tokens) if token in ('"', "}", "]", "</", ">", "<")] + self.eos


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Model(tmp_path_factory.mktemp("model"))


def text_of(own, calls):
    """Calls with JSON arguments where the tag wants them so."""
    if not own.string_mark:
        return rendered(own, calls)
    each = [own.call_begin(name) + json.dumps(arguments) + own.call_end for name, arguments in calls]
    return own.open + own.separator.join(each) + own.close


def is_valid(own, text, tools=TOOLS):
    """Whether all calls are of these tools, and valid; and at least one."""
    content, calls = parse(own, [text])
    for _, name, arguments in calls:
        jsonschema.validate(json.loads(arguments), tools[name])
    return bool(calls) and not content.strip()


@each_family
def test_what_the_template_renders_is_allowed(model, family):
    own = TOOL_FORMATS[family]
    one, two = [("get_weather", WEATHER)], [("get_weather", {"city": "x"}), ("now", {})]
    for is_required in (True, False):
        tag = tool_tag(own, CHECKED, is_required=is_required, is_parallel=True)
        assert model.accepts(tag, text_of(own, one))
        assert model.accepts(tag, text_of(own, two))
        assert model.accepts(tag, "Hello there.") == (not is_required)
        single = tool_tag(own, CHECKED, is_required=is_required, is_parallel=False)
        assert model.accepts(single, text_of(own, one))
        assert not model.accepts(single, text_of(own, two))


@each_family
def test_wrong_names_and_arguments_are_not(model, family):
    own = TOOL_FORMATS[family]
    for is_required in (True, False):
        tag = tool_tag(own, CHECKED, is_required=is_required, is_parallel=True)
        for name, arguments in [
            ("get_whether", {"city": "x"}),
            ("get_weather", {"city": "x", "days": "many"}),
            ("get_weather", {}),
            ("get_weather", {"city": "x", "unit": "K"}),
        ]:
            assert not model.accepts(tag, text_of(own, [(name, arguments)])), (name, arguments)


@each_family
def test_whatever_a_model_prefers_its_calls_are_valid(model, family):
    own = TOOL_FORMATS[family]
    tag = tool_tag(own, CHECKED, is_required=True, is_parallel=True)
    texts = [model.sample(tag, seed) for seed in range(scaled(80))]
    ended = [text for text in texts if text is not None]
    assert len(ended) > len(texts) / 2
    assert all(is_valid(own, text) for text in ended)
    free = [model.sample(None, seed) for seed in range(10)]
    assert not any(text is not None and is_valid(own, text) for text in free)


def test_text_and_calls_of_strict_tools(model):
    own = TOOL_FORMATS["hermes"]
    tag = tool_tag(own, CHECKED | {"loose": ANY_ARGUMENTS}, is_required=False, is_parallel=True)
    assert model.accepts(tag, 'So.\n<tool_call>\n{"name": "loose", "arguments": {"x": [1]}}\n</tool_call>\nDone.')
    assert not model.accepts(tag, 'So.\n<tool_call>\n{"name": "loose", "arguments": [1]}\n</tool_call>')


def test_calls_or_an_answer_of_a_schema(model):
    answer = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    for family in ("hermes", "llama3", "deepseek_v3"):
        own = TOOL_FORMATS[family]
        tag = tool_tag(own, CHECKED, is_required=False, is_parallel=True, content_schema=answer)
        assert model.accepts(tag, '{"ok": true}')
        assert model.accepts(tag, rendered(own, [("now", {})]))
        assert not model.accepts(tag, "Sure.")


# ---- beside xgrammar's own tags for the same inputs

XGRAMMAR_NAMES = {
    "hermes": "qwen_3", "llama3": "llama", "qwen3_coder": "qwen_3_coder", "deepseek_v3": "deepseek_r1",
    "deepseek_v3_1": "deepseek_v3_1", "kimi_k2": "kimi", "glm4": "glm_4_7", "minimax": "minimax",
    "deepseek_v3_2": "deepseek_v3_2",
}  # fmt: skip


@pytest.mark.parametrize("family", XGRAMMAR_NAMES)
def test_xgrammars_own_tag_decides_the_same(model, family):
    """Its texts are valid calls to us, and what it refuses we refuse; whitespace around markers may differ."""
    xgrammar = pytest.importorskip("xgrammar")

    own = TOOL_FORMATS[family]
    tools = [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in CHECKED.items()]
    theirs = xgrammar.get_model_structural_tag(
        XGRAMMAR_NAMES[family], tools=tools, tool_choice="required", reasoning="disabled"
    ).model_dump_json()
    for seed in range(scaled(20)):
        text = model.sample(theirs, seed)
        if text is not None:
            assert parse(own, [text])[1], text
            for _, name, arguments in parse(own, [text])[1]:
                jsonschema.validate(json.loads(arguments), TOOLS[name])
    begin = own.open.removesuffix("\n") + own.call_begin("get_weather").strip()
    for arguments in ({"city": "x", "days": "many"}, {}, {"city": "x", "unit": "K"}):
        assert not model.accepts(theirs, begin + written(own, arguments) + own.call_end + own.close)


# ---- schemas


DEFS = {"x": {"type": "integer", "maximum": 9}}
ARGUMENTS = {  # a schema of one argument `a`, values that fit and that do not
    "multipleOf": ({"type": "integer", "multipleOf": 3}, [3, 0], [4]),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 2}]}, [1, 2], [0, 3]),
    "keys beside $ref": ({"$ref": "#/$defs/x", "minimum": 3}, [3, 9], [2, 10]),
    "a long string": ({"type": "string", "maxLength": 100}, ["x" * 100, ""], ["x" * 101]),
    "pattern with a length": ({"type": "string", "pattern": "^a*$", "maxLength": 2}, ["aa"], ["aaa", "b"]),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "\n\n"], ["a", "abcd"]),
    "bare minimum": ({"minimum": 3}, [3, "x"], [2]),
    "disjoint oneOf": ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, [1, True], ["x", None]),
    "overlapping oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, [], [1]),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, [], [[1, 1]]),
    "not": ({"not": {"type": "string"}}, [], ["x"]),
    "format": ({"type": "string", "format": "date"}, ["2026-11-23"], ["x"]),
    "or null": ({"type": ["string", "null"], "maxLength": 3}, ["75", None], ["abcd"]),
    "or a number": ({"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 9}]}, ["x", 9], [10]),
    "or an object": (
        {"anyOf": [{"type": "string"}, {"type": "object", "required": ["k"]}]}, ["x", {"k": 1}], [{}],
    ),
    "enum": ({"enum": ["a b", 1, None]}, ["a b", 1, None], ["a", 2]),
    "items": ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, [[], [1, 2]], [[1, 2, 3], ["x"]]),
    "required alone": ({"type": "object", "required": ["k"]}, [{"k": 1}], [{}]),
}  # fmt: skip


@pytest.mark.parametrize("key", ARGUMENTS)
@pytest.mark.parametrize("family", ["hermes", "kimi_k2", "qwen3_coder", "glm4", "minimax", "deepseek_v3_2"])
def test_every_key_of_a_schema_is_honoured_or_refused_by_name(model, family, key):
    own = TOOL_FORMATS[family]
    one, fitting, others = ARGUMENTS[key]
    schema = {"type": "object", "properties": {"a": one}, "required": ["a"], "$defs": DEFS}
    checked = arguments_schema(schema, "f")
    tag = tool_tag(own, {"other": ANY_ARGUMENTS, "f": checked}, is_required=True, is_parallel=False)
    for value in fitting:
        jsonschema.validate({"a": value}, schema)
    try:
        model.matcher(tag)
    except InvalidRequest as error:
        is_xml = own.arguments != "json"
        assert key in ("overlapping oneOf", "uniqueItems", "not") or is_xml, error
        named = {*one, *(other for option in one.get("anyOf", ()) for other in option)}
        assert any(name in error.message for name in named), error
        assert in_tag(tag_begin(own, "f")) in error.message
        return
    for value in others:
        assert not model.accepts(tag, rendered(own, [("f", {"a": value})])), value
    for value in fitting:
        assert model.accepts(tag, rendered(own, [("f", {"a": value})])), value
    texts = [model.sample(tag, seed) for seed in range(scaled(6))]
    assert all(is_valid(own, text, {"f": schema, "other": {}}) for text in texts if text is not None)


def test_arguments_are_an_object(model):
    with pytest.raises(InvalidRequest, match="must have the type object") as caught:
        arguments_schema({"type": "array"}, "tools[1].function.parameters")
    assert caught.value.param == "tools[1].function.parameters"


def test_what_a_schema_leaves_open_stays_open(model):
    schema = {"properties": {"a": {"type": "object"}, "b": {"type": "array"}, "c": {}, "d": {"type": "string"}}}
    own = TOOL_FORMATS["hermes"]
    tag = tool_tag(own, {"f": arguments_schema(schema, "f")}, is_required=True, is_parallel=True)
    assert model.accepts(tag, rendered(own, [("f", {"a": {"x": 1}, "b": [1, "y"], "c": None, "d": "z"})]))


def test_pydantics_schemas_are_enforced(model):
    import enum

    import openai
    from pydantic import BaseModel, Field

    class Unit(enum.Enum):
        C = "C"
        F = "F"

    class Place(BaseModel):
        city: str
        zip: str | None = None

    class Ask(BaseModel):
        """Ask for the weather."""

        place: Place = Field(description="where")
        unit: Unit
        days: int = Field(ge=1, le=14)
        tags: list[str]

    schema = openai.pydantic_function_tool(Ask)["function"]["parameters"]
    own = TOOL_FORMATS["hermes"]
    tag = tool_tag(own, {"Ask": arguments_schema(schema, "f")}, is_required=True, is_parallel=True)
    good = {"place": {"city": "Paris", "zip": None}, "unit": "C", "days": 14, "tags": []}
    assert model.accepts(tag, rendered(own, [("Ask", good)]))
    assert not model.accepts(tag, rendered(own, [("Ask", good | {"days": 15})]))
    assert not model.accepts(tag, rendered(own, [("Ask", good | {"unit": "K"})]))
