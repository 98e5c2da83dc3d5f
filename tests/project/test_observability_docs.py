"""docs/observability.md lists every metric that there is, and none that there is not; and every span."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure


ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "observability.md").read_text()


def test_the_page_lists_exactly_the_metrics_of_the_code():
    source = (ROOT / "serve" / "telemetry" / "metrics.py").read_text()
    names = set(re.findall(r'"(kvrelay_\w+)"', source))
    table = PAGE.partition("## Metrics")[2].partition("\nBoth ends")[0]
    assert set(re.findall(r"`(kvrelay_\w+)`", table)) == names


def test_the_page_lists_exactly_the_spans_of_the_code():
    sources = [
        path for folder in ("kvrelay", "serve", "engine", "prefill", "decode") for path in (ROOT / folder).rglob("*.py")
    ]
    begun = re.compile(r"(?:\.begin\(|begin_span\((?:request_id|request\.request_id), |start_span\()\"([a-z ]+)\"")
    names = {name for path in sources for name in begun.findall(path.read_text())}
    assert set(re.findall(r"^\| `([a-z ]+)` \|", PAGE.partition("## Traces")[2], re.MULTILINE)) == names
