"""A whole ingress over fake workers on real sockets: every test of serve/ that needs a cluster uses this."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn

from kvrelay.config import Settings, settings_from
from kvrelay.errors import InvalidRequest
from kvrelay.grammar.limits import in_tag, nodes
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import GrammarSpec, Sampling, SequenceRequest, TokenOutput
from kvrelay.plane.reports import LoadReport
from kvrelay.router.decision.router import Router
from kvrelay.serve.api.app import ModelCard, create_app
from kvrelay.serve.requests.dispatcher import Dispatcher
from kvrelay.serve.requests.retries import RETRY_BUDGET
from kvrelay.serve.telemetry.history import History
from kvrelay.serve.tenants.access import Access
from kvrelay.serve.workers.queries import run_in_slices
from kvrelay.types import Role
from tests.fakes import SECRET, ByteCodec, FakeWorker, OwnSessions, Script, alphabet, until

MODEL = "fake-model"


def is_refused(node):
    return isinstance(node, dict) and "begin" in node and "refuse me" in json.dumps(node)


class Cluster:
    """Fake workers, a dispatcher connected to them, and the app in front."""

    def __init__(
        self,
        prefill: int,
        decode: int,
        settings: Settings,
        script: Script,
        retry_budget: int,
        codec: ByteCodec,
        **info: object,
    ) -> None:
        self.prefill = [FakeWorker(f"p{i}", Role.PREFILL, script, **info) for i in range(prefill)]
        self.decode = [FakeWorker(f"d{i}", Role.DECODE, script, **info) for i in range(decode)]
        self.settings = settings
        tokens_per_hash = settings.tokens_per_hash
        router = Router(settings.router, tokens_per_hash=tokens_per_hash, slo=settings.slo, schedule=run_in_slices)
        self.dispatcher = Dispatcher(router, SECRET, settings, retry_budget=retry_budget)
        self.history = History()
        self.access = Access(settings.serve.api_key, settings.serve.api_keys_file, SECRET)
        self.app = create_app(
            self.dispatcher,
            codec,
            settings,
            ModelCard(MODEL, codec.max_model_len, 1700000000),
            OwnSessions(self.dispatcher.clock),
            self.access,
            self._check_grammar,
            self.history,
        )
        self.checked: list[GrammarSpec] = []
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test", timeout=30)

    async def _check_grammar(self, spec: GrammarSpec) -> None:
        """Refuses what asks for it, and names the tag."""
        self.checked.append(spec)
        if "refuse me" in spec.text:
            begins = [one["begin"] for one in nodes(json.loads(spec.text)) if is_refused(one)]
            raise InvalidRequest("no such type" + "".join(map(in_tag, begins)), code="invalid_grammar")

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefill, *self.decode]

    async def start(self) -> None:
        """Connected, and every pair reported on."""
        members = [await worker.start() for worker in self.workers]
        for worker in self.prefill:
            worker.peers = {peer.worker_id: peer for peer in self.decode}
        await self.dispatcher.start()
        self.dispatcher.workers.set_members(members)
        async with asyncio.timeout(60):
            await self.dispatcher.workers.wait_for(
                lambda d: len(d.live_workers()) == len(members) and d.pairs.book.is_settled()
            )

    async def aclose(self) -> None:
        await self.client.aclose()
        await self.dispatcher.aclose()
        for worker in self.workers:
            await worker.aclose()

    async def all_released(self) -> None:
        """Fails after 10 s if some worker still holds something."""
        for worker in self.workers:
            await worker.until(lambda w: not w.holding)
        assert self.dispatcher.stats.running == 0
        assert all(view.assigned_requests == 0 for view in self.dispatcher.router.workers())


ClusterFactory = Callable[..., Any]


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait 0.3 s for the successor of a worker, not 19."""
    monkeypatch.setattr("kvrelay.serve.requests.retries.MAX_WAITS", 2)


@pytest.fixture
async def make_cluster() -> AsyncIterator[ClusterFactory]:
    """Make a running cluster: `await make_cluster(prefill=1, decode=1, script=..., serve={...}, router={...})`.

    pairings: what each prefill worker answers to Pair, such as FakeWorker.incompatible; they fit by default. info: of
    WorkerInfo.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def make(
            prefill: int = 1,
            decode: int = 1,
            script: Script = alphabet,
            pairings: Sequence[Callable[..., Any]] = (),
            info: dict[str, object] | None = None,
            retry_budget: int = RETRY_BUDGET,
            codec: ByteCodec | None = None,
            **sections: dict[str, Any],
        ) -> Cluster:
            sections["router"] = {"local_prefill_tokens": 0} | sections.get("router", {})
            settings = settings_from(sections)
            cluster = Cluster(prefill, decode, settings, script, retry_budget, codec or ByteCodec(), **(info or {}))
            for worker, pairing in zip(cluster.prefill, pairings, strict=False):
                worker.pairing = partial(pairing, worker)
            stack.push_async_callback(cluster.aclose)
            await cluster.start()
            return cluster

        yield make


@pytest.fixture
async def serve_http() -> AsyncIterator[Callable[[Any], Any]]:
    """Serve an app on a free loopback port: `url = await serve_http(app)`."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(app: Any) -> str:
            config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off", ws="none")
            server = uvicorn.Server(config)
            task = asyncio.create_task(server._serve())

            async def stop() -> None:
                server.should_exit = server.force_exit = True
                await task

            stack.push_async_callback(stop)
            await until(lambda: server.started)
            return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

        yield start


def sequence(
    prompt: str = "hello world", *, max_tokens: int = 8, request_id: str = "r1", **sampling: Any
) -> SequenceRequest:
    tokens = list(prompt.encode())
    return SequenceRequest(
        request_id=request_id,
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        block_hashes=list(block_hashes(tokens, 16)),
        sampling=Sampling(max_tokens=max_tokens, **sampling),
    )


async def collect(stream: AsyncIterator[TokenOutput]) -> tuple[list[int], str | None]:
    """All tokens and the finish reason; positions are checked on the way."""
    tokens: list[int] = []
    reason = None
    async for output in stream:
        assert output.position == len(tokens), "a token was lost or doubled"
        tokens += output.token_ids
        reason = output.finish_reason
    return tokens, reason


def hold_in_line(worker):
    """A decode worker without room: it answers nothing yet, but the request is in its line."""

    def answer(message):
        worker.holding.add(message.request.request_id)
        return LoadReport(seq=2, waiting=1)

    return answer
