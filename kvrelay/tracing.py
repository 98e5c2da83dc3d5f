"""OpenTelemetry spans. A request's spans in all processes join through W3C's traceparent.

Spans are no-ops unless the environment enables an exporter (`configure`); nothing happens per token. Imports the API
alone, and the SDK only when an exporter is enabled.
"""

import logging
from importlib.metadata import entry_points
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvrelay import __version__
from kvrelay.environment import otlp_protocol, trace_exporters

logger = logging.getLogger(__name__)

Value = str | bool | int | float
_HEADER = "traceparent"
_propagator = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("kvrelay", __version__)  # a proxy, which uses the provider that is set later
_provider: Any = None  # the SDK's provider, if this module has set it


def configure(instance: str, role: str) -> None:
    """Export this process's spans as the standard OTEL_* variables say; an existing provider stays."""
    global _provider
    names = trace_exporters()
    if not names or not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporters = [exporter for name in names if (exporter := _exporter(name)) is not None]
    if not exporters:
        return
    resource = Resource.create({"service.instance.id": instance, "kvrelay.role": role})
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):  # the environment sets none
        resource = resource.merge(Resource({"service.name": "kvrelay"}))
    _provider = TracerProvider(resource=resource)
    for exporter in exporters:
        _provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(_provider)
    logger.info("spans of %s are exported to %s", instance, ", ".join(names))


def _exporter(name: str) -> Any:
    """The exporter with this name in OTEL_TRACES_EXPORTER; None when it is not installed."""
    if name == "console":  # on standard error, like the log: standard output may be a pipe without a reader
        import sys

        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)
    wanted = f"otlp_proto_{otlp_protocol().partition('/')[0]}" if name == "otlp" else name
    for point in entry_points(group="opentelemetry_traces_exporter", name=wanted):
        return point.load()()
    logger.warning(
        "no spans are exported: exporter %s is not installed; pip install 'kvrelay[tracing]' includes OTLP", wanted
    )
    return None


def shutdown() -> None:
    """Export the remaining spans. May take seconds."""
    if _provider is not None:
        _provider.shutdown()


def begin_request(traceparent: str | None, route: str) -> Span:
    """The span of an HTTP request, a child of the client's span if the request carries one."""
    parent = _propagator.extract({_HEADER: traceparent} if traceparent else {})
    return _tracer.start_span("request", parent, SpanKind.SERVER, {"http.route": route})


def traceparent_of(span: Span) -> str:
    """The traceparent that makes another process's spans children of this one; empty for a no-op span."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span))
    return carrier.get(_HEADER, "")


class Spans:
    """A traced sequence's spans in this process, with common attributes, all children of `traceparent`.

    At most one with each name is open; `close` ends the rest.
    """

    __slots__ = ("_attributes", "_open", "_parent")

    def __init__(self, traceparent: str, **attributes: Value) -> None:
        self._parent = _propagator.extract({_HEADER: traceparent})
        self._attributes = attributes
        self._open: dict[str, Span] = {}

    def begin(self, name: str, **attributes: Value) -> None:
        """Start a span; an open one with this name ends."""
        self.end(name)
        self._open[name] = _tracer.start_span(name, self._parent, attributes=_named({**self._attributes, **attributes}))

    def end(self, name: str, *, error: str = "", **attributes: Value) -> None:
        """End the span; no effect when it is not open."""
        span = self._open.pop(name, None)
        if span is None:
            return
        span.set_attributes(_named(attributes))
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()

    def has(self, name: str) -> bool:
        """Whether a span with this name is open."""
        return name in self._open

    def close(self, error: str = "") -> None:
        """End all open spans; `error` is their failure, if any."""
        for name in list(self._open):
            self.end(name, error=error)


def _named(attributes: dict[str, Value]) -> dict[str, Value]:
    return {f"kvrelay.{name}": value for name, value in attributes.items()}
