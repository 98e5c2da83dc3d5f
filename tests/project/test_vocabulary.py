"""The words of the field: identifiers, comments, docstrings, messages and docs keep to them."""

import io
import re
import tokenize
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "kvrelay",
    "kernels",
    "kvcache",
    "engine",
    "kvtransfer",
    "prefill",
    "decode",
    "router",
    "serve",
    "cluster",
    "bench",
    "configs",
    "docs",
)
NOT_READ = {"results"}

PROSE = re.compile(
    r"\b(who|whoever|whom|somebody|nobody|everybody|anybody|told|tells?|telling|whereabouts|chores?|"
    r"hands? back|handed back|hand-?backs?|gives? way|giving way|gave way|in line|lends?|lent|lender|loans?|lonely|"
    r"knocks?|"
    r"seats?|lanes?|hops?|owed|gentle|amends)\b",
    re.IGNORECASE,
)
WORDS = frozenset(
    [
        "who",
        "whom",
        "whoever",
        "somebody",
        "nobody",
        "told",
        "tell",
        "tells",
        "whereabouts",
        "chore",
        "chores",
        "handback",
        "lend",
        "lends",
        "lender",
        "lending",
        "lent",
        "loan",
        "loans",
        "lonely",
        "knock",
        "seat",
        "seats",
        "lane",
        "lanes",
        "hop",
        "hops",
        "owed",
        "gentle",
        "amends",
        "appender",
        "scene",
        "desk",
        "stake",
        "leap",
        "asleep",
        "awake",
        "news",
    ]
)
NAMES = frozenset(
    {"Way", "Ask", "Side", "Scene", "Spot", "Desk", "Look", "Kept", "Off", "Said", "Told", "Stake", "Carrier", "Below"}
)
ALLOWED = {
    ("cluster/verify/text.txt", None)  # an English text that a perplexity is measured on
}


def words_of(name):
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def found_in_python(source):
    """(line, word) of every word that the glossary replaces."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for match in PROSE.finditer(token.string):
                yield token.start[0] + token.string[: match.start()].count("\n"), match[0]
        elif token.type == tokenize.NAME and (token.string in NAMES or words_of(token.string) & WORDS):
            yield token.start[0], token.string


def found_in_text(text):
    return [(number, match[0]) for number, line in enumerate(text.splitlines(), 1) for match in PROSE.finditer(line)]


def files():
    tops = [ROOT / "README.md", *(ROOT / folder for folder in FOLDERS)]
    for top in tops:
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.suffix in (".py", ".c", ".h", ".md", ".html", ".yaml") and not NOT_READ & set(path.parts):
                yield path


def test_the_fields_words_are_used():
    found = []
    for path in files():
        name = str(path.relative_to(ROOT))
        hits = found_in_python(path.read_text()) if path.suffix == ".py" else found_in_text(path.read_text())
        found += [f"{name}:{line}: {word}" for line, word in hits if not {(name, None), (name, word)} & ALLOWED]
    assert found == []


def test_the_old_words_are_seen():
    assert [word for _, word in found_in_python("# whoever waits in line\nclass Way:\n    lender = 1\n")] == [
        "whoever",
        "in line",
        "Way",
        "lender",
    ]
    assert found_in_text("blocks that are lent") == [(1, "lent")]
    assert list(found_in_python("def placement(candidate): return candidate  # which worker")) == []
