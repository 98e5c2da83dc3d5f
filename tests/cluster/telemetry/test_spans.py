"""The workers' spans, with real engines: prefill, the transfer and decode join the request's trace, however it ends."""

import asyncio
import itertools
import secrets

import pytest

from kvrelay.cluster.launch.local import make_worker
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.errors import KvrelayError
from kvrelay.hashing import block_hashes
from kvrelay.kvtransfer.mover.verification import ArrivingRead
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.router.decision.router import Router
from kvrelay.serve.requests.dispatcher import Dispatcher
from kvrelay.types import Role
from tests.kvtransfer.damage import damaged
from tests.small_cluster import connected

pytestmark = pytest.mark.processes


TRACE = 0x0AF7651916CD43DD8448EB211C80319C
PARENT = f"00-{TRACE:032x}-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


class Cluster:
    def __init__(self, dispatcher, prefill, decode):
        self.dispatcher, self.prefill, self.decode = dispatcher, prefill, decode

    def stream(self, *, traceparent=PARENT, max_tokens=6, force="remote"):
        ids = [3 + index % 200 for index in range(100)]
        request = SequenceRequest(
            request_id="r",
            token_ids=ids,
            num_prompt_tokens=100,
            block_hashes=list(block_hashes(ids, 16)),
            sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            traceparent=traceparent,
        )
        return self.dispatcher.generate(request, force=force)


@pytest.fixture
async def cluster(folder):
    """A prefill and a decode worker in this very process, whose spans a test can see."""
    settings = settings_from(
        {
            "model": {"dtype": "float32", "max_model_len": 1024},
            "engine": {"kv_memory": "4MiB", "num_threads": 1, "backend": "reference"},
            "transfer": {"transport": "shm"},
            "router": {"local_prefill_tokens": 0},
        }
    )
    secret = secrets.token_bytes(32)
    workers = [make_worker(role, settings, folder, secret, f"{role}-0", None) for role in Role]
    router = Router(settings.router, tokens_per_hash=settings.tokens_per_hash)
    dispatcher = Dispatcher(router, secret, settings, retry_budget=0)
    async with connected(dispatcher, workers):
        yield Cluster(dispatcher, *workers)


async def ended(exporter, *names):
    """The finished spans by name, once these are among them; each has ended once."""
    async with asyncio.timeout(60):
        while not set(names) <= {span.name for span in exporter.get_finished_spans()}:
            await asyncio.sleep(0.01)
    spans = exporter.get_finished_spans()
    found = {span.name: span for span in spans}
    assert len(found) == len(spans)
    return found


def nothing_is_open(cluster):
    return not cluster.prefill.requests._spans and not cluster.decode.requests._spans


async def test_prefill_transfer_and_decode_are_spans_of_the_requests_trace(cluster, exporter):
    tokens = [token async for output in cluster.stream() for token in output.token_ids]
    spans = await ended(exporter, "prefill", "kv send", "kv transfer", "decode")
    assert spans.keys() == {"route", "reserve", "prefill", "kv send", "kv transfer", "decode"}
    assert {(span.context.trace_id, span.parent.span_id) for span in spans.values()} == {(TRACE, 0xB7AD6B7169203331)}
    told = {name: dict(span.attributes) for name, span in spans.items()}
    assert told["prefill"]["kvrelay.worker"] == "prefill-0" and told["prefill"]["kvrelay.compute_s"] > 0
    assert told["prefill"]["kvrelay.decode_worker"] == "decode-0"
    for name in ("kv send", "kv transfer"):
        moved = told[name]
        assert moved["kvrelay.path"] == "shm" and moved["kvrelay.bytes"] > 0 and moved["kvrelay.retries"] == 0
        assert moved["kvrelay.seconds"] > 0 and moved["kvrelay.exposed_s"] >= 0
    assert told["decode"]["kvrelay.output_tokens"] == len(tokens) == 6
    assert told["decode"]["kvrelay.finish_reason"] == "length"
    assert all(span.status.is_ok or span.status.description is None for span in spans.values())
    assert spans["prefill"].end_time <= spans["kv transfer"].end_time <= spans["decode"].start_time + 1_000_000
    assert nothing_is_open(cluster)


async def test_a_prompt_computed_on_decode_has_its_prefill_there(cluster, exporter):
    assert [output async for output in cluster.stream(force="local")]
    spans = await ended(exporter, "prefill", "decode")
    assert spans.keys() == {"route", "prefill", "decode"}
    assert {spans[name].attributes["kvrelay.worker"] for name in ("prefill", "decode")} == {"decode-0"}


async def test_a_refused_transfer_says_why(cluster, exporter, monkeypatch):
    flips = []

    def tamper(memory, offset, num_bytes):
        if not flips:
            memory.view[offset] ^= 1
            flips.append(offset)

    monkeypatch.setattr("kvrelay.decode.read_queue.ArrivingRead", damaged(ArrivingRead, tamper))
    with pytest.raises(KvrelayError):
        [output async for output in cluster.stream()]
    spans = await ended(exporter, "kv transfer", "prefill")
    assert not spans["kv transfer"].status.is_ok
    assert "did not arrive as they left" in spans["kv transfer"].status.description
    assert spans["kv transfer"].attributes["kvrelay.reason"] == "ChecksumMismatch"
    assert "decode" not in spans
    async with asyncio.timeout(60):  # the prefill worker hears of it a little later
        while not nothing_is_open(cluster):
            await asyncio.sleep(0.01)


async def test_a_transfer_that_the_source_takes_back_says_why_at_both_ends(cluster, exporter):
    calls = itertools.count()
    cluster.prefill.ends.source.plane.generation_of = lambda block: next(
        calls
    )  # every block seems to be re-used all the time
    with pytest.raises(KvrelayError):
        [output async for output in cluster.stream()]
    spans = await ended(exporter, "kv transfer", "kv send")
    assert spans["kv send"].attributes["kvrelay.reason"] == "stale_generation"
    assert spans["kv transfer"].attributes["kvrelay.reason"] == "cancelled"
    assert all("was re-used" in spans[name].status.description for name in ("kv send", "kv transfer"))
    assert "decode" not in spans
    async with asyncio.timeout(60):  # the prefill worker hears of it a little later
        while not nothing_is_open(cluster):
            await asyncio.sleep(0.01)


async def test_a_client_that_leaves_ends_the_spans_as_given_up(cluster, exporter):
    stream = cluster.stream(max_tokens=900)
    await anext(stream)
    await ended(exporter, "kv transfer")
    await stream.aclose()
    spans = await ended(exporter, "decode")
    assert spans["decode"].status.description == "given up" and nothing_is_open(cluster)


async def test_what_nobody_traces_leaves_no_span(cluster, exporter):
    assert [output async for output in cluster.stream(traceparent="")]
    assert exporter.get_finished_spans() == () and nothing_is_open(cluster)
