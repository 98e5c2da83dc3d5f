"""JSON schemas as clients write them: limits, and the spelling that the libraries understand.

A keyword that would change which outputs are valid and cannot be enforced is refused by name; llguidance does that for
most, here are the rest. A keyword, or a format, that no draft of JSON Schema defines is an annotation, as the standard
has it.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from kvrelay.errors import InvalidRequest

Json = Any  # what json.loads returns

WHITESPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,32}"  # between JSON tokens: compact or indented, but never endless
JSON_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": WHITESPACE,
    "json_allow_general_unicode_escapes": True,
    "lenient": False,
    "coerce_one_of": False,
}
MOST_DEPTH = 64  # of nested schemas
MOST_SCHEMAS = 5_000
MOST_PATTERN_CHARS = 2_000
MOST_REPEATS = 10_000  # maxLength, minItems and the like
MOST_MULTIPLE = 10_000  # product of all multipleOf, in units of their last digit: automata grow with it
MOST_REFERENCES = 32  # in a row
MOST_LITERAL_CHARS = 65_536  # all property names, constants and values of enums

_ONE = (
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_BOUNDS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
_FORMATS = {
    *("date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6", "iri"),
    *("iri-reference", "json-pointer", "regex", "relative-json-pointer", "time", "uri", "uri-reference"),
    *("uri-template", "uuid"),
}


def refuse(message: str) -> NoReturn:
    raise InvalidRequest(message, code="invalid_grammar")


def loads(text: str, what: str) -> Json:
    """The parsed JSON. Raises InvalidRequest, also for NaN and for nesting beyond Python's."""

    def constant(name: str) -> NoReturn:
        refuse(f"{what} is not JSON: {name}")

    try:
        return json.loads(text, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        detail = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        refuse(f"{what} is not JSON: {detail}")


def subschemas(node: dict[str, Json]) -> Iterator[tuple[str, Json]]:
    """The schemas right below one, each with its place; constants, enums and annotations are not schemas."""
    for key, value in node.items():
        if isinstance(value, dict) and key in _MAPS:
            yield from ((f"{key}/{name}", one) for name, one in value.items())
        elif isinstance(value, list) and key in _LISTS:
            yield from ((f"{key}/{index}", one) for index, one in enumerate(value))
        elif key in _ONE:
            yield key, value


def normalised(text: str) -> str:
    """The schema as JSON in ASCII, as llguidance is to compile it. Raises InvalidRequest, naming the key at fault."""
    root = loads(text, "the JSON schema")
    root = {} if root is True else root
    if not isinstance(root, dict):
        refuse("the JSON schema must be an object, or true")
    check_and_rewrite(root)
    return json.dumps(root)


def check_and_rewrite(root: Json) -> None:
    """Hold a schema to the limits and rewrite it in place. Raises InvalidRequest, naming the key at fault."""
    if isinstance(root, dict) and "x-guidance" in root:
        refuse("x-guidance is not supported in a JSON schema")
    num_schemas = num_chars = 0
    multiple = 1
    left: list[tuple[str, Json, int]] = [("", root, 0)]
    while left:
        path, node, depth = left.pop()
        if not isinstance(node, dict):
            continue
        num_schemas += 1
        if num_schemas > MOST_SCHEMAS:
            refuse(f"the JSON schema has more than {MOST_SCHEMAS} subschemas (at {path[:200]})")
        if depth > MOST_DEPTH:
            refuse(f"the JSON schema nests more than {MOST_DEPTH} deep at {path[:200]}")
        _check_keys(path, node)
        _rewrite(root, node)
        multiple *= _multiple(path, node)
        if multiple > MOST_MULTIPLE:
            refuse(f"multipleOf at {path[:200] or '/'} has too many digits (with others: more than {MOST_MULTIPLE})")
        num_chars += _literal_chars(node)
        if num_chars > MOST_LITERAL_CHARS:
            refuse(
                f"the JSON schema's properties, const and enum have more than {MOST_LITERAL_CHARS} characters in all "
                f"(at {path[:200]})"
            )
        left += [(f"{path}/{place}", one, depth + 1) for place, one in subschemas(node)]


def _listed(node: dict[str, Json], key: str) -> list[Json]:
    value = node.get(key)
    return value if isinstance(value, list) else []


def _literal_chars(node: dict[str, Json]) -> int:
    properties = node.get("properties")
    chars = sum(map(len, properties)) if isinstance(properties, dict) else 0
    for key in ("const", "enum", "required"):
        if key in node:
            chars += len(json.dumps(node[key], ensure_ascii=False))
    return chars


def _multiple(path: str, node: dict[str, Json]) -> int:
    """multipleOf without its decimal point and outer zeros: 0.25 is 25, 1000 is 1."""
    digits = re.fullmatch(r"0*(\d*)\.?(\d*?)0*", str(node.get("multipleOf", 1)))
    return int(digits[1] + digits[2] or 1) if digits else refuse(f"multipleOf is not supported at {path[:200] or '/'}")


def _check_keys(path: str, node: dict[str, Json]) -> None:
    for key in _BOUNDS:
        value = node.get(key)
        if isinstance(value, int | float) and value > MOST_REPEATS:
            refuse(f"{key} is larger than {MOST_REPEATS} at {path[:200] or '/'}")
    patterns = node.get("patternProperties")
    for key, pattern in [("pattern", node.get("pattern"))] + [
        ("patternProperties", name) for name in (patterns if isinstance(patterns, dict) else ())
    ]:
        if isinstance(pattern, str) and len(pattern) > MOST_PATTERN_CHARS:
            refuse(f"{key} has more than {MOST_PATTERN_CHARS} characters at {path[:200] or '/'}")


def _rewrite(root: Json, node: dict[str, Json]) -> None:
    """What means the same, in a form that llguidance takes.

    It refuses oneOf unless it sees that the alternatives are disjoint, and does not look through references.
    """
    if "$ref" in node:
        resolved(root, node)
    if node.get("uniqueItems") is False:
        del node["uniqueItems"]
    if isinstance(node.get("format"), str) and node["format"] not in _FORMATS:
        del node["format"]
    alternatives = node.get("oneOf")
    if isinstance(alternatives, list) and 2 <= len(alternatives) <= 64 and "anyOf" not in node:
        found = [resolved(root, one) for one in alternatives]
        if all(_are_disjoint(one, other) for i, one in enumerate(found) for other in found[i + 1 :]):
            items = [("anyOf" if key == "oneOf" else key, value) for key, value in node.items()]
            node.clear()
            node.update(items)  # the order of keys is the order of properties


def resolved(root: Json, node: Json) -> dict[str, Json]:
    """A schema, or what it refers to within its document; empty where that is not known."""
    for _ in range(MOST_REFERENCES):
        if not isinstance(node, dict):
            return {}
        if "$ref" not in node:
            return node
        if node.keys() - {"$ref", "description", "title"} or not str(node["$ref"]).startswith("#/"):
            return {}
        target = root
        for part in node["$ref"][2:].split("/"):
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        node = target
    return refuse(f"$ref {node['$ref'][:200]} leads to itself, or through more than {MOST_REFERENCES} others")


def _are_disjoint(one: dict[str, Json], other: dict[str, Json]) -> bool:
    """Whether no value fits both: other types, or a required property (the discriminator) with other strings."""
    kinds = one.get("type"), other.get("type")
    if all(isinstance(kind, str) for kind in kinds) and kinds[0] != kinds[1]:
        return set(kinds) != {"integer", "number"}
    if kinds != ("object", "object"):
        return False
    shared = set(_listed(one, "required")) & set(_listed(other, "required"))
    return any(
        (ours := _strings(one, name)) and (theirs := _strings(other, name)) and not ours & theirs
        for name in shared
        if isinstance(name, str)
    )


def _strings(node: dict[str, Json], name: str) -> set[str]:
    """The values that a property may have, when they are strings and listed."""
    properties = node.get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    if not isinstance(schema, dict):
        return set()
    values = [schema["const"]] if "const" in schema else _listed(schema, "enum")
    return set(values) if all(isinstance(value, str) for value in values) else set()
