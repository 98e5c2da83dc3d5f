"""/metrics: the ingress's own figures and the workers' load reports, made when Prometheus asks."""

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
from kvrelay.serve.workers.pairs import Pair, Verdict
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
    yield _histogram(metrics.REQUEST_SECONDS, "A sequence's whole time.", stats.total_s)
    yield _histogram(metrics.KVTRANSFER_SECONDS, "KV transfers, first byte to verified.", stats.transfer_s)
    yield GaugeMetricFamily(metrics.REQUESTS_RUNNING, "Sequences in flight.", value=stats.running)
    yield _counter(metrics.REQUEST_DEFERRALS_TOTAL, "Sequences that had to wait at the ingress.", stats.deferred)
    yield _counter(metrics.REQUEST_RETRIES_TOTAL, "Attempts after a worker's fault.", stats.retries)
    yield _counter(metrics.PROMPT_TOKENS_TOTAL, "Prompt tokens.", stats.prompt_tokens)
    yield _counter(metrics.OUTPUT_TOKENS_TOTAL, "Output tokens.", stats.output_tokens)
    yield _counter(
        metrics.ROUTER_CACHED_PREFIX_TOKENS_TOTAL, "Prompt tokens found in a cache.", stats.cached_prefix_tokens
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
    """How far predictions were from what was seen."""
    ratios = HistogramMetricFamily(metrics.SLO_PREDICTION_RATIO, "Observed over predicted.", labels=["time"])
    for time, errors in (("ttft", forecast.ttft_errors), ("tpot", forecast.tpot_errors)):
        bounds = [*map(str, RATIO_BOUNDS), "+Inf"]
        ratios.add_metric([time], list(zip(bounds, accumulate(errors.counts), strict=True)), errors.total)
        what = "Mean of |observed - predicted| / observed over the last ones."
        table.add(metrics.SLO_PREDICTION_ERROR_RATIO, what, {"time": time}, errors.mean_error())
    yield ratios


def _worker(info: WorkerInfo, load: LoadReport, table: _Table) -> None:
    who = {"worker": info.worker_id, "role": info.role}
    blocks = {
        "free": load.total_blocks - load.used_blocks - load.cached_blocks,
        "cached": load.cached_blocks,
        "used": load.used_blocks,
        "leased": load.leased_blocks,
        "quarantined": load.quarantined_blocks,
        "probe": load.probe_blocks,
    }
    for state, count in blocks.items():
        table.add(metrics.KV_BLOCKS, "KV blocks by state.", {**who, "state": state}, count)
    for state, count in (("running", load.running), ("waiting", load.waiting), ("receiving", load.receiving)):
        table.add(metrics.WORKER_SEQUENCES, "Sequences on a worker.", {**who, "state": state}, count)
    table.add(metrics.WORKER_QUEUED_TOKENS, "Prompt tokens not yet computed.", who, load.queued_tokens)
    table.add(metrics.WORKER_STEP_SECONDS, "Moving average of a step.", who, load.step_s)
    table.add(metrics.WORKER_PREEMPTIONS_TOTAL, "Sequences pre-empted.", who, load.preemptions)
    table.add(
        metrics.WORKER_PREFIX_QUERY_TOKENS_TOTAL, "Tokens looked up in the prefix cache.", who, load.prefix_query_tokens
    )
    table.add(metrics.WORKER_PREFIX_HIT_TOKENS_TOTAL, "Of those, found there.", who, load.prefix_hit_tokens)
    table.add(
        metrics.WORKER_TIER_HIT_TOKENS_TOTAL, "Of those, brought up from below the pool.", who, load.tier_hit_tokens
    )
    table.add(
        metrics.WORKER_CASCADE_SAVED_TOKENS_TOTAL, "KV not read again, as another sequence of the step had read the same.", who,
        load.cascade_saved_tokens,
    )  # fmt: skip
    table.add(metrics.WORKER_FETCHING, "Sequences in line that wait for blocks from a store.", who, load.fetching)
    _drafted(who, load, table)
    _line(who, load, table)
    _preempted(who, load, table)
    _tiers(who, load, table)
    _transfers(who, load, table)


def _drafted(who: dict[str, str], load: LoadReport, table: _Table) -> None:
    by_model = load.model_drafted_tokens, load.model_accepted_tokens
    from_text = load.drafted_tokens - by_model[0], load.accepted_tokens - by_model[1]
    for source, (drafted, accepted) in (("ngram", from_text), ("model", by_model)):
        labels = {**who, "source": source}
        table.add(metrics.WORKER_DRAFTED_TOKENS_TOTAL, "Tokens guessed ahead and computed.", labels, drafted)
        table.add(metrics.WORKER_ACCEPTED_TOKENS_TOTAL, "Of those, right.", labels, accepted)


def _line(who: dict[str, str], load: LoadReport, table: _Table) -> None:
    for priority, count in load.waiting_by_priority.items():
        labels = {**who, "priority": str(priority)}
        table.add(metrics.WORKER_WAITING, "Sequences in line, by priority.", labels, count)
    table.add(metrics.WORKER_WAITING_TENANTS, "Tenants with something in line.", who, load.waiting_tenants)
    table.add(metrics.WORKER_DEADLINE_REFUSALS_TOTAL, "Refused: too late.", who, load.deadline_refusals)
    table.add(metrics.WORKER_DISPLACED_TOTAL, "Left a full line for another tenant's.", who, load.displaced)
    computed = {**load.tenant_tokens, "other": load.other_tenant_tokens}
    for tenant, count in computed.items():
        labels = {**who, "tenant": tenant or "none"}
        table.add(metrics.WORKER_TENANT_TOKENS_TOTAL, "Tokens computed, by tenant.", labels, count)


def _preempted(who: dict[str, str], load: LoadReport, table: _Table) -> None:
    for mode, count in load.preempted.items():
        labels = {**who, "mode": mode}
        table.add(metrics.WORKER_PREEMPTED_TOTAL, "Sequences pre-empted, by what became of them.", labels, count)
    table.add(
        metrics.WORKER_RECOMPUTED_TOKENS_TOTAL, "Tokens dropped with them, to be computed again.", who,
        load.recomputed_tokens,
    )  # fmt: skip
    table.add(metrics.WORKER_SWAPPED, "Sequences whose KV is in host memory.", who, load.swapped)
    table.add(metrics.WORKER_SWAPPED_BLOCKS, "Their blocks there.", who, load.swapped_blocks)
    table.add(metrics.WORKER_SWAPPED_BYTES, "Their bytes there.", who, load.swapped_bytes)
    for direction, seconds in (("out", load.swap_out_s), ("in", load.swap_in_s)):
        labels = {**who, "direction": direction}
        table.add(metrics.WORKER_SWAP_SECONDS_TOTAL, "Time spent on copies between pool and swap.", labels, seconds)
    table.add(
        metrics.WORKER_SWAP_CORRUPT_BLOCKS_TOTAL, "Swapped blocks found wrong and computed anew.", who,
        load.swap_corrupt_blocks,
    )  # fmt: skip


def _tiers(who: dict[str, str], load: LoadReport, table: _Table) -> None:
    for tier in load.tiers:
        labels = {**who, "tier": tier.tier}
        table.add(metrics.KV_TIER_BLOCKS, "Blocks in a tier below the pool.", labels, tier.num_blocks)
        table.add(metrics.KV_TIER_BYTES, "Their bytes, as stored.", labels, tier.num_bytes)
        table.add(
            metrics.KV_TIER_CAPACITY_BYTES, "Bytes that it may use; 0: no limit here.", labels, tier.capacity_bytes
        )
        table.add(metrics.KV_TIER_STORED_BLOCKS_TOTAL, "Blocks that went down to it.", labels, tier.stored_blocks)
        table.add(metrics.KV_TIER_LOADED_BLOCKS_TOTAL, "Blocks that came up from it.", labels, tier.loaded_blocks)
        table.add(metrics.KV_TIER_STORE_SECONDS_TOTAL, "Time that the former took.", labels, tier.store_s)
        table.add(metrics.KV_TIER_LOAD_SECONDS_TOTAL, "Time that the latter took.", labels, tier.load_s)
        table.add(metrics.KV_TIER_REJECTED_BLOCKS_TOTAL, "Not admitted, or no room.", labels, tier.rejected_blocks)
        table.add(metrics.KV_TIER_EVICTED_BLOCKS_TOTAL, "Given up for others.", labels, tier.evicted_blocks)
        table.add(metrics.KV_TIER_CORRUPT_BLOCKS_TOTAL, "Found wrong and discarded.", labels, tier.corrupt_blocks)
        table.add(metrics.KV_TIER_FAILURES_TOTAL, "Calls that failed as a whole.", labels, tier.failures)


def _transfers(who: dict[str, str], load: LoadReport, table: _Table) -> None:
    """Both ends count a transfer: sum over one role."""
    for path in load.kv_paths:
        labels = {**who, "path": path.path}
        table.add(metrics.KVTRANSFER_BYTES_TOTAL, "KV bytes moved.", labels, path.num_bytes)
        table.add(
            metrics.KVTRANSFER_READ_SECONDS_TOTAL, "Reading and verifying, all reads added up.", labels, path.seconds
        )
        table.add(
            metrics.KVTRANSFER_EXPOSED_SECONDS_TOTAL,
            "Of transfers, after their prefill had ended.",
            labels,
            path.exposed_s,
        )
        table.add(metrics.KVTRANSFER_RETRIES_TOTAL, "Reads that went on over another path.", labels, path.retries)
    is_source = who["role"] == Role.PREFILL  # it hashes before a path is chosen
    checks = {"any": load.kv_check_s} if is_source else {path.path: path.check_s for path in load.kv_paths}
    for name, seconds in checks.items():
        table.add(metrics.KVTRANSFER_CHECK_SECONDS_TOTAL, "Checksums of KV.", {**who, "path": name}, seconds)
    for reason, count in load.kv_refused.items():
        table.add(metrics.KVTRANSFER_REFUSALS_TOTAL, "KV transfers refused.", {**who, "reason": reason}, count)
    table.add(metrics.KVTRANSFER_LEASES, "KV transfers under way.", who, load.kv_leases)
    table.add(
        metrics.KVTRANSFER_LEASE_EXPIRED_TOTAL, "Leases that ended before their transfer.", who, load.kv_expired_leases
    )


def _pairs(pairs: list[Pair], table: _Table) -> None:
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
                table.add(metrics.KVTRANSFER_PATH_BYTES_PER_SECOND, "As measured last.", labels, path.bytes_per_s)
            if path.latency_s:
                table.add(metrics.KVTRANSFER_PATH_LATENCY_SECONDS, "One block, as probed.", labels, path.latency_s)


def _audited(worker_id: str, index: PrefixIndex, table: _Table) -> None:
    counts = index.audit_counts(worker_id)
    agreed = counts.compared - counts.wrong - counts.missed
    for result, count in (("agreed", agreed), ("wrong", counts.wrong), ("missed", counts.missed)):
        labels = {"worker": worker_id, "result": result}
        table.add(
            metrics.ROUTER_AUDITED_HASHES_TOTAL, "Hashes of the index that a worker was asked about.", labels, count
        )


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
            "Sequences that wait at the ingress, since their first token will be late in any case.",
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
