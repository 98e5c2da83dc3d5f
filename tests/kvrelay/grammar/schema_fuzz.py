"""Random JSON schemas, and outputs sampled under their masks: python -m tests.kvrelay.grammar.schema_fuzz --count 10000

Each schema is refused by name or compiles; each output that ends is valid by `jsonschema`. With --no-masks, the
control, most are not.
"""

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path

import jsonschema
import numpy as np

from kvrelay.errors import InvalidRequest
from kvrelay.grammar.compiler import GrammarCompiler
from kvrelay.grammar.masks import fill_masks
from kvrelay.plane.messages import GrammarSpec

MOST_TOKENS = 120
PATTERNS = ["^[a-z]+$", "[0-9]", "^a{2,5}$", "^(ab|c)*$", "^.{1,4}$", "x", "^\\w-\\d$", "^$", "(a|b)+c?$", "^[^a]*$"]
BOMBS = [
    {"type": "string", "maxLength": 10**8},
    {"type": "integer", "multipleOf": 999_983},
    {"type": "string", "pattern": "((a{1,99}){1,99}){1,99}"},
    {"type": "string", "pattern": "(.*a){20}", "minLength": 300},
    {"type": "string", "pattern": "(a?){500}a{500}"},
    {"enum": ["x" * 100_000]},
    {"properties": {f"p{i}": {} for i in range(3000)}},
    {"allOf": [{"type": "string", "pattern": letter} for letter in "abcdefghijkl"]},
    {"$ref": "http://example.com/schema"},
    {"$ref": "#/nowhere"},
    {"pattern": "("},
    {"type": "nonsense"},
    {"not": {"type": "string"}},
    {"if": {}, "then": {}},
    {"type": "array", "uniqueItems": True},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"minimum": "a"},
    {"properties": 3},
    {"required": {}},
    {"type": "object", "minProperties": 3},
    {"x-guidance": {"lenient": True}, "not": {}},
]


