"""The panels of the five dashboards, as data: title, unit, description and queries. Pure.

Names are those of serve/telemetry/metrics.py. A worker's series may come from several ingresses at once, so queries
take `max by (worker, role, …)` before they add up; an ingress's own counters are summed. Both hold where Ray exports.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

CLUSTER = 'SessionName=~"$SessionName",ray_io_cluster=~"$Cluster"'  # labels of Ray and KubeRay; absent ones match All
WORKER = f'{CLUSTER},role=~"$role",worker=~"$worker"'
RATE = "$__rate_interval"
PAIR, OK = "source, target, ok", 'ok="true"'
PREFILL, DECODE = 'role=~"prefill|both"', 'role=~"decode|both"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. `queries`: legend -> PromQL; `unit`: one of Grafana's ids."""

    title: str
    unit: str
    description: str
    queries: dict[str, str]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`uid` stays: links and Ray's pages name it. `rows`: title -> panels."""

    uid: str
    title: str
    rows: Mapping[str, tuple[Panel, ...]]


# ---- queries


def _in(metric: str, labels: str, more: str) -> str:
    return f"{metric}{{{labels}{',' if more else ''}{more}}}"


def total(metric: str, by: str = "", more: str = "") -> str:
    """An ingress's gauge, added up over ingresses."""
    return f"sum by ({by}) ({_in(metric, CLUSTER, more)})"


def rate(metric: str, by: str = "", more: str = "") -> str:
    """An ingress's counter per second, added up over ingresses."""
    return f"sum by ({by}) (rate({_in(metric, CLUSTER, more)}[{RATE}]))"


def seen(metric: str, by: str, more: str = "") -> str:
    """What every ingress sees alike, once."""
    return f"max by ({by}) ({_in(metric, CLUSTER, more)})"


def quantile(share: float, metric: str, by: str = "") -> str:
    """Of a histogram, over all ingresses."""
    keys = f"le, {by}" if by else "le"
    return f"histogram_quantile({share:g}, {rate(f'{metric}_bucket', keys)})"


def quantiles(metric: str) -> dict[str, str]:
    return {f"p{100 * share:g}": quantile(share, metric) for share in (0.5, 0.9, 0.99)}


def _once(by: str) -> str:
    keys = ["worker", "role", *(key for key in by.split(", ") if key not in ("", "worker", "role"))]
    return ", ".join(keys)


def workers(metric: str, by: str = "", more: str = "", keys: str = "") -> str:
    """A gauge of workers, added up; `keys`: labels that a sum over them must not merge before."""
    inner = _once(", ".join(filter(None, (by, keys))))
    return f"sum by ({by}) (max by ({inner}) ({_in(metric, WORKER, more)}))"


def work(metric: str, by: str = "", more: str = "", keys: str = "") -> str:
    """A counter of workers per second, added up."""
    inner = _once(", ".join(filter(None, (by, keys))))
    return f"sum by ({by}) (max by ({inner}) (rate({_in(metric, WORKER, more)}[{RATE}])))"


def share(part: str, whole: str) -> str:
    """0 where the whole is 0."""
    return f"{part} / clamp_min({whole}, 1e-9)"


# ---- panels that several dashboards show

REQUESTS = Panel(
    "Requests by outcome",
    "reqps",
    "Sequences that ended, per second: stop and length are answers; client: it left.",
    {"{{outcome}}": rate("kvrelay_requests_total", "outcome")},
)
ERRORS = Panel(
    "HTTP 5xx share",
    "percentunit",
    "Completions answered with a server error, of all.",
    {"5xx": share(rate("kvrelay_http_responses_total", more='status=~"5.."'), rate("kvrelay_http_responses_total"))},
)
TTFT = Panel(
    "Time to first token",
    "s",
    "From a request's arrival at the ingress to its first token.",
    quantiles("kvrelay_request_ttft_seconds"),
)
ITL = Panel(
    "Inter-token latency", "s", "Gaps between the tokens of a sequence.", quantiles("kvrelay_request_itl_seconds")
)
POOL = share(
    workers("kvrelay_kv_blocks", "role", 'state="used"'),
    workers("kvrelay_kv_blocks", "role", 'state=~"used|cached|free"', "state"),
)
HITS = share(
    work("kvrelay_worker_prefix_hit_tokens_total", "role"), work("kvrelay_worker_prefix_query_tokens_total", "role")
)
KV_BYTES = Panel(
    "KV transferred",
    "Bps",
    "KV bytes that decode workers read, by path.",
    {"{{path}}": work("kvrelay_kvtransfer_bytes_total", "path", DECODE)},
)

