"""docs/api.md names every field, every header and every error code of the code, and no field that there is not."""

import ast
import re
from pathlib import Path

import pytest

from kvrelay.serve.api.schemas import ChatBody, CompletionBody, KvFields, PrefetchChatBody, SloFields, StreamOptions
from kvrelay.serve.bodies.grammars import StructuredOutputs
from kvrelay.serve.bodies.unknown_fields import IGNORED_HEADER, REFUSED, WITHOUT_EFFECT

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/api.md").read_text()
SOURCES = [
    *(ROOT / "serve").rglob("*.py"),
    ROOT / "kvrelay/errors.py",
    *(ROOT / "cluster/registry").glob("*.py"),
    *(ROOT / "cluster/deployments").glob("*.py"),
]
NO_CODES = {"invalid_request_error", "server_error"}  # these are types


def names(text):
    return set(re.findall(r"[`.]([a-z_0-9-]+)`", text))


def section(title):
    return PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def fields(*bodies):
    return {field.alias or name for body in bodies for name, field in body.model_fields.items()}


def codes(source):
    """Words that the source passes as an error's code: InvalidRequest(message, param, status, code) and the like."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            given = [*node.args, *(word.value for word in node.keywords if word.arg == "code")]
            is_error = re.search("Error|Invalid|Unavailable|ErrorBody", ast.unparse(node.func))
            found = given[3:] if is_error and "Unavailable" not in ast.unparse(node.func) else given[2:]
            for value in (one for arg in found if is_error for one in ast.walk(arg)):
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value
        elif isinstance(node, ast.Assign) and re.search("own_code|self.code", ast.unparse(node.targets[0])):
            yield from (one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant))


def test_every_field_is_described():
    known = fields(CompletionBody, ChatBody, PrefetchChatBody, KvFields, SloFields, StreamOptions, StructuredOutputs)
    assert known - names(section("Request fields")) == set()


def test_every_other_field_that_is_known_is_listed():
    assert (REFUSED.keys() | WITHOUT_EFFECT) <= names(section("Request fields"))


def test_every_error_code_is_listed():
    found = {
        code for path in SOURCES for code in codes(path.read_text()) if re.fullmatch("[a-z]+(_[a-z]+)+", str(code))
    }
    listed = names(section("Errors"))
    assert {"body_too_large", "context_length_exceeded", "slo_unreachable", "sessions_unavailable"} <= found
    assert found - listed - NO_CODES - fields(CompletionBody, ChatBody) == set()


def test_every_header_is_listed():
    found = {
        name for path in (ROOT / "serve/api").glob("*.py") for name in re.findall('"(x-[a-z-]+)"', path.read_text())
    }
    found.add(IGNORED_HEADER)
    listed = set(re.findall("`(x-[a-z-]+)", section("Headers")))
    assert found - {"x-accel-buffering", "x-content-type-options"} == listed
