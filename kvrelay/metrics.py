"""Names of every Prometheus metric. Base units; labels have few values, never a request id."""

REQUEST_TTFT_SECONDS = "kvrelay_request_ttft_seconds"
REQUEST_ITL_SECONDS = "kvrelay_request_itl_seconds"
REQUEST_TPOT_SECONDS = "kvrelay_request_tpot_seconds"
REQUEST_SECONDS = "kvrelay_request_seconds"
REQUESTS_TOTAL = "kvrelay_requests_total"  # {outcome}
REQUESTS_RUNNING = "kvrelay_requests_running"
REQUEST_RETRIES_TOTAL = "kvrelay_request_retries_total"
PROMPT_TOKENS_TOTAL = "kvrelay_prompt_tokens_total"
OUTPUT_TOKENS_TOTAL = "kvrelay_output_tokens_total"
KV_BLOCKS = "kvrelay_kv_blocks"  # {worker, role, state}
WORKER_SEQUENCES = "kvrelay_worker_sequences"  # {worker, role, state}
WORKER_QUEUED_TOKENS = "kvrelay_worker_queued_tokens"
WORKER_STEP_SECONDS = "kvrelay_worker_step_seconds"
WORKER_PREEMPTIONS_TOTAL = "kvrelay_worker_preemptions_total"
WORKER_PREFIX_QUERY_TOKENS_TOTAL = "kvrelay_worker_prefix_query_tokens_total"
WORKER_PREFIX_HIT_TOKENS_TOTAL = "kvrelay_worker_prefix_hit_tokens_total"
KVTRANSFER_BYTES_TOTAL = "kvrelay_kvtransfer_bytes_total"  # {worker, transport}
KVTRANSFER_SECONDS = "kvrelay_kvtransfer_seconds"
KVTRANSFER_REFUSALS_TOTAL = "kvrelay_kvtransfer_refusals_total"
ROUTER_DECISIONS_TOTAL = "kvrelay_router_decisions_total"  # {path}
ROUTER_CACHED_PREFIX_TOKENS_TOTAL = "kvrelay_router_cached_prefix_tokens_total"
ROUTER_PREDICTION_ERROR_SECONDS = "kvrelay_router_prediction_error_seconds"
WORKERS = "kvrelay_workers"  # {role}