OVERVIEW_ROWS = {
    "Traffic": (
        REQUESTS, ERRORS, TTFT, ITL,
        Panel("Tokens", "short", "Prompt tokens taken and found cached, output tokens delivered; per second.", {
            "prompt": rate("kvrelay_prompt_tokens_total"), "output": rate("kvrelay_output_tokens_total"),
            "cached": rate("kvrelay_router_cached_prefix_tokens_total")}),
        Panel("In flight", "short", "Sequences that run, and those that are deferred at the ingress.", {
            "running": total("kvrelay_requests_running"), "deferred": total("kvrelay_requests_deferred")}),
    ),
    "Workers": (
        Panel("Connected workers", "short", "Workers that an ingress is connected to.",
              {"{{role}}": seen("kvrelay_workers", "role")}),
        Panel("Queued prompt tokens", "short", "Prompt tokens not yet computed, by role.",
              {"{{role}}": workers("kvrelay_worker_queued_tokens", "role")}),
        Panel("KV pool in use", "percentunit", "Blocks of running sequences, of all blocks.", {"{{role}}": POOL}),
        Panel("Prefix hit share", "percentunit", "Prompt tokens found in a worker's cache, of those looked up.",
              {"{{role}}": HITS}),
        KV_BYTES,
        Panel("Running sequences", "short", "Sequences that workers compute.",
              {"{{role}}": workers("kvrelay_worker_sequences", "role", 'state="running"')}),
    ),
}  # fmt: skip

REQUESTS_ROWS = {
    "Ingress": (
        REQUESTS,
        Panel("HTTP responses", "reqps", "Responses to completions by status. 429: overloaded, or no SLO can be kept.",
              {"{{status}}": rate("kvrelay_http_responses_total", "status")}),
        TTFT, ITL,
        Panel("Time per output token", "s", "Mean of each sequence after its first token.",
              quantiles("kvrelay_request_tpot_seconds")),
        Panel("Request duration", "s", "From a sequence's arrival to its end.", quantiles("kvrelay_request_seconds")),
        Panel("Tokens", "short", "Per second. Reasoning: of the output tokens.", {
            "prompt": rate("kvrelay_prompt_tokens_total"), "output": rate("kvrelay_output_tokens_total"),
            "reasoning": rate("kvrelay_reasoning_tokens_total")}),
        Panel("Deferred", "reqps", "Sequences deferred at the ingress: overdue, or behind others that are.",
              {"deferred": rate("kvrelay_request_deferrals_total")}),
    ),
    "SLO classes": (
        Panel("SLO kept", "percentunit", "Finished requests whose times were within the class that was promised.",
              {"{{class}}": share(rate("kvrelay_slo_outcomes_total", "class", 'met="true"'),
                                  rate("kvrelay_slo_outcomes_total", "class"))}),
        Panel("SLO verdicts", "reqps", "What the ingress decided when a request with an SLO arrived.",
              {"{{class}} {{verdict}}": rate("kvrelay_slo_verdicts_total", "class, verdict")}),
        Panel("Prediction error", "percentunit", "Mean of |observed - predicted| / observed of the last requests.",
              {"{{time}}": seen("kvrelay_slo_prediction_error_ratio", "time")}),
        Panel("Observed over predicted", "short", "Median; 1 is exact, above 1 later than predicted.",
              {"{{time}}": quantile(0.5, "kvrelay_slo_prediction_ratio", "time")}),
    ),
    "Queues and tenants": (
        Panel("Waiting by priority", "short", "Queued sequences on workers; the lowest number is served first.",
              {"{{priority}}": workers("kvrelay_worker_waiting", "priority")}),
        Panel("Tokens by tenant", "short", "Computed per second. Tenants are digests; at most 32 and those with a "
              "weight have their own series, the rest is `other`.",
              {"{{tenant}}": work("kvrelay_worker_tenant_tokens_total", "tenant", 'tenant=~"$tenant"')}),
        Panel("Tenants waiting", "short", "Tenants with queued sequences, the most on one worker.",
              {"{{role}}": f"max by (role) ({_in('kvrelay_worker_waiting_tenants', WORKER, '')})"}),
        Panel("Dropped from queues", "reqps", "Past their deadline, or displaced from a full queue.", {
            "deadline": work("kvrelay_worker_deadline_refusals_total"),
            "displaced": work("kvrelay_worker_displaced_total")}),
    ),
}  # fmt: skip


