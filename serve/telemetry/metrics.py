"""/metrics: the ingress's own counters and the workers' load reports, collected when Prometheus scrapes."""

from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay import metrics
from kvrelay.plane.messages import LoadReport, WorkerInfo
from kvrelay.router.decision.router import Router
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.slo.calibration import RATIO_BOUNDS
from kvrelay.router.slo.forecast import Forecast
from kvrelay.serve.telemetry.observer import Histogram, ServeStats
from kvrelay.serve.workers.membership import Membership
from kvrelay.serve.workers.pairs import Verdict, WorkerPair
from kvrelay.types import Role


def _histogram(name: str, documentation: str, histogram: Histogram) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, documentation)
    buckets = [("+Inf" if bound == float("inf") else str(bound), count) for bound, count in histogram.cumulative()]
    family.add_metric([], buckets, histogram.total)
    return family


def _counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name.removesuffix("_total"), documentation, value=value)


class _Table:
    """Families with labels, filled worker by worker."""

    def __init__(self) -> None:
        self.families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

    def add(self, name: str, documentation: str, labels: dict[str, str], value: float) -> None:
        family = self.families.get(name)
        if family is None:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name.removesuffix("_total"), documentation, labels=list(labels))
            self.families[name] = family
        family.add_metric(list(labels.values()), value)


def _own(stats: ServeStats) -> Iterable[Metric]:
    yield _histogram(metrics.REQUEST_TTFT_SECONDS, "Time to a sequence's first token.", stats.ttft_s)
    yield _histogram(metrics.REQUEST_ITL_SECONDS, "Gaps between tokens.", stats.itl_s)
    yield _histogram(metrics.REQUEST_TPOT_SECONDS, "Mean time per token after the first.", stats.tpot_s)
    yield _histogram(metrics.REQUEST_SECONDS, "Time from a sequence's arrival to its end.", stats.total_s)
    yield _histogram(metrics.KVTRANSFER_SECONDS, "KV transfers, first byte to verified.", stats.transfer_s)
    yield GaugeMetricFamily(metrics.REQUESTS_RUNNING, "Sequences in flight.", value=stats.running)
    yield _counter(metrics.REQUEST_DEFERRALS_TOTAL, "Sequences that were deferred at the ingress.", stats.deferred)
    yield _counter(metrics.REQUEST_RETRIES_TOTAL, "Attempts after a worker's fault.", stats.retries)
    yield _counter(metrics.PROMPT_TOKENS_TOTAL, "Prompt tokens.", stats.prompt_tokens)
    yield _counter(metrics.OUTPUT_TOKENS_TOTAL, "Output tokens.", stats.output_tokens)
    yield _counter(
        metrics.ROUTER_CACHED_PREFIX_TOKENS_TOTAL, "Prompt tokens found in a prefix cache.", stats.cached_prefix_tokens
    )


def _counted(stats: ServeStats, table: _Table) -> None:
    for outcome, count in stats.outcomes.items():
        table.add(metrics.REQUESTS_TOTAL, "Sequences by how they ended.", {"outcome": outcome}, count)
    for path, count in stats.decisions.items():
        table.add(metrics.ROUTER_DECISIONS_TOTAL, "Routing decisions by path.", {"path": path}, count)
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


def _worker(info: WorkerInfo, load: LoadReport, table: _Table) -> None:
    worker = {"worker": info.worker_id, "role": info.role}
    blocks = {
        "free": load.total_blocks - load.used_blocks - load.cached_blocks,
        "cached": load.cached_blocks,
        "used": load.used_blocks,
        "leased": load.leased_blocks,
        "quarantined": load.quarantined_blocks,
        "probe": load.probe_blocks,
    }
    for state, count in blocks.items():
        table.add(metrics.KV_BLOCKS, "KV blocks by state.", {**worker, "state": state}, count)
    for state, count in (("running", load.running), ("waiting", load.waiting), ("receiving", load.receiving)):
        table.add(metrics.WORKER_SEQUENCES, "Sequences on a worker.", {**worker, "state": state}, count)
    table.add(metrics.WORKER_QUEUED_TOKENS, "Prompt tokens not yet computed.", worker, load.queued_tokens)
    table.add(metrics.WORKER_STEP_SECONDS, "Moving average of the step time.", worker, load.step_s)
    table.add(metrics.WORKER_PREEMPTIONS_TOTAL, "Sequences preempted.", worker, load.preemptions)
    table.add(
        metrics.WORKER_PREFIX_QUERY_TOKENS_TOTAL,
        "Tokens looked up in the prefix cache.",
        worker,
        load.prefix_query_tokens,
    )
    table.add(
        metrics.WORKER_PREFIX_HIT_TOKENS_TOTAL, "Tokens found in the prefix cache.", worker, load.prefix_hit_tokens
    )
    table.add(
        metrics.WORKER_TIER_HIT_TOKENS_TOTAL,
        "Tokens of prefix hits loaded from lower tiers.",
        worker,
        load.tier_hit_tokens,
    )
    table.add(
        metrics.WORKER_CASCADE_SAVED_TOKENS_TOTAL,
        "KV tokens that sequences of a step shared instead of reading each.",
        worker,
        load.cascade_saved_tokens,
    )
    table.add(metrics.WORKER_FETCHING, "Queued sequences that wait for blocks from a store.", worker, load.fetching)
    _drafted(worker, load, table)
    _queue(worker, load, table)
    _preempted(worker, load, table)
    _tiers(worker, load, table)
    _transfers(worker, load, table)


