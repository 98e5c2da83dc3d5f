"""Two ingresses keep their quotas together through the registry, whose actor runs in this process."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from ray.exceptions import RayError

from kvrelay.cluster.registry import actor
from kvrelay.cluster.registry.actor import RegistryActor, follow_store_quotas
from kvrelay.cluster.tenants import following
from kvrelay.cluster.tenants.following import exchange_usage, follow_keys, report_store_quotas
from kvrelay.errors import InvalidRequest
from kvrelay.serve.tenants.access import Access
from kvrelay.serve.tenants.quotas import QuotaExceeded
from tests.cluster.registry.handle import RegistryHandle
from tests.fakes import until
from tests.serve.tenants.test_access import written

pytestmark = pytest.mark.alone

KEY = "key of search"


class Handle(RegistryHandle):
    async def called(self, times=4):
        """After so many more calls, each ingress has heard what the other had reported before."""
        before = self.num_calls
        await until(lambda: self.num_calls >= before + times)


@contextlib.asynccontextmanager
async def running(*tasks):
    started = [asyncio.create_task(task) for task in tasks]
    try:
        yield
    finally:
        for task in started:
            task.cancel()
        await asyncio.gather(*started, return_exceptions=True)


@pytest.fixture
def ingresses(tmp_path, monkeypatch):
    """(registry, two ingresses' keys): a tenant with a quota of 2 sequences and 600 tokens per minute."""
    monkeypatch.setattr(following, "EXCHANGE_S", 0.001)
    monkeypatch.setattr(following, "RELOAD_S", 0.001)
    monkeypatch.setattr(actor, "QUOTAS_S", 0.001)
    file = written(tmp_path / "keys.yaml", search={"max_running": 2, "tokens_per_minute": 600})
    return Handle(), *(Access(None, file, b"secret", lambda: 0.0) for _ in range(2))


def request_at(access, tokens=0):
    return access.meter(access.caller(KEY)).running(2, tokens)


async def test_what_runs_at_one_ingress_counts_at_the_other(ingresses):
    registry, one, other = ingresses
    async with running(exchange_usage(one, registry, "one"), exchange_usage(other, registry, "other")):
        with request_at(one):
            await registry.called(6)
            with pytest.raises(QuotaExceeded), request_at(other):
                pass
        await registry.called(6)
        with request_at(other):
            pass


async def test_without_the_registry_the_last_sums_hold_and_reports_are_made_up_for(ingresses, caplog):
    registry, one, other = ingresses
    async with running(exchange_usage(one, registry, "one"), exchange_usage(other, registry, "other")):
        with request_at(one):
            await registry.called(6)
            registry.error = RayError("away")
            await registry.called(6)
            with pytest.raises(QuotaExceeded), request_at(other):
                pass
        with request_at(one, tokens=600):
            await registry.called(6)
        registry.error = None
        await registry.called(6)
        with pytest.raises(QuotaExceeded, match="tokens per minute"), request_at(other, tokens=10):
            pass
    lines = [record.getMessage() for record in caplog.records if "last sums" in record.getMessage()]
    assert len(lines) == 2  # one for each ingress, not one for each second


async def test_a_registry_of_an_older_version_leaves_each_ingress_its_own_count(ingresses):
    _, one, _ = ingresses
    async with running(exchange_usage(one, SimpleNamespace(), "one")):
        with request_at(one):
            for _ in range(20):
                await asyncio.sleep(0)
            with pytest.raises(QuotaExceeded), request_at(one):
                pass


async def test_quotas_of_the_store_reach_its_nodes_and_outlive_the_registry(ingresses, tmp_path):
    registry, one, _ = ingresses
    seen = []
    async with running(follow_store_quotas(registry, seen.append)):
        await registry.called()
        assert not seen  # no ingress has reported: what the node knows holds
        async with running(report_store_quotas(one, registry, "one"), follow_keys(one)):
            written(tmp_path / "keys.yaml", search={"store_bytes": 4096})
            await until(lambda: seen and seen[-1])
            assert seen[-1] == one.store_quotas() and list(seen[-1].values()) == [4096]
            registry.error = RayError("away")
            await registry.called()
            before, registry.actor, registry.error = len(seen), RegistryActor("secret", None, None), None
            await registry.called()
            assert len(seen) == before  # the new registry has heard of them before it was asked, or knows nothing
            written(tmp_path / "keys.yaml", search={})
            await until(lambda: seen[-1] == {})


async def test_a_registry_of_an_older_version_changes_no_nodes_quotas(ingresses):
    _, one, _ = ingresses
    seen = []
    async with running(
        report_store_quotas(one, SimpleNamespace(), "one"), follow_store_quotas(SimpleNamespace(), seen.append)
    ):
        for _ in range(20):
            await asyncio.sleep(0)
    assert not seen


async def test_a_changed_file_is_found(ingresses, tmp_path):
    _, one, _ = ingresses
    async with running(follow_keys(one)):
        written(tmp_path / "keys.yaml", chat={})
        await until(lambda: not one.counted())
    assert one.caller("key of chat").name == "chat"
    with pytest.raises(InvalidRequest):
        one.caller(KEY)