def _role_row(role: str) -> tuple[Panel, ...]:
    each = "{{worker}}"
    panels = (
        Panel("Sequences", "short", "Running, waiting, and receiving KV, over all workers of the role.",
              {"{{state}}": workers("kvrelay_worker_sequences", "state", role)}),
        Panel("Queued prompt tokens", "short", "Not yet computed, by worker.",
              {each: workers("kvrelay_worker_queued_tokens", "worker", role)}),
        Panel("Step time", "s", "Moving average of one step of the engine, by worker.",
              {each: workers("kvrelay_worker_step_seconds", "worker", role)}),
        Panel("Tokens of a step", "short", "Tokens of the last step, by worker.",
              {each: workers("kvrelay_worker_batch_tokens", "worker", role)}),
    )  # fmt: skip
    return panels


FLOW_ROWS = {
    "Placement": (
        Panel("Routing decisions", "reqps", "local: the decode worker computes the prompt itself.",
              {"{{path}}": rate("kvrelay_router_decisions_total", "path")}),
        Panel("TTFT prediction", "s", "Moving average of observed minus predicted time to first token, worst ingress.",
              {"error": seen("kvrelay_router_prediction_error_seconds", "")}),
        Panel("Sequences moved", "reqps", "Running sequences that another decode worker took over with their KV.",
              {"{{outcome}}": rate("kvrelay_request_moves_total", "outcome")}),
        Panel("KV moved with them", "Bps", "Per second.", {"KV": rate("kvrelay_request_moved_bytes_total")}),
    ),
    "Prefill workers": _role_row(PREFILL),
    "Decode workers": (
        *_role_row(DECODE),
        Panel("Drafted tokens accepted", "percentunit", "Of the tokens drafted by prompt lookup or a draft model.",
              {"{{source}}": share(work("kvrelay_worker_accepted_tokens_total", "source", DECODE),
                                   work("kvrelay_worker_drafted_tokens_total", "source", DECODE))}),
        Panel("Shared KV reads", "short", "KV tokens per second that cascade attention read once for several.",
              {"{{role}}": work("kvrelay_worker_cascade_saved_tokens_total", "role", DECODE)}),
    ),
    "KV transfers": (
        KV_BYTES,
        Panel("KV transfer time", "s", "Reading and verifying of one transfer.",
              quantiles("kvrelay_kvtransfer_seconds")),
        Panel("Hidden share", "percentunit", "Transfer time that prefill's compute hid.",
              {"hidden": "1 - " + share(work("kvrelay_kvtransfer_exposed_seconds_total", more=DECODE, keys="path"),
                                        work("kvrelay_kvtransfer_read_seconds_total", more=DECODE, keys="path"))}),
        Panel("Transfers in flight", "short", "Open transfers; both ends count one.",
              {"{{role}}": workers("kvrelay_kvtransfer_leases", "role")}),
        Panel("Bandwidth of paths", "Bps", "As measured last, from prefill to decode worker.",
              {"{{source}} → {{target}} {{path}}":
               seen("kvrelay_kvtransfer_path_bytes_per_second", "source, target, path")}),
        Panel("Latency of paths", "s", "Of one block, as probed.",
              {"{{source}} → {{target}} {{path}}":
               seen("kvrelay_kvtransfer_path_latency_seconds", "source, target, path")}),
        Panel("Checksums", "s", "Seconds per second that workers spend on checksums of KV.",
              {"{{role}}": work("kvrelay_kvtransfer_check_seconds_total", "role", keys="path")}),
        Panel("Pairs", "short", "Pairs of a prefill and a decode worker, by whether KV can travel.",
              {"ok {{ok}}": f"sum by (ok) ({seen('kvrelay_kvtransfer_pairs', PAIR)})"}),
    ),
}  # fmt: skip

