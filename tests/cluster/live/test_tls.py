"""A whole cluster under TLS: the same tokens as without, and nothing else that its ports would talk to."""

import asyncio

import pytest

from kvrelay.cluster.launch.local import local_cluster
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.errors import ConfigError, TlsMismatch
from kvrelay.hashing import block_hashes
from kvrelay.plane import connection as plane
from kvrelay.plane.messages import Sampling, SequenceRequest

pytestmark = [pytest.mark.slow, pytest.mark.processes]

PROMPT = [3 + 7 * index % 200 for index in range(150)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def settings(**cluster):
    return settings_from(
        {
            "model": {"dtype": "float32", "max_model_len": 512},
            "engine": {"kv_memory": "8MiB", "token_budget": 64, "num_threads": 1},
            "transfer": {"transport": "tcp"},
            "router": {"local_prefill_tokens": 0},
            "cluster": cluster,
        }
    )


async def tokens(cluster):
    hashes = list(block_hashes(PROMPT, 16))
    sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
    wanted = SequenceRequest(
        request_id="a", token_ids=PROMPT, num_prompt_tokens=len(PROMPT), block_hashes=hashes, sampling=sampling
    )
    found = []
    async for output in cluster.dispatcher.generate(wanted, force="remote"):
        found += output.token_ids
    return found


async def test_a_cluster_under_tls_answers_as_one_without(folder):
    async with local_cluster(settings(tls=False), folder) as plain:
        expected = await tokens(plain)
    async with local_cluster(settings(tls=True), folder) as secured:
        assert await tokens(secured) == expected
        assert len(expected) == 12
        (inside,) = secured.inside
        assert inside.ends.target.plane.stats().transport == "tcp"
        ports = [(member.host, member.port) for member in secured.members]
        ports.append((ports[0][0], inside.ends.target.plane.port))  # the KV plane's
        for host, port in ports:
            with pytest.raises(TlsMismatch, match=r"cluster\.tls"):
                await plane.connect(host, port, secured.secret)


async def test_an_ingress_without_tls_is_told_so_and_never_hangs(folder, caplog):
    async with local_cluster(settings(tls=True), folder, num_prefill=0) as secured:
        (member,) = secured.members
        dispatcher = type(secured.dispatcher)(secured.dispatcher.router, secured.secret, settings())
        await dispatcher.start()
        dispatcher.workers.set_members([member])
        try:
            async with asyncio.timeout(30):
                while "cluster.tls" not in caplog.text:
                    await asyncio.sleep(0.01)
            assert dispatcher.workers.live_workers() == []
        finally:
            await dispatcher.aclose()


async def test_a_worker_with_bad_files_says_which_before_it_listens(folder):
    with pytest.raises(ConfigError, match=r"cluster\.tls_dir: /nowhere/tls\.crt"):
        async with local_cluster(settings(tls=True, tls_dir="/nowhere"), folder):
            pass
