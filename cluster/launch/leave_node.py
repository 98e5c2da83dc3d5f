"""Takes this machine's Ray node out of service before it stops: `python -m kvrelay.cluster.launch.leave_node`.

For a container that is about to end (a pod's preStop, compose's SIGTERM). Ray marks the node as draining, so that Serve
starts a replacement of each replica elsewhere and then stops the one here, which finishes what it runs. Returns when no
replica is left here, or when the time is over. Idempotent: a node that drains goes on draining.
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

POLL_S = 0.5
REPLICA = "SERVE_REPLICA::"  # how the names of Serve's replicas begin
_LIVING = ("ALIVE", "PENDING_CREATION", "RESTARTING")


def replicas_on(actors: Iterable[Mapping[str, Any]], node_id: str) -> list[str]:
    """The names of Serve's replicas that live on this node. `actors`: as the GCS lists them."""
    return sorted(
        str(actor["Name"])
        for actor in actors
        if str(actor.get("Name", "")).startswith(REPLICA)
        and actor.get("State") in _LIVING
        and (actor.get("Address") or {}).get("NodeID") == node_id
    )


def wait_until_empty(
    replicas: Callable[[], list[str]], within_s: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> list[str]:
    """Poll until there is none; the replicas that are left after `within_s`."""
    deadline_s = clock() + within_s
    while (left := replicas()) and clock() < deadline_s:
        sleep(POLL_S)
    return left


def leave(within_s: float) -> list[str]:
    """Drain this machine's node; the replicas that are left on it. Raises ConnectionError: no Ray runs here."""
    import ray
    from ray._private import services
    from ray._private.state import actors
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

    address = services.canonicalize_bootstrap_address_or_die("auto")
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        node_id = ray.get_runtime_context().get_node_id()
        deadline_ms = int((time.time() + within_s) * 1000)
        message = "its container stops"
        accepted, why = GcsClient(address=address).drain_node(
            node_id, DRAIN_NODE_REASON_PREEMPTION, message, deadline_ms
        )
        if not accepted:
            raise ConnectionError(f"Ray does not drain this node: {why}")
        return wait_until_empty(lambda: replicas_on(actors().values(), node_id), within_s, time.monotonic, time.sleep)
    finally:
        ray.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(prog="leave_node", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--within", type=float, default=60.0, help="seconds to wait at most (60)")
    within_s = parser.parse_args().within
    began_s = time.monotonic()
    try:
        left = leave(within_s)
    except (ConnectionError, RuntimeError) as error:
        print(f"this node does not leave: {error}", file=sys.stderr)
        return 1
    spent_s = time.monotonic() - began_s
    if left:
        print(f"still here after {spent_s:.0f} s: {', '.join(left)}", file=sys.stderr)
        return 1
    print(f"no replica is left on this node, after {spent_s:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