CACHE_ROWS = {
    "Prefix cache": (
        Panel("Prefix hit share", "percentunit", "Prompt tokens found, of those looked up.", {"{{role}}": HITS}),
        Panel("Hits from lower tiers", "short", "Tokens per second that hits loaded from host memory, disk or a store.",
              {"{{role}}": work("kvrelay_worker_tier_hit_tokens_total", "role")}),
        Panel("Cached prompt tokens", "short", "Per second, as the ingress's requests found them.",
              {"cached": rate("kvrelay_router_cached_prefix_tokens_total")}),
        Panel("Waiting for a store", "short", "Queued sequences whose blocks are being loaded.",
              {"{{role}}": workers("kvrelay_worker_fetching", "role")}),
    ),
    "Pool": (
        Panel("Blocks of prefill workers", "short", "used: of sequences; leased, quarantined, probe: of the used.",
              {"{{state}}": workers("kvrelay_kv_blocks", "state", PREFILL)}),
        Panel("Blocks of decode workers", "short", "used: of sequences; leased, quarantined, probe: of the used.",
              {"{{state}}": workers("kvrelay_kv_blocks", "state", DECODE)}),
        Panel("Pool in use", "percentunit", "Blocks of sequences, of all; by worker.",
              {"{{worker}}": share(workers("kvrelay_kv_blocks", "worker", 'state="used"'),
                                   workers("kvrelay_kv_blocks", "worker", 'state=~"used|cached|free"', "state"))}),
        Panel("Swapped", "bytes", "KV of preempted sequences in host memory.",
              {"{{role}}": workers("kvrelay_worker_swapped_bytes", "role")}),
    ),
    "Tiers below the pool": (
        Panel("Content", "bytes", "Bytes in a tier, as stored.",
              {"{{role}} {{tier}}": workers("kvrelay_kv_tier_bytes", "role, tier")}),
        Panel("Capacity", "bytes", "Bytes that a tier may use; 0: no limit.",
              {"{{role}} {{tier}}": workers("kvrelay_kv_tier_capacity_bytes", "role, tier")}),
        Panel("Blocks in and out", "ops", "Blocks per second stored in a tier, and loaded from it.", {
            "{{tier}} in": work("kvrelay_kv_tier_stored_blocks_total", "tier"),
            "{{tier}} out": work("kvrelay_kv_tier_loaded_blocks_total", "tier")}),
        Panel("Time spent", "s", "Seconds per second spent on storing and loading.", {
            "{{tier}} in": work("kvrelay_kv_tier_store_seconds_total", "tier"),
            "{{tier}} out": work("kvrelay_kv_tier_load_seconds_total", "tier")}),
        Panel("Evicted and rejected", "ops", "Blocks per second evicted for others, and not admitted.", {
            "{{tier}} evicted": work("kvrelay_kv_tier_evicted_blocks_total", "tier"),
            "{{tier}} rejected": work("kvrelay_kv_tier_rejected_blocks_total", "tier")}),
        Panel("Blocks", "short", "Blocks in a tier.",
              {"{{role}} {{tier}}": workers("kvrelay_kv_tier_blocks", "role, tier")}),
    ),
}  # fmt: skip

