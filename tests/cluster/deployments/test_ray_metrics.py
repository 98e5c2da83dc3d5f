"""What is given to Ray is what /metrics shows: the same names, labels and values, absolute and from 0."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.cluster.deployments.ray_metrics import RayExporter
from kvrelay.cluster.deployments.worker import WorkerReplica
from kvrelay.config import Settings
from kvrelay.plane.reports import KvPathLoad, LoadReport
from kvrelay.serve.telemetry.metrics import worker_metrics
from kvrelay.types import Role
from tests.fakes import FakeWorker


class FakeGauge:
    """As ray.util.metrics.Gauge: refuses other tags than those that it was made with."""

    values: ClassVar[dict] = {}

    def __init__(self, name, documentation, tags):
        self.name, self.tags = name, tags

    def set(self, value, tags):
        assert set(tags) == set(self.tags)
        self.values[self.name, tuple(sorted(tags.items()))] = value


@pytest.fixture
def gauges():
    FakeGauge.values = {}
    return FakeGauge.values


def info(role="decode"):
    worker = FakeWorker("d0", Role(role))
    worker.port = 1
    return worker.info()


def exposed(metrics):
    """Every sample of the text that Prometheus would get."""

    class Collector:
        def collect(self):
            return metrics

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def report(**fields):
    paths = [KvPathLoad(path="shm", num_bytes=4096, seconds=0.25)]
    return LoadReport(seq=1, total_blocks=8, used_blocks=3, kv_paths=paths, **fields)


def test_every_sample_of_the_text_is_given_to_ray_with_its_value(gauges):
    load = report(tenant_tokens={"a": 5}, preemptions=2, preempted={"swap": 2})
    RayExporter(lambda: worker_metrics([(info(), load)], shows_tenants=True), {}, FakeGauge).export()
    assert gauges == exposed(list(worker_metrics([(info(), load)], shows_tenants=True)))
    assert gauges["kvrelay_worker_preempted_total", (("mode", "recompute"), ("role", "decode"), ("worker", "d0"))] == 0


def test_counters_are_absolute_so_exporting_twice_counts_nothing_twice(gauges):
    exporter = RayExporter(
        lambda: worker_metrics([(info(), report(steps=7))], shows_tenants=True), {"ingress": "ab12"}, FakeGauge
    )
    exporter.export()
    first = dict(gauges)
    exporter.export()
    assert gauges == first
    labels = (("ingress", "ab12"), ("role", "decode"), ("worker", "d0"))
    assert gauges["kvrelay_worker_steps_total", labels] == 7


@pytest.mark.parametrize(("file", "names_tenants"), [(None, True), ("keys.yaml", False)])
def test_with_tenants_keys_rays_port_which_asks_for_none_names_no_tenant(gauges, file, names_tenants):
    worker = SimpleNamespace(info=info(), load=lambda: report(tenant_tokens={"ab12": 5}))
    settings = Settings(serve={"api_keys_file": file})
    replica = SimpleNamespace(_worker=worker, _settings=settings)
    RayExporter(lambda: WorkerReplica._metrics(replica), {}, FakeGauge).export()
    assert any("ab12" in dict(labels).values() for _, labels in gauges) is names_tenants
    assert any("tenant" in dict(labels) for _, labels in gauges) is names_tenants
    assert any(name == "kvrelay_worker_waiting_tenants" for name, _ in gauges)


def test_after_a_change_of_role_the_former_roles_gauges_are_0_and_its_counters_stay(gauges):
    roles = ["prefill"]
    exporter = RayExporter(
        lambda: worker_metrics([(info(roles[-1]), report(steps=7, queued_tokens=9))], shows_tenants=True), {}, FakeGauge
    )
    exporter.export()
    roles.append("decode")
    exporter.export()
    former, now = (("role", "prefill"), ("worker", "d0")), (("role", "decode"), ("worker", "d0"))
    assert (gauges["kvrelay_worker_queued_tokens", former], gauges["kvrelay_worker_queued_tokens", now]) == (0, 9)
    assert gauges["kvrelay_worker_steps_total", former] == 7
