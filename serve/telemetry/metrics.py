"""/metrics: the ingress's own counters and the workers' load reports, collected when Prometheus scrapes."""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay import metrics
from kvrelay.plane.messages import LoadReport, WorkerInfo
from kvrelay.router.decision.router import Router
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.slo.forecast import Forecast
from kvrelay.router.slo.learning import RATIO_BOUNDS
from kvrelay.serve.telemetry.observer import Histogram, ServeStats
from kvrelay.serve.workers.membership import Membership
from kvrelay.serve.workers.pairs import Verdict, WorkerPair
from kvrelay.types import Role


def _histogram(name: str, documentation: str, histogram: Histogram) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, documentation)
    buckets = [("+Inf" if bound == float("inf") else str(bound), count) for bound, count in histogram.cumulative()]
    family.add_metric([], buckets, histogram.total)
    return family


class _Table:
    """Families with labels, filled worker by worker."""

    def __init__(self) -> None:
        self.families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

    def add(self, name: str, documentation: str, labels: Mapping[str, str], value: float) -> None:
        family = self.families.get(name)
        if family is None:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name.removesuffix("_total"), documentation, labels=list(labels))
            self.families[name] = family
        family.add_metric(list(labels.values()), value)

    def add_fields(self, rows: Iterable[tuple[str, str, str]], source: object, labels: Mapping[str, str]) -> None:
        """One value for each row: (metric, documentation, the source's attribute)."""
        for name, documentation, attribute in rows:
            self.add(name, documentation, labels, getattr(source, attribute))

    def add_counts(
        self, name: str, documentation: str, labels: Mapping[str, str], label: str, counts: Mapping[Any, float]
    ) -> None:
        """One value for each key of `counts`, which is the value of `label`."""
        for key, count in counts.items():
            self.add(name, documentation, {**labels, label: str(key)}, count)


_HISTOGRAMS = (  # with the field of ServeStats
    (metrics.REQUEST_TTFT_SECONDS, "Time to a sequence's first token.", "ttft_s"),
    (metrics.REQUEST_ITL_SECONDS, "Gaps between tokens.", "itl_s"),
    (metrics.REQUEST_TPOT_SECONDS, "Mean time per token after the first.", "tpot_s"),
    (metrics.REQUEST_SECONDS, "Time from a sequence's arrival to its end.", "total_s"),
    (metrics.KVTRANSFER_SECONDS, "KV transfers, first byte to verified.", "transfer_s"),
)
_OF_INGRESS = (
    (metrics.REQUESTS_RUNNING, "Sequences in flight.", "running"),
    (metrics.REQUEST_DEFERRALS_TOTAL, "Sequences that were deferred at the ingress.", "deferred"),
    (metrics.REQUEST_RETRIES_TOTAL, "Attempts after a worker's fault.", "retries"),
    (metrics.PROMPT_TOKENS_TOTAL, "Prompt tokens.", "prompt_tokens"),
    (metrics.OUTPUT_TOKENS_TOTAL, "Output tokens.", "output_tokens"),
    (metrics.ROUTER_CACHED_PREFIX_TOKENS_TOTAL, "Prompt tokens found in a prefix cache.", "cached_prefix_tokens"),
)


def _counted(stats: ServeStats, table: _Table) -> None:
    table.add_counts(metrics.REQUESTS_TOTAL, "Sequences by how they ended.", {}, "outcome", stats.outcomes)
    table.add_counts(metrics.ROUTER_DECISIONS_TOTAL, "Routing decisions by path.", {}, "path", stats.decisions)
    for (name, verdict), count in stats.slo_verdicts.items():
        table.add(metrics.SLO_VERDICTS_TOTAL, "Requests with an SLO.", {"class": name, "verdict": verdict}, count)
    for (name, is_kept), count in stats.slo_outcomes.items():
        labels = {"class": name, "met": "true" if is_kept else "false"}
        table.add(metrics.SLO_OUTCOMES_TOTAL, "Finished requests by promised class.", labels, count)


def _forecast(forecast: Forecast, table: _Table) -> Iterable[Metric]:
    """How far predictions were from observed times."""
    ratios = HistogramMetricFamily(metrics.SLO_PREDICTION_RATIO, "Observed over predicted.", labels=["time"])
    for time, errors in (("ttft", forecast.ttft_errors), ("tpot", forecast.tpot_errors)):
        bounds = [*map(str, RATIO_BOUNDS), "+Inf"]
        ratios.add_metric([time], list(zip(bounds, accumulate(errors.counts), strict=True)), errors.total)
        what = "Mean of |observed - predicted| / observed over the last ones."
        table.add(metrics.SLO_PREDICTION_ERROR_RATIO, what, {"time": time}, errors.mean_error())
    yield ratios