FAULTS_ROWS = {
    "Requests": (
        ERRORS,
        Panel("Failed and refused", "reqps", "Sequences without an answer, by outcome.",
              {"{{outcome}}": rate("kvrelay_requests_total", "outcome", 'outcome!~"stop|length"')}),
        Panel("Retries", "reqps", "Attempts after a worker's fault; clients see none of them.",
              {"retries": rate("kvrelay_request_retries_total")}),
        Panel("Workers lost", "ops", "Connections lost to workers that had not left: crashes, cut links.",
              {"{{role}}": f"max by (role) (rate({_in('kvrelay_worker_losses_total', CLUSTER, '')}[{RATE}]))"}),
    ),
    "KV transfers": (
        Panel("Refused transfers", "ops", "Transfers that were not committed, by reason.",
              {"{{reason}}": work("kvrelay_kvtransfer_refusals_total", "reason")}),
        Panel("Retried reads", "ops", "Reads that failed on a path and went on over another.",
              {"{{path}}": work("kvrelay_kvtransfer_retries_total", "path")}),
        Panel("Expired leases", "ops", "Leases that ended before their transfer.",
              {"{{role}}": work("kvrelay_kvtransfer_lease_expired_total", "role")}),
        Panel("Pairs without KV", "short", "Pairs between which KV cannot travel now.",
              {"pairs": f"sum({seen('kvrelay_kvtransfer_pairs', PAIR)}) - "
                        f"(sum({seen('kvrelay_kvtransfer_pairs', PAIR, OK)}) or vector(0))"}),
    ),
    "Workers": (
        Panel("Preemptions", "ops", "Sequences preempted because blocks ran out, by mode.",
              {"{{mode}}": work("kvrelay_worker_preempted_total", "mode")}),
        Panel("Recomputed tokens", "short", "Tokens per second that preemption makes workers compute again.",
              {"{{role}}": work("kvrelay_worker_recomputed_tokens_total", "role")}),
        Panel("Quarantined blocks", "short", "Blocks that a transport may still write.",
              {"{{role}}": workers("kvrelay_kv_blocks", "role", 'state="quarantined"')}),
        Panel("Dropped from queues", "reqps", "Past their deadline, or displaced from a full queue.", {
            "deadline": work("kvrelay_worker_deadline_refusals_total"),
            "displaced": work("kvrelay_worker_displaced_total")}),
    ),
    "Caches": (
        Panel("Corrupt blocks", "ops", "Blocks found wrong and computed anew, in tiers and in the swap area.", {
            "tier {{tier}}": work("kvrelay_kv_tier_corrupt_blocks_total", "tier"),
            "swap": work("kvrelay_worker_swap_corrupt_blocks_total")}),
        Panel("Tier failures", "ops", "Calls to a tier that failed entirely.",
              {"{{tier}}": work("kvrelay_kv_tier_failures_total", "tier")}),
        Panel("Wrong index entries", "percentunit", "Sampled entries of the index that a worker does not have.",
              {"wrong": share(rate("kvrelay_router_audited_hashes_total", more='result="wrong"'),
                              rate("kvrelay_router_audited_hashes_total"))}),
        Panel("Ignored fields", "reqps", "Fields of requests that were ignored, by name.",
              {"{{field}}": rate("kvrelay_ignored_fields_total", "field")}),
    ),
}  # fmt: skip

DASHBOARDS = (
    Dashboard("kvrelay-overview", "kvrelay: Overview", OVERVIEW_ROWS),
    Dashboard("kvrelay-requests", "kvrelay: Requests & SLO", REQUESTS_ROWS),
    Dashboard("kvrelay-flow", "kvrelay: Prefill/decode & KV flow", FLOW_ROWS),
    Dashboard("kvrelay-cache", "kvrelay: Cache & tiers", CACHE_ROWS),
    Dashboard("kvrelay-faults", "kvrelay: Faults", FAULTS_ROWS),
)
SERVE_PAGE = {
    number: replace(panel, queries={name: query.replace(CLUSTER, "") for name, query in panel.queries.items()})
    for number, panel in ((7, REQUESTS), (8, ERRORS), (15, TTFT))
}
"""The ids of the three panels that the Serve page of Ray's dashboard embeds -> what it shows in their place, without
the variables of our dashboards, which Ray's Serve dashboard lacks."""
