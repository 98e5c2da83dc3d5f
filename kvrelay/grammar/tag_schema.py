"""JSON schemas inside structural tags: what xgrammar enforces in full; what it would drop silently is refused."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvrelay.errors import InvalidRequest
from kvrelay.grammar.schema import check_and_rewrite, subschemas

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANNOTATIONS = (
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "discriminator",
    "example", "examples", "readOnly", "title", "writeOnly",
)  # fmt: skip
_NOT_ENFORCED = (
    "additionalItems", "contains", "contentSchema", "dependencies", "dependentRequired", "dependentSchemas", "else",
    "if", "maxContains", "minContains", "multipleOf", "not", "oneOf", "then", "unevaluatedItems",
    "unevaluatedProperties", "uniqueItems",
)  # fmt: skip
_NOT_TOGETHER = (("pattern", "minLength"), ("pattern", "maxLength"), ("format", "minLength"), ("format", "maxLength"))


def checked_schema(schema: Mapping[str, Any] | None, field: str, *, is_xml: bool = False) -> Any:
    """A schema as tags enforce it: in full. None: no arguments. Raises InvalidRequest naming `field` and the key.

    is_xml: of arguments in an XML form, in which a string is raw text.
    """
    if schema is None:
        return NO_ARGUMENTS
    root = json.loads(json.dumps(schema))  # a copy, rewritten in place
    try:
        check_and_rewrite(root)
    except InvalidRequest as error:
        raise _refused(field, error.message) from error
    left: list[tuple[str, Any]] = [("", root)]
    while left:
        place, node = left.pop()
        if isinstance(node, dict):
            _check_node(node, field, place or "/")
            _open(node)
            left += [(f"{place}/{below}", one) for below, one in subschemas(node)]
    if root.get("type", "object") != "object":
        raise _refused(field, "the schema of a function's arguments must have the type object")
    if is_xml:
        _check_raw_texts(root, field)
    if "$ref" not in root:
        root["type"] = "object"
        _open(root)
    return root


def _check_node(node: Mapping[str, Any], field: str, place: str) -> None:
    """Whether the library enforces every key; it drops some without a word."""
    ignored: Sequence[str] = sorted(node.keys() & set(_NOT_ENFORCED))
    given = node.keys() - set(_ANNOTATIONS)
    if node.get("additionalItems", None) is True:
        ignored = [key for key in ignored if key != "additionalItems"]
    for key in ("$ref", "anyOf", "allOf", "const", "enum"):
        if key in given and not ignored:
            beside = given - {key} - ({"type"} if key in ("const", "enum") or _is_typed_alike(node, key) else set())
            ignored = [f"{other} beside {key}" for other in sorted(beside)]
    if not ignored and len(node.get("allOf") or ()) > 1:
        ignored = ["allOf of several schemas"]
    if not ignored:
        ignored = [f"{one} with {other}" for one, other in _NOT_TOGETHER if one in node and other in node]
    if not ignored and isinstance(node.get("items"), list):
        ignored = ["items as a list"]
    if ignored:
        raise _refused(field, f"{ignored[0]} is not supported where calls are constrained (at {place[:200]})")


def _check_raw_texts(root: Mapping[str, Any], field: str) -> None:
    """A raw text of a pattern or a length could hold the marker that ends it."""
    properties = root.get("properties")
    for name, one in properties.items() if isinstance(properties, Mapping) else ():
        for node in [one, *(one.get("anyOf") or ())] if isinstance(one, Mapping) else ():
            for key in ("pattern", "minLength", "maxLength"):
                if isinstance(node, Mapping) and key in node:
                    place = f"/properties/{name}"[:200]
                    raise _refused(field, f"{key} is not supported in the XML form of this model's calls (at {place})")


def _is_typed_alike(node: Mapping[str, Any], key: str) -> bool:
    """Whether all alternatives have the type that stands beside them."""
    options = node.get(key)
    return isinstance(options, list) and all(
        isinstance(option, Mapping) and option.get("type") == node.get("type") for option in options
    )


def _open(node: dict[str, Any]) -> None:
    """Say what the standard means by leaving it out; the library takes it for "none"."""
    types = node.get("type")
    if types == "object" and not node.keys() & {"properties", "patternProperties", "additionalProperties"}:
        node["additionalProperties"] = True
    if types == "array" and not node.keys() & {"items", "prefixItems"}:
        node["items"] = True


def _refused(field: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {reason}", field, 400, "invalid_grammar")