class Generator:
    """Random schemas; `names` are the definitions that references may name."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.names = ["a", "b"][: self.random.choice([0, 0, 1, 2])]

    def root(self):
        found = self.schema(0)
        if self.names and isinstance(found, dict):
            found["$defs"] = {name: self.schema(1) for name in self.names}
        return found

    def schema(self, depth):
        kinds = ["null", "boolean", "integer", "number", "string", "string", "enum", "const"]
        if depth < 4:
            kinds += ["object", "object", "array", "array", "anyOf", "oneOf", "allOf", "types"]
        if self.names and depth:
            kinds += ["ref"] * 3
        if self.random.random() < 0.02:
            return json.loads(json.dumps(self.random.choice(BOMBS)))
        return getattr(self, f"_{self.random.choice(kinds)}")(depth)

    def _some(self, **keys):
        return {key: value for key, value in keys.items() if self.random.random() < 0.4}

    def _null(self, depth):
        return {"type": "null"}

    def _boolean(self, depth):
        return self.random.choice([{"type": "boolean"}, True, {}, {"type": "boolean", "title": "x"}])

    def _integer(self, depth):
        low = self.random.randint(-1000, 1000)
        keys = self._some(
            minimum=low, maximum=low + self.random.randint(-2, 2000), multipleOf=self.random.randint(1, 9)
        )
        return {"type": "integer", **keys, **({"exclusiveMinimum": low} if self.random.random() < 0.1 else {})}

    def _number(self, depth):
        low = round(self.random.uniform(-100, 100), self.random.randint(0, 4))
        return {"type": "number", **self._some(minimum=low, maximum=low + round(self.random.uniform(0, 100), 2))}

    def _string(self, depth):
        low = self.random.randint(0, 5)
        keys = self._some(minLength=low, maxLength=low + self.random.randint(-1, 30))
        if self.random.random() < 0.3:
            keys["pattern"] = self.random.choice(PATTERNS)
        elif self.random.random() < 0.1:
            keys["format"] = self.random.choice(["date-time", "email", "uuid", "ipv6", "made-up", "regex"])
        return {"type": "string", **keys}

    def _value(self, depth=0):
        values = [None, True, 0, -7, 2.5, 10**9, "", "a", "ü🎉", 'q"\\', "line\n", "x" * 20]
        if depth < 2:
            values += [[self._value(depth + 1)], {"k": self._value(depth + 1)}]
        return self.random.choice(values)

    def _enum(self, depth):
        return {"enum": [self._value() for _ in range(self.random.randint(1, 4))]}

    def _const(self, depth):
        return {"const": self._value()}

    def _object(self, depth):
        names = self.random.sample(["a", "b", "ab", "ü", "x y", 'q"', "id", "name"], self.random.randint(0, 4))
        found = {"type": "object", "properties": {name: self.schema(depth + 1) for name in names}}
        found["required"] = [name for name in names if self.random.random() < 0.6]
        if self.random.random() < 0.1:
            found["required"].append("other")
        if self.random.random() < 0.6:
            found["additionalProperties"] = self.random.choice([False, False, True, {"type": "integer"}])
        if self.random.random() < 0.15:
            found["patternProperties"] = {"^p_": self.schema(depth + 1)}
        if self.random.random() < 0.1:
            found[self.random.choice(["minProperties", "maxProperties"])] = self.random.randint(0, 3)
        return found

    def _array(self, depth):
        low = self.random.randint(0, 3)
        found = {"type": "array", **self._some(minItems=low, maxItems=low + self.random.randint(-1, 4))}
        found["items"] = self.schema(depth + 1)
        if self.random.random() < 0.2:
            found["prefixItems"] = [self.schema(depth + 1) for _ in range(self.random.randint(1, 3))]
        return found

    def _anyOf(self, depth):
        return {"anyOf": [self.schema(depth + 1) for _ in range(self.random.randint(1, 3))]}

    def _oneOf(self, depth):
        return {"oneOf": [self.schema(depth + 1) for _ in range(self.random.randint(1, 3))]}

    def _allOf(self, depth):
        return {"allOf": [self.schema(depth + 1) for _ in range(self.random.randint(1, 2))]}

    def _types(self, depth):
        return {"type": self.random.sample(["null", "boolean", "integer", "string", "array", "object"], 2)}

    def _ref(self, depth):
        return {"$ref": f"#/$defs/{self.random.choice(self.names)}"}


class Sampler:
    """Outputs of random tokens under the masks of a grammar, drawn to an end."""

    def __init__(self, compiler, token_bytes, eos_ids):
        self.compiler, self.token_bytes, self.eos_ids = compiler, token_bytes, set(eos_ids)
        self._closing = np.array([token[:1] in (b'"', b"}", b"]", b",") for token in token_bytes])
        self._text = np.array([bool(token) for token in token_bytes])
        self._mask = np.zeros((1, compiler.num_words), np.int32)

    def output(self, grammar, seed, *, has_masks=True):
        """The text of one output; None when it has no end within MOST_TOKENS. Raises AssertionError for a dead end."""
        random, matcher, text = np.random.default_rng(seed), grammar.matcher(), b""
        for step in range(MOST_TOKENS):
            allowed = self._allowed(matcher) if has_masks else np.ones(len(self.token_bytes), bool)
            assert matcher.problem is None, matcher.problem
            assert allowed.any(), f"no token may follow {text!r}"
            ends = any(allowed[token_id] for token_id in self.eos_ids)
            allowed = allowed & self._text
            if ends and (not allowed.any() or random.random() < 0.2 + step / 60):
                return text
            closing = allowed & self._closing
            if closing.any() and random.random() < 0.3 + step / 60:
                allowed = closing
            token_id = int(random.choice(np.nonzero(allowed)[0]))
            if has_masks and not matcher.accept([token_id]):
                assert matcher.problem, (text, token_id)
                return None  # beyond the parser's limits
            text += self.token_bytes[token_id]
        return None

    def _allowed(self, matcher):
        fill_masks([(matcher, [], 0)], self._mask)
        return np.unpackbits(self._mask[0].view(np.uint8), bitorder="little")[: len(self.token_bytes)].astype(bool)


def fault_of(schema, text):
    """What is wrong with an output; "" when it is valid, None where jsonschema follows references forever."""
    try:
        value = json.loads(text.decode())
        jsonschema.Draft202012Validator(schema).validate(value)
    except ValueError as error:
        return f"not JSON: {error}"
    except jsonschema.ValidationError as error:
        return error.message[:200]
    except RecursionError:
        return None
    return ""


def fuzz(sampler, count, seed, *, has_masks=True, report=lambda line: None):
    """Counts of what became of `count` schemas: refused, valid, invalid, endless, or `fault`s, which are reported."""
    counts = Counter()
    for index in range(count):
        schema, start = Generator(seed + index).root(), time.process_time()
        try:
            grammar = sampler.compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
        except InvalidRequest as error:
            counts["refused"] += 1
            counts["unnamed"] += not str(error).strip()
            continue
        finally:
            counts["slow"] += time.process_time() - start > 1.0
        try:
            text = sampler.output(grammar, seed + index, has_masks=has_masks)
        except AssertionError as error:
            counts["fault"] += 1
            report(f"{seed + index}: {error}\n  {json.dumps(schema)}")
            continue
        fault = "" if text is None else fault_of(schema, text)
        name = "endless" if text is None else "unjudged" if fault is None else "invalid" if fault else "valid"
        counts[name] += 1
        if fault and has_masks:
            report(f"{seed + index}: {fault}\n  {text!r}\n  {json.dumps(schema)}")
    return counts


def token_bytes_of(compiler):
    """Each token's bytes; none for special tokens and for ids without a token."""
    tokenizer = compiler._llguidance_library()._tokenizer
    is_special, decode = tokenizer.is_special_token, tokenizer.decode_bytes
    return [b"" if is_special(token_id) else decode([token_id]) for token_id in range(tokenizer.vocab_size)]


def sampler_of(folder):
    config = json.loads((folder / "config.json").read_text())
    size = (config.get("text_config") or config)["vocab_size"]
    eos = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    eos_ids = eos if isinstance(eos, list) else [eos]
    compiler = GrammarCompiler(folder, size, eos_ids)
    compiler.load()
    return Sampler(compiler, token_bytes_of(compiler), eos_ids)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a prepared model folder")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-masks", action="store_true")
    chosen = parser.parse_args()
    start = time.monotonic()
    counts = fuzz(sampler_of(chosen.model), chosen.count, chosen.seed, has_masks=not chosen.no_masks, report=print)
    print(dict(counts), f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
