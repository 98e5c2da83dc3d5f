"""The one table of metrics: an ingress's own counters, and what follows from workers' load reports.

Two exporters read it, so that names, labels and values are the same: /metrics, when Prometheus scrapes an ingress, and
Ray's metrics (cluster/deployments/ray_metrics.py), every few seconds in every process. Counters that dashboards and
alerts ask for begin with 0: Prometheus sees no increase in a series that begins with 1.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.plane.reports import LoadReport, WorkerInfo
from kvrelay.router.decision.router import Router
from kvrelay.router.slo.forecast import Forecast
from kvrelay.router.slo.learning import RATIO_BOUNDS
from kvrelay.serve.telemetry.observer import ServeStats
from kvrelay.serve.workers.membership import Membership
from kvrelay.serve.workers.pairs import Verdict, WorkerPair
from kvrelay.types import FinishReason, Role

PAIRS_SHOWN = 256  # pairs of workers with series of their own, those that do not work first
OUTCOMES = (FinishReason.STOP, FinishReason.LENGTH, "client", "overloaded", "deadline", "slo", "error")
REFUSALS = ("expired", "checksum", "incomplete", "transport", "fingerprint", "stale_epoch", "stale_generation")
PREEMPTION_MODES = ("swap", "recompute", "return-to-prefill")
MOVES = ("moved", "ended", "failed")
Labels = Mapping[str, str]
Counts = Mapping[Any, float]
PATHS = ("disaggregated", "local", "prefill_only")


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
        self, name: str, what: str, labels: Labels, label: str, counts: Counts, known: Iterable[str] = ()
    ) -> None:
        """One value for each key of `counts`, which is the value of `label`; 0 for keys in `known` that it lacks."""
        for key, count in {**dict.fromkeys(known, 0.0), **counts}.items():
            self.add(name, what, {**labels, label: str(key)}, count)


_HISTOGRAMS = (  # with the field of ServeStats
    ("kvrelay_request_ttft_seconds", "Time to a sequence's first token.", "ttft_s"),
    ("kvrelay_request_itl_seconds", "Gaps between tokens.", "itl_s"),
    ("kvrelay_request_tpot_seconds", "Mean time per token after the first.", "tpot_s"),
    ("kvrelay_request_seconds", "Time from a sequence's arrival to its end.", "total_s"),
    ("kvrelay_kvtransfer_seconds", "KV transfers, first byte to verified.", "transfer_s"),
)
_OF_INGRESS = (
    ("kvrelay_requests_running", "Sequences in flight.", "running"),
    ("kvrelay_request_deferrals_total", "Sequences that were deferred at the ingress.", "deferred"),
    ("kvrelay_request_retries_total", "Attempts after a worker's fault.", "retries"),
    ("kvrelay_prompt_tokens_total", "Prompt tokens.", "prompt_tokens"),
    ("kvrelay_output_tokens_total", "Output tokens.", "output_tokens"),
    ("kvrelay_reasoning_tokens_total", "Output tokens of reasoning in chat replies.", "reasoning_tokens"),
    ("kvrelay_router_cached_prefix_tokens_total", "Prompt tokens found in a prefix cache.", "cached_prefix_tokens"),
)


def _counted(stats: ServeStats, table: _Table) -> None:
    table.add_counts("kvrelay_requests_total", "Sequences by how they ended.", {}, "outcome", stats.outcomes, OUTCOMES)
    table.add_counts("kvrelay_router_decisions_total", "Routing decisions by path.", {}, "path", stats.decisions, PATHS)
    what = "Running sequences that another decode worker was to take over with their KV."
    table.add_counts("kvrelay_request_moves_total", what, {}, "outcome", stats.moves.outcomes, MOVES)
    what = "Time from the choice of the worker until it decodes, of sequences that moved."
    table.add("kvrelay_request_move_seconds_total", what, {}, stats.moves.seconds)
    table.add("kvrelay_request_moved_bytes_total", "KV bytes of sequences that moved.", {}, stats.moves.num_bytes)
    what = "Responses to requests for completions, by HTTP status; 499: the client left."
    table.add_counts("kvrelay_http_responses_total", what, {}, "status", stats.responses)
    what = "Fields of requests that were ignored, by name."
    table.add_counts("kvrelay_ignored_fields_total", what, {}, "field", stats.ignored_fields)
    for (name, verdict), count in stats.slo_verdicts.items():
        table.add("kvrelay_slo_verdicts_total", "Requests with an SLO.", {"class": name, "verdict": verdict}, count)
    for (name, is_kept), count in stats.slo_outcomes.items():
        labels = {"class": name, "met": "true" if is_kept else "false"}
        table.add("kvrelay_slo_outcomes_total", "Finished requests by promised class.", labels, count)


def _forecast(forecast: Forecast, table: _Table) -> Iterable[Metric]:
    """How far predictions were from observed times."""
    ratios = HistogramMetricFamily("kvrelay_slo_prediction_ratio", "Observed over predicted.", labels=["time"])
    for time, errors in (("ttft", forecast.ttft_errors), ("tpot", forecast.tpot_errors)):
        bounds = [*map(str, RATIO_BOUNDS), "+Inf"]
        ratios.add_metric([time], list(zip(bounds, accumulate(errors.counts), strict=True)), errors.total)
        what = "Mean of |observed - predicted| / observed over the last ones."
        table.add("kvrelay_slo_prediction_error_ratio", what, {"time": time}, errors.mean_error())
    yield ratios


_OF_WORKER = (  # with the field of the worker's LoadReport
    ("kvrelay_worker_queued_tokens", "Prompt tokens not yet computed.", "queued_tokens"),
    ("kvrelay_worker_step_seconds", "Moving average of the step time.", "step_s"),
    ("kvrelay_worker_steps_total", "Steps computed.", "steps"),
    ("kvrelay_worker_batch_tokens", "Tokens of the last step.", "batch_tokens"),
    ("kvrelay_worker_preemptions_total", "Sequences preempted.", "preemptions"),
    ("kvrelay_worker_prefix_query_tokens_total", "Tokens looked up in the prefix cache.", "prefix_query_tokens"),
    ("kvrelay_worker_prefix_hit_tokens_total", "Tokens found in the prefix cache.", "prefix_hit_tokens"),
    ("kvrelay_worker_tier_hit_tokens_total", "Tokens of prefix hits loaded from lower tiers.", "tier_hit_tokens"),
    ("kvrelay_worker_cascade_saved_tokens_total",
     "KV tokens that sequences of a step shared instead of reading each.", "cascade_saved_tokens"),
    ("kvrelay_worker_fetching", "Queued sequences that wait for blocks from a store.", "fetching"),
    ("kvrelay_worker_waiting_tenants", "Tenants with queued sequences.", "waiting_tenants"),
    ("kvrelay_worker_deadline_refusals_total", "Sequences refused, past their deadline.", "deadline_refusals"),
    ("kvrelay_worker_displaced_total", "Sequences dropped from a full queue for another tenant's.", "displaced"),
    ("kvrelay_worker_recomputed_tokens_total",
     "Tokens of preempted sequences that are recomputed.", "recomputed_tokens"),
    ("kvrelay_worker_swapped", "Sequences swapped out to host memory.", "swapped"),
    ("kvrelay_worker_swapped_blocks", "KV blocks swapped out to host memory.", "swapped_blocks"),
    ("kvrelay_worker_swapped_bytes", "KV bytes swapped out to host memory.", "swapped_bytes"),
    ("kvrelay_worker_swap_corrupt_blocks_total", "Swapped blocks found corrupt and recomputed.", "swap_corrupt_blocks"),
    ("kvrelay_kvtransfer_leases", "KV transfers in flight.", "kv_leases"),
    ("kvrelay_kvtransfer_lease_expired_total", "Leases that expired before their transfer ended.", "kv_expired_leases"),
)  # fmt: skip
_OF_TIER = (
    ("kvrelay_kv_tier_blocks", "Blocks in a tier below the pool.", "num_blocks"),
    ("kvrelay_kv_tier_bytes", "Bytes in a tier, as stored.", "num_bytes"),
    ("kvrelay_kv_tier_capacity_bytes", "Bytes that a tier may use; 0: no limit.", "capacity_bytes"),
    ("kvrelay_kv_tier_stored_blocks_total", "Blocks stored in a tier.", "stored_blocks"),
    ("kvrelay_kv_tier_loaded_blocks_total", "Blocks loaded from a tier.", "loaded_blocks"),
    ("kvrelay_kv_tier_store_seconds_total", "Time spent on storing.", "store_s"),
    ("kvrelay_kv_tier_load_seconds_total", "Time spent on loading.", "load_s"),
    ("kvrelay_kv_tier_rejected_blocks_total", "Blocks not admitted, or without room.", "rejected_blocks"),
    ("kvrelay_kv_tier_evicted_blocks_total", "Blocks evicted from a tier.", "evicted_blocks"),
    ("kvrelay_kv_tier_corrupt_blocks_total", "Blocks found corrupt and discarded.", "corrupt_blocks"),
    ("kvrelay_kv_tier_failures_total", "Tier operations that failed.", "failures"),
)
_OF_PATH = (  # both ends count a transfer: sum over one role
    ("kvrelay_kvtransfer_bytes_total", "KV bytes moved.", "num_bytes"),
    ("kvrelay_kvtransfer_read_seconds_total", "Time spent on reading and verifying, summed over reads.", "seconds"),
    ("kvrelay_kvtransfer_exposed_seconds_total", "Transfer time that prefill did not hide.", "exposed_s"),
    ("kvrelay_kvtransfer_retries_total", "Reads retried over another path.", "retries"),
)


def _worker(info: WorkerInfo, load: LoadReport, table: _Table) -> None:
    worker = {"worker": info.worker_id, "role": info.role}
    table.add_fields(_OF_WORKER, load, worker)
    free = load.total_blocks - load.used_blocks - load.cached_blocks
    blocks = {
        "free": free, "cached": load.cached_blocks, "used": load.used_blocks,
        "leased": load.leased_blocks, "quarantined": load.quarantined_blocks, "probe": load.probe_blocks,
    }  # fmt: skip
    table.add_counts("kvrelay_kv_blocks", "KV blocks by state.", worker, "state", blocks)
    sequences = {"running": load.running, "waiting": load.waiting, "receiving": load.receiving}
    table.add_counts("kvrelay_worker_sequences", "Sequences on a worker.", worker, "state", sequences)
    by_model = load.model_drafted_tokens, load.model_accepted_tokens
    from_text = load.drafted_tokens - by_model[0], load.accepted_tokens - by_model[1]
    for source, (drafted, accepted) in (("ngram", from_text), ("model", by_model)):
        labels = {**worker, "source": source}
        table.add("kvrelay_worker_drafted_tokens_total", "Draft tokens verified.", labels, drafted)
        table.add("kvrelay_worker_accepted_tokens_total", "Draft tokens accepted.", labels, accepted)
    waiting = {0: 0} | load.waiting_by_priority
    table.add_counts("kvrelay_worker_waiting", "Queued sequences, by priority.", worker, "priority", waiting)
    computed = {tenant or "none": count for tenant, count in load.tenant_tokens.items()}
    computed["other"] = load.other_tenant_tokens
    table.add_counts("kvrelay_worker_tenant_tokens_total", "Tokens computed, by tenant.", worker, "tenant", computed)
    what = "Sequences preempted, by mode."
    table.add_counts("kvrelay_worker_preempted_total", what, worker, "mode", load.preempted, PREEMPTION_MODES)
    swaps, what = {"out": load.swap_out_s, "in": load.swap_in_s}, "Time spent on copies between pool and swap area."
    table.add_counts("kvrelay_worker_swap_seconds_total", what, worker, "direction", swaps)
    for tier in load.tiers:
        table.add_fields(_OF_TIER, tier, {**worker, "tier": tier.tier})
    for path in load.kv_paths:
        table.add_fields(_OF_PATH, path, {**worker, "path": path.path})
    checks = {path.path: path.check_s for path in load.kv_paths}
    checks["any"] = max(0.0, load.kv_check_s - sum(checks.values()))  # as a source: before a path is chosen
    table.add_counts("kvrelay_kvtransfer_check_seconds_total", "Time spent on KV checksums.", worker, "path", checks)
    what = "KV transfers refused."
    table.add_counts("kvrelay_kvtransfer_refusals_total", what, worker, "reason", load.kv_refused, REFUSALS)


def _pairs(pairs: list[WorkerPair], table: _Table) -> None:
    reported = [pair for pair in pairs if pair.report is not None]
    reported.sort(key=lambda pair: pair.verdict is Verdict.OK)
    for pair in reported[:PAIRS_SHOWN]:
        assert pair.report is not None
        ends = dict(zip(("source", "target"), pair.key, strict=True))
        is_ok = "true" if pair.verdict is Verdict.OK else "false"
        labels = {**ends, "path": pair.path.path if pair.path is not None else "none", "ok": is_ok}
        table.add("kvrelay_kvtransfer_pairs", "Prefill and decode workers that are paired.", labels, 1)
        for path in pair.report.paths:
            labels, speed, latency_s = {**ends, "path": path.path}, path.bytes_per_s, path.latency_s
            if speed:
                table.add("kvrelay_kvtransfer_path_bytes_per_second", "Last measured bandwidth.", labels, speed)
            if latency_s:
                table.add("kvrelay_kvtransfer_path_latency_seconds", "Probed latency of one block.", labels, latency_s)


def ingress_metrics(stats: ServeStats, router: Router, workers: Membership) -> Iterable[Metric]:
    """What one ingress counts and sees: sum counters over ingresses; take the maximum of what it sees of workers."""
    for name, documentation, attribute in _HISTOGRAMS:
        histogram = getattr(stats, attribute)
        buckets = [("+Inf" if bound == math.inf else str(bound), count) for bound, count in histogram.cumulative()]
        yield HistogramMetricFamily(name, documentation, buckets, histogram.total)
    table = _Table()
    table.add_fields(_OF_INGRESS, stats, {})
    what = "Moving average of observed minus predicted time to first token."
    table.add("kvrelay_router_prediction_error_seconds", what, {}, router.prediction_error_s)
    what = "Sequences deferred at the ingress: overdue, or behind others that are."
    table.add("kvrelay_requests_deferred", what, {}, router.num_deferred)
    _counted(stats, table)
    if router.forecast is not None:
        yield from _forecast(router.forecast, table)
    roles = Counter(info.role for info, _ in workers.live_workers())
    for info, _ in workers.live_workers():
        audit = router.index.audit_counts(info.worker_id)
        counts = {"agreed": audit.compared - audit.wrong - audit.missed, "wrong": audit.wrong, "missed": audit.missed}
        what, labels = "Index entries compared with a worker's cache.", {"worker": info.worker_id}
        table.add_counts("kvrelay_router_audited_hashes_total", what, labels, "result", counts)
    table.add_counts("kvrelay_workers", "Connected workers.", {}, "role", roles, Role)
    what = "Connections lost to workers that had not left the cluster: crashes, cut links."
    table.add_counts("kvrelay_worker_losses_total", what, {}, "role", workers.losses, Role)
    _pairs(workers.pairs.book.pairs, table)
    yield from table.families.values()


def worker_metrics(workers: Iterable[tuple[WorkerInfo, LoadReport]], *, shows_tenants: bool) -> Iterable[Metric]:
    """What follows from the last load report of each worker."""
    table = _Table()
    for info, load in workers:
        _worker(info, load, table)
    for family in table.families.values():
        if shows_tenants or not any("tenant" in sample.labels for sample in family.samples):
            yield family


class ServeCollector(Collector):
    """Reads the counters where they are kept; holds none of its own, and no other metrics of the process."""

    def __init__(self, stats: ServeStats, router: Router, workers: Membership, *, shows_tenants: bool) -> None:
        self._stats, self._router, self._workers, self._shows_tenants = stats, router, workers, shows_tenants

    def collect(self) -> Iterable[Metric]:
        yield from ingress_metrics(self._stats, self._router, self._workers)
        yield from worker_metrics(self._workers.live_workers(), shows_tenants=self._shows_tenants)
