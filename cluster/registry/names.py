"""Names of the actors that belong to one application, so that several run side by side on one Ray cluster. Pure."""

APP_NAME = "kvrelay"  # what `kvrelay serve` deploys, and the files in configs/
NAMESPACE = "kvrelay"  # Ray's, of all these actors
DETACHED = {  # options of an actor that outlives its starter, and that is there already for those that come later
    "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0, "max_restarts": -1,
    "max_task_retries": 0,
}  # fmt: skip


def registry_name(app_name: str) -> str:
    """The name of the application's registry."""
    return f"kvrelay-registry{_own(app_name)}"


def store_name(app_name: str, node_id: str) -> str:
    """The name of the application's node of the KV store on the node `node_id` of Ray."""
    return f"kvrelay-store{_own(app_name)}-{node_id[:16]}"


def _own(app_name: str) -> str:
    return "" if app_name == APP_NAME else f"-{app_name}"


def worker_name(role: str, replica: str) -> str:
    """A worker's id, derived from its replica's id, which Serve shows."""
    return f"{role}-{replica}"
