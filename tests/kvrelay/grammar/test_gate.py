"""The ingress's check of grammars: bombs are refused in time and by name, and no process is left."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvrelay.errors import InvalidRequest, Overloaded
from kvrelay.grammar import gate as gates
from kvrelay.grammar.gate import GrammarGate
from kvrelay.plane.messages import GrammarSpec
from tests.serve.text.family_folders import write_family

ROOT = Path(__file__).resolve().parents[3]


def schema(**keys):
    return GrammarSpec("json_schema", json.dumps(keys))


def hard_patterns(count, seed=0):
    """Schemas whose patterns are just within llguidance's own limits: 0.1 s each."""
    letters = "abcdefghijkl"
    names = [f"p{seed}_{i}" for i in range(count)]
    patterns = [{"allOf": [{"type": "string", "pattern": f"{a}{name}"} for a in letters]} for name in names]
    return schema(type="object", properties=dict(zip(names, patterns, strict=True)))


def tag(**keys):
    form = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": keys}, "end": "</a>"}
    return GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


BOMBS = {
    "one megabyte": (schema(enum=["x" * 1000] * 1000), "1004"),
    "deep": (GrammarSpec("json_schema", '{"items":' * 20_000 + "1" + "}" * 20_000), "nested too deeply|nests more"),
    "deep constant": (GrammarSpec("json_schema", '{"enum":' + "[" * 90_000 + "]" * 90_000 + "}"), "too deeply"),
    "bounds": (schema(type="string", maxLength=10**9), "maxLength"),
    "items": (schema(type="array", items={"type": "array", "minItems": 10**6}), "minItems .* at /items"),
    "multiples": (schema(allOf=[{"multipleOf": n, "type": "integer"} for n in (97, 89, 83, 79)]), "multipleOf"),
    "properties": (schema(properties={f"p{i}": {} for i in range(6000)}), "subschemas"),
    "exponential": (GrammarSpec("regex", "(a?){500}a{500}"), "regular expression"),
    "intersections": (hard_patterns(20), "JSON schema"),
    "nested alternatives": (GrammarSpec("regex", "(" * 5000 + "a" + "|b)" * 3000), "regular expression"),
    "ambiguous": (
        GrammarSpec("lark", "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(30)), 'r30: "a"'])),
        "grammar",
    ),
    "bounds in a tag": (tag(type="string", maxLength=10**9), "maxLength .*tag that begins"),
    "intersections in a tag": (tag(**json.loads(hard_patterns(20, seed=1).text)), "JSON schema|CPU time"),
    "many tags": (
        GrammarSpec(
            "structural_tag",
            '{"type":"structural_tag","format":{"type":"triggered_tags","triggers":["<"],"tags":['
            + ",".join(['{"begin":"<","content":{"type":"any_text"},"end":">"}'] * 2000)
            + "]}}",
        ),
        "at most 512 tags",
    ),
    "deep formats": (
        GrammarSpec(
            "structural_tag",
            '{"type":"structural_tag","format":'
            + '{"type":"or","elements":[' * 50
            + '{"type":"any_text"}'
            + "]}" * 50
            + "}",
        ),
        "too large",
    ),
    "surrogate": (GrammarSpec("regex", "a\ud800"), "surrogate"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_family("qwen2.5", tmp_path_factory.mktemp("qwen"))[0]


@pytest.fixture
async def gate(folder):
    found = GrammarGate(folder, json.loads((folder / "config.json").read_text())["vocab_size"], [2])
    await found.check(schema(type="object"))
    yield found
    await found.aclose()
    assert not psutil.Process().children(recursive=True)


async def test_bombs_are_refused_by_name_in_time_and_nothing_else_waits(gate):
    async def refused(spec, named):
        with pytest.raises(InvalidRequest, match=named):
            await gate.check(spec)

    longest_gap, last = 0.0, time.monotonic()
    bombs = asyncio.gather(*(refused(*bomb) for bomb in BOMBS.values()))
    while not bombs.done():
        await asyncio.sleep(0.001)
        longest_gap, last = max(longest_gap, time.monotonic() - last), time.monotonic()
    await bombs
    await gate.check(schema(type="array", items={"type": "string"}))
    assert longest_gap < 0.5  # of this process's event loop, on a loaded machine


async def test_an_ingress_with_many_connections_is_answered(gate):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    with contextlib.ExitStack() as files:
        for _ in range(1100):
            files.callback(os.close, os.dup(1))
        await gate.check(schema(type="boolean"))  # its pipes are above 1,023
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_long_string_in_a_tag_is_compiled(gate):
    await gate.check(tag(type="string", maxLength=100))
    assert len(psutil.Process().children(recursive=True)) == 1  # for every kind


async def test_a_grammar_is_checked_once(gate, monkeypatch):
    asked = []
    answer = gates._Checker._answer
    monkeypatch.setattr(gates._Checker, "_answer", lambda self, *args: asked.append(args) or answer(self, *args))
    await asyncio.gather(*(gate.check(schema(title="once")) for _ in range(20)))
    await gate.check(schema(title="once"))
    assert len(asked) == 1


async def test_too_many_at_once_are_told_to_come_back(gate):
    found = await asyncio.gather(*(gate.check(schema(title=str(i))) for i in range(60)), return_exceptions=True)
    assert found[0] is None
    assert any(isinstance(one, Overloaded) for one in found)
    await gate.check(schema(title="later"))


async def test_a_checker_that_is_killed_is_started_again(gate):
    (child,) = psutil.Process().children()
    child.kill()
    child.wait()
    await gate.check(schema(title="after"))
    with pytest.raises(InvalidRequest, match="not"):
        await gate.check(schema(**{"not": {}}))


def test_the_checker_ends_with_its_ingress(folder):
    code = f"""
import asyncio, signal, sys, psutil
from kvrelay.grammar.gate import GrammarGate
from kvrelay.plane.messages import GrammarSpec
async def main():
    await GrammarGate({str(folder)!r}, 1000, [2]).check(GrammarSpec("regex", "a"))
    print(*(child.pid for child in psutil.Process().children()), flush=True)
    assert not {{"llguidance", "torch", "xgrammar"}} & sys.modules.keys()
    await asyncio.sleep(60)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
asyncio.run(main())
"""
    for sent in (signal.SIGKILL, signal.SIGINT):
        ingress = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, stderr=subprocess.PIPE
        )
        checker = psutil.Process(int(ingress.stdout.readline()))
        os.kill(ingress.pid, sent)
        ingress.communicate(timeout=20)
        psutil.wait_procs([checker], timeout=10)
        assert not checker.is_running() or checker.status() == psutil.STATUS_ZOMBIE
