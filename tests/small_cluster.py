"""A prefill worker, a decode worker and an ingress in this process: the product's own classes, without Ray."""

import asyncio
import contextlib
import secrets
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from kvrelay.cluster.launch.local import HOST, make_worker
from kvrelay.config import settings_from
from kvrelay.engine.worker.service import WorkerService
from kvrelay.grammar.gate import GrammarGate
from kvrelay.serve.api.app import ModelCard, create_app
from kvrelay.serve.requests.dispatcher import Dispatcher
from kvrelay.serve.tenants.access import Access
from kvrelay.serve.text.tokenizer import Tokenizer
from kvrelay.serve.workers.queries import make_router
from kvrelay.serve.workers.worker_link import Member
from kvrelay.types import Role
from tests.fakes import OwnSessions

CHAT_SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"dtype": "float32", "max_model_len": 8192},
    "engine": {"kv_memory": "64MiB", "num_threads": 1},
    "transfer": {"transport": "shm"},
    "router": {"local_prefill_tokens": 0},
}


@contextlib.asynccontextmanager
async def connected(dispatcher: Dispatcher, workers: Sequence[WorkerService]) -> AsyncIterator[None]:
    """The workers run, and the dispatcher has all of them as live, settled pairs; every one is closed at the end."""
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(dispatcher.aclose)
        infos = []
        for worker in workers:
            infos.append(await worker.start())
            stack.push_async_callback(worker.aclose)
        await dispatcher.start()
        dispatcher.workers.set_members([Member(info.worker_id, info.role, HOST, info.port) for info in infos])
        async with asyncio.timeout(60):
            await dispatcher.workers.wait_for(
                lambda d: len(d.live_workers()) == len(infos) and d.pairs.book.is_settled()
            )
        yield


@contextlib.asynccontextmanager
async def small_cluster(folder: Path, settings: Mapping[str, Any] = CHAT_SETTINGS) -> AsyncIterator[Any]:
    """The app of an ingress whose two workers are connected and paired; every part is closed at the end."""
    checked, secret = settings_from(dict(settings)), secrets.token_bytes(32)
    workers = [make_worker(role, checked, folder, secret, f"{role}-0", None) for role in Role]
    dispatcher = Dispatcher(make_router(checked), secret, checked)
    card = ModelCard("tiny", checked.model.max_model_len or 1024, 0)
    codec = Tokenizer(folder)
    gate = GrammarGate(folder, codec.vocab_size, codec.eos_ids)
    access = Access(checked.serve.api_key, checked.serve.api_keys_file, secret)
    app = create_app(dispatcher, codec, checked, card, OwnSessions(dispatcher.clock), access, gate.check)
    async with contextlib.aclosing(gate), connected(dispatcher, workers):
        yield app


@contextlib.contextmanager
def served_cluster(folder: Path, settings: Mapping[str, Any] = CHAT_SETTINGS) -> Iterator[str]:
    """A small cluster over HTTP in a thread of its own, for clients that block; its URL, which ends in /v1."""
    ready, found = threading.Event(), {}

    async def serve() -> None:
        async with small_cluster(folder, settings) as app:
            server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off", ws="none"))
            server.install_signal_handlers = lambda: None
            task = asyncio.create_task(server._serve())
            while not server.started and not task.done():
                await asyncio.sleep(0.01)
            found["server"], found["url"] = server, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            ready.set()
            await task

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            found["error"] = error
            raise
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="small cluster")
    thread.start()
    try:
        assert ready.wait(60) and "url" in found, found.get("error")
        yield f"{found['url']}/v1"
    finally:
        if "server" in found:
            found["server"].should_exit = found["server"].force_exit = True
        thread.join(30)
