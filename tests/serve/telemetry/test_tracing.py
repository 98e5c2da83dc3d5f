"""One trace from the client's header to the workers: the ingress's spans, and what the workers are told."""

from kvrelay.plane import messages as wire
from tests.fakes import FakeWorker

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CLIENT_TRACE = 0x0AF7651916CD43DD8448EB211C80319C
BODY = {"model": "fake-model", "prompt": "hello world", "max_tokens": 4}


def requests_of(worker):
    """The sequences that a fake worker was given."""
    kinds = (wire.Reserve, wire.Prefill, wire.Generate)
    return [message.request for message in worker.received if isinstance(message, kinds)]


async def complete(cluster, headers=None, **body):
    return await cluster.client.post("/v1/completions", json=BODY | body, headers=headers or {})


async def test_the_spans_of_a_request_join_the_clients_trace_and_go_on_to_both_workers(make_cluster, exporter):
    cluster = await make_cluster()
    assert (await complete(cluster, {"traceparent": CLIENT})).status_code == 200
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans.keys() == {"request", "route", "reserve"}
    assert {span.context.trace_id for span in spans.values()} == {CLIENT_TRACE}
    root = spans["request"]
    assert root.attributes["http.response.status_code"] == 200
    assert all(spans[name].parent.span_id == root.context.span_id for name in ("route", "reserve"))
    route = spans["route"].attributes
    assert (route["kvrelay.route"], route["kvrelay.prefill"], route["kvrelay.decode"]) == ("disaggregated", "p0", "d0")
    carried = {request.traceparent for w in cluster.workers for request in requests_of(w)}
    assert carried == {f"00-{CLIENT_TRACE:032x}-{root.context.span_id:016x}-01"}


async def test_a_streams_span_lasts_until_its_last_byte(make_cluster, exporter):
    cluster = await make_cluster()
    async with cluster.client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
        chunks = [chunk async for chunk in answer.aiter_bytes()]
    assert chunks and [span.name for span in exporter.get_finished_spans()][-1] == "request"


async def test_a_retry_shows_as_a_second_route_with_the_fault_before_it(make_cluster, exporter):
    cluster = await make_cluster(decode=2)
    cluster.prefill[0].answers = [
        lambda m: wire.Failed(request_id=m.request.request_id, code="transfer", message="x", retryable=True)
    ]
    assert (await complete(cluster)).status_code == 200
    first, second = (span.attributes for span in exporter.get_finished_spans() if span.name == "route")
    assert (first["kvrelay.attempt"], second["kvrelay.attempt"]) == (1, 2)
    assert "kvrelay.previous_failure" not in first and second["kvrelay.previous_failure"] == "p0: transfer"


async def test_a_request_that_fails_is_marked_with_its_status_and_the_routers_reason(make_cluster, exporter):
    cluster = await make_cluster(prefill=2, pairings=[FakeWorker.incompatible, FakeWorker.incompatible])
    assert (await complete(cluster)).status_code == 503
    route, root = exporter.get_finished_spans()
    assert not route.status.is_ok and route.status.description.startswith("incompatible: ")
    assert not root.status.is_ok and root.attributes["http.response.status_code"] == 503


async def test_a_bad_request_is_no_fault_of_the_server(make_cluster, exporter):
    cluster = await make_cluster()
    assert (await complete(cluster, n=0)).status_code == 400
    (root,) = exporter.get_finished_spans()
    assert root.status.is_ok or root.status.status_code.name == "UNSET"
    assert root.attributes["http.response.status_code"] == 400


async def test_health_and_metrics_are_not_traced(make_cluster, exporter):
    cluster = await make_cluster()
    await cluster.client.get("/health")
    await cluster.client.get("/metrics")
    assert exporter.get_finished_spans() == ()


async def test_without_a_provider_workers_are_told_of_the_clients_trace_alone(make_cluster):
    cluster = await make_cluster()
    await complete(cluster)
    assert {request.traceparent for w in cluster.workers for request in requests_of(w)} == {""}
    await complete(cluster, {"traceparent": CLIENT})
    assert {request.traceparent for w in cluster.workers for request in requests_of(w)} == {"", CLIENT}
    await complete(cluster, {"traceparent": "nonsense; \x7f"})
    assert {request.traceparent for w in cluster.workers for request in requests_of(w)} == {"", CLIENT}
