"""Spans join across processes by traceparent, cost nothing when nobody asks, and go where OTEL_* says."""

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvrelay import tracing
from kvrelay.environment import otlp_protocol, trace_exporters

pytestmark = pytest.mark.pure


CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
VARIABLES = (
    "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
)  # fmt: skip


@pytest.fixture
def exporter(monkeypatch):
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


@pytest.fixture
def environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def trace_id(traceparent):
    return int(traceparent.split("-")[1], 16)


def test_a_request_joins_the_clients_trace_and_its_sequences_join_the_requests(exporter):
    request = tracing.begin_request(CLIENT, "/v1/completions")
    spans = tracing.Spans(tracing.traceparent_of(request), worker="p0")
    spans.begin("prefill", tokens=7)
    spans.end("prefill", cached_tokens=3)
    request.end()
    prefill, whole = exporter.get_finished_spans()
    assert {span.context.trace_id for span in (prefill, whole)} == {trace_id(CLIENT)}
    assert whole.parent.span_id == 0xB7AD6B7169203331 and prefill.parent.span_id == whole.context.span_id
    assert dict(prefill.attributes) == {"kvrelay.worker": "p0", "kvrelay.tokens": 7, "kvrelay.cached_tokens": 3}


def test_an_error_marks_the_span_and_what_is_left_open_is_closed_once(exporter):
    spans = tracing.Spans(CLIENT)
    spans.begin("kv transfer")
    spans.end("kv transfer", error="checksum: block 3", reason="checksum")
    spans.begin("decode")
    spans.close("given up")
    spans.close("again")
    spans.end("decode")
    first, second = exporter.get_finished_spans()
    assert (first.name, first.status.status_code, first.status.description) == (
        "kv transfer",
        StatusCode.ERROR,
        "checksum: block 3",
    )
    assert (second.name, second.status.description) == ("decode", "given up")


@pytest.mark.parametrize("header", [None, "", "nonsense", "00-0-0-01", "00-" + "0" * 32 + "-b7ad6b7169203331-01"])
def test_a_header_that_is_no_trace_context_is_ignored(exporter, header):
    tracing.begin_request(header, "/").end()
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


def test_without_a_provider_nothing_is_carried_but_the_clients_own_context():
    assert tracing.traceparent_of(tracing.begin_request(None, "/")) == ""
    carried = tracing.traceparent_of(tracing.begin_request(CLIENT, "/"))
    assert trace_id(carried) == trace_id(CLIENT)  # a worker that has a provider joins the client's trace
    spans = tracing.Spans(carried)
    spans.begin("prefill")
    spans.close()


def test_the_environment_names_the_exporters(environment):
    assert trace_exporters() == []
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert (trace_exporters(), otlp_protocol()) == (["otlp"], "http/protobuf")
    environment.setenv("OTEL_TRACES_EXPORTER", "console, otlp")
    environment.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert (trace_exporters(), otlp_protocol()) == (["console", "otlp"], "grpc")
    environment.setenv("OTEL_TRACES_EXPORTER", "none")
    assert trace_exporters() == []
    environment.setenv("OTEL_TRACES_EXPORTER", "console")
    environment.setenv("OTEL_SDK_DISABLED", "true")
    assert trace_exporters() == []


def in_a_process_of_its_own(environment, exporter_name):
    """Configure from the environment, make a span, end; a process's provider can be set only once."""
    environment.setenv("OTEL_TRACES_EXPORTER", exporter_name)
    program = (
        "import logging; logging.basicConfig()\n"
        "from kvrelay import tracing\n"
        "tracing.configure('decode-7', 'decode')\n"
        "tracing.begin_request(None, '/v1/completions').end()\n"
        "tracing.shutdown()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr


def test_console_spans_go_to_standard_error_with_the_processs_name(environment):
    told = in_a_process_of_its_own(environment, "console")
    assert all(part in told for part in ('"name": "request"', '"service.instance.id": "decode-7"', '"kvrelay"'))


def test_an_exporter_that_is_not_installed_is_told_and_harms_nobody(environment):
    told = in_a_process_of_its_own(environment, "nosuch")
    assert "exporter nosuch is not installed" in told and "kvrelay[tracing]" in told and "request" not in told


def test_unasked_the_sdk_is_not_even_imported(environment):
    program = (
        "import sys; from kvrelay import tracing; tracing.configure('a', 'b');"
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
