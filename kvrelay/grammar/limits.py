"""Limits of a grammar that need no compiler, and which of its bounds is the largest."""

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

from kvrelay.errors import InvalidRequest
from kvrelay.grammar.schema import loads
from kvrelay.plane.messages import GrammarSpec

MOST_BYTES = {"json_schema": 256 << 10, "structural_tag": 256 << 10, "regex": 16 << 10, "lark": 64 << 10}
_JSON = ("json_schema", "structural_tag")
FIELD = {
    "json_schema": "the JSON schema",
    "structural_tag": "the structural tag",
    "regex": "the regular expression",
    "lark": "the grammar",
}


def in_tag(begin: str) -> str:
    """Where in a structural tag something is wrong, as refusals have it."""
    return f" (in the tag that begins with {json.dumps(begin, ensure_ascii=False)})" if begin else ""


def check_size(spec: GrammarSpec) -> None:
    """Raises InvalidRequest."""
    most = MOST_BYTES[spec.kind]
    try:
        size = len(spec.text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{FIELD[spec.kind]} holds half a surrogate pair", code="invalid_grammar") from None
    if size > most:
        raise InvalidRequest(
            f"{FIELD[spec.kind]} has {size} bytes; at most {most} are supported", code="invalid_grammar"
        )


def digest_of(spec: GrammarSpec) -> bytes:
    """What a grammar is remembered under; its size has been checked."""
    return hashlib.blake2b(f"{spec.kind}\0{spec.text}".encode(), digest_size=16).digest()


_KEYS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties", "multipleOf")


def nodes(root: Any) -> Iterator[Any]:
    """Every value within parsed JSON, and its keys."""
    left = [root]
    while left:
        node = left.pop()
        yield node
        left += [*node.keys(), *node.values()] if isinstance(node, dict) else node if isinstance(node, list) else []


def largest_bound(spec: GrammarSpec) -> str:
    """The largest bound in a grammar, as `key value`; empty when it has none."""
    found: list[tuple[float, str]] = []
    for node in nodes(loads(spec.text, FIELD[spec.kind]) if spec.kind in _JSON else spec.text):
        if isinstance(node, dict):
            found += [(node[key], f"{key} {node[key]}") for key in _KEYS if isinstance(node.get(key), int | float)]
        elif isinstance(node, str):
            repeats = re.findall(r"\{(\d{1,9})?(?:,(\d{1,9})?)?\}", node)
            found += [(int(most or least or 0), f"{{{least},{most}}} in a pattern") for least, most in repeats]
    return max(found)[1] if found else ""
