"""For all tests: the checkout's root is importable, GPU tests skip without a GPU, files without a wanted mark are not
imported, and a skip whose reason has a word of KVRELAY_REQUIRE (`hosts,prometheus`) is a failure.
"""

import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.append(str(Path(__file__).parents[1]))  # appended, so that nothing of ours hides an installed package

# a test's first example may compile a kernel, and pure tests wait for those that run beside them
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

pytest.register_assert_rewrite("tests.kvcache.stores.store_contract")


def pytest_ignore_collect(collection_path, config):
    """With `-m pure…`, `-m processes…` or `-m alone…`, a file that never names the mark is skipped unread: importing
    torch takes seconds.
    """
    wanted = re.match(r"(pure|processes|alone)\b", config.option.markexpr)
    if wanted is None or not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    return f"mark.{wanted[1]}" not in collection_path.read_text() or None


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
    if item.get_closest_marker("long") is not None and _scale() < 1:
        pytest.skip("runs with make test-all")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return _required((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return _required((yield))


def _required(report):
    reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
    if any(word and word in reason.lower() for word in os.environ.get("KVRELAY_REQUIRE", "").lower().split(",")):
        report.outcome, report.longrepr = "failed", f"KVRELAY_REQUIRE does not let this test be skipped: {reason}"
    return report


def _scale():
    from tests.scale import SCALE

    return SCALE


@pytest.fixture
def exporter(monkeypatch):
    """Spans that this process ends are in its memory, not sent anywhere."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from kvrelay import tracing

    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("test"))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()
