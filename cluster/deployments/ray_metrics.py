"""The metrics of this process in Ray's: every few seconds the samples of serve/telemetry/metrics.py, under the same
names; Ray's agent of the host puts `ray_` before each and serves them to Prometheus with those of Ray.

Every sample is a gauge that holds the count so far. Ray's own counters cannot begin with 0 and outlive the process
whose label they carry, and its histograms cost one call per observation in two processes and lose the sum. As it is
`rate` and `histogram_quantile` give what they give over /metrics, and a dead worker's series end with Ray's time limit.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from prometheus_client.core import Metric
from ray.util.metrics import Gauge

logger = logging.getLogger(__name__)

EXPORT_S = 5.0  # below Ray's metrics_report_interval_ms (10 s): what is not set in between is not reported, and evicted
Collect = Callable[[], Iterable[Metric]]
Series = tuple[str, tuple[tuple[str, str], ...]]


class RayExporter:
    """Sets one gauge of Ray for each name of a sample. `labels` are added to every series, as this process's name."""

    def __init__(self, collect: Collect, labels: dict[str, str], make_gauge: Callable[..., Gauge] = Gauge) -> None:
        self._collect, self._labels, self._make_gauge = collect, labels, make_gauge
        self._gauges: dict[str, Gauge] = {}
        self._present: set[Series] = set()  # series of gauges at the last export

    def export(self) -> None:
        """Set every series. A gauge's series that has gone (a pair, a former role) is set to 0: Ray keeps the last
        value of some for as long as the process lives.
        """
        present: set[Series] = set()
        for family in self._collect():
            for sample in family.samples:
                labels = {**sample.labels, **self._labels}
                self._gauge(sample.name, family.documentation, labels).set(float(sample.value), tags=labels)
                if family.type == "gauge":
                    present.add((sample.name, tuple(labels.items())))
        for name, gone in self._present - present:
            self._gauges[name].set(0.0, tags=dict(gone))
        self._present = present

    def _gauge(self, name: str, documentation: str, labels: dict[str, str]) -> Gauge:
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._gauges[name] = self._make_gauge(name, documentation, tuple(labels))
        return gauge


async def export_metrics(collect: Collect, labels: dict[str, str] | None = None) -> None:
    """Export until cancelled. What fails is logged and tried again: metrics end no process."""
    exporter = RayExporter(collect, labels or {})
    while True:
        try:
            exporter.export()
        except Exception:  # a process edge
            logger.exception("metrics could not be given to Ray")
        await asyncio.sleep(EXPORT_S)
