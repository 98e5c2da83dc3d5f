"""Two tenants over a real engine and real nodes of the cluster's store: the greedy one's bytes stay within its quota
over all nodes, the other's blocks stay, and a changed file of keys holds without a restart.
"""

import asyncio
import contextlib

import httpx
import pytest

from kvrelay.cluster.launch.local import HOST, local_cluster
from kvrelay.cluster.registry import actor
from kvrelay.cluster.registry.actor import follow_store_quotas
from kvrelay.cluster.store.service import StoreService
from kvrelay.cluster.tenants import following
from kvrelay.cluster.tenants.following import follow_keys, report_store_quotas
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.hashing import root_hash, tenant_name
from kvrelay.serve.api.app import ModelCard, create_app
from kvrelay.serve.tenants.access import Access
from kvrelay.serve.text.tokenizer import Tokenizer
from kvrelay.settings.cache import StoreSettings
from tests.cluster.tenants.test_following import Handle, running
from tests.fakes import OwnSessions, until
from tests.serve.tenants.test_access import OPERATOR, written

pytestmark = pytest.mark.alone

QUOTA = 1 << 20
SIZES = ("6MiB", "18MiB")  # uneven nodes


@contextlib.asynccontextmanager
async def store(secret):
    """(nodes, addresses): two nodes that know each other."""
    nodes = [StoreService(f"store-{i}", StoreSettings(memory=size), secret, host=HOST) for i, size in enumerate(SIZES)]
    addresses = [await node.start() for node in nodes]
    try:
        for node in nodes:
            node.set_nodes(addresses)
        yield nodes, addresses
    finally:
        for node in nodes:
            await node.aclose()


class Tenants:
    """Clients of one ingress, and what the nodes of the store have of each."""

    def __init__(self, client, nodes, access):
        self._client, self.nodes, self._access = client, nodes, access

    async def ask(self, name, *numbers):
        """Prompts that begin differently; returns when their blocks are in the store."""
        for number in numbers:
            body = {"model": "tiny", "prompt": f"{number:04d} " * 60, "max_tokens": 1, "cache_salt": str(number % 2)}
            headers = {"authorization": f"Bearer key of {name}"}
            answer = await self._client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
        kept = None
        while kept != (kept := [node.node.stats.kept for node in self.nodes]):
            await asyncio.sleep(0.3)

    def stored(self, name):
        """Bytes of all copies, in whole rows."""
        digest = tenant_name(root_hash(self._access.caller(f"key of {name}").salt(None)))
        indexes = [(one.node._index, one.node._stride) for one in self.nodes if one.node._index is not None]
        return sum(stride * index._num_rows_of[digest] for index, stride in indexes)


@pytest.fixture
async def tenants(tmp_path, monkeypatch):
    """All parts but Ray: the registry's actor runs in this process."""
    for module, period in ((following, "EXCHANGE_S"), (following, "RELOAD_S"), (actor, "QUOTAS_S")):
        monkeypatch.setattr(module, period, 0.01)
    folder = tiny_checkpoint("llama", tmp_path / "tiny-llama")
    keys = written(tmp_path / "keys.yaml", greedy={"store_bytes": QUOTA}, modest={})
    settings = settings_from(
        {
            "model": {"dtype": "float32", "max_model_len": 512},
            "engine": {"kv_memory": "8MiB", "num_threads": 1, "backend": "reference", "block_size": 16},
            "cache": {"host_memory": "8MiB", "remote": "cluster"},
        }
    )
    async with (
        local_cluster(settings, folder, num_prefill=0, num_stores=0) as cluster,
        store(cluster.secret) as (nodes, addresses),
    ):
        cluster.inside[0].cluster_store.set_nodes(addresses)
        access, registry = Access(OPERATOR, keys, cluster.secret), Handle()
        follow = [follow_store_quotas(registry, node.set_quotas) for node in nodes]
        sessions, card = OwnSessions(cluster.dispatcher.clock), ModelCard("tiny", 512, 0)
        app = create_app(cluster.dispatcher, Tokenizer(folder), settings, card, sessions, access)
        async with (
            running(*follow, follow_keys(access), report_store_quotas(access, registry, "one")),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60) as client,
        ):
            await until(lambda: all(node._quotas._by_tenant for node in nodes))
            yield Tenants(client, nodes, access)


async def test_a_greedy_tenant_stays_within_its_quota_and_the_others_blocks_stay(tenants, tmp_path):
    await tenants.ask("modest", *range(8))
    others = tenants.stored("modest")
    await tenants.ask("greedy", *range(100, 160))
    assert others > 0 and tenants.stored("modest") == others
    assert 0.8 * QUOTA < tenants.stored("greedy") <= QUOTA
    assert sum(node.node._index.num_evicted for node in tenants.nodes) > 20, "nothing had to go"
    written(tmp_path / "keys.yaml", greedy={"store_bytes": QUOTA // 4}, modest={})
    await until(lambda: tenants.stored("greedy") <= QUOTA // 4)
    assert tenants.stored("greedy") > 0 and tenants.stored("modest") == others