def _drafted(worker: dict[str, str], load: LoadReport, table: _Table) -> None:
    by_model = load.model_drafted_tokens, load.model_accepted_tokens
    from_text = load.drafted_tokens - by_model[0], load.accepted_tokens - by_model[1]
    for source, (drafted, accepted) in (("ngram", from_text), ("model", by_model)):
        labels = {**worker, "source": source}
        table.add(metrics.WORKER_DRAFTED_TOKENS_TOTAL, "Draft tokens verified.", labels, drafted)
        table.add(metrics.WORKER_ACCEPTED_TOKENS_TOTAL, "Draft tokens accepted.", labels, accepted)


def _queue(worker: dict[str, str], load: LoadReport, table: _Table) -> None:
    for priority, count in load.waiting_by_priority.items():
        labels = {**worker, "priority": str(priority)}
        table.add(metrics.WORKER_WAITING, "Queued sequences, by priority.", labels, count)
    table.add(metrics.WORKER_WAITING_TENANTS, "Tenants with queued sequences.", worker, load.waiting_tenants)
    table.add(
        metrics.WORKER_DEADLINE_REFUSALS_TOTAL,
        "Sequences refused, past their deadline.",
        worker,
        load.deadline_refusals,
    )
    table.add(
        metrics.WORKER_DISPLACED_TOTAL,
        "Sequences dropped from a full queue for another tenant's.",
        worker,
        load.displaced,
    )
    computed = {**load.tenant_tokens, "other": load.other_tenant_tokens}
    for tenant, count in computed.items():
        labels = {**worker, "tenant": tenant or "none"}
        table.add(metrics.WORKER_TENANT_TOKENS_TOTAL, "Tokens computed, by tenant.", labels, count)


def _preempted(worker: dict[str, str], load: LoadReport, table: _Table) -> None:
    for mode, count in load.preempted.items():
        labels = {**worker, "mode": mode}
        table.add(metrics.WORKER_PREEMPTED_TOTAL, "Sequences preempted, by mode.", labels, count)
    table.add(
        metrics.WORKER_RECOMPUTED_TOKENS_TOTAL,
        "Tokens of preempted sequences that are recomputed.",
        worker,
        load.recomputed_tokens,
    )
    table.add(metrics.WORKER_SWAPPED, "Sequences swapped out to host memory.", worker, load.swapped)
    table.add(metrics.WORKER_SWAPPED_BLOCKS, "KV blocks swapped out to host memory.", worker, load.swapped_blocks)
    table.add(metrics.WORKER_SWAPPED_BYTES, "KV bytes swapped out to host memory.", worker, load.swapped_bytes)
    for direction, seconds in (("out", load.swap_out_s), ("in", load.swap_in_s)):
        labels = {**worker, "direction": direction}
        table.add(
            metrics.WORKER_SWAP_SECONDS_TOTAL, "Time spent on copies between pool and swap area.", labels, seconds
        )
    table.add(
        metrics.WORKER_SWAP_CORRUPT_BLOCKS_TOTAL,
        "Swapped blocks found corrupt and recomputed.",
        worker,
        load.swap_corrupt_blocks,
    )


def _tiers(worker: dict[str, str], load: LoadReport, table: _Table) -> None:
    for tier in load.tiers:
        labels = {**worker, "tier": tier.tier}
        table.add(metrics.KV_TIER_BLOCKS, "Blocks in a tier below the pool.", labels, tier.num_blocks)
        table.add(metrics.KV_TIER_BYTES, "Bytes in a tier, as stored.", labels, tier.num_bytes)
        table.add(
            metrics.KV_TIER_CAPACITY_BYTES, "Bytes that a tier may use; 0: no limit.", labels, tier.capacity_bytes
        )
        table.add(metrics.KV_TIER_STORED_BLOCKS_TOTAL, "Blocks stored in a tier.", labels, tier.stored_blocks)
        table.add(metrics.KV_TIER_LOADED_BLOCKS_TOTAL, "Blocks loaded from a tier.", labels, tier.loaded_blocks)
        table.add(metrics.KV_TIER_STORE_SECONDS_TOTAL, "Time spent on storing.", labels, tier.store_s)
        table.add(metrics.KV_TIER_LOAD_SECONDS_TOTAL, "Time spent on loading.", labels, tier.load_s)
        table.add(
            metrics.KV_TIER_REJECTED_BLOCKS_TOTAL, "Blocks not admitted, or without room.", labels, tier.rejected_blocks
        )
        table.add(metrics.KV_TIER_EVICTED_BLOCKS_TOTAL, "Blocks evicted from a tier.", labels, tier.evicted_blocks)
        table.add(
            metrics.KV_TIER_CORRUPT_BLOCKS_TOTAL, "Blocks found corrupt and discarded.", labels, tier.corrupt_blocks
        )
        table.add(metrics.KV_TIER_FAILURES_TOTAL, "Tier operations that failed.", labels, tier.failures)


