"""Real workers that do or do not fit each other: what clients, /health, `kvrelay doctor` and `kvrelay serve` say."""

import asyncio
import contextlib
import json
import re
import secrets

import httpx
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from kvrelay.cluster.commands import doctor
from kvrelay.cluster.commands.cli import run
from kvrelay.cluster.commands.serve import check_pairs
from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.launch.local import LocalProcess, spawn
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.router.decision.router import Router
from kvrelay.serve.api.app import ModelCard, create_app
from kvrelay.serve.requests.dispatcher import Dispatcher
from kvrelay.serve.tenants.access import Access
from kvrelay.serve.text.tokenizer import Tokenizer
from kvrelay.types import Role
from tests.fakes import OwnSessions

pytestmark = [pytest.mark.slow, pytest.mark.processes]
LONG, SHORT = "a prompt that is worth a prefill worker's while " * 4, "short"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same architecture with other weights in each."""
    root = tmp_path_factory.mktemp("models")
    return [tiny_checkpoint("llama", root / f"tiny-llama-{seed}", seed=seed) for seed in (0, 1)]


def settings(port=8000, **transfer):
    return settings_from(
        {
            "model": {"dtype": "float32", "max_model_len": 1024},
            "engine": {"kv_memory": "4MiB", "num_threads": 1, "backend": "reference"},
            "transfer": transfer,
            "serve": {"port": port, "api_key": "k3y"},
        }
    )


class Cluster:
    """Workers in processes of their own, an ingress in this one, and its URL."""

    def __init__(self, dispatcher, url):
        self.dispatcher, self.url = dispatcher, url
        self.headers = {"authorization": "Bearer k3y"}

    @property
    def port(self):
        return int(self.url.rsplit(":", 1)[1])

    async def complete(self, prompt, **headers):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=60) as client:
            return await client.post(f"{self.url}/v1/completions", json=body, headers={**self.headers, **headers})

    async def get(self, path, **headers):
        async with httpx.AsyncClient(timeout=60) as client:
            return await client.get(self.url + path, headers=headers)

    async def moved_bytes(self):
        """{(worker, path): bytes} of every worker, once both have told."""
        text = (await self.get("/metrics")).text
        families = {family.name: family.samples for family in text_string_to_metric_families(text)}
        samples = families.get("kvrelay_kvtransfer_bytes", [])
        found = {(s.labels["worker"], s.labels["path"]): s.value for s in samples if s.value}
        return found if len(found) == 2 else {}

    async def doctor(self, capsys, *flags):
        code = await asyncio.to_thread(run, ["doctor", "--url", self.url, "--api-key", "k3y", *flags])
        return code, capsys.readouterr().out


@contextlib.asynccontextmanager
async def cluster(*workers):
    """`workers`: (role, settings, folder) each."""
    secret, own = secrets.token_bytes(32), settings()
    async with contextlib.AsyncExitStack() as stack:
        starting = [
            spawn(role, theirs, secret, f"{role}-{index}", folder)
            for index, (role, theirs, folder) in enumerate(workers)
        ]
        started = await asyncio.gather(*starting, return_exceptions=True)
        for worker in started:
            if isinstance(worker, LocalProcess):
                stack.push_async_callback(worker.aclose)
        assert all(isinstance(worker, LocalProcess) for worker in started), started
        members = [worker.member for worker in started]
        folder = workers[0][2]
        dispatcher = Dispatcher(Router(own.router, tokens_per_hash=own.tokens_per_hash), secret, own)
        await dispatcher.start()
        stack.push_async_callback(dispatcher.aclose)
        dispatcher.workers.set_members(members)
        sessions = OwnSessions(dispatcher.clock)
        app = create_app(
            dispatcher, Tokenizer(folder), own, ModelCard("tiny", 1024, 1700000000), sessions, Access(own.serve.api_key)
        )
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off", ws="none"))
        serving = asyncio.create_task(server._serve())

        async def stop():
            server.should_exit = server.force_exit = True
            await serving

        stack.push_async_callback(stop)
        async with asyncio.timeout(60):
            await dispatcher.workers.wait_for(
                lambda d: len(d.live_workers()) == len(members) and d.pairs.book.is_settled()
            )
            while not server.started:
                await asyncio.sleep(0.01)
        yield Cluster(dispatcher, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")


async def test_workers_that_fit_serve_and_the_doctor_shows_how_fast(folders, capsys):
    pair = [(Role.PREFILL, settings(), folders[0]), (Role.DECODE, settings(), folders[0])]
    async with cluster(*pair) as here:
        answer = await here.complete(LONG, **{"x-kvrelay-explain": "1"})
        assert answer.status_code == 200 and answer.json()["kvrelay"]["path"] == "disaggregated"
        assert "incompatible_pairs" not in answer.json()["kvrelay"]
        assert (await here.get("/health")).status_code == 200
        code, table = await here.doctor(capsys)
        assert code == 0 and re.search(r"prefill-0 .* ok .*\n.*→ decode-1 ", table) and "1 ok" in table
        code, text = await here.doctor(capsys, "--json", "--probe")
        (report,) = json.loads(text)["pairs"]
        assert code == 0 and report["verdict"] == "ok" and doctor.chosen(report)["bytes_per_s"] > 0
        told = await asyncio.to_thread(check_pairs, here.url, "k3y", Console(quiet=True), prefill=1, decode=1)
        assert told == "1 ok"
        assert (await here.get("/kvrelay/pairs")).status_code == 401
        async with asyncio.timeout(60):  # until a load report has brought it
            while not (moved := await here.moved_bytes()):
                await asyncio.sleep(0.05)
        assert {worker for worker, _ in moved} == {"prefill-0", "decode-1"} and len({path for _, path in moved}) == 1
        assert len(set(moved.values())) == 1  # both ends have counted the same
        for worker_id in ("prefill-0", "decode-1"):
            status = json.loads(await here.dispatcher.queries.status(worker_id))
            assert status["load"]["kv_paths"][0]["num_bytes"] > 0 and status["load"]["probe_blocks"] == 0
            assert doctor.chosen(status["pairs"][0])["bytes_per_s"] > 0


@pytest.mark.parametrize(
    ("theirs", "model", "field", "remedy"),
    [
        ({"checks": "off"}, 0, "checksum", "set transfer.checks alike on both"),
        ({"transport": "tcp"}, 0, "transport", "set transfer.transport to one that both have"),
        ({}, 1, "model", "let every worker serve the same model.source"),
    ],
    ids=["checks", "transport", "weights"],
)
async def test_workers_that_misfit_serve_nothing_and_everybody_says_why_and_what_to_do(
    folders, capsys, theirs, model, field, remedy
):
    ours = {"transport": "shm"} if field == "transport" else {}
    pair = [(Role.PREFILL, settings(**theirs), folders[model]), (Role.DECODE, settings(**ours), folders[0])]
    async with cluster(*pair) as here:
        for prompt in (LONG, SHORT):  # nothing is silently computed on the decode worker alone
            answer = await here.complete(prompt)
            error = answer.json()["error"]
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            assert (error["type"], error["code"]) == ("server_error", "kv_incompatible")
            assert field in error["message"] and remedy in error["message"]
        health = await here.get("/health")
        assert health.status_code == 503 and field in health.json()["incompatible_pairs"][0]
        code, table = await here.doctor(capsys, "--json")
        (report,) = json.loads(table)["pairs"]
        assert code == 1 and field in report["line"] and remedy in report["remedy"]
        code, table = await here.doctor(capsys)
        assert code == 1 and "incompatible" in table
        with pytest.raises(ClusterError, match=remedy):
            await asyncio.to_thread(check_pairs, here.url, "k3y", Console(quiet=True), prefill=1, decode=1)


async def test_beside_a_pair_that_fits_a_misfit_is_left_out_and_explained(folders, capsys):
    fits, misfits = settings(), settings(checks="off")
    workers = [(Role.PREFILL, misfits, folders[0]), (Role.PREFILL, fits, folders[0]), (Role.DECODE, fits, folders[0])]
    async with cluster(*workers) as here:
        for _ in range(4):
            answer = await here.complete(LONG, **{"x-kvrelay-explain": "1", "x-kvrelay-prefill": "remote"})
            explained = answer.json()["kvrelay"]
            assert explained["prefill"] == "prefill-1"
            (left_out,) = explained["incompatible_pairs"]
            assert left_out["prefill"] == "prefill-0" and "transfer.checks" in left_out["reason"]
        health = await here.get("/health")
        assert health.status_code == 200 and len(health.json()["incompatible_pairs"]) == 1
        assert (await here.doctor(capsys))[0] == 1


async def test_a_decode_worker_alone_is_no_misfit(folders, capsys):
    async with cluster((Role.DECODE, settings(), folders[0])) as here:
        assert (await here.complete(LONG)).status_code == 200
        code, text = await here.doctor(capsys)
        assert code == 0 and "no KV travels" in " ".join(text.split())