_OF_WORKER = (  # with the field of the worker's LoadReport
    (metrics.WORKER_QUEUED_TOKENS, "Prompt tokens not yet computed.", "queued_tokens"),
    (metrics.WORKER_STEP_SECONDS, "Moving average of the step time.", "step_s"),
    (metrics.WORKER_PREEMPTIONS_TOTAL, "Sequences preempted.", "preemptions"),
    (metrics.WORKER_PREFIX_QUERY_TOKENS_TOTAL, "Tokens looked up in the prefix cache.", "prefix_query_tokens"),
    (metrics.WORKER_PREFIX_HIT_TOKENS_TOTAL, "Tokens found in the prefix cache.", "prefix_hit_tokens"),
    (metrics.WORKER_TIER_HIT_TOKENS_TOTAL, "Tokens of prefix hits loaded from lower tiers.", "tier_hit_tokens"),
    (metrics.WORKER_CASCADE_SAVED_TOKENS_TOTAL,
     "KV tokens that sequences of a step shared instead of reading each.", "cascade_saved_tokens"),
    (metrics.WORKER_FETCHING, "Queued sequences that wait for blocks from a store.", "fetching"),
    (metrics.WORKER_WAITING_TENANTS, "Tenants with queued sequences.", "waiting_tenants"),
    (metrics.WORKER_DEADLINE_REFUSALS_TOTAL, "Sequences refused, past their deadline.", "deadline_refusals"),
    (metrics.WORKER_DISPLACED_TOTAL, "Sequences dropped from a full queue for another tenant's.", "displaced"),
    (metrics.WORKER_RECOMPUTED_TOKENS_TOTAL, "Tokens of preempted sequences that are recomputed.", "recomputed_tokens"),
    (metrics.WORKER_SWAPPED, "Sequences swapped out to host memory.", "swapped"),
    (metrics.WORKER_SWAPPED_BLOCKS, "KV blocks swapped out to host memory.", "swapped_blocks"),
    (metrics.WORKER_SWAPPED_BYTES, "KV bytes swapped out to host memory.", "swapped_bytes"),
    (metrics.WORKER_SWAP_CORRUPT_BLOCKS_TOTAL, "Swapped blocks found corrupt and recomputed.", "swap_corrupt_blocks"),
    (metrics.KVTRANSFER_LEASES, "KV transfers in flight.", "kv_leases"),
    (metrics.KVTRANSFER_LEASE_EXPIRED_TOTAL, "Leases that expired before their transfer ended.", "kv_expired_leases"),
)  # fmt: skip
_OF_TIER = (
    (metrics.KV_TIER_BLOCKS, "Blocks in a tier below the pool.", "num_blocks"),
    (metrics.KV_TIER_BYTES, "Bytes in a tier, as stored.", "num_bytes"),
    (metrics.KV_TIER_CAPACITY_BYTES, "Bytes that a tier may use; 0: no limit.", "capacity_bytes"),
    (metrics.KV_TIER_STORED_BLOCKS_TOTAL, "Blocks stored in a tier.", "stored_blocks"),
    (metrics.KV_TIER_LOADED_BLOCKS_TOTAL, "Blocks loaded from a tier.", "loaded_blocks"),
    (metrics.KV_TIER_STORE_SECONDS_TOTAL, "Time spent on storing.", "store_s"),
    (metrics.KV_TIER_LOAD_SECONDS_TOTAL, "Time spent on loading.", "load_s"),
    (metrics.KV_TIER_REJECTED_BLOCKS_TOTAL, "Blocks not admitted, or without room.", "rejected_blocks"),
    (metrics.KV_TIER_EVICTED_BLOCKS_TOTAL, "Blocks evicted from a tier.", "evicted_blocks"),
    (metrics.KV_TIER_CORRUPT_BLOCKS_TOTAL, "Blocks found corrupt and discarded.", "corrupt_blocks"),
    (metrics.KV_TIER_FAILURES_TOTAL, "Tier operations that failed.", "failures"),
)
_OF_PATH = (  # both ends count a transfer: sum over one role
    (metrics.KVTRANSFER_BYTES_TOTAL, "KV bytes moved.", "num_bytes"),
    (metrics.KVTRANSFER_READ_SECONDS_TOTAL, "Time spent on reading and verifying, summed over reads.", "seconds"),
    (metrics.KVTRANSFER_EXPOSED_SECONDS_TOTAL, "Transfer time that prefill did not hide.", "exposed_s"),
    (metrics.KVTRANSFER_RETRIES_TOTAL, "Reads retried over another path.", "retries"),
)


