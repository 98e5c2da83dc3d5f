"""An OTLP collector over HTTP, which keeps the spans that it gets."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Receiver:
    """An OTLP collector: keeps every span that is posted to /v1/traces, with the resource that it came from."""

    def __init__(self):
        self.spans = []  # (service.instance.id, span)
        self.is_answering = threading.Event()
        self.is_answering.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                data = self.rfile.read(int(self.headers["content-length"]))
                receiver.is_answering.wait()
                if self.path == "/v1/traces":
                    receiver.take(ExportTraceServiceRequest.FromString(data))
                with contextlib.suppress(OSError):
                    self.send_response(200 if self.path == "/v1/traces" else 404)
                    self.end_headers()

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, message):
        for group in message.resource_spans:
            name = values(group.resource)["service.instance.id"]
            self.spans += [(name, span) for scope in group.scope_spans for span in scope.spans]

    def close(self):
        self.is_answering.set()
        self._server.shutdown()
        self._server.server_close()

    def by_name(self, trace_id):
        found = {}
        for instance, span in self.spans:
            if span.trace_id.hex() == trace_id:
                found.setdefault(span.name, []).append((instance, span))
        return found


def values(owner):
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in owner.attributes}
