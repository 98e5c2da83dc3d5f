"""Labels have few values, whatever clients send: each further one is a series that Prometheus keeps."""

from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

from kvrelay.engine.scheduling.fair_share import MAX_NAMED, FairShare, QueueRules
from kvrelay.hashing import tenant_of
from kvrelay.plane.reports import LoadReport
from kvrelay.serve.bodies.unknown_fields import MAX_COUNTED
from kvrelay.serve.telemetry.metrics import worker_metrics
from kvrelay.types import Role
from tests.fakes import FakeWorker
from tests.serve.api.test_api import complete

CLIENTS = 80


def values(families):
    """Label -> its values, over all series."""
    found = defaultdict(set)
    for sample in (sample for family in families for sample in family.samples):
        for label, value in sample.labels.items():
            found[label].add(value)
    return found


def test_forty_tenants_have_no_more_series_than_the_cap_and_all_their_tokens_are_counted():
    shares, worker = FairShare(QueueRules()), FakeWorker("d0", Role.DECODE)
    shares.set_weight(tenant_of("gold"), 2.0)
    for name in [*map(str, range(40)), "gold"]:
        shares.computed(tenant_of(name), 10)
    load = LoadReport(seq=1, tenant_tokens=dict(shares.computed_tokens), other_tenant_tokens=shares.other_tokens)
    worker.port = 1
    families = [one for one in worker_metrics([(worker.info(), load)], shows_tenants=True) if "tenant" in values([one])]
    assert len(values(families)["tenant"]) == MAX_NAMED + 2  # one has a weight; `other`
    assert sum(sample.value for family in families for sample in family.samples) == 41 * 10


async def test_what_clients_make_up_adds_no_series_beyond_the_caps(make_cluster):
    cluster = await make_cluster(slo={"classes": {"fast": {"ttft_s": 60.0}}})
    for number in range(CLIENTS):
        name = f"made-up-{number}"
        body = {name: 1, "user": name, "cache_salt": name}
        assert (await complete(cluster, body)).status_code == 200
        for refused in ({"model": name}, {"slo": {"class": name}}):
            assert (await complete(cluster, body | refused)).status_code >= 400
    text = (await cluster.client.get("/metrics")).text
    seen = values(text_string_to_metric_families(text))
    assert len(seen.pop("field")) == MAX_COUNTED + 1
    assert not [value for found in seen.values() for value in found if "made-up" in value]
    assert seen["class"] <= {"default", "fast"}