def _worker(info: WorkerInfo, load: LoadReport, table: _Table) -> None:
    worker = {"worker": info.worker_id, "role": info.role}
    table.add_fields(_OF_WORKER, load, worker)
    blocks = {
        "free": load.total_blocks - load.used_blocks - load.cached_blocks,
        "cached": load.cached_blocks,
        "used": load.used_blocks,
        "leased": load.leased_blocks,
        "quarantined": load.quarantined_blocks,
        "probe": load.probe_blocks,
    }
    table.add_counts(metrics.KV_BLOCKS, "KV blocks by state.", worker, "state", blocks)
    sequences = {"running": load.running, "waiting": load.waiting, "receiving": load.receiving}
    table.add_counts(metrics.WORKER_SEQUENCES, "Sequences on a worker.", worker, "state", sequences)
    by_model = load.model_drafted_tokens, load.model_accepted_tokens
    from_text = load.drafted_tokens - by_model[0], load.accepted_tokens - by_model[1]
    for source, (drafted, accepted) in (("ngram", from_text), ("model", by_model)):
        labels = {**worker, "source": source}
        table.add(metrics.WORKER_DRAFTED_TOKENS_TOTAL, "Draft tokens verified.", labels, drafted)
        table.add(metrics.WORKER_ACCEPTED_TOKENS_TOTAL, "Draft tokens accepted.", labels, accepted)
    waiting = load.waiting_by_priority
    table.add_counts(metrics.WORKER_WAITING, "Queued sequences, by priority.", worker, "priority", waiting)
    computed = {tenant or "none": count for tenant, count in load.tenant_tokens.items()}
    computed["other"] = load.other_tenant_tokens
    table.add_counts(metrics.WORKER_TENANT_TOKENS_TOTAL, "Tokens computed, by tenant.", worker, "tenant", computed)
    table.add_counts(metrics.WORKER_PREEMPTED_TOTAL, "Sequences preempted, by mode.", worker, "mode", load.preempted)
    swaps, what = {"out": load.swap_out_s, "in": load.swap_in_s}, "Time spent on copies between pool and swap area."
    table.add_counts(metrics.WORKER_SWAP_SECONDS_TOTAL, what, worker, "direction", swaps)
    for tier in load.tiers:
        table.add_fields(_OF_TIER, tier, {**worker, "tier": tier.tier})
    for path in load.kv_paths:
        table.add_fields(_OF_PATH, path, {**worker, "path": path.path})
    is_source = info.role == Role.PREFILL  # it hashes before a path is chosen
    checks = {"any": load.kv_check_s} if is_source else {path.path: path.check_s for path in load.kv_paths}
    table.add_counts(metrics.KVTRANSFER_CHECK_SECONDS_TOTAL, "Time spent on KV checksums.", worker, "path", checks)
    table.add_counts(metrics.KVTRANSFER_REFUSALS_TOTAL, "KV transfers refused.", worker, "reason", load.kv_refused)


def _pairs(pairs: list[WorkerPair], table: _Table) -> None:
    for pair in pairs:
        if pair.report is None:
            continue
        ends = dict(zip(("source", "target"), pair.key, strict=True))
        is_ok = "true" if pair.verdict is Verdict.OK else "false"
        labels = {**ends, "path": pair.path.path if pair.path is not None else "none", "ok": is_ok}
        table.add(metrics.KVTRANSFER_PAIRS, "Prefill and decode workers that are paired.", labels, 1)
        for path in pair.report.paths:
            labels, speed, latency_s = {**ends, "path": path.path}, path.bytes_per_s, path.latency_s
            if speed:
                table.add(metrics.KVTRANSFER_PATH_BYTES_PER_SECOND, "Last measured bandwidth.", labels, speed)
            if latency_s:
                table.add(metrics.KVTRANSFER_PATH_LATENCY_SECONDS, "Probed latency of one block.", labels, latency_s)


def _audited(worker_id: str, index: PrefixIndex, table: _Table) -> None:
    counts = index.audit_counts(worker_id)
    results = {"agreed": counts.compared - counts.wrong - counts.missed, "wrong": counts.wrong, "missed": counts.missed}
    what = "Index entries compared with a worker's cache."
    table.add_counts(metrics.ROUTER_AUDITED_HASHES_TOTAL, what, {"worker": worker_id}, "result", results)


class ServeCollector(Collector):
    """Reads the counters where they are kept; holds none of its own."""

    def __init__(self, stats: ServeStats, router: Router, workers: Membership) -> None:
        self._stats, self._router, self._workers = stats, router, workers

    def collect(self) -> Iterable[Metric]:
        for name, documentation, attribute in _HISTOGRAMS:
            yield _histogram(name, documentation, getattr(self._stats, attribute))
        table = _Table()
        table.add_fields(_OF_INGRESS, self._stats, {})
        what = "Moving average of observed minus predicted time to first token."
        table.add(metrics.ROUTER_PREDICTION_ERROR_SECONDS, what, {}, self._router.prediction_error_s)
        what = "Sequences deferred at the ingress, as their first token would miss its target anyway."
        table.add(metrics.REQUESTS_DEFERRED, what, {}, self._router.num_deferred)
        _counted(self._stats, table)
        if self._router.forecast is not None:
            yield from _forecast(self._router.forecast, table)
        roles = {"prefill": 0, "decode": 0}
        for info, load in self._workers.live_workers():
            _worker(info, load, table)
            roles[info.role] = roles.get(info.role, 0) + 1
            _audited(info.worker_id, self._router.index, table)
        table.add_counts(metrics.WORKERS, "Connected workers.", {}, "role", roles)
        _pairs(self._workers.pairs.book.pairs, table)
        yield from table.families.values()


def make_registry(stats: ServeStats, router: Router, workers: Membership) -> CollectorRegistry:
    """A separate registry, so that no other metrics of the process appear in it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServeCollector(stats, router, workers))
    return registry