def _transfers(worker: dict[str, str], load: LoadReport, table: _Table) -> None:
    """Both ends count a transfer: sum over one role."""
    for path in load.kv_paths:
        labels = {**worker, "path": path.path}
        table.add(metrics.KVTRANSFER_BYTES_TOTAL, "KV bytes moved.", labels, path.num_bytes)
        table.add(
            metrics.KVTRANSFER_READ_SECONDS_TOTAL,
            "Time spent on reading and verifying, summed over reads.",
            labels,
            path.seconds,
        )
        table.add(
            metrics.KVTRANSFER_EXPOSED_SECONDS_TOTAL,
            "Transfer time that prefill did not hide.",
            labels,
            path.exposed_s,
        )
        table.add(metrics.KVTRANSFER_RETRIES_TOTAL, "Reads retried over another path.", labels, path.retries)
    is_source = worker["role"] == Role.PREFILL  # it hashes before a path is chosen
    checks = {"any": load.kv_check_s} if is_source else {path.path: path.check_s for path in load.kv_paths}
    for name, seconds in checks.items():
        table.add(
            metrics.KVTRANSFER_CHECK_SECONDS_TOTAL, "Time spent on KV checksums.", {**worker, "path": name}, seconds
        )
    for reason, count in load.kv_refused.items():
        table.add(metrics.KVTRANSFER_REFUSALS_TOTAL, "KV transfers refused.", {**worker, "reason": reason}, count)
    table.add(metrics.KVTRANSFER_LEASES, "KV transfers in flight.", worker, load.kv_leases)
    table.add(
        metrics.KVTRANSFER_LEASE_EXPIRED_TOTAL,
        "Leases that expired before their transfer ended.",
        worker,
        load.kv_expired_leases,
    )


def _pairs(pairs: list[WorkerPair], table: _Table) -> None:
    for pair in pairs:
        if pair.report is None:
            continue
        source, target = pair.key
        ends = {"source": source, "target": target}
        chosen = pair.path
        is_ok = "true" if pair.verdict is Verdict.OK else "false"
        labels = {**ends, "path": chosen.path if chosen is not None else "none", "ok": is_ok}
        table.add(metrics.KVTRANSFER_PAIRS, "Prefill and decode workers that are paired.", labels, 1)
        for path in pair.report.paths:
            labels = {**ends, "path": path.path}
            if path.bytes_per_s:
                table.add(
                    metrics.KVTRANSFER_PATH_BYTES_PER_SECOND, "Last measured bandwidth.", labels, path.bytes_per_s
                )
            if path.latency_s:
                table.add(
                    metrics.KVTRANSFER_PATH_LATENCY_SECONDS, "Probed latency of one block.", labels, path.latency_s
                )


def _audited(worker_id: str, index: PrefixIndex, table: _Table) -> None:
    counts = index.audit_counts(worker_id)
    agreed = counts.compared - counts.wrong - counts.missed
    for result, count in (("agreed", agreed), ("wrong", counts.wrong), ("missed", counts.missed)):
        labels = {"worker": worker_id, "result": result}
        table.add(metrics.ROUTER_AUDITED_HASHES_TOTAL, "Index entries compared with a worker's cache.", labels, count)


class ServeCollector(Collector):
    """Reads the counters where they are kept; holds none of its own."""

    def __init__(self, stats: ServeStats, router: Router, workers: Membership) -> None:
        self._stats, self._router, self._workers = stats, router, workers

    def collect(self) -> Iterable[Metric]:
        yield from _own(self._stats)
        yield GaugeMetricFamily(
            metrics.ROUTER_PREDICTION_ERROR_SECONDS,
            "Moving average of observed minus predicted time to first token.",
            value=self._router.prediction_error_s,
        )
        yield GaugeMetricFamily(
            metrics.REQUESTS_DEFERRED,
            "Sequences deferred at the ingress, as their first token would miss its target anyway.",
            value=self._router.num_deferred,
        )
        table = _Table()
        _counted(self._stats, table)
        if self._router.forecast is not None:
            yield from _forecast(self._router.forecast, table)
        roles = {"prefill": 0, "decode": 0}
        for info, load in self._workers.live_workers():
            _worker(info, load, table)
            roles[info.role] = roles.get(info.role, 0) + 1
            _audited(info.worker_id, self._router.index, table)
        for role, count in roles.items():
            table.add(metrics.WORKERS, "Connected workers.", {"role": role}, count)
        _pairs(self._workers.pairs.book.pairs, table)
        yield from table.families.values()


def make_registry(stats: ServeStats, router: Router, workers: Membership) -> CollectorRegistry:
    """A separate registry, so that no other metrics of the process appear in it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServeCollector(stats, router, workers))
    return registry
