"""Environment variables for a local Ray cluster with few log lines and little idle work, set before Ray is imported.

Ray, Serve and the dashboard inherit them from `kvrelay serve`. Variables that the user has set stay. A Ray cluster that
the user started (`serve deploy`) keeps its own. `bench/serving/footprint.py` measures a cluster with them.
"""

import contextlib
import os
import secrets
from pathlib import Path

DIRECT_PORTS = 16  # ingress replicas on one machine listen at port, port + 1, ...

_VARIABLES = {
    # no usage reports, no logs on the terminal
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_LOG_TO_DRIVER": "0",
    "RAY_SERVE_SLOW_STARTUP_WARNING_S": "10",  # how soon Serve reports a replica without resources
    # fewer wake-ups of idle processes
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1.0",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
    "RAY_SERVE_EVENT_LOOP_MONITORING_INTERVAL_S": "60",
    "RAY_event_stats": "0",
    "RAY_event_stats_metrics": "0",
    "RAY_task_events_report_interval_ms": "5000",
    "RAY_metrics_report_interval_ms": "30000",
    "RAY_enable_open_telemetry": "0",
    "RAY_core_worker_internal_heartbeat_ms": "10000",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_raylet_report_resources_period_milliseconds": "500",
    "RAY_raylet_check_gc_period_milliseconds": "5000",
    "RAY_object_manager_timer_freq_ms": "1000",
    "RAY_kill_idle_workers_interval_ms": "5000",
    "RAY_report_worker_backlog_interval_ms": "5000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "5000",
    "RAY_raylet_liveness_self_check_interval_ms": "30000",
    "RAY_io_context_monitor_probe_interval_ms": "10000",
    "RAY_ray_events_report_interval_ms": "60000",
    "RAY_raylet_check_for_unexpected_worker_disconnect_interval_ms": "5000",
    "RAY_grpc_client_check_connection_status_interval_milliseconds": "5000",
    "REPORTER_UPDATE_INTERVAL_MS": "30000",
    "SCAN_EVENT_DIR_INTERVAL_SECONDS": "60",
    "METRICS_RECORD_INTERVAL_S": "60",
    "NODE_STATS_UPDATE_INTERVAL_SECONDS": "30",
    "RAY_DASHBOARD_AGENT_CHECK_PARENT_INTERVAL_S": "5",
    "RAY_DASHBOARD_STATS_UPDATING_INTERVAL": "60",
    "AUTOSCALER_UPDATE_INTERVAL_S": "60",
    # no idle workers kept for Ray tasks, which kvrelay does not use
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_idle_worker_killing_time_threshold_ms": "1000",
    "MALLOC_ARENA_MAX": "2",
    # Ray's default of 15 lets every other process of the machine delay a decode step
    "RAY_worker_niceness": "0",
    # clients connect to the ingress replica itself: through Serve's proxy a token costs ten times the CPU
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    "RAY_SERVE_PORT_QUARANTINE_S": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}


def set_ray_environment(port: int) -> None:
    """Prepare this process's environment for a Ray cluster of its own whose first ingress listens on `port`."""
    ports = {
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(min(port + DIRECT_PORTS, 65535)),
    }
    for name, value in {**_VARIABLES, **ports}.items():
        os.environ.setdefault(name, value)


def keep_ray_token_private() -> None:
    """Create Ray's token file readable by this user alone; Ray itself would create it readable by all.

    An existing one stays.

    Raises OSError when the home folder cannot be written; Ray itself fails then too.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "token").lower()
    if mode != "token" or os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    path = _token_path()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (
        contextlib.suppress(FileExistsError),
        open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file,
    ):
        file.write(secrets.token_hex(32))


def _token_path() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def ray_auth_headers() -> dict[str, str]:
    """The dashboard's request headers for Ray's token authentication: the token is looked up in Ray's own order of
    places.
    """
    token = os.environ.get("RAY_AUTH_TOKEN")
    if not token:
        path = _token_path()
        token = path.read_text().strip() if path.is_file() else None
    return {"authorization": f"Bearer {token}"} if token else {}
